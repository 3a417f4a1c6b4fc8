// What happened: numbers in short, the saves, what a crash would have lost, metrics, troubles, and all events.

const PHASES = [
  ["stage", "stage", "taking the state apart, and copies"],
  ["write", "write", "bytes to the device"],
  ["sync", "sync", "until they are durable"],
  ["commit", "commit", "manifest, rename, retention"],
];
const KINDS = {
  saved: ["saved", "saves", ""], failed: ["failed", "failed saves", "bad"], passed_over: ["passed over", "passed over", "bad"], restored: ["resumed", "resumes", ""],
  opened: ["opened", "openings", ""], preempted: ["preempted", "preemptions", "warn"], short_of_room: ["little space", "little space", "warn"], gave_up: ["removed early", "removed early", "warn"],
};

function totals(saves) { return saves.time.map((time, at) => time - saves.captured[at]); }

class Overview {
  constructor() {
    this.id = "overview";
    this.title = "Overview";
    this.element = el("section", { class: "plain", id: this.id });
  }
  show(run) {
    this.run = run;
    const { view } = run;
    const problems = [...view.problems, ...run.problems];
    if (view.skipped_lines) problems.push(`${plural(view.skipped_lines, "line")} of events.jsonl passed over: torn by a crash, or not of this version`);
    this.tiles = el("div", { class: "tiles" });
    this.element.replaceChildren(
      el("h1", { text: view.name }), el("div", { class: "path", text: view.path }), this.tiles,
      ...problems.map((text) => el("div", { class: "alert foreign", text })));
    this.tick();
  }
  tick() {
    const { run } = this;
    const { view, saves } = run;
    const now = clockOf(run);
    const unsaved = run.happenings.filter((item) => item.lost_seconds !== null).map((item) => item.lost_seconds);
    const last = saves.step.length - 1;
    const tile = (what, value, more, tone) => el("div", { class: `tile ${tone || ""}`, "data-tile": what }, el("div", { class: "what", text: what }), el("div", { class: "value", text: value }), el("div", { class: "more" }, more));
    const newest = view.checkpoints[view.checkpoints.length - 1];
    const found = [];
    if (last >= 0) found.push(tile("Newest durable step", whole(saves.step[last]), ago(now - saves.time[last])));
    else if (newest) found.push(tile("Newest step", whole(newest.step), newest.created === null ? "" : ago(now - newest.created)));
    if (last >= 0) {
      const [usual, worst] = [seconds(median(saves.lost_seconds)), seconds(most(saves.lost_seconds.concat(unsaved)))];
      if (view.being_written) found.push(tile("A crash now would lose", long(Math.max(0, now - Math.max(saves.captured[last], run.base))), `so far usually ${usual}, at most ${worst}`));
      else found.push(tile("A crash would have lost", usual, `usually; at most ${worst}`));
      const spent = totals(saves);
      found.push(tile("Until durable", seconds(median(spent)), `median; slowest ${seconds(most(spent))}`));
      const typical = view.summary && view.summary.saves;
      if (typical) found.push(tile("Speed", `${typical.gb_per_second.median >= 0.095 ? `${typical.gb_per_second.median.toFixed(2)} GB/s` : `${digits(typical.gb_per_second.median * 1000, 2)} MB/s`}`, `median; ${bytes(typical.state_nbytes)} of state`));
      const stall = view.summary && view.summary.stall_share;
      if (stall !== null && stall !== undefined) found.push(tile("Stall", share(stall), "of the time between saves", stall > 0.1 ? "warn" : ""));
    }
    const measure = mainMetric(run);
    if (measure) {
      const { name, last: newestValue, said, points } = measure;
      const shown = tile(name.length > 60 ? `${name.slice(0, 59)}…` : name, valueOf(newestValue[1]), [trend(points, run.color), el("div", { text: said })], newestValue[1] === null ? "bad" : "");
      shown.dataset.tile = "Metric";
      shown.firstChild.classList.add("foreign");
      found.push(shown);
    }
    const size = view.checkpoints.reduce((sum, entry) => sum + entry.nbytes, 0);
    const damaged = view.checkpoints.filter((entry) => entry.damage !== null).length;
    found.push(tile("Checkpoints kept", whole(view.all_checkpoints), damaged ? `${damaged} damaged; ${bytes(size)}` : bytes(size), damaged ? "bad" : ""));
    if (view.summary) {
      const { failed, passed_over: passed } = view.summary;
      found.push(tile("Failed saves", whole(failed), passed ? `${plural(passed, "damaged checkpoint")} passed over` : `of ${whole(failed + run.view.timeline.all_saves)}`, failed || passed ? "bad" : ""));
    }
    // Of several file systems, the one that is full first.
    const [disk] = view.disks.filter((item) => !item.missing).sort((a, b) => (a.fits ?? Infinity) - (b.fits ?? Infinity) || 0);
    if (disk) found.push(tile("Free space", bytes(disk.free_nbytes), disk.fits === null ? `of ${bytes(disk.all_nbytes)}` : `for ${plural(disk.fits, "more checkpoint")}`, disk.fits !== null && disk.fits < 3 ? "bad" : ""));
    this.tiles.replaceChildren(...found);
  }
}

// A save in a tooltip.
function savedRows(saves, at) {
  return [
    ...PHASES.map(([key, name]) => [name, seconds(saves[key][at]), `var(--${key})`]),
    ["until durable", seconds(saves.time[at] - saves.captured[at])],
    ["stall", seconds(saves.stall[at]), "var(--stall)", true],
    ["state", bytes(saves.nbytes[at])],
    ["speed", speed(saves.nbytes[at], saves.time[at] - saves.captured[at])],
  ];
}
function marksOf(run, axis, kinds) {
  return run.happenings.filter((item) => kinds.includes(item.kind) && (axis === "time" || item.step !== null)).slice(-200)
    .map((item) => ({ x: axis === "time" ? item.time : item.step, tone: item.tone, title: item.text, item }));
}
// What the triangles mean: one entry for each colour.
function markLegend(marks) {
  return ["bad", "warn", "note"].map((tone) => [tone, [...new Set(marks.filter((mark) => mark.tone === tone).map((mark) => KINDS[mark.item.kind][0]))]])
    .filter(([, names]) => names.length).map(([tone, names]) => el("span", { class: "said" }, el("span", { class: `pointer ${tone === "note" ? "" : tone}` }), names.join(", ")));
}
// A mark near the pointer tells its story, else the nearest save does.
function tipOf(run, axis, marks, rows, weight) {
  const xs = axis === "time" ? run.saves.time : run.saves.step;
  return (offset, low, high) => {
    const mark = marks.find((item) => Math.abs(offset(item.x)) < 5 && item.x >= low && item.x <= high);
    if (mark) return { x: mark.x, title: `${KINDS[mark.item.kind][0]}${mark.item.step === null ? "" : `, step ${whole(mark.item.step)}`}`, rows: [], text: `${moment(mark.item.time)}\n${mark.item.text}` };
    const at = nearest(xs, offset, weight);
    if (at === null || xs[at] < low || xs[at] > high) return null;
    return { x: xs[at], title: `Step ${whole(run.saves.step[at])}`, rows: [["", moment(run.saves.time[at])], ...rows(at)] };
  };
}

class Saves {
  constructor() {
    Object.assign(this, { id: "saves", title: "Saves", ofEvents: true, axis: "time", measure: "seconds", off: new Set() });
    this.chart = new Chart("Seconds of each save by phase", 260);
    this.legend = el("div");
    this.said = el("p", { class: "note after" });
    this.body = el("div", {}, this.legend, this.chart.element, this.said);
    this.empty = el("p", { class: "empty", text: "No save of this run has become durable yet. Saves appear here when a Checkpointer writes them." });
    this.tools = el("div", { class: "tools" },
        segments("Measure", [["seconds", "Time"], ["bytes", "Bytes"], ["speed", "Speed"]], "seconds", (measure) => { this.measure = measure; this.show(this.run); }),
        segments("Horizontal axis", [["time", "by time"], ["step", "by step"]], "time", (axis) => { this.axis = axis; this.show(this.run); }));
    this.element = el("section", { id: this.id }, el("div", { class: "head" }, el("h2", { text: this.title }), this.tools), this.body, this.empty);
  }
  show(run) {
    this.run = run;
    const { saves, view } = run;
    for (const part of [this.body, this.tools]) part.classList.toggle("hidden", !saves.step.length);
    this.empty.classList.toggle("hidden", saves.step.length > 0);
    if (!saves.step.length) return;
    const xs = this.axis === "time" ? saves.time : saves.step;
    const marks = marksOf(run, this.axis, ["failed", "passed_over", "preempted"]);
    const [low, high] = extent(xs.concat(marks.map((mark) => mark.x)));
    const spent = totals(saves);
    const series = {
      seconds: PHASES.map(([key, name, title]) => ({ key, name, title, color: `var(--${key})`, values: saves[key] })),
      bytes: [{ key: "written", name: "read in place, or at once", color: "var(--write)", values: saves.nbytes.map((size, at) => size - saves.copied_nbytes[at]) }, { key: "copied", name: "copied first", color: "var(--commit)", values: saves.copied_nbytes }],
      speed: [{ key: "speed", name: "state made durable per second", color: "var(--write)", values: saves.nbytes.map((size, at) => (spent[at] > 0 ? size / spent[at] / 1e9 : 0)) }],
    }[this.measure];
    const stall = this.measure === "seconds" ? [{ key: "stall", name: "stall: training waited", color: "var(--stall)", line: true }] : [];
    const shown = series.filter((item) => !this.off.has(item.key));
    const layers = [{ kind: "bars", x: xs, series: shown }];
    if (stall.length && !this.off.has("stall")) {
      const line = { x: [], y: [] };
      const order = xs.map((_, at) => at);
      if (this.axis === "step") order.sort((a, b) => xs[a] - xs[b]);
      order.forEach((at, place) => {
        const before = order[place - 1];
        if (this.axis === "time" && place && saves.training[at] !== saves.training[before]) { line.x.push(xs[before]); line.y.push(null); }
        line.x.push(xs[at]);
        line.y.push(saves.stall[at]);
      });
      layers.push({ kind: "line", ...line, color: "var(--stall)", dots: true });
    }
    const explained = legend([...series, ...stall].map((item) => ({ ...item, off: this.off.has(item.key) })), (item, on) => {
      if (on) this.off.delete(item.key); else this.off.add(item.key);
      this.show(this.run);
    });
    explained.append(...markLegend(marks));
    this.legend.replaceChildren(explained);
    const y = {
      seconds: { unit: "per save", format: secondsAxis }, speed: { unit: "GB/s", format: (value) => digits(value) }, bytes: { unit: "per save", format: (value) => bytes(value), binary: true },
    }[this.measure];
    this.chart.set({
      x: { kind: this.axis, low, high, name: this.axis === "step" ? "step" : "" }, y, layers, marks,
      tip: tipOf(run, this.axis, marks, (at) => savedRows(saves, at), (at) => spent[at]),
    });
    const all = view.timeline.all_saves;
    const thin = all > saves.step.length ? `${whole(saves.step.length)} of ${whole(all)} saves are drawn: the slowest ones and the longest stalls of each stretch. ` : "";
    this.said.textContent = `${thin}${plural(all, "durable save")} in ${plural(view.timeline.trainings || 1, "training")}, ${bytes(view.summary.saves.stored_nbytes)} written.`;
    this.said.append(el("span", { class: "formouse", text: " Drag to zoom in." }));
  }
}

class Durability {
  constructor() {
    Object.assign(this, { id: "durability", title: "Durability", ofEvents: true, unit: "seconds" });
    this.steps = new Chart("Durable step over time", 170);
    this.lost = new Chart("What a crash would have lost", 190);
    this.legend = el("div", { class: "legend" });
    this.said = el("p", { class: "note after" });
    this.body = el("div", {},
      el("h3", { text: "Durable step" }), this.legend, this.steps.element,
      el("div", { class: "head" }, el("h3", { text: "A crash at this moment would have lost" }),
        segments("Unit of loss", [["seconds", "seconds"], ["steps", "steps"]], "seconds", (unit) => { this.unit = unit; this.show(this.run); })),
      this.lost.element, this.said);
    this.empty = el("p", { class: "empty", text: "Nothing is durable yet: a crash would lose all of the training." });
    this.element = el("section", { id: this.id }, el("div", { class: "head" }, el("h2", { text: this.title })), this.body, this.empty);
  }
  show(run) {
    this.run = run;
    const { saves, view } = run;
    this.body.classList.toggle("hidden", !saves.step.length);
    this.empty.classList.toggle("hidden", saves.step.length > 0);
    if (!saves.step.length) return;
    const now = clockOf(run);
    const live = view.being_written === true;
    const marks = marksOf(run, "time", ["failed", "passed_over", "restored", "preempted", "gave_up"]);
    this.legend.replaceChildren(...markLegend(marks));
    // Saves, and those that failed: until then the training went on, and what a crash would have lost grew.
    const ends = [
      ...saves.event.map((event, at) => ({ event, at, training: saves.training[at], time: saves.time[at], step: saves.step[at], lost_seconds: saves.lost_seconds[at], lost_steps: saves.lost_steps[at] })),
      ...run.happenings.filter((item) => item.lost_seconds !== null),
    ].sort((a, b) => a.event - b.event);
    const [first, latest] = extent(ends.map((end) => end.time).concat(marks.map((mark) => mark.x)));
    const low = Math.min(first, ends[0].time - (ends[0].lost_seconds || 0));
    const high = live ? Math.max(latest, now) : latest;
    const line = { x: [], y: [] }, saw = { x: [], y: [] };
    const add = (to, x, y) => { to.x.push(x); to.y.push(y); };
    // A resume takes the training back to its step: from then on that is what is durable of it.
    const resumes = run.happenings.filter((item) => item.kind === "restored");
    let next = 0;
    ends.forEach((end, place) => {
      const begins = place === 0 || end.training !== ends[place - 1].training;
      const highest = this.unit === "seconds" ? end.lost_seconds : end.lost_steps;
      if (begins && place) add(saw, ends[place - 1].time, null);
      if (begins && highest !== null) add(saw, this.unit === "seconds" ? end.time - highest : end.time, 0);
      add(saw, end.time, highest);
      if (end.at === undefined) return;
      while (next < resumes.length && resumes[next].event < end.event) { add(line, resumes[next].time, resumes[next].step); next += 1; }
      add(line, end.time, end.step);
      add(saw, end.time, this.unit === "seconds" ? end.time - saves.captured[end.at] : 0);
    });
    for (; next < resumes.length; next += 1) add(line, resumes[next].time, resumes[next].step);
    if (line.x[line.x.length - 1] < latest) add(line, latest, line.y[line.y.length - 1]);
    if (live && this.unit === "seconds") {
      const newest = ends[ends.length - 1];
      const durable = newest.at === undefined ? newest.time - newest.lost_seconds : saves.captured[newest.at];
      if (run.base > newest.time) { add(saw, newest.time, null); add(saw, run.base, 0); }  // nothing was saved since it began
      add(saw, high, high - Math.max(durable, run.base));
    }
    if (live) add(line, high, line.y[line.y.length - 1]);
    const x = { kind: "time", low, high };
    const rows = (at) => [["until durable", seconds(saves.time[at] - saves.captured[at])], ["lost just before, in time", seconds(saves.lost_seconds[at])], ["lost just before, in steps", whole(saves.lost_steps[at])]];
    const weigh = (at) => saves.lost_seconds[at] || 0;
    this.steps.set({ x, y: { unit: "step", format: (value) => digits(value, 6), whole: true, free: true }, marks, layers: [{ kind: "line", ...line, steps: true, color: "var(--accent)", wide: 2 }], tip: tipOf(run, "time", marks, rows, weigh) });
    const y = this.unit === "seconds" ? { unit: "of training", format: secondsAxis } : { unit: "steps", format: (value) => digits(value, 6), whole: true };
    this.lost.set({ x, y, marks: [], layers: [{ kind: "line", ...saw, color: "var(--stall)", area: true, wide: 1.4 }], tip: tipOf(run, "time", [], rows, weigh) });
    const worst = ends.reduce((found, end) => ((end.lost_seconds || 0) > (found.lost_seconds || 0) ? end : found));
    const outcome = worst.at === undefined ? `when the save of step ${whole(worst.step)} failed` : `just before step ${whole(worst.step)} became durable`;
    this.said.textContent = `At worst ${seconds(worst.lost_seconds)} and ${plural(worst.lost_steps || 0, "step")}, ${outcome} on ${moment(worst.time)}. `
      + "The line falls when a checkpoint becomes durable, to the seconds that its save took. Between trainings it is not drawn: no event says when the earlier one ended.";
  }
}

// By name, in the order in which the training first used them: the value at each step. Those of later saves count.
function metricsOf(run) {
  const found = new Map();
  const values = (name) => { if (!found.has(name)) found.set(name, new Map()); return found.get(name); };
  run.saves.metrics.forEach((metrics, at) => { for (const [name, value] of Object.entries(metrics)) values(name).set(run.saves.step[at], value); });
  for (const entry of run.view.checkpoints) {
    for (const [name, value] of entry.step === null ? [] : Object.entries(entry.metrics)) if (!values(name).has(entry.step)) values(name).set(entry.step, value);
  }
  return found;
}
const inOrder = (values) => [...values].sort((a, b) => a[0] - b[0]);
const valueOf = (value) => (value === null ? "NaN or infinite" : number(value));
// Which end of a metric is the good one: as the run's rules say (Keep), else as its name does; null where nothing tells.
function aimOf(run, name) {
  if (run.view.best && run.view.best[0] === name) return run.view.best[1];
  const parts = name.toLowerCase().split(/[^a-z0-9]+/);
  const has = (words) => parts.some((part) => words.includes(part) || words.some((word) => word.length > 3 && part.endsWith(word)));
  if (has(["scale", "rate", "lr", "count", "weight"])) return null;
  if (has(["loss", "error", "err", "perplexity", "ppl", "mse", "rmse", "mae", "nll", "wer", "cer"])) return "min";
  return has(["acc", "accuracy", "f1", "auc", "auroc", "bleu", "rouge", "reward", "score", "precision", "recall", "iou", "map"]) ? "max" : null;
}
// What is said of a metric's values: [step, value], in order of step.
function reading(run, name, points) {
  let low = null, high = null;
  for (const point of points) {
    if (point[1] === null) continue;
    if (low === null || point[1] < low[1]) low = point;
    if (high === null || point[1] > high[1]) high = point;
  }
  const at = (point) => `${number(point[1])} at step ${whole(point[0])}`;
  const last = points[points.length - 1];
  if (points.length === 1) return { last, ends: "the only value" };
  if (low === null) return { last, ends: "" };
  const aim = aimOf(run, name);
  if (aim) return { last, ends: `best ${at(aim === "min" ? low : high)}` };
  return { last, ends: low[1] === high[1] ? "always the same" : `lowest ${at(low)}, highest ${at(high)}` };
}
// The one that tells most in short: that of the run's rules, else a loss, else the first.
function mainMetric(run) {
  const found = metricsOf(run);
  const names = [...found.keys()];
  const ruled = run.view.best && found.has(run.view.best[0]) ? run.view.best[0] : null;
  const name = ruled ?? names.find((item) => /loss/i.test(item) && aimOf(run, item) === "min") ?? names[0];
  if (name === undefined) return null;
  const points = inOrder(found.get(name));
  const { last, ends } = reading(run, name, points);
  return { name, points, last, said: `step ${whole(last[0])}${ends ? `; ${ends}` : ""}` };
}
// A small line without axes.
function trend(points, color) {
  const [low, high] = extent(points.map((point) => point[1]));
  const [first, last] = extent(points.map((point) => point[0]));
  if (!(high > low) || !(last > first)) return null;
  const parts = reduced(points.map((point) => point[0]), points.map((point) => point[1]), (x) => (200 * (x - first)) / (last - first), first, last);
  const d = parts.map((part) => part.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)} ${(29 - (28 * (y - low)) / (high - low)).toFixed(1)}`).join("")).join("");
  return svg("svg", { class: "trend", viewBox: "0 0 200 30", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("path", { d, css: { stroke: color } }));
}
// A moving average that weighs what is older ever less, and knows that it begins with nothing. Gaps stay.
function smoothed(values, weight) {
  let sum = 0, known = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + (1 - weight) * value;
    known = known * weight + (1 - weight);
    return sum / known;
  });
}

class Metrics {
  constructor(runs) {
    Object.assign(this, { id: "metrics", title: "Metrics", runs, charts: new Map(), all: false, off: new Set(), log: false, smoothing: 0 });
    this.legend = el("div");
    this.grid = el("div", { class: "charts" });
    this.more = el("button", { class: "plainbutton", type: "button", on: { click: () => { this.all = true; this.show(); } } });
    this.empty = el("p", { class: "empty" }, "No metrics were saved. Pass them to ", el("span", { class: "mono", text: "ckpt.save(step, metrics={\"loss\": loss})" }), " and they appear here.");
    const amount = el("output", { text: "off" });
    const slider = el("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", "aria-label": "Smoothing", on: { input: (event) => {
      this.smoothing = Number(event.target.value);
      amount.textContent = this.smoothing ? this.smoothing.toFixed(2) : "off";
      this.show();
    } } });
    this.tools = el("div", { class: "tools" },
      segments("Scale of metrics", [["linear", "linear"], ["log", "logarithmic"]], "linear", (scale) => { this.log = scale === "log"; this.show(); }),
      el("label", { class: "slider" }, "Smoothing", slider, amount));
    this.element = el("section", { id: this.id }, el("div", { class: "head" }, el("h2", { text: this.title }), this.tools), this.legend, this.grid, this.more, this.empty);
  }
  show() {
    const found = this.runs.map(metricsOf);
    const names = [...new Set(found.flatMap((metrics) => [...metrics.keys()]))];
    const shown = this.all ? names : names.slice(0, 6);
    this.empty.classList.toggle("hidden", names.length > 0);
    this.tools.classList.toggle("hidden", !names.length);
    this.more.classList.toggle("hidden", shown.length === names.length);
    this.more.textContent = `Show all ${names.length} metrics`;
    const several = this.runs.length > 1 && names.length > 0;
    this.legend.replaceChildren(several ? legend(this.runs.map((run) => ({ name: run.view.name, color: run.color, line: true, off: this.off.has(run.number), number: run.number })), (item, on) => {
      if (on) this.off.delete(item.number); else this.off.add(item.number);
      this.show();
    }) : "");
    const hosts = shown.map((name) => {
      if (!this.charts.has(name)) {
        const chart = new Chart(`The metric ${name} by step`, 190);
        const [odd, said] = [el("span", { class: "odd" }), el("div", { class: "reading" })];
        this.charts.set(name, { chart, odd, said, host: el("div", {}, el("h3", {}, el("span", { class: "foreign", text: name }), " ", odd), said, chart.element) });
      }
      return this.charts.get(name).host;
    });
    if (hosts.length !== this.grid.children.length || hosts.some((host, at) => this.grid.children[at] !== host)) this.grid.replaceChildren(...hosts);
    for (const name of shown) this.draw(name, found);
  }
  draw(name, found) {
    const { chart, odd, said } = this.charts.get(name);
    const several = this.runs.length > 1;
    const lines = this.runs.filter((run) => found[run.number].has(name) && !this.off.has(run.number)).map((run) => {
      const points = inOrder(found[run.number].get(name));
      const y = points.map((point) => point[1]);
      return { kind: "line", run, points, x: points.map((point) => point[0]), y, color: run.color, dots: true, wide: 1.8, smooth: this.smoothing ? smoothed(y, this.smoothing) : null };
    });
    const [low, high] = extent(lines.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]));
    const values = lines.flatMap((line) => line.y);
    const log = this.log && values.some((value) => value > 0);
    const below = this.log ? values.filter((value) => value !== null && value <= 0).length : 0;
    const tags = [];
    const strange = lines.flatMap((line) => line.x.filter((_, at) => line.y[at] === null)).sort((a, b) => a - b);
    const newest = whole(strange[strange.length - 1]);
    if (strange.length) tags.push(tag(strange.length === 1 ? `NaN or infinite at step ${newest}` : `NaN or infinite ${whole(strange.length)} times, last at step ${newest}`, "bad"));
    if (below) tags.push(tag(log ? `${plural(below, "value")} of 0 or less not drawn` : "no value above 0: linear", "warn"));
    odd.replaceChildren(...tags);
    said.replaceChildren(...lines.slice(0, 6).map((line) => {
      const { last, ends } = reading(line.run, name, line.points);
      return el("div", {}, several ? el("span", { class: "swatch line", css: { background: line.color } }) : null, `last ${valueOf(last[1])}${ends ? `, ${ends}` : ""}`);
    }), lines.length > 6 ? el("div", { text: `and ${lines.length - 6} more runs` }) : "");
    const smooth = lines.filter((line) => line.smooth);
    chart.set({
      x: { kind: "step", low, high, name: "step" }, y: { unit: "", format: (value) => digits(value, 4), free: true, log },
      layers: smooth.length ? [...lines.map((line) => ({ ...line, faint: true, dots: line.x.length === 1, wide: 1.2 })), ...smooth.map((line) => ({ ...line, y: line.smooth, dots: false, wide: 2 }))] : lines,
      tip: (offset, first, last) => {
        const rows = [];
        let at = null;
        for (const line of lines) {
          const place = nearest(line.x, offset);
          if (place === null || line.x[place] < first || line.x[place] > last) continue;
          if (at === null || Math.abs(offset(line.x[place])) < Math.abs(offset(at))) at = line.x[place];
          rows.push([several ? `${line.run.view.name}, step ${whole(line.x[place])}` : name, valueOf(line.y[place]), line.color, true]);
          if (line.smooth && line.smooth[place] !== null) rows.push(["smoothed", number(line.smooth[place])]);
        }
        return at === null ? null : { x: at, title: `Step ${whole(at)}`, rows };
      },
    });
  }
}

class Troubles {
  constructor() {
    Object.assign(this, { id: "troubles", title: "Failures and fall-backs", short: "Failures", ofEvents: true, all: false });
    this.list = el("ul", { class: "list" });
    this.more = el("button", { class: "plainbutton", type: "button", on: { click: () => { this.all = true; this.show(this.run); } } });
    this.empty = el("p", { class: "empty", text: "No save failed, no checkpoint was passed over, and nothing was short of space." });
    this.element = el("section", { id: this.id }, el("div", { class: "head" }, el("h2", { text: this.title })), this.list, this.more, this.empty);
  }
  show(run) {
    this.run = run;
    const bad = run.happenings.filter((item) => item.tone !== "note" || (item.kind === "restored" && item.text.includes("before the newest"))).reverse();
    const shown = this.all ? bad : bad.slice(0, 12);
    this.empty.classList.toggle("hidden", bad.length > 0);
    this.empty.textContent = run.view.summary ? "No save failed, no checkpoint was passed over, and nothing was short of space." : "This directory has no events, so failures were not noted.";
    this.more.classList.toggle("hidden", shown.length === bad.length);
    this.more.textContent = `Show all ${bad.length}`;
    this.list.replaceChildren(...shown.map((item) => el("li", {},
      el("span", { class: "when", text: moment(item.time) }), el("span", { class: "step", text: item.step === null ? "" : `step ${whole(item.step)}` }),
      el("span", {}, tag(KINDS[item.kind][0], item.tone), foreign(item.text)))));
  }
}

class Events {
  constructor() {
    Object.assign(this, { id: "events", title: "All events", short: "Events", ofEvents: true, kind: "all", words: "" });
    this.chips = el("div", { class: "chips", role: "group", "aria-label": "Kinds of events" });
    this.rows = new Rows("Events, newest first", { draw: (at) => this.row(this.found[at]), most: 380 });
    this.detail = el("div", { class: "detail hidden" });
    this.said = el("p", { class: "note after" });
    this.element = el("section", { id: this.id },
      el("div", { class: "head" }, el("h2", { text: this.title }), el("div", { class: "tools" }, searchBox("Filter by step or text", (words) => { this.words = words; this.show(this.run); }))),
      this.chips, this.rows.element, this.detail, this.said);
  }
  show(run) {
    if (run !== this.run) this.detail.classList.add("hidden");
    this.run = run;
    const { saves } = run;
    const all = [
      ...saves.event.map((event, at) => ({ event, at, kind: "saved", time: saves.time[at], step: saves.step[at], tone: "" })),
      ...run.happenings,
    ].sort((a, b) => b.event - a.event);
    const counts = { all: all.length };
    for (const item of all) counts[item.kind] = (counts[item.kind] || 0) + 1;
    if (!counts[this.kind]) this.kind = "all";
    this.chips.replaceChildren(...[["all", "all"], ...Object.entries(KINDS).map(([kind, names]) => [kind, names[1]])].filter(([kind]) => counts[kind]).map(([kind, name]) =>
      el("button", { type: "button", "data-kind": kind, "aria-pressed": String(kind === this.kind), on: { click: () => { this.kind = kind; this.show(this.run); } } }, name, el("span", { class: "count", text: whole(counts[kind]) }))));
    const words = this.words.trim().toLowerCase();
    this.found = all.filter((item) => (this.kind === "all" || item.kind === this.kind) && (!words || String(item.step).includes(words) || (item.text || "").toLowerCase().includes(words)));
    this.rows.set(this.found.length);
    this.rows.element.classList.toggle("hidden", !this.found.length);
    const left = run.view.timeline.all_happenings - run.happenings.length;
    this.said.textContent = this.found.length ? (left > 0 ? `The oldest ${whole(left)} events that are no saves are left out.` : "") : (all.length ? "No event matches." : "This directory has no events.jsonl: a Checkpointer writes it from its first save on.");
  }
  row(item) {
    const text = item.kind === "saved" ? this.told(item.at) : item.text;
    return el("div", { class: "row event eventrows", on: { click: () => this.open(item) } },
      el("span", { class: "dim", text: window.innerWidth < 760 ? clock(new Date(1000 * item.time), true) : moment(item.time) }), el("span", { class: "number", text: item.step === null ? "" : whole(item.step) }),
      el("span", {}, tag(KINDS[item.kind][0], item.tone)), el("span", { class: "foreign", text, css: { "white-space": "nowrap" } }));
  }
  told(at) {
    const { saves } = this.run;
    const spent = saves.time[at] - saves.captured[at];
    return `${bytes(saves.nbytes[at])} in ${seconds(spent)}, ${speed(saves.nbytes[at], spent)}, stall ${seconds(saves.stall[at])}`;
  }
  open(item) {
    const { saves } = this.run;
    const rows = item.kind === "saved"
      ? [["saved", moment(item.time)], ["mode", saves.mode[item.at]], ...PHASES.map(([key, name, title]) => [name, `${seconds(saves[key][item.at])} (${title})`]), ["stall", seconds(saves.stall[item.at])],
        ["state", bytes(saves.nbytes[item.at])], ["stored", bytes(saves.stored_nbytes[item.at])], ...Object.entries(saves.metrics[item.at]).map(([name, value]) => [name, number(value)])]
      : [["when", moment(item.time)], ["what", foreign(item.text)]];
    this.detail.classList.remove("hidden");
    this.detail.replaceChildren(el("h3", { text: item.step === null ? KINDS[item.kind][0] : `Step ${whole(item.step)}: ${KINDS[item.kind][0]}` }), facts(rows));
  }
}

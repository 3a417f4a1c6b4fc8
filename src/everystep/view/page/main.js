// The page as a whole: its runs, its sections, and the news of a server.

const data = JSON.parse(document.getElementById("data").textContent);
// Items that there are many of come as lists, without the names of their fields.
const withNames = (fields, item) => (item ? Object.fromEntries(fields.map((field, at) => [field, item[at]])) : null);
function readContents(found) {
  found.leaves.sample = found.leaves.sample.map((item) => withNames(data.sample_fields, item));
  return found;
}
function readChanges(found) {
  found.leaves = found.leaves.map((item) => withNames(data.change_fields, item));
  return found;
}
const runs = data.runs.map((shown, index) => {
  const run = { number: index, color: `var(--run-${index % 8})`, problems: shown.problems, contents: new Map(), changes: new Map() };
  for (const content of shown.contents) run.contents.set(content.path.split("/").pop(), readContents(content));
  for (const change of shown.changes) run.changes.set(`${change.a.split("/").pop()}\n${change.b.split("/").pop()}`, readChanges(change));
  take(run, shown.view);
  return run;
});

// A view has all events of a run, or those after the ones that are known.
function take(run, view) {
  const { saves, happenings } = view.timeline;
  if (view.first_event && run.saves) {
    for (const key of Object.keys(saves)) for (const value of saves[key]) run.saves[key].push(value);
    run.happenings.push(...happenings);
  } else {
    run.saves = saves;
    run.happenings = happenings;
  }
  run.view = view;
  run.skew = view.now - Date.now() / 1000;
  const began = run.happenings.filter((item) => item.kind === "restored" || item.kind === "opened").pop();
  run.base = began ? began.time : 0;
}
// The time of the machine that made this view; a page in a file stands still.
function clockOf(run) { return data.served ? Date.now() / 1000 + run.skew : run.view.now; }

async function get(address) {
  const answer = await fetch(address, { cache: "no-store" });
  const found = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(found.error || `the server answered ${answer.status}`), { isGone: answer.status === 410 });
  return found;
}
const named = (run, name) => {
  const entry = run.view.checkpoints.find((item) => item.name === name);
  return entry && entry.step !== null ? `step ${whole(entry.step)}` : name;
};
const ask = {
  served: data.served,
  checkpoints(run) {
    const known = run.view.checkpoints.filter((entry) => entry.damage === null).map((entry) => ({ name: entry.name, label: named(run, entry.name) }));
    if (data.served) return known;
    return known.filter((entry) => run.contents.has(entry.name) || [...run.changes.keys()].some((key) => key.split("\n").includes(entry.name)));
  },
  pairs(run) {
    if (!data.served) return [...run.changes.keys()].map((key) => key.split("\n"));
    const names = this.checkpoints(run).map((entry) => entry.name);
    return names.length > 1 ? [names.slice(-2)] : [];
  },
  async contents(run, name) {
    if (!run.contents.has(name)) {
      if (!data.served) throw new Error("This page does not hold the leaves of that checkpoint.");
      run.contents.clear();  // one is enough: they can be large
      // What is on its way counts, too: two sections ask for the same at once.
      run.contents.set(name, get(`runs/${run.number}/contents?name=${encodeURIComponent(name)}`).then(readContents));
    }
    try { return await run.contents.get(name); } catch (error) { run.contents.delete(name); throw error; }
  },
  async samples(run, name, places) {
    const found = await get(`runs/${run.number}/samples?name=${encodeURIComponent(name)}&places=${places.join(",")}`);
    return Object.fromEntries(Object.entries(found).map(([at, item]) => [at, withNames(data.sample_fields, item)]));
  },
  async changes(run, a, b) {
    const key = `${a}\n${b}`;
    if (!run.changes.has(key)) {
      if (run.changes.size > 3) run.changes.clear();
      run.changes.set(key, readChanges(await get(`runs/${run.number}/changes?a=${encodeURIComponent(a)}&b=${encodeURIComponent(b)}`)));
    }
    return run.changes.get(key);
  },
};
// A page in a file has the leaves of one checkpoint only.
const leavesAsk = { ...ask, checkpoints: (run) => ask.checkpoints(run).filter((entry) => data.served || run.contents.has(entry.name)) };

const overview = new Overview();
const sections = [overview, new Saves(), new Durability(), new Metrics(runs), new Troubles(), new Leaves(leavesAsk), new Changed(ask), new Writers(leavesAsk), new Disks(), new Events()];
let current = runs[0];

function show(run) {
  current = run;
  for (const section of sections) section.show(run);
  // Of checkpoints that no Checkpointer wrote into a run, there is nothing to tell but what they hold.
  const silent = !run.view.timeline.events && run.view.checkpoints.length > 0;
  sections.forEach((section, at) => {
    for (const part of [section.element, document.getElementById("sections").children[at]]) part.classList.toggle("hidden", Boolean(section.ofEvents && silent));
  });
  for (const button of document.getElementById("runs").children) button.setAttribute("aria-selected", String(Number(button.dataset.run) === run.number));
  tellStatus();
}
function tellStatus(lost) {
  const host = document.getElementById("status");
  const live = data.served && current.view.being_written;
  const gone = data.served && !current.view.is_there;
  host.className = `status ${lost || gone ? "lost" : live ? "live" : ""}`;
  let text = `as of ${moment(current.view.now)}`;
  if (lost) text = "the server does not answer";
  else if (gone) text = "the run is not there any more";
  else if (data.served) text = live ? "live: training" : current.view.being_written === false ? "live: no training now" : "live";
  host.replaceChildren(el("span", { class: "dot" }), el("span", { text }));
}

document.getElementById("main").append(...sections.map((section) => section.element));
document.getElementById("sections").append(...sections.map((section) => el("a", { href: `#${section.id}`, text: section.short || section.title })));
document.getElementById("runs").append(...(runs.length > 1 ? runs.map((run) => el("button", { type: "button", role: "tab", "data-run": run.number, title: run.view.path, on: { click: () => show(run) } },
  el("span", { class: "dot", css: { background: run.color } }), run.view.name)) : []));
document.getElementById("footer").textContent = `Made by everystep ${data.version}. ${data.served ? "This page asks a server on this machine; it changes nothing." : "This file is complete: it loads nothing and sends nothing."}`;
show(current);

// What a view shows beside its events: when it differs, the page is drawn again.
function shownOf(view) {
  const { timeline, origin, being_written: written, checkpoints, leftovers, problems, skipped_lines: skipped } = view;
  return JSON.stringify([timeline.events, origin, written, checkpoints, leftovers, problems, skipped]);
}
async function news() {
  let wait = 2000;
  try {
    for (const run of runs) {
      if (document.hidden) break;
      const before = run.view;
      const origin = before.origin === null ? "" : `&origin=${before.origin}`;
      const found = await get(`runs/${run.number}/view?first_event=${before.timeline.events}${origin}`);
      take(run, found.view);
      wait = Math.max(wait, 1000 * found.poll_seconds);
      if (shownOf(before) !== shownOf(found.view)) {
        if (run === current) show(run);
        else sections.find((section) => section.id === "metrics").show(run);
      } else if (run === current && run.view.being_written) sections.find((section) => section.id === "durability").show(run);  // time goes on
    }
    tellStatus();
  } catch (error) {
    tellStatus(true);
    wait = 5000;
  }
  setTimeout(news, wait);
}
if (data.served) {
  setTimeout(news, 1500);
  setInterval(() => { if (!document.hidden && current.view.being_written) overview.tick(); }, 1000);
}
document.documentElement.dataset.ready = "true";

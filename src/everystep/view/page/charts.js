// Charts as SVG: axes with units, a tooltip, zoom by dragging. Points are gathered by pixel column, so ten thousand cost little.

const MARGIN = { top: 20, right: 12, bottom: 26, left: 58 };
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 1209600, 2592000, 7776000, 31536000];

// At most so many ticks; `about`: a few more, where there is room.
function niceStep(span, count, about) {
  const rough = span / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].find((factor) => factor * power * (about ? Math.SQRT2 : 1) >= rough) * power;
}
// Bytes are shown in powers of two, so their ticks are, too.
function binaryStep(span, count) { return 2 ** Math.ceil(Math.log2(span / count)); }
function multiples(low, high, step) {
  const found = [];
  // 15 digits: a time has ten before its point, and a tick may be a millisecond.
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(Number((at * step).toPrecision(15)));
  return found;
}
function ticks(low, high, count, { least = 0, binary = false, about = false } = {}) {
  if (!(high > low)) return [low];
  return multiples(low, high, Math.max((binary ? binaryStep : niceStep)(high - low, count, about), least));
}
// On a logarithmic scale, as exponents of ten: powers of ten; where there are few of them, also twice and five times these.
function logTicks(low, high, count) {
  if (high - low >= 2) return multiples(Math.ceil(low - 1e-9), high, Math.max(1, Math.ceil((high - low) / (count + 1))));
  const found = [];
  for (let power = Math.floor(low); power <= high; power += 1) for (const factor of [1, 2, 5]) found.push(power + Math.log10(factor));
  const inside = found.filter((at) => at >= low - 1e-9 && at <= high + 1e-9);
  return inside.length > 2 ? inside : ticks(10 ** low, 10 ** high, count, { about: true }).filter((value) => value > 0).map(Math.log10);
}
// Within seconds all ticks have as many digits.
function momentTicks(low, high, count) {
  const step = Math.max(niceStep(high - low, count), 1e-3);
  const shown = Math.max(1, Math.ceil(-Math.log10(step) - 1e-9));
  return multiples(low, high, step).map((at) => {
    const thousandths = Math.round(at * 1000);
    return [at, `${clock(new Date(thousandths), true)}.${String(thousandths % 1000).padStart(3, "0").slice(0, shown)}`];
  });
}
function timeTicks(low, high, count) {
  const span = high - low;
  if (span < 2) return momentTicks(low, high, count + 1);
  const step = TIME_STEPS.find((size) => span / size <= count + 0.5) || TIME_STEPS[TIME_STEPS.length - 1];
  const offset = -60 * new Date(1000 * low).getTimezoneOffset();
  const found = [];
  let day = "";
  for (let at = Math.ceil((low + offset) / step) * step - offset; at <= high; at += step) {
    const date = new Date(1000 * at);
    const today = date.toLocaleDateString("en", { month: "short", day: "numeric" });
    let text = clock(date, step < 60);
    if (step >= 86400) text = span > 3e7 ? date.toLocaleDateString("en", { year: "numeric", month: "short" }) : today;
    else if (today !== day && (day || span > 43200)) text = text === "00:00" ? today : `${today}, ${text}`;
    day = today;
    found.push([at, text]);
  }
  return found;
}

// At most four points per pixel column: the first, the lowest, the highest and the last.
function reduced(xs, ys, toX, low, high) {
  const parts = [];
  let part = [], column = null, least = null, highest = null, first = null, last = null;
  const flush = () => {
    if (first === null) return;
    for (const at of [...new Set([first, least, highest, last])].sort((a, b) => a - b)) part.push([toX(xs[at]), ys[at]]);
    column = first = null;
  };
  const outside = (at) => (xs[at] < low && !(xs[at + 1] >= low)) || (xs[at] > high && !(xs[at - 1] <= high));
  for (let at = 0; at < xs.length; at += 1) {
    if (ys[at] === null || ys[at] === undefined) { flush(); if (part.length) parts.push(part); part = []; continue; }
    if (outside(at)) continue;
    const here = Math.round(toX(xs[at]));
    if (first !== null && here === column) {
      if (ys[at] < ys[least]) least = at;
      if (ys[at] > ys[highest]) highest = at;
      last = at;
    } else { flush(); column = here; first = last = least = highest = at; }
  }
  flush();
  if (part.length) parts.push(part);
  return parts;
}

// Of points in one pixel column the highest.
function highest(part) {
  const found = [];
  for (const point of part) {
    const last = found[found.length - 1];
    if (last && Math.round(last[0]) === Math.round(point[0])) { if (point[1] > last[1]) found[found.length - 1] = point; } else found.push(point);
  }
  return found;
}

class Chart {
  constructor(label, height = 220) {
    this.height = height;
    this.domain = null;
    this.svg = svg("svg", { role: "img", "aria-label": label });
    this.tip = el("div", { class: "tip hidden" });
    this.reset = el("button", { class: "plainbutton hidden", type: "button", text: "Show all", css: { position: "absolute", right: "12px", top: "22px" }, on: { click: () => this.zoom(null) } });
    this.element = el("div", { class: "chart" }, this.svg, this.reset, this.tip);
    this.svg.addEventListener("pointermove", (event) => this.hover(event));
    this.svg.addEventListener("pointerdown", (event) => this.press(event));
    this.svg.addEventListener("pointerup", (event) => this.release(event));
    this.svg.addEventListener("pointerleave", () => { if (this.pressed === undefined) this.hide(); });
    this.svg.addEventListener("dblclick", () => this.zoom(null));
    new ResizeObserver(() => this.draw()).observe(this.element);
  }
  // spec: x {kind, low, high, name}, y {format, unit, whole, binary, free, log}, layers, marks,
  // tip(offset from the pointer in pixels, low, high)
  set(spec) {
    if (this.spec && this.spec.x.kind !== spec.x.kind) this.domain = null;
    this.spec = spec;
    this.draw();
  }
  zoom(domain) {
    this.domain = domain;
    this.hide();
    this.draw();
  }
  draw() {
    const width = this.element.clientWidth;
    if (!this.spec || !width) return;
    const { x, y, layers, marks = [] } = this.spec;
    const [low, high] = this.domain || (x.high > x.low ? [x.low, x.high] : [x.low - 0.5, x.high + 0.5]);
    const inner = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: this.height - MARGIN.bottom };
    const toX = (value) => inner.left + ((value - low) / (high - low)) * (inner.right - inner.left);
    this.scale = { low, high, inner, toX };
    const bars = layers.filter((layer) => layer.kind === "bars").map((layer) => [layer, this.columns(layer)]);
    const tops = bars.flatMap(([, columns]) => columns.map((column) => column.total));
    const lines = layers.filter((layer) => layer.kind !== "bars").map((layer) => [layer, reduced(layer.x, y.log ? layer.y.map((value) => (value > 0 ? Math.log10(value) : null)) : layer.y, toX, low, high)]);
    let [bottom, top] = extent(tops.concat(...lines.map(([, parts]) => parts.flatMap((part) => part.map((point) => point[1])))));
    // Values that only differ by rounding are one value: no axis can be cut so finely.
    if (top - bottom < 1e-11 * Math.max(Math.abs(top), Math.abs(bottom))) bottom = top;
    if (y.log) {
      const room = 0.06 * (top - bottom) || 0.3;
      [bottom, top] = [bottom - room, top + room];
    } else if (y.free) {  // measures whose zero means nothing
      const room = 0.06 * (top - bottom) || 0.1 * Math.abs(top) || 1;
      bottom = bottom >= 0 && bottom < room ? 0 : bottom - room;
      top += room;
    } else bottom = 0;
    let clipped = 0;
    if (tops.length > 40) {
      const ordered = [...tops].sort((a, b) => a - b);
      const usual = ordered[Math.floor(0.98 * (ordered.length - 1))];
      if (usual > 0 && top > 5 * usual) {
        top = 2 * usual;
        clipped = tops.filter((total) => total > top).length;
      }
    }
    if (!(top > bottom)) top = bottom + 1;
    const most = this.height < 170 ? 3 : 4;
    const marksY = y.log ? logTicks(bottom, top, most) : ticks(bottom, top, most, { least: y.whole ? 1 : 0, binary: y.binary, about: true });
    if (!y.free && !y.log && !clipped) top *= 1.04;
    const toY = (value) => inner.bottom - ((Math.min(value, top) - bottom) / (top - bottom)) * (inner.bottom - inner.top);
    this.scale.toY = toY;
    const parts = [];
    for (const at of marksY) {
      const place = Math.round(toY(at)) + 0.5;
      if (place < inner.top - 8) continue;
      parts.push(svg("line", { class: at === 0 && !y.log ? "base" : "grid", x1: inner.left, x2: inner.right, y1: place, y2: place }));
      parts.push(svg("text", { x: inner.left - 8, y: place + 4, "text-anchor": "end", text: y.format(y.log ? 10 ** at : at, marksY) }));
    }
    parts.push(svg("text", { x: 2, y: 11, text: y.unit }));
    const label = x.kind === "time" ? 80 : 7 * digits(high, 6).length + 30;
    const room = Math.max(2, Math.floor((inner.right - inner.left) / label));
    const across = x.kind === "time" ? timeTicks(low, high, room) : ticks(low, high, room, { least: 1 }).map((at) => [at, digits(at, 6)]);
    let taken = -Infinity;
    for (const [at, text] of across) {
      const place = Math.round(toX(at)) + 0.5;
      if (place < inner.left - 1 || place > inner.right + 1) continue;
      parts.push(svg("line", { class: "base", x1: place, x2: place, y1: inner.bottom, y2: inner.bottom + 4 }));
      const half = text.length * 3.4;
      const middle = Math.min(Math.max(place, inner.left - 20 + half), inner.right + MARGIN.right - half);
      if (middle - half < taken + 8) continue;
      taken = middle + half;
      parts.push(svg("text", { x: middle, y: inner.bottom + 18, "text-anchor": "middle", text }));
    }
    if (x.name) parts.push(svg("text", { x: 2, y: inner.bottom + 18, text: x.name }));
    const drawn = [...bars.map(([layer, columns]) => this.drawBars(layer, columns, toY, top)), ...lines.map(([layer, found]) => this.drawLine(layer, found, toY))];
    // What goes on beyond the ends of the axis is cut off there; points at an end stay round.
    const frame = { x: inner.left - 4, y: 0, width: inner.right - inner.left + 8, height: this.height };
    parts.push(svg("svg", { ...frame, viewBox: Object.values(frame).join(" "), class: "plot" }, drawn));
    for (const mark of marks) {
      if (mark.x < low || mark.x > high) continue;
      const place = Math.round(toX(mark.x)) + 0.5;
      parts.push(svg("line", { class: `mark markline ${mark.tone}`, x1: place, x2: place, y1: inner.top, y2: inner.bottom }));
      parts.push(svg("path", { class: `mark ${mark.tone}`, d: `M${place - 4} ${inner.top - 5}h8l-4 6z` }, svg("title", { text: mark.title })));
    }
    parts.push(svg("line", { class: "base", x1: inner.left, x2: inner.right, y1: inner.bottom + 0.5, y2: inner.bottom + 0.5 }));
    if (clipped) parts.push(svg("text", { x: inner.right, y: 11, "text-anchor": "end", text: `${plural(clipped, "bar")} higher than the axis` }));
    this.cross = svg("line", { class: "cross hidden", y1: inner.top, y2: inner.bottom });
    this.selection = svg("rect", { class: "selection hidden", y: inner.top, height: inner.bottom - inner.top });
    parts.push(this.selection, this.cross);
    this.svg.setAttribute("height", this.height);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.svg.replaceChildren(...parts);
    this.reset.classList.toggle("hidden", !this.domain);
  }
  columns(layer) {
    const { low, high, inner, toX } = this.scale;
    const inside = [];
    for (let at = 0; at < layer.x.length; at += 1) if (layer.x[at] >= low && layer.x[at] <= high) inside.push(at);
    // As far apart as they usually are: a pause between two trainings makes room for nothing.
    const placed = inside.map((at) => toX(layer.x[at])).sort((a, b) => a - b);
    const gap = median(placed.slice(1).map((place, at) => place - placed[at]).filter((away) => away > 0.01));
    const pitch = Math.min((inner.right - inner.left) / Math.max(inside.length, 1), gap ?? Infinity);
    const wide = Math.max(2, Math.min(16, Math.floor(pitch * 0.72)));
    const best = new Map();
    for (const at of inside) {
      let total = 0;
      for (const series of layer.series) total += series.values[at] || 0;
      const column = Math.round(toX(layer.x[at]) / wide);
      const known = best.get(column);
      if (!known || total > known.total) best.set(column, { at, total });
    }
    // Where they stand close, bars keep to a grid: gaps between them would only say how pixels fell.
    const dense = pitch < 4;
    const left = (number, at) => (dense ? number * wide : toX(layer.x[at]) - wide / 2);
    return [...best].map(([number, column]) => ({ ...column, wide, x: Math.min(Math.max(left(number, column.at), inner.left), inner.right - wide) }));
  }
  drawBars(layer, columns, toY, top) {
    const paths = layer.series.map(() => []);
    for (const column of columns) {
      let below = 0;
      layer.series.forEach((series, number) => {
        const value = series.values[column.at] || 0;
        if (value > 0 && below < top) {
          const [from, to] = [toY(below), toY(below + value)];
          if (from - to > 0.05) paths[number].push(`M${column.x.toFixed(1)} ${from.toFixed(2)}V${to.toFixed(2)}h${column.wide}V${from.toFixed(2)}z`);
        }
        below += value;
      });
    }
    return layer.series.map((series, number) => svg("path", { d: paths[number].join(""), css: { fill: series.color } }));
  }
  drawLine(layer, parts, toY) {
    const draw = (part) => part.map(([x, y], at) => {
      const place = `${x.toFixed(1)} ${toY(y).toFixed(1)}`;
      if (!at) return `M${place}`;
      return layer.steps ? `H${x.toFixed(1)}V${toY(y).toFixed(1)}` : `L${place}`;
    }).join("");
    const found = [];
    const base = this.scale.inner.bottom;
    if (layer.area) {
      const count = parts.reduce((sum, part) => sum + part.length, 0);
      if (count > this.scale.inner.right - this.scale.inner.left) parts = parts.map(highest);
      const d = parts.map((part) => `${draw(part)}V${base}H${part[0][0].toFixed(1)}z`).join("");
      found.push(svg("path", { d, css: { fill: layer.color, opacity: "0.16" } }));
    }
    found.push(svg("path", { d: parts.map(draw).join(""), css: { fill: "none", stroke: layer.color, "stroke-width": `${layer.wide || 1.6}`, "stroke-linejoin": "round", opacity: `${layer.faint ? 0.3 : 1}` } }));
    const points = parts.reduce((sum, part) => sum + part.length, 0);
    if (layer.dots && points <= (this.scale.inner.right - this.scale.inner.left) / 12) {
      for (const part of parts) for (const [x, y] of part) found.push(svg("circle", { cx: x.toFixed(1), cy: toY(y).toFixed(1), r: 2.6, css: { fill: layer.color } }));
    }
    return found;
  }
  place(event) {
    const box = this.svg.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }
  hover(event) {
    if (!this.scale || !this.spec.tip) return;
    const { low, high, inner, toX } = this.scale;
    const [left] = this.place(event);
    if (this.pressed !== undefined) {
      const [from, to] = [Math.min(this.pressed, left), Math.max(this.pressed, left)];
      this.selection.classList.remove("hidden");
      this.selection.setAttribute("x", Math.max(from, inner.left));
      this.selection.setAttribute("width", Math.max(0, Math.min(to, inner.right) - Math.max(from, inner.left)));
    }
    if (left < inner.left - 6 || left > inner.right + 6) { this.hide(); return; }
    const told = this.spec.tip((at) => toX(at) - left, low, high);
    if (!told) { this.hide(); return; }
    const place = toX(told.x);
    this.cross.classList.remove("hidden");
    this.cross.setAttribute("x1", place);
    this.cross.setAttribute("x2", place);
    this.tip.replaceChildren(el("div", { class: "title", text: told.title }), told.rows.length ? el("table", {}, told.rows.map(([name, text, color, line]) =>
      el("tr", {}, el("td", {}, color ? el("span", { class: `swatch ${line ? "line" : ""}`, css: { background: color } }) : null, name), el("td", { text })))) : "", told.text ? el("div", { class: "foreign", text: told.text }) : "");
    this.tip.classList.remove("hidden");
    const wide = this.tip.offsetWidth;
    const room = this.element.clientWidth;
    const beside = place + 14 + wide > room ? place - 14 - wide : place + 14;
    this.tip.style.left = `${Math.max(0, Math.min(beside, room - wide))}px`;
    this.tip.style.top = `${MARGIN.top}px`;
  }
  hide() {
    this.tip.classList.add("hidden");
    if (this.cross) this.cross.classList.add("hidden");
  }
  press(event) {
    if (event.pointerType !== "mouse" || event.button !== 0 || !this.scale) { this.hover(event); return; }
    this.pressed = this.place(event)[0];
    this.svg.setPointerCapture(event.pointerId);
  }
  release(event) {
    if (this.pressed === undefined) return;
    const { low, high, inner } = this.scale;
    const toValue = (left) => low + ((Math.min(Math.max(left, inner.left), inner.right) - inner.left) / (inner.right - inner.left)) * (high - low);
    const [from, to] = [this.pressed, this.place(event)[0]].sort((a, b) => a - b);
    this.pressed = undefined;
    this.selection.classList.add("hidden");
    if (to - from > 8) this.zoom([toValue(from), toValue(to)]);
  }
}

// The place in a column whose value is nearest to the pointer; of those drawn upon each other, the one with the highest weight.
function nearest(xs, offset, weight) {
  let best = null, least = Infinity;
  for (let at = 0; at < xs.length; at += 1) {
    const away = Math.abs(offset(xs[at]));
    if (best === null || away < least) { best = at; least = away; }
  }
  if (best === null || !weight) return best;
  const place = offset(xs[best]);
  for (let at = 0; at < xs.length; at += 1) if (Math.abs(offset(xs[at]) - place) <= 1.5 && weight(at) > weight(best)) best = at;
  return best;
}
function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (value !== null && value !== undefined) { if (value < low) low = value; if (value > high) high = value; }
  return low <= high ? [low, high] : [0, 1];
}
// Seconds on an axis: one unit for all its ticks.
function secondsAxis(value, all) {
  const top = Math.max(...all.map(Math.abs));
  if (value === 0) return "0";
  if (top < 1e-3) return `${digits(value * 1e6)} µs`;
  if (top < 1) return `${digits(value * 1e3)} ms`;
  if (top < 300) return `${digits(value)} s`;
  if (top < 2 * 3600) return `${digits(value / 60)} min`;
  return top < 48 * 3600 ? `${digits(value / 3600)} h` : `${digits(value / 86400)} d`;
}
function legend(items, toggle) {
  return el("div", { class: "legend" }, items.map((item) => {
    const swatch = el("span", { class: `swatch ${item.line ? "line" : ""}`, css: { background: item.color } });
    if (!toggle) return el("span", { class: "said" }, swatch, item.name);
    return el("button", { type: "button", "aria-pressed": String(!item.off), title: item.title || "", on: { click: (event) => {
      const on = event.currentTarget.getAttribute("aria-pressed") !== "true";
      event.currentTarget.setAttribute("aria-pressed", String(on));
      toggle(item, on);
    } } }, swatch, item.name);
  }));
}

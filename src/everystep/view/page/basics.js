// Elements, numbers and times. Text from checkpoints only ever becomes text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (name === "css") for (const [key, to] of Object.entries(value)) node.style.setProperty(key, to);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
function bytes(count) {
  if (count === null || count === undefined) return "–";
  let unit = 0;
  while (count >= 1024 && unit < SIZES.length - 1) { count /= 1024; unit += 1; }
  return `${unit === 0 || count >= 100 ? count.toFixed(0) : count.toFixed(1)} ${SIZES[unit]}`;
}
function digits(value, most = 3) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return Number(value.toPrecision(most)).toExponential().replace("e+", "e").replace("-", "−").replace("e-", "e−");
  const text = size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(most)));
  return text.replace("-", "−");
}
function number(value) { return value === null || value === undefined ? "–" : digits(value, 4); }
function whole(value) { return value === null || value === undefined ? "–" : value.toLocaleString("en"); }
function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${digits(value * 1e6)} µs`;
  if (size < 1) return `${digits(value * 1e3)} ms`;
  if (size < 100) return `${digits(value)} s`;
  return long(value);
}
function long(value) {
  const all = Math.round(value);
  if (all < 100) return `${all} s`;
  const [days, hours, minutes] = [Math.floor(all / 86400), Math.floor(all / 3600) % 24, Math.floor(all / 60) % 60];
  if (days) return hours ? `${days} d ${hours} h` : `${days} d`;
  if (hours) return minutes ? `${hours} h ${minutes} min` : `${hours} h`;
  return all % 60 ? `${minutes} min ${all % 60} s` : `${minutes} min`;
}
function ago(value) {
  if (value < -2) return "in the future";
  if (value < 2) return "just now";
  return `${value < 100 ? `${Math.round(value)} s` : long(value - (value >= 3600 ? value % 60 : 0))} ago`;
}
function share(value) { return value === null || value === undefined ? "–" : `${digits(100 * value, 2)} %`; }
function speed(nbytes, spent) {
  if (!(spent > 0)) return "–";
  const rate = nbytes / spent / 1e9;
  return rate >= 0.095 ? `${rate.toFixed(2)} GB/s` : `${digits(rate * 1000, 2)} MB/s`;
}
function plural(count, noun, more) { return `${whole(count)} ${count === 1 ? noun : more || `${noun}s`}`; }
function moment(time) {
  const date = new Date(1000 * time);
  if (Number.isNaN(date.getTime())) return `${time} s after 1970`;
  const two = (part) => String(part).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock(date, true)}`;
}
function clock(date, exact) {
  const two = (part) => String(part).padStart(2, "0");
  return `${two(date.getHours())}:${two(date.getMinutes())}${exact ? `:${two(date.getSeconds())}` : ""}`;
}
function median(values) {
  const known = values.filter((value) => value !== null).sort((a, b) => a - b);
  return known.length ? known[known.length >> 1] : null;
}
function most(values) {
  let found = null;
  for (const value of values) if (value !== null && (found === null || value > found)) found = value;
  return found;
}

function segments(label, choices, chosen, choose) {
  const buttons = choices.map(([value, text]) =>
    el("button", {
      type: "button", "aria-pressed": String(value === chosen), "data-value": value, text,
      on: { click: () => { for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.value === value)); choose(value); } },
    }));
  return el("div", { class: "segments", role: "group", "aria-label": label }, buttons);
}
function options(label, choices, chosen, choose) {
  return el("select", { "aria-label": label, on: { change: (event) => choose(event.target.value) } },
    choices.map(([value, text, off]) => el("option", { value, text, selected: value === chosen, disabled: off })));
}
function searchBox(label, type) {
  let waiting = 0;
  return el("input", {
    type: "search", placeholder: label, "aria-label": label, spellcheck: "false", autocomplete: "off",
    on: { input: (event) => { clearTimeout(waiting); waiting = setTimeout(() => type(event.target.value), 90); } },
  });
}
function facts(rows) {
  return el("dl", { class: "facts" }, rows.filter(Boolean).map(([name, value]) => [el("dt", { text: name }), el("dd", {}, value)]));
}
function table(columns, rows) {
  const kind = (column) => ({ class: column.number ? "number" : column.when ? "when" : null });
  return el("div", { class: "scroll" }, el("table", { class: "rows" },
    el("thead", {}, el("tr", {}, columns.map((column) => el("th", { ...kind(column), text: column.name })))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, at) => el("td", kind(columns[at]), cell)))))));
}
function meter(part, tone) {
  return el("div", { class: `meter ${tone || ""}` }, el("i", { css: { width: `${Math.max(0, Math.min(100, 100 * part)).toFixed(2)}%` } }));
}
function tag(text, tone) { return el("span", { class: `tag ${tone === "note" ? "" : tone || ""}`, text }); }
function foreign(text) { return el("span", { class: "foreign", text }); }

// Rows of one height, of which only those in sight exist: 20,000 cost as much as 20.
class Rows {
  constructor(label, { height = 30, most = 460, draw, role = "list" }) {
    Object.assign(this, { height, most, draw, count: 0, drawn: new Map() });
    this.space = el("div", { class: "space" });
    this.element = el("div", { class: "virtual", role, "aria-label": label, tabindex: "0", on: { scroll: () => this.refresh(), keydown: (event) => this.key(event) } }, this.space);
    new ResizeObserver(() => this.refresh()).observe(this.element);
  }
  set(count) {
    this.count = count;
    this.element.style.height = `${Math.min(this.most, Math.max(count, 1) * this.height + 2)}px`;
    this.space.style.height = `${count * this.height}px`;
    this.drawn.forEach((row) => row.remove());
    this.drawn.clear();
    this.refresh();
  }
  // Arrows move from row to row, and what is out of sight comes into it.
  key(event) {
    const here = [...this.drawn].find(([, row]) => row === document.activeElement);
    const from = here ? here[0] : Math.ceil(this.element.scrollTop / this.height) - (event.key === "ArrowDown" ? 1 : 0);
    const to = { ArrowDown: from + 1, ArrowUp: from - 1, Home: 0, End: this.count - 1 }[event.key];
    if (to === undefined || !this.count) return;
    event.preventDefault();
    this.focus(Math.max(0, Math.min(this.count - 1, to)));
  }
  focus(at) {
    const [top, room] = [at * this.height, this.element.clientHeight];
    if (top < this.element.scrollTop) this.element.scrollTop = top;
    else if (top + this.height > this.element.scrollTop + room) this.element.scrollTop = top + this.height - room;
    this.refresh();
    if (this.drawn.has(at)) this.drawn.get(at).focus({ preventScroll: true });
  }
  refresh() {
    const first = Math.max(0, Math.floor(this.element.scrollTop / this.height) - 6);
    const last = Math.min(this.count, Math.ceil((this.element.scrollTop + this.element.clientHeight) / this.height) + 6);
    for (const [at, row] of this.drawn) if (at < first || at >= last) { row.remove(); this.drawn.delete(at); }
    for (let at = first; at < last; at += 1) {
      if (this.drawn.has(at)) continue;
      const row = this.draw(at);
      row.style.top = `${at * this.height}px`;
      this.drawn.set(at, row);
      this.space.append(row);
    }
    if (this.seen) this.seen(first, last);
  }
}

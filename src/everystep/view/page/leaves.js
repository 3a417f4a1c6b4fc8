// The tree of leaves: groups with totals, histograms of samples, and a closer look at one leaf.

const LEVELS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";

const DEEPEST = 60;  // groups in groups; what a name has beyond that stays one name

// Names with dots as a tree. A group with one thing in it is one row with that: "h.0.attn", "norm.weight".
function treeOf(names, measure) {
  const root = { name: "", path: "", groups: new Map(), leaves: [], depth: -1 };
  names.forEach((name, at) => {
    const parts = name.split(".");
    let node = root;
    for (const part of parts.slice(0, Math.min(parts.length - 1, DEEPEST))) {
      if (!node.groups.has(part)) node.groups.set(part, { name: part, path: node.path ? `${node.path}.${part}` : part, groups: new Map(), leaves: [] });
      node = node.groups.get(part);
    }
    node.leaves.push(at);
  });
  const isSingle = (node) => !node.children.length && node.leaves.length === 1;
  const finish = (node, depth) => {
    node.depth = depth;
    let children = [...node.groups.values()];
    children = children.map((child) => {
      let kept = child;
      while (kept.groups.size === 1 && !kept.leaves.length) {
        const [only] = kept.groups.values();
        kept = { ...only, name: `${kept.name}.${only.name}` };
      }
      return finish(kept, depth + 1);
    });
    for (const child of children) if (isSingle(child)) node.leaves.push(child.leaves[0]);
    node.children = children = children.filter((child) => !isSingle(child));
    node.count = node.leaves.length;
    node.sum = measure ? measure.start() : null;
    for (const at of node.leaves) if (measure) measure.leaf(node.sum, at);
    for (const child of children) { node.count += child.count; if (measure) measure.join(node.sum, child.sum); }
    return node;
  };
  return finish(root, -1);
}

class Tree {
  constructor(label, kind, heads, drawCells) {
    Object.assign(this, { kind, drawCells, open: new Set(), words: "", order: "state", names: [] });
    this.head = el("div", { class: `headrow ${kind}` }, heads.map(([name, isNumber]) => el("span", { class: isNumber ? "number" : "", text: name })));
    this.rows = new Rows(label, { draw: (at) => this.row(at), role: "tree", most: 520 });
    this.rows.seen = (first, last) => { if (this.seen) this.seen(this.list.slice(first, last).filter((item) => item.leaf !== undefined).map((item) => item.leaf)); };
    this.element = el("div", {}, this.head, this.rows.element);
    this.list = [];
  }
  set(names, measure) {
    const same = names.length === this.names.length && names.every((name, at) => name === this.names[at]);
    this.names = names;
    this.lower = names.map((name) => name.toLowerCase());
    this.root = treeOf(names, measure);
    if (!same) {
      this.open = new Set();
      // As much as fits without scrolling, level by level.
      let rows = this.root.children.length + this.root.leaves.length;
      const queue = [...this.root.children];
      while (queue.length) {
        const node = queue.shift();
        rows += node.children.length + node.leaves.length;
        if (rows > 14) break;
        this.open.add(node.path);
        queue.push(...node.children);
      }
    }
    this.refresh();
  }
  refresh() {
    const words = this.words.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const extra = this.extra || (() => "");
    const wanted = words.length ? new Set(this.names.map((_, at) => at).filter((at) => { const text = `${this.lower[at]} ${extra(at)}`; return words.every((word) => text.includes(word)); })) : null;
    const list = [];
    const any = (node) => node.leaves.some((at) => wanted.has(at)) || node.children.some(any);
    const walk = (node) => {
      const items = [...node.children.map((group) => ({ group })), ...node.leaves.map((leaf) => ({ leaf, depth: node.depth + 1, under: node.path }))];
      if (this.order === "state") items.sort((a, b) => this.first(a) - this.first(b));
      else items.sort((a, b) => this.weigh(b) - this.weigh(a));
      for (const item of items) {
        if (item.leaf !== undefined) { if (!wanted || wanted.has(item.leaf)) list.push(item); continue; }
        if (wanted && !any(item.group)) continue;
        list.push(item);
        if (wanted || this.open.has(item.group.path)) walk(item.group);
      }
    };
    if (this.root) walk(this.root);
    this.list = list;
    this.matching = wanted ? wanted.size : this.names.length;
    this.filtered = Boolean(wanted);
    this.rows.set(list.length);
    this.element.classList.toggle("hidden", !list.length);
  }
  filter(words) {
    this.words = words;
    this.rows.element.scrollTop = 0;
    this.refresh();
  }
  first(item) {
    if (item.leaf !== undefined) return item.leaf;
    const { group } = item;
    if (group.begin === undefined) {
      group.begin = Infinity;
      for (const leaf of group.leaves) group.begin = Math.min(group.begin, leaf);
      for (const child of group.children) group.begin = Math.min(group.begin, this.first({ group: child }));
    }
    return group.begin;
  }
  expand(all) {
    this.open = new Set();
    const walk = (node) => { for (const child of node.children) { this.open.add(child.path); walk(child); } };
    if (all) walk(this.root);
    this.refresh();
  }
  row(at) {
    const item = this.list[at];
    const group = item.group;
    const depth = group ? group.depth : item.depth;
    const name = group ? group.name : this.names[item.leaf].slice(item.under ? item.under.length + 1 : 0);
    const isOpen = group && (this.filtered || this.open.has(group.path));
    const cell = el("span", { class: "name", title: group ? group.path : this.names[item.leaf], css: { "padding-left": `${Math.min(depth, 12) * (window.innerWidth < 760 ? 8 : 16)}px` } },
      el("span", { class: `caret ${isOpen ? "open" : ""}`, text: group ? "›" : "" }), " ", el("bdi", { text: name || "(no name)" }), " ", group ? el("span", { class: "in", text: plural(group.count, "leaf", "leaves") }) : this.badge ? this.badge(item.leaf) : null);
    const act = () => {
      if (group && !this.filtered) {
        if (this.open.has(group.path)) this.open.delete(group.path); else this.open.add(group.path);
        const top = this.rows.element.scrollTop;
        this.refresh();
        this.rows.element.scrollTop = top;
      } else if (!group && this.choose) {
        this.chosen = item.leaf;
        this.rows.drawn.forEach((row) => row.removeAttribute("aria-selected"));
        row.setAttribute("aria-selected", "true");
        this.choose(item.leaf);
      }
    };
    const row = el("div", {
      class: `row ${this.kind} ${group ? "group" : "leaf"}`, role: "treeitem", tabindex: "-1", "aria-level": depth + 1, "aria-expanded": group ? String(isOpen) : null,
      "aria-selected": !group && this.chosen === item.leaf ? "true" : null,
      on: { click: act, keydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); this.rows.focus(at); } } },
    }, cell, ...this.drawCells(item));
    return row;
  }
}

function spark(sample, large) {
  if (!sample) return el("span", { class: "dim", text: "" });
  const [wide, high] = large ? [480, 120] : [96, 22];
  const drawn = svg("svg", { class: large ? "large" : "spark", viewBox: `0 0 ${wide} ${high}`, preserveAspectRatio: "none", role: "img", "aria-label": "histogram" });
  if (!sample.bars) {
    if (sample.low !== null) drawn.append(svg("path", { d: `M${wide / 2 - 2} ${high}V2h4V${high}z` }));
  } else {
    const bar = wide / sample.bars.length;
    const d = [...sample.bars].map((letter, at) => {
      const height = (LEVELS.indexOf(letter) / (LEVELS.length - 1)) * (high - 1);
      return height ? `M${(at * bar).toFixed(2)} ${high}v${(-height).toFixed(2)}h${(bar * 0.86).toFixed(2)}V${high}z` : "";
    }).join("");
    drawn.append(svg("path", { d }));
  }
  drawn.append(svg("line", { x1: 0, x2: wide, y1: high - 0.5, y2: high - 0.5 }));
  return drawn;
}
function shapeOf(shape) { return shape.length ? shape.join(" × ") : "scalar"; }

class Leaves {
  constructor(ask) {
    Object.assign(this, { id: "leaves", title: "Leaves", ask, name: null, asked: new Set() });
    this.tree = new Tree("Leaves", "leaftree", [["name"], ["dtype"], ["shape"], ["bytes", true], ["share"], ["values"]], (item) => this.cells(item));
    this.tree.weigh = (item) => (item.leaf !== undefined ? this.content.leaves.nbytes[item.leaf] : item.group.sum.nbytes);
    this.tree.extra = (at) => `${this.content.leaves.dtype[at].toLowerCase()} ${this.content.leaves.tied[at] ? "tied" : ""} ${this.odd(at) ? "nan" : ""}`;
    this.tree.badge = (at) => (this.odd(at) ? tag("NaN or infinite", "bad") : null);
    this.tree.choose = (at) => this.look(at);
    this.tree.seen = (places) => this.want(places);
    this.picker = el("span");
    this.said = el("p", { class: "note" });
    this.detail = el("div", { class: "detail hidden" });
    this.values = el("details", {});
    this.empty = el("p", { class: "empty" });
    this.tools = el("div", { class: "tools" }, this.picker,
      searchBox("Filter, e.g. attn bf16", (words) => { this.tree.filter(words); this.count(); }),
      options("Order", [["state", "in order of the state"], ["bytes", "largest first"]], "state", (order) => { this.tree.order = order; this.tree.refresh(); }),
      el("button", { class: "plainbutton", type: "button", text: "Expand all", on: { click: () => this.tree.expand(true) } }),
      el("button", { class: "plainbutton", type: "button", text: "Collapse", on: { click: () => this.tree.expand(false) } }));
    this.element = el("section", { id: this.id }, el("div", { class: "head" }, el("h2", { text: this.title }), this.tools), this.said, this.tree.element, this.empty, this.detail, this.values);
  }
  async show(run) {
    const other = run !== this.run;
    this.run = run;
    const names = this.ask.checkpoints(run);
    const newest = names[names.length - 1];
    // A page that is live follows the newest checkpoint until another is chosen.
    if (other || !names.some((entry) => entry.name === this.name)) { this.name = newest ? newest.name : null; this.follows = true; }
    if (this.follows && newest) this.name = newest.name;
    const offered = JSON.stringify([names, this.name]);
    if (offered !== this.offered) {  // an open list stays open
      this.offered = offered;
      this.picker.replaceChildren(names.length ? options("Checkpoint", names.map((entry) => [entry.name, entry.label]).reverse(), this.name, (name) => { this.name = name; this.follows = name === newest.name; this.load(); }) : "");
    }
    await this.load();
  }
  async load() {
    const { name, run } = this;
    if (name === null) { this.none("This run has no intact checkpoint, so there are no leaves to show."); return; }
    if (this.content && this.content.of === `${run.number} ${name}`) return;
    let found;
    try { found = await this.ask.contents(run, name); } catch (error) {
      if (!error.isGone || !this.content || this.content.run !== run) this.none(error.message);  // else the next news has the next one
      return;
    }
    if (name !== this.name || run !== this.run) return;
    const before = this.content;
    this.content = { ...found, of: `${run.number} ${name}` };
    this.asked = new Set();
    this.wanted = null;
    this.failed = false;
    this.tools.classList.remove("hidden");
    this.empty.classList.add("hidden");
    const { leaves } = this.content;
    // The next checkpoint of a training has the same leaves: what is open stays open, and histograms are shown until newer ones come.
    const alike = before && before.run === run && before.leaves.name.length === leaves.name.length && leaves.name.every((leaf, at) => leaf === before.leaves.name[at]);
    this.content.run = run;
    if (alike && this.ask.served) for (const at of this.inSight()) leaves.sample[at] = leaves.sample[at] || before.leaves.sample[at];
    if (!alike) { this.detail.classList.add("hidden"); this.tree.chosen = undefined; }
    this.tree.set(leaves.name, { start: () => ({ nbytes: 0 }), leaf: (sum, at) => { if (!leaves.tied[at]) sum.nbytes += leaves.nbytes[at]; }, join: (sum, other) => { sum.nbytes += other.nbytes; } });
    this.count();
    this.showValues();
    if (!this.detail.classList.contains("hidden")) { this.look(this.tree.chosen); this.want([this.tree.chosen]); }
  }
  // The leaves whose rows exist, and the one that is open below them.
  inSight() { return [...[...this.tree.rows.drawn.keys()].map((at) => this.tree.list[at].leaf), this.tree.chosen].filter((leaf) => leaf !== undefined); }
  none(text) {
    this.content = null;
    this.tools.classList.add("hidden");
    this.tree.set([], null);
    this.empty.textContent = text;
    this.empty.classList.remove("hidden");
    this.values.classList.add("hidden");
    this.detail.classList.add("hidden");
    this.said.textContent = "";
  }
  odd(at) {
    const sample = this.content.leaves.sample[at];
    return sample ? sample.not_finite : 0;
  }
  count() {
    if (!this.content) return;
    const { leaves, nbytes, sampled, read_nbytes: read } = this.content;
    const matching = this.tree.matching === leaves.name.length ? "" : `${whole(this.tree.matching)} of `;
    const known = leaves.sample.filter(Boolean).length;
    const large = leaves.sample.some((sample) => sample && !sample.whole);
    const histograms = this.ask.served ? "Histograms are read as you look. " : known ? `Histograms of ${known === leaves.name.length ? "all" : whole(known)} leaves were read (${bytes(read)}, all verified)${sampled < leaves.name.length ? "; the others are tied, empty, hold no numbers, or there was no time" : ""}. ` : "";
    this.said.textContent = `${matching}${plural(leaves.name.length, "leaf", "leaves")}, ${bytes(nbytes)}. ${histograms}${large || this.ask.served ? "Of a leaf above 256 KiB four stretches are sampled." : ""}`;
    const odd = leaves.name.filter((_, at) => this.odd(at)).length;
    if (odd) this.said.append(" ", tag(`${plural(odd, "leaf holds", "leaves hold")} NaN or infinite elements: filter by nan`, "bad"));
    this.empty.textContent = "No leaf matches.";
    this.empty.classList.toggle("hidden", this.tree.matching > 0);
    if (!leaves.name.length) { this.empty.textContent = "This checkpoint has no leaves, only values."; this.empty.classList.remove("hidden"); }
  }
  cells(item) {
    const { leaves, nbytes } = this.content;
    if (item.group) {
      return [el("span"), el("span"), el("span", { class: "number", text: bytes(item.group.sum.nbytes) }), meter(item.group.sum.nbytes / Math.max(nbytes, 1)), el("span")];
    }
    const at = item.leaf;
    const tied = leaves.tied[at];
    return [
      el("span", { class: "dim", text: leaves.dtype[at].toLowerCase() }), el("span", { class: "dim", text: shapeOf(leaves.shape[at]), title: shapeOf(leaves.shape[at]) }),
      el("span", { class: "number", text: tied ? "tied" : bytes(leaves.nbytes[at]), title: tied ? `another name of ${tied}` : "" }), meter(tied ? 0 : leaves.nbytes[at] / Math.max(nbytes, 1)),
      el("span", {}, spark(leaves.sample[at])),
    ];
  }
  want(places) {
    if (!this.ask.served || !this.content || this.failed) return;
    for (const at of places) if (!this.asked.has(at) && !this.content.leaves.tied[at]) (this.wanted = this.wanted || new Set()).add(at);
    clearTimeout(this.waiting);
    if (this.wanted && this.wanted.size) this.waiting = setTimeout(() => this.fetch(), 120);
  }
  async fetch() {
    if (this.busy || !this.wanted) return;
    const { content, run, name } = this;
    const places = [...this.wanted].slice(0, 200);
    this.wanted = null;
    this.busy = true;
    try {
      const found = await this.ask.samples(run, name, places);
      if (content !== this.content) return;
      // There may have been no time for all of them; those are asked for again.
      const answered = places.filter((at) => String(at) in found);
      for (const at of answered.length ? answered : places) this.asked.add(at);
      this.want(places);
      for (const [at, sample] of Object.entries(found)) content.leaves.sample[at] = sample;
      for (const [at, row] of this.tree.rows.drawn) {
        const item = this.tree.list[at];
        if (item && item.leaf !== undefined && found[item.leaf]) row.lastChild.replaceChildren(spark(found[item.leaf]));
      }
      if (this.tree.chosen in found && !this.detail.classList.contains("hidden")) this.look(this.tree.chosen);
    } catch (error) {
      if (content !== this.content) return;
      this.failed = true;
      // A checkpoint that retention has removed meanwhile is no news: the page moves on to the next.
      if (!error.isGone) this.said.textContent = `Histograms cannot be read: ${error.message}`;
    } finally {
      this.busy = false;
      if (this.content) this.want([]);
    }
  }
  look(at) {
    const { leaves } = this.content;
    const sample = leaves.sample[at];
    const elements = leaves.shape[at].reduce((product, size) => product * size, 1);
    this.detail.classList.remove("hidden");
    const chart = sample && sample.low !== null ? el("div", {}, spark(sample, true), el("div", { class: "head", css: { margin: "2px 0 0" } }, el("span", { class: "note", text: number(sample.first) }), el("span", { class: "note", text: number(sample.last) })),
      sample.low < sample.first || sample.high > sample.last ? el("p", { class: "note", text: "The outermost bars also count what lies beyond." }) : null) : el("p", { class: "empty", text: leaves.tied[at] ? "Another name of a leaf above." : this.ask.served && !this.asked.has(at) ? "Reading…" : "No histogram: no numbers in it, or there was no time to read it." });
    this.detail.replaceChildren(el("h3", { text: leaves.name[at] }), chart, facts([
      ["type", `${leaves.dtype[at]}, from ${leaves.framework[at]}`], ["shape", shapeOf(leaves.shape[at])], ["size", `${bytes(leaves.nbytes[at])}, ${plural(elements, "element")}`],
      leaves.tied[at] && ["tied to", foreign(leaves.tied[at])],
      sample && ["looked at", sample.whole ? "all elements" : `${plural(sample.elements, "element")}, a sample`],
      sample && sample.low !== null && ["range", `${number(sample.low)} … ${number(sample.high)}`],
      sample && sample.mean !== null && ["mean ± deviation", `${number(sample.mean)} ± ${number(sample.deviation)}`],
      sample && ["zeros", `${share(sample.elements ? sample.zeros / sample.elements : 0)}`],
      sample && ["NaN or infinite", sample.not_finite ? tag(plural(sample.not_finite, "element"), "bad") : "none"],
    ]));
  }
  showValues() {
    const { values, all_values: all, facts: said } = this.content;
    this.values.classList.toggle("hidden", !values.length && !said.length);
    const left = all - values.length;
    this.values.replaceChildren(el("summary", { text: `${plural(all, "value")} beside the leaves` }),
      table([{ name: "value" }, { name: "type" }, { name: "is" }], [...said.map(([name, text]) => [foreign(name), "fact", foreign(text)]), ...values.map((value) => [foreign(value.name), value.type, foreign(value.text)])]),
      left > 0 ? el("p", { class: "note after", text: `and ${whole(left)} more` }) : "");
  }
}

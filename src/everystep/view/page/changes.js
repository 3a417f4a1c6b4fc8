// How far two checkpoints are apart, layer by layer.

const STATES = {
  same: ["identical", ""], changed: ["changed", ""], alike: ["alike in the sample", ""], unread: ["not read", "warn"], only_a: ["only in A", "warn"], only_b: ["only in B", "warn"], kind: ["other type or shape", "warn"],
};
const SMALLEST = -6;

class Changed {
  constructor(ask) {
    Object.assign(this, { id: "changes", title: "Change between two steps", short: "Changes", ask, pair: [null, null] });
    this.tree = new Tree("Changes of leaves", "changetree", [["name"], ["relative change"], ["", true], ["largest |Δ|", true], ["changed", true]], (item) => this.cells(item));
    this.tree.weigh = (item) => (item.leaf !== undefined ? this.relative(this.found.leaves[item.leaf]) : this.ofGroup(item.group.sum)) ?? -1;
    this.tree.extra = (at) => STATES[this.found.leaves[at].change][0];
    this.pickers = el("span", { class: "tools" });
    this.said = el("p", { class: "note" });
    this.empty = el("p", { class: "empty" });
    this.values = el("details", {});
    this.controls = el("div", { class: "tools" }, this.pickers,
      searchBox("Filter, e.g. mlp changed", (words) => this.tree.filter(words)),
      options("Order of changes", [["state", "in order of the state"], ["change", "largest change first"]], "state", (order) => { this.tree.order = order; this.tree.refresh(); }));
    this.element = el("section", { id: this.id }, el("div", { class: "head" }, el("h2", { text: this.title }), this.controls), this.said, this.tree.element, this.empty, this.values);
  }
  async show(run) {
    const other = run !== this.run;
    this.run = run;
    const pairs = this.ask.pairs(run);
    if (!pairs.length) { this.none("A comparison needs two intact checkpoints in the run. Keep more with Keep(last=...), Keep(every=...) or Keep(best=...)."); this.pickers.replaceChildren(); this.offered = null; return; }
    const names = this.ask.checkpoints(run);
    const known = (name) => names.some((entry) => entry.name === name);
    if (other || !known(this.pair[0]) || !known(this.pair[1])) this.pair = pairs[0];
    this.offer(names, pairs);
    await this.load();
  }
  offer(names, pairs) {
    const offered = JSON.stringify([names, pairs, this.pair]);
    if (offered === this.offered) return;
    this.offered = offered;
    const choose = (side) => (name) => {
      this.pair = side ? [this.pair[0], name] : [name, this.pair[1]];
      if (!this.ask.served && !pairs.some(([a, b]) => a === this.pair[0] && b === this.pair[1])) this.pair = pairs.find((pair) => pair[side] === name);
      this.offer(names, pairs);
      this.load();
    };
    const possible = (side) => names.filter((entry) => this.ask.served || pairs.some((pair) => pair[side] === entry.name)).map((entry) => [entry.name, entry.label]).reverse();
    this.pickers.replaceChildren(el("span", { class: "dim", text: "A" }), options("Checkpoint A", possible(0), this.pair[0], choose(0)), el("span", { class: "dim", text: "B" }), options("Checkpoint B", possible(1), this.pair[1], choose(1)));
  }
  async load() {
    const { run, pair } = this;
    const of = `${run.number} ${pair.join(" ")}`;
    if (this.of === of) return;
    if (this.ask.served) this.said.textContent = "Comparing…";
    let found;
    try { found = await this.ask.changes(run, ...pair); } catch (error) {
      if (pair !== this.pair || run !== this.run) return;
      this.of = null;
      if (error.isGone) this.said.textContent = "One of them was removed meanwhile.";  // the next news brings another pair
      else this.none(error.message);
      return;
    }
    if (pair !== this.pair || run !== this.run) return;
    this.of = of;
    this.found = found;
    this.controls.classList.remove("hidden");
    this.empty.classList.add("hidden");
    this.tree.set(found.leaves.map((leaf) => leaf.name), {
      start: () => ({ square: 0, change: 0, known: false, most: null, differing: 0 }),
      leaf: (sum, at) => {
        const leaf = found.leaves[at];
        if (leaf.change === "same" || leaf.change === "alike") sum.known = true;
        if (leaf.change !== "same" && leaf.change !== "alike") sum.differing += 1;
        if (leaf.square_change === null || leaf.tied) return;  // a second name adds nothing to the sum
        sum.known = true;
        sum.square += leaf.leaf_elements * leaf.square;
        sum.change += leaf.leaf_elements * leaf.square_change;
        if (leaf.max_abs !== null && (sum.most === null || leaf.max_abs > sum.most)) sum.most = leaf.max_abs;
      },
      join: (sum, part) => {
        sum.square += part.square;
        sum.change += part.change;
        sum.known = sum.known || part.known;
        sum.differing += part.differing;
        if (part.most !== null && (sum.most === null || part.most > sum.most)) sum.most = part.most;
      },
    });
    this.tell();
  }
  none(text) {
    this.of = null;
    this.controls.classList.toggle("hidden", !this.ask.pairs(this.run).length);
    this.tree.set([], null);
    this.said.textContent = "";
    this.empty.textContent = text;
    this.empty.classList.remove("hidden");
    this.values.classList.add("hidden");
  }
  tell() {
    const { leaves, values, all_values: all, read_nbytes: read } = this.found;
    const counts = {};
    for (const leaf of leaves) counts[leaf.change] = (counts[leaf.change] || 0) + 1;
    const parts = Object.entries(STATES).filter(([key]) => counts[key]).map(([key, [name]]) => `${whole(counts[key])} ${name}`);
    this.said.textContent = `Of ${plural(leaves.length, "leaf", "leaves")}: ${parts.join(", ")}. The bar is ‖B − A‖ / ‖A‖ on a logarithmic scale, of a group over its leaves that changed. Identical is exact, by checksums; the size of a change is that of a sample${read ? ` (${bytes(read)} read)` : ""}.`;
    this.values.classList.toggle("hidden", !all);
    this.values.replaceChildren(el("summary", { text: `${plural(all, "value")} changed` }),
      table([{ name: "value" }, { name: "A" }, { name: "B" }], values.map((value) => [foreign(value.name), foreign(value.a ?? "–"), foreign(value.b ?? "–")])),
      all > values.length ? el("p", { class: "note after", text: `and ${whole(all - values.length)} more` }) : "");
  }
  relative(leaf) {
    if (leaf.change === "same" || leaf.change === "alike") return 0;
    if (leaf.square === null || leaf.square_change === null) return null;
    return leaf.square > 0 ? Math.sqrt(leaf.square_change / leaf.square) : Infinity;
  }
  ofGroup(sum) {
    if (!sum.known) return null;
    if (!sum.change) return 0;
    return sum.square > 0 ? Math.sqrt(sum.change / sum.square) : Infinity;
  }
  cells(item) {
    const leaf = item.group ? null : this.found.leaves[item.leaf];
    const relative = leaf ? this.relative(leaf) : this.ofGroup(item.group.sum);
    const largest = leaf ? leaf.max_abs : item.group.sum.most;
    const bar = relative ? meter(relative === Infinity ? 1 : (Math.log10(relative) - SMALLEST) / -SMALLEST) : relative === 0 ? meter(0) : el("span", { class: "dim", text: leaf ? STATES[leaf.change][0] : "" });
    const told = relative === null ? "" : relative === 0 ? (leaf && leaf.change === "alike" ? "alike" : "same") : relative === Infinity ? "from 0" : share(relative);
    let elements = leaf && leaf.elements && leaf.change === "changed" ? share(leaf.differing / leaf.elements) : "";
    if (leaf && leaf.tied) elements = "tied";
    if (item.group && item.group.sum.differing) elements = plural(item.group.sum.differing, "leaf", "leaves");
    return [bar, el("span", { class: `number ${relative ? "" : "dim"}`, text: told }), el("span", { class: "number dim", text: largest === null ? "" : number(largest) }), el("span", { class: "number dim", text: elements, title: leaf && (leaf.text || (leaf.tied && `another name of ${leaf.tied}`)) || null })];
  }
}

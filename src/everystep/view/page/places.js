// Who wrote what, and where it lies.

function balance(ratio) {
  return ratio < 1.02 ? "All wrote about the same." : `The most that a rank wrote is ${digits(ratio, 3)} times the median.`;
}

const OWN = "the checkpoint's own directory";
function placeOf(file) { return file.volume === null ? OWN : `${file.volume}${file.host ? ` on ${file.host}` : ""}`; }
// Bytes and shards at each place.
function places(files) {
  const found = new Map();
  for (const file of files) {
    const known = found.get(placeOf(file)) || { files: 0, nbytes: 0 };
    found.set(placeOf(file), { files: known.files + 1, nbytes: known.nbytes + file.nbytes });
  }
  return found;
}

class Writers {
  constructor(ask) {
    Object.assign(this, { id: "writers", title: "Who wrote what", short: "Writers", ask });
    this.body = el("div");
    this.element = el("section", { id: this.id }, el("div", { class: "head" }, el("h2", { text: this.title })), this.body);
  }
  async show(run) {
    this.run = run;
    const names = this.ask.checkpoints(run);
    const newest = names[names.length - 1];
    const of = newest ? `${run.number} ${newest.name}` : "";
    if (of && of === this.of) return;
    this.of = of;
    if (!newest) { this.body.replaceChildren(el("p", { class: "empty", text: "This run has no intact checkpoint." })); return; }
    let found;
    try { found = await this.ask.contents(run, newest.name); } catch (error) { this.of = ""; if (!error.isGone || !this.body.children.length) this.body.replaceChildren(el("p", { class: "empty", text: error.message })); return; }
    if (run !== this.run) return;
    this.draw(found);
  }
  draw(found) {
    const files = found.writers.flatMap((writer) => writer.files.map((file) => ({ ...file, rank: writer.rank })));
    const top = most(found.writers.map((writer) => writer.nbytes)) || 1;
    const volumes = places(files);
    const said = `Step ${whole(found.step)}: ${plural(found.world, "rank")}, ${plural(files.length, "shard")} ${volumes.has(OWN) ? `in ${plural(volumes.size, "directory", "directories")}` : `on ${plural(volumes.size, "volume")}`}, ${bytes(found.stored_nbytes)} in files.`;
    const parts = [el("p", { class: "note", text: found.world > 1 ? `${said} Seconds of saves are those that rank 0 measured.` : said })];
    if (found.world > 1) {
      const spread = found.writers.map((writer) => writer.nbytes);
      parts.push(table([{ name: "rank", number: true }, { name: "share" }, { name: "bytes", number: true }, { name: "leaves", number: true }, { name: "where" }],
        found.writers.map((writer) => [whole(writer.rank), meter(writer.nbytes / top), bytes(writer.nbytes), whole(writer.leaves), foreign(this.where(writer))])));
      const left = found.all_writers - found.writers.length;
      parts.push(el("p", { class: "note after", text: `${left > 0 ? `and ${whole(left)} more ranks. ` : ""}${balance(Math.max(...spread) / Math.max(median(spread), 1))}` }));
    }
    parts.push(el("h3", { text: "Where it lies" }), table([{ name: "where" }, { name: "shards", number: true }, { name: "bytes", number: true }], [...volumes].map(([name, volume]) => [foreign(name), whole(volume.files), bytes(volume.nbytes)])));
    this.body.replaceChildren(...parts);
  }
  where(writer) {
    if (!writer.files.length) return "nothing";
    const names = writer.files.filter((file) => file.volume === null).map((file) => file.name);
    const elsewhere = [...places(writer.files.filter((file) => file.volume !== null))].map(([place, { nbytes }]) => `${place}: ${bytes(nbytes)}`);
    return [...(names.length ? [names.join(", ")] : []), ...elsewhere].join("\n");
  }
}

class Disks {
  constructor() {
    Object.assign(this, { id: "disk", title: "Disk and checkpoints", short: "Disk", all: false });
    this.body = el("div");
    this.element = el("section", { id: this.id }, el("div", { class: "head" }, el("h2", { text: this.title })), this.body);
  }
  show(run) {
    this.run = run;
    const { view } = run;
    const parts = [el("div", { class: "cards" }, view.disks.map((disk) => this.disk(disk)))];
    const checks = new Map(view.checks.map((check) => [check.name, check]));
    const listed = [...view.checkpoints].reverse();
    const shown = this.all ? listed : listed.slice(0, 12);
    const columns = [{ name: "step", number: true }, { name: "state" }, { name: "saved", when: true }, { name: "size", number: true }, { name: "leaves", number: true }];
    parts.push(el("h3", { text: "Checkpoints" }));
    if (!listed.length) parts.push(el("p", { class: "empty", text: "There is no checkpoint here yet." }));
    else {
      parts.push(table(columns, shown.map((entry) => [entry.step === null ? foreign(entry.name) : whole(entry.step), this.state(entry, checks.get(entry.name)), entry.created === null ? "–" : moment(entry.created), bytes(entry.nbytes), whole(entry.leaves)])));
      if (shown.length < listed.length) parts.push(el("button", { class: "plainbutton", type: "button", text: `Show all ${whole(listed.length)}`, on: { click: () => { this.all = true; this.show(this.run); } } }));
      if (!view.checks.length) parts.push(el("p", { class: "note after" }, "Manifests and sizes were checked. To read every byte, use ", el("span", { class: "mono", text: "everystep verify" }), " or ", el("span", { class: "mono", text: "everystep view --verify" }), "."));
    }
    if (view.leftovers.length) {
      const told = { partial: "a save that is under way, or did not finish", retired: "retired; the next save overwrites its files or removes it" };
      parts.push(el("h3", { text: "Also in this directory" }), table([{ name: "name" }, { name: "size", number: true }, { name: "what it is" }], view.leftovers.map((item) => [foreign(item.name), bytes(item.nbytes), told[item.kind] || item.kind])));
    }
    this.body.replaceChildren(...parts);
  }
  disk(disk) {
    if (disk.missing) return el("div", { class: "card" }, el("div", { class: "mono foreign", text: disk.path }), el("p", { text: `Cannot be examined from here: ${disk.missing}` }));
    const used = disk.all_nbytes ? 1 - disk.free_nbytes / disk.all_nbytes : 0;
    const kind = disk.device ? `${disk.device.name}${disk.device.write_cache ? ", write cache on" : ""}` : disk.source;
    return el("div", { class: "card" }, el("div", { class: "mono foreign", text: disk.path }), meter(used, used > 0.95 ? "bad" : used > 0.85 ? "warn" : ""),
      el("div", { text: `${bytes(disk.free_nbytes)} free of ${bytes(disk.all_nbytes)}${disk.fits === null ? "" : `: room for ${plural(disk.fits, "more checkpoint")} like the newest`}` }),
      el("p", { text: `${disk.kind} at ${disk.point}, ${kind}${disk.free_inodes === null ? "" : `; ${whole(disk.free_inodes)} inodes free`}` }),
      disk.warnings.map((text) => el("p", { class: "warning", text })));
  }
  state(entry, check) {
    if (entry.damage !== null) return el("span", {}, tag("damaged", "bad"), foreign(entry.damage));
    if (check && check.problems.length) return el("span", {}, tag("damaged", "bad"), foreign(check.problems.slice(0, 5).join("\n")));
    return check ? tag("every byte verified", "good") : tag("complete", "good");
  }
}

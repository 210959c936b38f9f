// A map of the cache: the prefixes that save most tokens, each with the ranks that hold it and their tiers.

import { bar, byId, h, replace, say } from "./dom.js";
import { TIERS } from "./explain.js";
import { compact, count, percent, plural } from "./format.js";
import { ask } from "./stream.js";

const CLASSES = { device: "device", host_pinned: "host", disk: "disk", external: "remote" };
const MOST_RANKS = 12;
const FRESH_MS = 10_000;

export class Prefixes {
  constructor(store) {
    this.store = store;
    this.held = new Map();
    this.isAsking = false;
    this.problem = "";
    this.text = "";
    replace(byId("prefixes-key"), TIERS.map(([name, where]) => h("li", {}, h("i", { class: name }), where)));
  }

  show() {
    const { decisions, top } = this.store.prefixes;
    for (const id of ["prefixes", "prefixes-key"]) byId(id).hidden = top.length === 0;
    byId("prefixes-empty").hidden = top.length > 0;
    const sampled = top.length ? `of ${plural(decisions, "sampled decision")}` : "";
    say(byId("prefixes-note"), this.problem || sampled);
    say(byId("prefixes-empty"), "No prefix has been found in a cache twice yet.");
    const rows = this.folded(top);
    const ranks = this.ranks(rows);
    const text = JSON.stringify([decisions, rows, ranks]);
    if (text !== this.text) this.draw(rows, ranks, decisions);
    this.text = text;
    this.find(top);
  }

  /** Fold a prefix into the shorter one that it begins with, where the same ranks hold both in the same tiers. */
  folded(top) {
    const rows = new Map(top.map((each) => [each.sequence_hash, { ...each, held: this.held.get(each.sequence_hash)?.held ?? null, longer: 0 }]));
    for (const row of [...rows.values()].sort((a, b) => b.blocks - a.blocks)) {
      const shorter = rows.get(row.within);
      if (!shorter?.held || JSON.stringify(shorter.held) !== JSON.stringify(row.held)) continue;
      shorter.longer += row.longer + 1;
      rows.delete(row.sequence_hash);
    }
    return [...rows.values()];
  }

  /** Return the ranks that hold most of the prefixes, in the order of their names: [key, name]. */
  ranks(rows) {
    const counts = new Map();
    for (const { held } of rows) for (const [key] of held ?? []) counts.set(key, (counts.get(key) ?? 0) + 1);
    const most = [...counts].sort((a, b) => b[1] - a[1]).slice(0, MOST_RANKS);
    const collator = new Intl.Collator("en", { numeric: true });
    return most.map(([key]) => [key, this.store.nameOfAbout(key)]).sort((a, b) => collator.compare(a[1], b[1]));
  }

  draw(rows, ranks, decisions) {
    const heads = ["Prefix", "Found in", ...ranks.map(([, name]) => name), "Others"];
    replace(byId("prefixes").tHead, h("tr", {}, heads.map((text) => h("th", { scope: "col" }, text))));
    const most = Math.max(1, ...rows.map((each) => each.count * each.tokens));
    replace(byId("prefixes").tBodies[0], rows.map((row) => h("tr", {}, nameCell(row), foundCell(row, most, decisions), ranks.map((rank) => tierCell(row, rank)), othersCell(row, ranks))));
  }

  /** Ask for the holders of each prefix, one after another, at most once in ten seconds. */
  async find(top) {
    const isOld = ({ sequence_hash }) => Date.now() - (this.held.get(sequence_hash)?.at ?? 0) > FRESH_MS;
    if (this.isAsking || document.hidden || !top.some(isOld)) return;
    this.isAsking = true;
    try {
      for (const { sequence_hash } of top.filter(isOld)) {
        const { holders } = await ask(`blocks/${BigInt(`0x${sequence_hash}`)}`);
        const held = holders.map((each) => [`${each.worker_id}.${each.dp_rank}`, each.fastest_tier]);
        this.held.set(sequence_hash, { at: Date.now(), held: held.sort() });
      }
      this.problem = "";
    } catch (error) {
      this.problem = error.message;
      for (const { sequence_hash } of top) this.held.set(sequence_hash, { at: Date.now(), held: null });
    }
    const known = new Set(top.map((each) => each.sequence_hash));
    for (const key of this.held.keys()) if (!known.has(key)) this.held.delete(key);
    this.isAsking = false;
    this.show();
  }
}

function nameCell(row) {
  const longer = row.longer ? h("span", { class: "sub" }, `and ${plural(row.longer, "longer one")}, held alike`) : null;
  const model = row.model_name === "default" ? null : h("span", { class: "sub" }, row.model_name);
  const size = h("span", { class: "sub" }, `${compact(row.tokens)} tokens, ${plural(row.blocks, "block")}`);
  return h("th", { scope: "row" }, h("code", { title: row.sequence_hash }, `…${row.sequence_hash.slice(-8)}`), model, size, longer);
}

function foundCell(row, most, decisions) {
  const share = decisions ? row.count / decisions : 0;
  const least = row.excess ? `, at least ${count(row.count - row.excess)}` : "";
  const saved = compact(row.count * row.tokens);
  return h(
    "td",
    { "data-label": "Found in" },
    bar([["load", (row.count * row.tokens) / most]], `saves ${saved} tokens`),
    h("span", { class: "sub" }, `${plural(row.count, "prompt")}${least} (${percent(Math.min(share, 1))}), ${saved} tokens`),
  );
}

function tierCell(row, [key, name]) {
  const tier = row.held?.find(([holder]) => holder === key)?.[1];
  const where = TIERS.find(([each]) => each === CLASSES[tier])?.[1] ?? "not held";
  return h("td", { class: "held", "data-label": name }, h("i", { class: CLASSES[tier] ?? "free", title: `${name}: ${where}` }), h("span", { class: "unseen" }, where));
}

function othersCell(row, ranks) {
  const shown = new Set(ranks.map(([key]) => key));
  const others = row.held?.filter(([key]) => !shown.has(key)).length;
  return h("td", { "data-label": "Others" }, row.held === null ? "…" : row.held.length ? count(others) : "no rank any more");
}

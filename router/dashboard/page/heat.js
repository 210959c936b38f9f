// A map of a large fleet: a square for each rank, as dark as it is loaded, where it stays as long as the fleet is the same.

import { byId, h, Keyed, say, set } from "./dom.js";
import { compact, plural } from "./format.js";

const FEWEST = 50;
const SHADES = 5;
const DOUBTED = new Set(["degraded", "blind", "unreachable"]);

export class Heat {
  constructor(open) {
    this.rows = new Map();
    this.order = [];
    const map = byId("heat-map");
    this.cells = new Keyed(map, (row) => {
      const element = h("i", { "data-key": row.key });
      return { element, update: (now) => set(element, "class", shade(now, this.most)) };
    });
    map.addEventListener("pointerover", (event) => this.name(this.rows.get(event.target.dataset.key)));
    map.addEventListener("pointerleave", () => this.name(null));
    map.addEventListener("click", (event) => {
      const row = this.rows.get(event.target.dataset.key);
      if (row) open(row.worker_id);
    });
  }

  show(rows) {
    byId("heat").hidden = rows.length <= FEWEST;
    if (rows.length <= FEWEST) return;
    this.most = Math.max(1e-9, ...rows.map(load));
    const isSame = rows.length === this.rows.size && rows.every((row) => this.rows.has(row.key));
    this.rows = new Map(rows.map((row) => [row.key, row]));
    if (!isSame) {
      const collator = new Intl.Collator("en", { numeric: true });
      this.order = [...rows].sort((a, b) => collator.compare(a.title, b.title)).map((row) => row.key);
    }
    this.cells.show(this.order.map((key) => this.rows.get(key)), (row) => row.key);
    const doubted = rows.filter((row) => DOUBTED.has(row.trust)).length;
    const out = rows.filter((row) => row.worker.lifecycle !== "schedulable").length;
    const text = `${plural(rows.length, "rank")} by load; ${out} take no requests, ${doubted} in doubt`;
    set(byId("heat-map"), "aria-label", text);
    if (!this.isNamed) say(byId("heat-note"), text);
  }

  name(row) {
    this.isNamed = Boolean(row);
    if (!row) return;
    const requests = row.requests + row.foreign_requests;
    say(byId("heat-note"), `${row.title}: ${row.worker.lifecycle}, ${row.trust}, ${plural(requests, "request")}, ${compact(row.prefill_tokens)} prompt tokens to compute`);
  }
}

/** Return a rank's load; a request counts as a thousand tokens to compute. */
function load(row) {
  return row.prefill_tokens + 1_000 * (row.requests + row.foreign_requests);
}

function shade(row, most) {
  if (row.worker.lifecycle !== "schedulable") return "heat-out";
  if (DOUBTED.has(row.trust)) return "heat-bad";
  return `heat-${Math.ceil((SHADES * load(row)) / most)}`;
}

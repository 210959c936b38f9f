// The table of all ranks: filtered, sorted, in pages.

import { bar, byId, h, Keyed, replace, say, set } from "./dom.js";
import { TIERS } from "./explain.js";
import { compact, count, percent, plural } from "./format.js";
import { TRUST } from "./glance.js";
import { Heat } from "./heat.js";

const COLUMNS = [
  ["name", "Worker", (row) => row.worker.name, "ascending"],
  ["trust", "Trust", (row) => TRUST.indexOf(row.trust), "descending"],
  ["load", "Load", (row) => row.prefill_tokens * 1e6 + row.requests, "descending"],
  ["tiers", "Blocks held, by tier", (row) => row.device_blocks + row.host_blocks + row.disk_blocks + row.remote_blocks, "descending"],
  ["predicted", "Hits predicted", (row) => row.predicted_hits ?? -1, "descending"],
  ["actual", "Hits reported", (row) => row.actual_hits ?? -1, "descending"],
];

/** How much a row needs attention: not usable, doubted, waiting, busy, loaded. */
function badness(row) {
  const unusable = row.worker.lifecycle === "schedulable" ? 0 : 1;
  return unusable * 1e15 + TRUST.indexOf(row.trust) * 1e14 + (row.waiting ?? 0) * 1e11 + row.is_busy * 1e10 + row.prefill_tokens + row.requests;
}

const WORST = ["worst", "descending"];
const FILTERS = { find: "workers-find", trust: "workers-trust", model: "workers-model", rows: "workers-rows" };

/** The table. Its filters and its order are in the page's address. `open` shows a worker in detail. */
export class Workers {
  constructor(store, open) {
    this.store = store;
    this.sort = WORST;
    this.page = 0;
    this.read();
    this.body = new Keyed(byId("workers").tBodies[0], () => makeRow(open));
    replace(byId("tier-key"), TIERS.map(([name, where]) => h("li", {}, h("i", { class: name }), where)));
    this.heat = new Heat(open);
    this.heads();
    for (const id of Object.values(FILTERS)) {
      byId(id).addEventListener("input", () => {
        this.page = 0;
        this.write();
        this.show();
      });
    }
    byId("workers-worst").addEventListener("click", () => this.sortAs(WORST));
    byId("workers-form").addEventListener("submit", (event) => event.preventDefault());
    this.before = h("button", { type: "button", click: () => this.turn(-1) }, "Previous");
    this.after = h("button", { type: "button", click: () => this.turn(1) }, "Next");
    this.where = h("span", { role: "status" });
    byId("workers-pages").append(this.where, this.before, this.after);
  }

  heads() {
    const cells = COLUMNS.map(([name, text, , first]) => {
      const button = h("button", { type: "button", click: () => this.sortBy(name, first) }, text);
      return h("th", { scope: "col", "data-column": name }, button);
    });
    replace(byId("workers").tHead, h("tr", {}, cells));
  }

  sortBy(name, first) {
    const [known, direction] = this.sort;
    const other = direction === "ascending" ? "descending" : "ascending";
    this.sortAs([name, known === name ? other : first]);
  }

  sortAs(sort) {
    this.sort = sort;
    this.page = 0;
    this.write();
    this.show();
  }

  /** Take the filters and the order from the page's address. */
  read() {
    const query = new URLSearchParams(location.search);
    const [name, direction] = (query.get("sort") ?? "").split(" ");
    if (COLUMNS.some(([column]) => column === name) && /^(a|de)scending$/.test(direction)) this.sort = [name, direction];
    this.model = query.get("model") ?? "";
    for (const [key, id] of Object.entries(FILTERS)) {
      if (!query.has(key) || key === "model") continue;
      const before = byId(id).value;
      byId(id).value = query.get(key);
      if (!byId(id).value) byId(id).value = before;
    }
  }

  /** Put them there. */
  write() {
    this.model = byId("workers-model").value;
    const query = new URLSearchParams(location.search);
    const put = (key, value) => (value ? query.set(key, value) : query.delete(key));
    for (const [key, id] of Object.entries(FILTERS)) put(key, key === "rows" && byId(id).value === "25" ? "" : byId(id).value);
    put("sort", this.sort === WORST ? "" : this.sort.join(" "));
    history.replaceState(null, "", `${location.pathname}${query.size ? `?${query}` : ""}${location.hash}`);
  }

  /** Show totals by model, where there are several. */
  showModels() {
    const models = this.store.models();
    const choice = byId("workers-model");
    const names = models.map(([name]) => name);
    if (choice.dataset.names !== JSON.stringify(names)) {
      choice.dataset.names = JSON.stringify(names);
      replace(choice, h("option", { value: "" }, "any"), names.map((name) => h("option", {}, name)));
      if (names.includes(this.model)) choice.value = this.model;
    }
    const place = byId("models");
    place.hidden = models.length < 2;
    const text = JSON.stringify(models);
    if (place.hidden || place.dataset.text === text) return;
    place.dataset.text = text;
    const heads = [...place.tHead.querySelectorAll("th")].map((each) => each.textContent);
    const cell = (i, text) => h("td", { class: "number", "data-label": heads[i] }, text);
    replace(
      place.tBodies[0],
      models.map(([name, each]) =>
        h("tr", {}, h("th", { scope: "row" }, name), cell(1, `${count(each.schedulable)} of ${count(each.workers)}`), cell(2, compact(each.doubted)), cell(3, compact(each.requests)), cell(4, compact(each.waiting)), cell(5, compact(each.prefill_tokens))),
      ),
    );
  }

  turn(by) {
    this.page += by;
    this.show();
  }

  show() {
    this.showModels();
    set(byId("workers-worst"), "aria-pressed", String(this.sort === WORST));
    const rows = this.rows();
    this.heat.show(rows);
    const size = Number(byId("workers-rows").value);
    const pages = Math.max(1, Math.ceil(rows.length / size));
    this.page = Math.min(Math.max(this.page, 0), pages - 1);
    const start = this.page * size;
    const shown = rows.slice(start, start + size);
    const most = Math.max(1, ...shown.map((row) => row.prefill_tokens));
    this.body.show(shown.map((row) => ({ ...row, most })), (row) => row.key);
    for (const head of byId("workers").tHead.querySelectorAll("th")) {
      if (head.dataset.column === this.sort[0]) set(head, "aria-sort", this.sort[1]);
      else head.removeAttribute("aria-sort");
    }
    say(this.where, rows.length ? `${count(start + 1)}–${count(start + shown.length)} of ${plural(rows.length, "rank")}` : "");
    this.before.disabled = this.page === 0;
    this.after.disabled = this.page >= pages - 1;
    byId("workers-pages").hidden = rows.length <= 10 && pages === 1;
    this.showEmpty(rows);
  }

  showEmpty(rows) {
    const place = byId("workers-empty");
    place.hidden = rows.length > 0;
    byId("workers").hidden = rows.length === 0;
    if (rows.length) return;
    if (this.store.ranks.size) {
      say(place, `None of ${plural(this.store.ranks.size, "rank")} matches.`);
      return;
    }
    if (place.querySelector("code")) return;
    replace(
      place,
      h("p", {}, "No workers yet. A worker appears once an agent runs next to its engine:"),
      h("p", {}, h("code", {}, "kv-worker-agent run --nats-url nats://… --name worker-1")),
      h("p", {}, "or once it is registered with POST /workers."),
    );
  }

  rows() {
    const wanted = byId("workers-find").value.trim().toLowerCase();
    const trust = byId("workers-trust").value;
    const model = byId("workers-model").value;
    const rows = [];
    for (const rank of this.store.ranks.values()) {
      const worker = this.store.workers.get(rank.worker_id);
      if (!worker || (trust && rank.trust !== trust) || (model && worker.model_name !== model) || (wanted && !found(worker, rank, wanted))) continue;
      rows.push({ ...rank, worker, title: this.store.nameOf(rank.worker_id, rank.dp_rank) });
    }
    const [name, direction] = this.sort;
    const valueOf = name === "worst" ? badness : COLUMNS.find(([column]) => column === name)[2];
    const sign = direction === "ascending" ? 1 : -1;
    const collator = new Intl.Collator("en", { numeric: true });
    const order = (a, b) => (typeof a === "string" ? collator.compare(a, b) : a - b);
    return rows.sort(
      (a, b) => sign * order(valueOf(a), valueOf(b)) || collator.compare(a.title, b.title) || a.dp_rank - b.dp_rank,
    );
  }
}

function found(worker, rank, wanted) {
  const texts = [worker.name, worker.worker_id, worker.model_name, worker.routing_group, worker.role, worker.lifecycle, worker.endpoint];
  return [...texts, ...worker.labels, ...worker.obstacles, rank.trust, rank.reason ?? "", rank.is_busy ? "busy" : ""]
    .some((text) => text.toLowerCase().includes(wanted));
}

/** A row that changes only cells with different content. */
function makeRow(open) {
  const cells = [h("th", { scope: "row" }), ...["cell-trust", "cell-load", "cell-tiers", "cell-hits", "cell-hits"].map((c, i) => h("td", { class: c, "data-label": COLUMNS[i + 1][1] }))];
  const element = h("tr", {}, cells);
  const said = [];
  const put = (i, key, make) => {
    if (said[i] === key) return;
    said[i] = key;
    replace(cells[i], make());
  };
  return {
    element,
    update(row) {
      const { worker } = row;
      put(0, JSON.stringify([row.title, worker]), () => nameCell(row, open));
      put(1, `${row.trust} ${row.reason}`, () => trustCell(row));
      put(2, [row.requests, row.foreign_requests, row.waiting, row.prefill_tokens, row.most, row.is_busy].join(), () => loadCell(row));
      put(3, [row.device_blocks, row.host_blocks, row.disk_blocks, row.remote_blocks, worker.capacity_blocks, row.classes].join(), () => tiersCell(row));
      put(4, String(row.predicted_hits), () => hitsCell(row.predicted_hits, "curve-1", "predicted"));
      put(5, String(row.actual_hits), () => hitsCell(row.actual_hits, "curve-2", "reported"));
    },
  };
}

function nameCell({ title, worker }, open) {
  const scope = worker.routing_group === "default" ? worker.model_name : `${worker.model_name}, ${worker.routing_group}`;
  const role = worker.role === "aggregated" ? "" : ` · ${worker.role}`;
  const state = worker.lifecycle === "schedulable" ? null : h("span", { class: "sub" }, h("b", {}, worker.lifecycle), worker.obstacles.length ? `: ${worker.obstacles.join("; ")}` : "");
  const name = h("button", { type: "button", class: "link", click: () => open(worker.worker_id) }, title);
  return [name, h("span", { class: "sub" }, `${scope}${role}`), state];
}

function trustCell({ trust, reason, is_without_events }) {
  return [h("span", { class: "trust", "data-trust": trust, "data-chosen": is_without_events ? "yes" : "no" }, trust), reason ? h("span", { class: "sub" }, reason) : null];
}

function loadCell(row) {
  const requests = row.requests + row.foreign_requests;
  const waits = row.waiting ? `, ${count(row.waiting)} waiting` : "";
  const text = `${plural(requests, "request")}${waits}${row.is_busy ? ", busy" : ""}`;
  const tokens = `${compact(row.prefill_tokens)} prompt tokens to compute`;
  return [
    h("div", {}, text),
    bar([["load", row.prefill_tokens / row.most]], tokens),
    h("span", { class: "sub" }, row.prefill_tokens ? tokens : "nothing to compute"),
  ];
}

function tiersCell(row) {
  const blocks = [row.device_blocks, row.host_blocks, row.disk_blocks, row.remote_blocks];
  const held = blocks.reduce((sum, each) => sum + each, 0);
  const capacity = row.worker.capacity_blocks;
  const whole = Math.max(held, capacity, 1);
  const label = TIERS.map(([, where], i) => `${count(blocks[i])} ${where}`).filter((_, i) => blocks[i]).join(", ");
  const full = capacity ? `, device ${percent(Math.min(1, row.device_blocks / capacity))} full` : "";
  return [
    bar(TIERS.map(([name], i) => [name, blocks[i] / whole]), label || "no blocks"),
    h("span", { class: "sub" }, held ? `${blocks.map((each) => compact(each)).filter((_, i) => blocks[i]).join(" + ")} blocks${full}` : "holds nothing"),
    row.classes ? h("span", { class: "sub" }, `hybrid, ${row.classes}`) : null,
  ];
}

function hitsCell(share, name, what) {
  if (share === null) return h("span", { class: "note" }, "–", h("span", { class: "unseen" }, ` nothing ${what} recently`));
  return h("div", { class: "pair" }, bar([[name, share]], `${percent(share)} ${what}`), h("span", {}, percent(share)));
}

// One worker in detail, and orders to it: cordon, drain, let it serve again.

import { byId, h, replace, say } from "./dom.js";
import { count, percent, plural, seconds } from "./format.js";
import { ask } from "./stream.js";

const ORDERS = [
  ["cordoned", "Cordon", "gets no new requests"],
  ["draining", "Drain", "gets no new requests, and is about to leave"],
  ["schedulable", "Let it serve", "gets requests again"],
];

export class WorkerDetail {
  constructor(store, announce) {
    this.store = store;
    this.announce = announce;
    this.worker_id = null;
    byId("worker-close").addEventListener("click", () => byId("worker").close());
  }

  async open(worker_id) {
    this.worker_id = worker_id;
    say(byId("worker-title"), this.store.nameOf(worker_id));
    replace(byId("worker-facts"), h("p", { class: "note" }, "Asking the router …"));
    replace(byId("worker-orders"), []);
    byId("worker").showModal();
    await this.attempt(() => ask(`workers/${worker_id}`));
  }

  async order(lifecycle, text) {
    const body = JSON.stringify({ lifecycle });
    const headers = { "content-type": "application/json" };
    const path = `workers/${this.worker_id}`;
    if (await this.attempt(() => ask(path, { method: "PATCH", headers, body }))) {
      this.announce(`${this.store.nameOf(this.worker_id)} ${text}`);
    }
  }

  /** Show the worker that a request returns, or its error; return whether there was none. */
  async attempt(request) {
    try {
      this.show(await request());
      return true;
    } catch (error) {
      replace(byId("worker-error"), h("p", { class: "refusal", role: "alert" }, error.message));
      return false;
    }
  }

  /** Return what the newest decision that weighed this rank says of its speed. */
  learned({ dp_rank }) {
    for (const { decision } of this.store.decisions) {
      const found = decision.shown.find((each) => String(each.worker_id) === String(this.worker_id) && each.dp_rank === dp_rank);
      if (found) return found.predicted;
    }
    return null;
  }

  show(worker) {
    replace(byId("worker-error"), []);
    replace(byId("worker-facts"), facts(worker), worker.ranks.map((rank) => rankFacts(rank, worker, this.learned(rank))));
    const orders = ORDERS.filter(([lifecycle]) => lifecycle !== worker.lifecycle);
    replace(
      byId("worker-orders"),
      orders.map(([lifecycle, name, text]) => h("button", { type: "button", title: `It ${text}`, click: () => this.order(lifecycle, text) }, name)),
    );
  }
}

function facts(worker) {
  const why = worker.not_schedulable_reasons.join("; ");
  return list([
    ["State", `${worker.lifecycle}${why ? `: ${why}` : ""}`],
    ["Endpoint", worker.endpoint ?? "–"],
    ["Serves", `${worker.model_name}, group ${worker.routing_group}`],
    ["Blocks", `${worker.block_size ?? "?"} tokens each, ${count(worker.total_kv_blocks)} on each device`],
    ["Last seen", worker.last_heard_s === null || worker.last_heard_s === undefined ? "–" : `${seconds(worker.last_heard_s)} ago`],
  ]);
}

function rankFacts(rank, worker, learned) {
  const { trust, reported, engine } = rank;
  const used = reported && worker.total_kv_blocks ? `, ${percent(reported.kv_used_blocks / worker.total_kv_blocks)} of its blocks in use` : "";
  const load = reported ? `${plural(reported.running_requests, "request")} running, ${count(reported.waiting_requests)} waiting${used}` : "none";
  const problem = engine?.problem ? `: ${engine.problem}` : "";
  return h("section", {}, h("h3", {}, `Rank ${rank.dp_rank}`), list([
    ["Trust", `${trust.state}${trust.reason ? `: ${trust.reason}` : ""}`],
    ["Booked here", `${plural(rank.active_requests, "request")}, ${count(rank.active_prefill_tokens)} tokens to compute`],
    ["Its last report", load],
    ["Event sockets", engine ? `${engine.condition}, ${engine.events}${problem}` : "–"],
    ["Learned speed", rates(learned)],
  ]));
}

function rates(learned) {
  if (!learned?.rates) return "not weighed recently";
  const { prompt_token_s, step_s } = learned.rates;
  return `${seconds(prompt_token_s)} a prompt token, ${seconds(step_s)} a step, within ${percent(Math.min(1, learned.relative_error))}`;
}

function list(pairs) {
  return h("dl", { class: "settings" }, pairs.flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]));
}

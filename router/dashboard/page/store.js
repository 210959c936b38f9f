// The state accumulated from the frames, independent of the page.

const MOST_DECISIONS = 200;
const MOST_EVENTS = 300;
const MOST_POINTS = 900;

const DOUBTED = new Set(["degraded", "blind", "unreachable"]);

export class Store {
  constructor() {
    this.workers = new Map();
    this.ranks = new Map();
    this.decisions = [];
    this.events = new Map();
    this.prefixes = { decisions: 0, top: [] };
    this.history = [];
    this.totals = null;
    this.router = this.version = "";
    this.skipped = 0;
    this.mispredicted = [];
    this.latencies = [];
    this.at = 0;
    this.columns = null;
  }

  take(frame) {
    if (frame.is_whole) this.begin(frame);
    this.at = frame.at;
    this.totals = frame.totals;
    this.skipped = frame.skipped ?? this.skipped;
    for (const line of frame.workers ?? []) {
      const worker = named(line, this.columns.workers);
      this.workers.set(worker.worker_id, worker);
    }
    for (const line of frame.ranks ?? []) {
      const rank = named(line, this.columns.ranks);
      rank.key = `${rank.worker_id}.${rank.dp_rank}`;
      this.ranks.set(rank.key, rank);
    }
    for (const worker_id of frame.gone_workers ?? []) this.workers.delete(worker_id);
    for (const [worker_id, dp_rank] of frame.gone_ranks ?? []) this.ranks.delete(`${worker_id}.${dp_rank}`);
    for (const seen of frame.decisions ?? []) this.decisions.unshift(seen);
    this.decisions.length = Math.min(this.decisions.length, MOST_DECISIONS);
    for (const each of frame.events ?? []) {
      this.events.delete(each.entry_id);
      this.events.set(each.entry_id, each);
    }
    while (this.events.size > MOST_EVENTS) this.events.delete(this.events.keys().next().value);
    this.mispredicted = frame.mispredicted ?? [];
    this.latencies = frame.latencies ?? [];
    if (frame.prefixes) this.prefixes = frame.prefixes;
    for (const point of frame.history ?? []) this.history.push(named(point, this.columns.history));
    this.history.splice(0, Math.max(0, this.history.length - MOST_POINTS));
  }

  begin(frame) {
    this.columns = frame.columns;
    this.router = frame.router;
    this.version = frame.version;
    this.workers.clear();
    this.ranks.clear();
    this.events.clear();
    this.decisions = [];
    this.history = [];
  }

  /** Add decisions that the router remembers, oldest first, to those of the stream. */
  remember(decisions) {
    const known = new Map([...decisions, ...this.decisions].map((seen) => [seen.number, seen]));
    this.decisions = [...known.values()].sort((a, b) => b.number - a.number).slice(0, MOST_DECISIONS);
  }

  /** Return what each model's workers do: [model, {workers, schedulable, doubted, requests, waiting}]. */
  models() {
    const models = new Map();
    const of = (worker) => {
      const none = { workers: 0, schedulable: 0, doubted: 0, requests: 0, waiting: 0, prefill_tokens: 0 };
      if (!models.has(worker.model_name)) models.set(worker.model_name, none);
      return models.get(worker.model_name);
    };
    for (const worker of this.workers.values()) {
      of(worker).workers += 1;
      of(worker).schedulable += worker.lifecycle === "schedulable";
    }
    for (const rank of this.ranks.values()) {
      const worker = this.workers.get(rank.worker_id);
      if (!worker) continue;
      const model = of(worker);
      model.doubted += DOUBTED.has(rank.trust);
      model.requests += rank.requests + rank.foreign_requests;
      model.waiting += rank.waiting ?? 0;
      model.prefill_tokens += rank.prefill_tokens;
    }
    return [...models].sort();
  }

  /** Return the display name of a worker, or of one of its ranks. */
  nameOf(worker_id, dp_rank = null) {
    const worker = this.workers.get(String(worker_id));
    const name = worker?.name ?? `worker ${worker_id}`;
    return dp_rank === null || this.ranksOf(worker_id) < 2 ? name : `${name} rank ${dp_rank}`;
  }

  /** Return the display name of an event's "about": an id, or an id and a rank. */
  nameOfAbout(about) {
    const [worker_id, dp_rank] = about.split(".");
    return this.nameOf(worker_id, dp_rank === undefined ? null : Number(dp_rank));
  }

  ranksOf(worker_id) {
    let ranks = 0;
    while (this.ranks.has(`${worker_id}.${ranks}`)) ranks += 1;
    return ranks;
  }

  /** Return all models and groups that any worker serves, and others. */
  scopes(others) {
    const scopes = new Map(others.map((scope) => [JSON.stringify(scope), scope]));
    for (const { model_name, routing_group } of this.workers.values()) {
      scopes.set(JSON.stringify([model_name, routing_group]), [model_name, routing_group]);
    }
    return [...scopes.values()].sort();
  }
}

function named(line, columns) {
  return Object.fromEntries(columns.map((name, i) => [name, line[i]]));
}

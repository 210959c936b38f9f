// The tiles: cache hits, load, and trust in the caches.

import { bar, byId, h, replace, say, svg } from "./dom.js";
import { clock, compact, count, percent, plural, rate, seconds } from "./format.js";

export const TRUST = ["exact", "lagging", "approximate", "degraded", "blind", "unreachable"];

export function showGlance(store) {
  const { totals, history } = store;
  say(byId("hits"), percent(totals.actual_hits ?? totals.predicted_hits));
  say(byId("hits-note"), hitsNote(totals));
  CURVES.hits.show(history, hitsLabel(totals));
  const last = history.at(-1);
  say(byId("rate"), last ? rate(last.decisions_per_s) : "–");
  CURVES.rate.show(history, "decisions a second, means of 10 seconds");
  say(byId("rate-note"), `${compact(totals.decisions)} so far, ${compact(totals.prompt_tokens)} prompt tokens`);
  say(byId("active"), count(totals.active_requests));
  say(byId("waiting"), totals.waiting_requests ? `and ${compact(totals.waiting_requests)} waiting` : "none waiting");
  CURVES.active.show(history, "requests in flight, and waiting");
  const saved = totals.predicted_cached_tokens;
  say(byId("active-note"), `${compact(saved)} prompt tokens saved`);
  showTrust(store);
  showLatency(store);
}

/** Show the times of sampled requests, as measured and as predicted. */
function showLatency({ history, latencies, ...store }) {
  const last = history.at(-1);
  say(byId("ttft"), seconds(last?.ttft_s));
  say(byId("ttft-note"), last?.predicted_ttft_s == null ? "no recent reports" : `${seconds(last.predicted_ttft_s)} predicted`);
  CURVES.ttft.show(history, "mean time to the first token, predicted and measured");
  const place = byId("latencies");
  const text = JSON.stringify(latencies);
  place.hidden = latencies.length === 0;
  byId("latencies-empty").hidden = latencies.length > 0;
  if (place.dataset.text === text) return;
  place.dataset.text = text;
  const cell = (name, ...parts) => h("td", { "data-label": name }, ...parts);
  const pair = (name, measured, predicted) => cell(name, seconds(measured), predicted === null ? null : h("span", { class: "sub" }, `${seconds(predicted)} predicted`));
  replace(
    place.tBodies[0],
    latencies.map((row) =>
      h(
        "tr",
        {},
        h("th", { scope: "row" }, row.worker_id === null ? row.model_name : (store.workers.get(row.worker_id)?.name ?? `worker ${row.worker_id}`), h("span", { class: "sub" }, row.worker_id === null ? "all its workers" : row.model_name)),
        pair("First token", row.ttft_s, row.predicted_ttft_s),
        pair("Per output token", row.tpot_s, row.predicted_tpot_s),
        cell("Whole request", seconds(row.request_s)),
        cell("Requests", count(row.requests), row.without_first_token ? h("span", { class: "sub" }, `${count(row.without_first_token)} not streamed, or failed`) : null),
      ),
    ),
  );
}

// Above this part of unplaced tokens the two rates are of different prompts, and their difference says nothing.
const UNPLACED = 0.05;

function hitsNote(totals) {
  if (totals.predicted_hits === null && totals.actual_hits === null) return "no recent prompts";
  if (totals.actual_hits === null) return "predicted; not yet reported by engines";
  if (totals.predicted_hits === null) return "reported; nothing placed here recently";
  const gap = Math.round(Math.abs(totals.predicted_hits - totals.actual_hits) * 100);
  if (!gap) return "as predicted";
  const predicted = `${percent(totals.predicted_hits)} predicted`;
  if (totals.unplaced > UNPLACED) return `${predicted} for prompts placed here; ${percent(totals.unplaced)} of prompt tokens came another way`;
  return `${predicted}, ${plural(gap, "point")} off`;
}

const hitsLabel = (t) => `predicted ${percent(t.predicted_hits)}, reported ${percent(t.actual_hits)}`;

function showTrust(store) {
  const { totals } = store;
  say(byId("workers-up"), count(totals.schedulable_workers));
  const others = totals.workers - totals.schedulable_workers;
  say(byId("workers-note"), `of ${count(totals.workers)} accept requests${others ? `, ${count(others)} do not` : ""}`);
  const counts = new Map(TRUST.map((state) => [state, 0]));
  for (const { trust } of store.ranks.values()) counts.set(trust, counts.get(trust) + 1);
  const label = TRUST.map((state) => `${counts.get(state)} ${state}`).join(", ");
  const said = `${label} of ${plural(store.ranks.size, "rank")}`;
  const place = byId("trust-bar");
  if (place.firstElementChild?.title === said) return;
  replace(place, ...bar(TRUST.map((s) => [s, counts.get(s) / (store.ranks.size || 1)]), said).children);
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", `Trust: ${said}`);
  place.title = said;
  replace(byId("trust-key"), TRUST.map((s) => h("li", {}, h("i", { class: s }), `${count(counts.get(s))} ${s}`)));
}

const WIDTH = 300;
const HEIGHT = 40;
const SPAN_S = 900;
const SHORTEST_S = 60;

/** Curves over the last minutes. `names`: their columns of the history, and what a reader calls each. */
class Curve {
  /** `top`: the end of the scale; 0 for a round number above the highest value. */
  constructor(id, names, top = 0, format = (value) => (value < 10 ? rate(value) : compact(value))) {
    Object.assign(this, { place: byId(id), names, top, format, history: [], pointed: null });
    this.place.addEventListener("pointermove", (event) => {
      const { left, width } = this.place.querySelector("svg").getBoundingClientRect();
      this.pointed = Math.min(1, Math.max(0, (event.clientX - left) / width));
      this.draw();
    });
    this.place.addEventListener("pointerleave", () => {
      this.pointed = null;
      this.draw();
    });
  }

  show(history, label) {
    Object.assign(this, { history, label });
    this.draw();
  }

  draw() {
    const { history, top, format, label } = this;
    if (!history.length) return;
    const names = Object.keys(this.names);
    const least = format === seconds ? 0.001 : 1;
    const highest = top || above(Math.max(least, ...history.map((point) => Math.max(...names.map((name) => point[name] ?? 0)))));
    const now = history.at(-1).at;
    const spanS = Math.min(SPAN_S, Math.max(SHORTEST_S, now - history[0].at));
    const scale = { now, spanS, highest };
    const lines = names.map((name, i) => svg("path", { d: path(history, name, scale), class: i ? "second" : "first" }));
    const area = names.length === 1 ? [svg("path", { d: path(history, names[0], scale, true), class: "area" })] : [];
    const grid = [0, 0.5, 1].map((part) => svg("line", { x1: 0, x2: WIDTH, y1: HEIGHT * part, y2: HEIGHT * part }));
    this.place.replaceChildren(
      h("span", { class: "scale", "aria-hidden": "true" }, h("span", {}, format(highest)), h("span", {}, format(highest / 2)), h("span", {}, "0")),
      svg(
        "svg",
        { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${label}, up to ${format(highest)}` },
        ...grid,
        ...area,
        ...lines,
        ...(this.pointed === null ? [] : [svg("line", { class: "pointed", x1: WIDTH * this.pointed, x2: WIDTH * this.pointed, y1: 0, y2: HEIGHT })]),
      ),
      h("span", { class: "span", "aria-hidden": "true" }, ...this.words(now, spanS)),
    );
  }

  /** Return the ends of the time shown, or the values at the pointer. */
  words(now, spanS) {
    const ends = [spanS < 120 ? `${Math.round(spanS)} s ago` : `${Math.round(spanS / 60)} min ago`, "now"];
    if (this.pointed === null) return ends.map((text) => h("span", {}, text));
    const at = now - (1 - this.pointed) * spanS;
    const nearest = this.history.reduce((best, point) => (Math.abs(point.at - at) < Math.abs(best.at - at) ? point : best));
    const values = Object.entries(this.names).map(([name, text]) => `${nearest[name] === null ? "–" : this.format(nearest[name])}${text}`);
    return [h("b", {}, `${clock(nearest.at)}: ${values.join(", ")}`)];
  }
}

const CURVES = {
  hits: new Curve("hits-curve", { predicted_hits: " predicted", actual_hits: " reported" }, 1, percent),
  rate: new Curve("rate-curve", { decisions_per_s: " a second" }),
  active: new Curve("active-curve", { active_requests: " in flight", waiting_requests: " waiting" }),
  ttft: new Curve("ttft-curve", { predicted_ttft_s: " predicted", ttft_s: " measured" }, 0, seconds),
};

/** The next of 1, 2, 5, 10, 20, … that is no smaller. */
function above(value) {
  const ten = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((each) => each * ten).find((each) => each >= value * 0.999);
}

function path(history, name, { now, spanS, highest }, isClosed = false) {
  let d = "";
  let isDown = false;
  let first = 0;
  let last = 0;
  for (const point of history) {
    const value = point[name];
    if (value === null || now - point.at > spanS) {
      isDown = false;
      continue;
    }
    const x = (WIDTH * (1 - (now - point.at) / spanS)).toFixed(1);
    if (!d) first = x;
    last = x;
    d += `${isDown ? "L" : "M"}${x} ${(HEIGHT - (value / highest) * HEIGHT).toFixed(1)}`;
    isDown = true;
  }
  return isClosed && d ? `${d}L${last} ${HEIGHT}L${first} ${HEIGHT}Z` : d;
}

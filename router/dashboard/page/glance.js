// The tiles: cache hits, load, and trust in the caches.

import { bar, byId, h, replace, say, svg } from "./dom.js";
import { compact, count, percent, plural, rate, seconds } from "./format.js";

export const TRUST = ["exact", "lagging", "approximate", "degraded", "blind", "unreachable"];

export function showGlance(store) {
  const { totals, history } = store;
  say(byId("hits"), percent(totals.actual_hits ?? totals.predicted_hits));
  say(byId("hits-note"), hitsNote(totals));
  curve(byId("hits-curve"), history, ["predicted_hits", "actual_hits"], 1, hitsLabel(totals));
  const last = history.at(-1);
  say(byId("rate"), last ? rate(last.decisions_per_s) : "–");
  curve(byId("rate-curve"), history, ["decisions_per_s"], 0, "decisions a second, means of 10 seconds");
  say(byId("rate-note"), `${compact(totals.decisions)} so far, ${compact(totals.prompt_tokens)} prompt tokens`);
  say(byId("active"), count(totals.active_requests));
  say(byId("waiting"), totals.waiting_requests ? `and ${compact(totals.waiting_requests)} waiting` : "none waiting");
  curve(byId("active-curve"), history, ["active_requests", "waiting_requests"], 0, "requests in flight, and waiting");
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
  curve(byId("ttft-curve"), history, ["predicted_ttft_s", "ttft_s"], 0, "mean time to the first token, predicted and measured", seconds);
  const place = byId("latencies");
  const text = JSON.stringify(latencies);
  place.hidden = latencies.length === 0;
  byId("latencies-empty").hidden = latencies.length > 0;
  if (place.dataset.text === text) return;
  place.dataset.text = text;
  const cell = (...parts) => h("td", {}, ...parts);
  const pair = (measured, predicted) => cell(seconds(measured), predicted === null ? null : h("span", { class: "sub" }, `${seconds(predicted)} predicted`));
  replace(
    place.tBodies[0],
    latencies.map((row) =>
      h(
        "tr",
        {},
        h("th", { scope: "row" }, row.worker_id === null ? row.model_name : (store.workers.get(row.worker_id)?.name ?? `worker ${row.worker_id}`), h("span", { class: "sub" }, row.worker_id === null ? "all its workers" : row.model_name)),
        pair(row.ttft_s, row.predicted_ttft_s),
        pair(row.tpot_s, row.predicted_tpot_s),
        cell(seconds(row.request_s)),
        cell(count(row.requests), row.without_first_token ? h("span", { class: "sub" }, `${count(row.without_first_token)} not streamed, or failed`) : null),
      ),
    ),
  );
}

function hitsNote(totals) {
  if (totals.predicted_hits === null && totals.actual_hits === null) return "no recent prompts";
  if (totals.actual_hits === null) return "predicted; not yet reported by engines";
  if (totals.predicted_hits === null) return "reported; nothing placed here recently";
  const gap = Math.round(Math.abs(totals.predicted_hits - totals.actual_hits) * 100);
  return gap ? `${percent(totals.predicted_hits)} predicted, ${plural(gap, "point")} off` : "as predicted";
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

/** Draw curves over the last minutes; `top` is the end of the scale, 0 for a round number above the highest value. */
function curve(place, history, names, top, label, unit = null) {
  const highest = top || above(Math.max(unit ? 0.001 : 1, ...history.map((point) => Math.max(...names.map((name) => point[name] ?? 0)))));
  const now = history.at(-1)?.at ?? 0;
  const spanS = Math.min(SPAN_S, Math.max(SHORTEST_S, now - (history[0]?.at ?? now)));
  const scale = { now, spanS, highest };
  const lines = names.map((name, i) => svg("path", { d: path(history, name, scale), class: i ? "second" : "first" }));
  const area = names.length === 1 ? [svg("path", { d: path(history, names[0], scale, true), class: "area" })] : [];
  const grid = [0, 0.5, 1].map((part) => svg("line", { x1: 0, x2: WIDTH, y1: HEIGHT * part, y2: HEIGHT * part }));
  const format = unit ?? ((value) => top === 1 ? percent(value) : value < 10 ? rate(value) : compact(value));
  place.replaceChildren(
    h("span", { class: "scale", "aria-hidden": "true" }, h("span", {}, format(highest)), h("span", {}, format(highest / 2)), h("span", {}, "0")),
    svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${label}, up to ${format(highest)}` },
      ...grid,
      ...area,
      ...lines,
    ),
    h("span", { class: "span", "aria-hidden": "true" }, h("span", {}, spanS < 120 ? `${Math.round(spanS)} s ago` : `${Math.round(spanS / 60)} min ago`), h("span", {}, "now")),
  );
}

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

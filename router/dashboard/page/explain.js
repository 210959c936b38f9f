// The explanation of one decision, for readers without experience of the router.

import { bar, h } from "./dom.js";
import { amount, clock, count, percent, plural, seconds } from "./format.js";

export const TIERS = [
  ["device", "on the device"],
  ["host", "in host memory"],
  ["disk", "on disk"],
  ["remote", "in a remote store"],
];

/** The parts of each policy's cost, with label and style; those that end in _s are seconds. */
const PARTS = {
  queue_s: ["waiting for its turn", "part-5"],
  room_s: ["waiting for cache space", "part-4"],
  prefill_s: ["computing the prompt", "part-1"],
  stream_s: ["writing the response", "part-6"],
  delay_s: ["delaying current requests", "part-2"],
  future_s: ["delaying future requests", "part-7"],
  pushed_s: ["recomputing evicted blocks", "part-3"],
  slow_start_s: ["worker just started", "part-8"],
  trial_s: ["tried: too little is known of it", "part-4"],
  prefill_blocks: ["blocks to compute", "part-1"],
  decode_blocks: ["blocks in use", "part-2"],
  active_request_blocks: ["active requests", "part-5"],
  uncached_fraction: ["share not cached", "part-1"],
  requests: ["active requests", "part-2"],
  foreign_requests: ["requests from elsewhere", "part-5"],
  queued_token_requests: ["queued tokens × requests", "part-2"],
  own_token_requests: ["own tokens × requests", "part-1"],
  preference: ["the request's preferences", "part-4"],
  cost: ["cost", "part-6"],
};

const FILTERS = {
  allowed_worker_ids: "the request allows only other workers",
  excluded_worker_ids: "the request excludes it",
  pinned_worker: "the request is pinned to another worker",
  required_taints: "missing a label that the request requires",
  lora_name: "does not serve the LoRA adapter",
  lora: "does not serve the LoRA adapter",
  busy: "busy, above a threshold",
  unschedulable: "accepts no new requests",
  draining: "draining",
  cordoned: "cordoned by an operator",
};

const isInSeconds = (candidate) => Object.keys(candidate.parts).some((name) => name.endsWith("_s"));

/** Return each tier's part of the held prefix, in tokens; a block counts for its fastest tier. */
export function heldTokens(candidate, decision) {
  const running = [
    candidate.device_blocks,
    candidate.host_pinned_blocks,
    candidate.disk_blocks,
    candidate.remote_blocks,
  ];
  const isl = decision.isl_tokens;
  return running.map((blocks, i) => {
    const tokens = (n) => Math.min(n * decision.block_size, isl);
    return tokens(blocks) - (i ? tokens(running[i - 1]) : 0);
  });
}

export const cachedShare = (candidate, decision) =>
  decision.isl_tokens ? (candidate.predicted_cached_blocks * decision.block_size) / decision.isl_tokens : 0;

export function heldBar(candidate, decision) {
  const held = heldTokens(candidate, decision);
  const said = TIERS.map(([, where], i) => (held[i] ? `${count(held[i])} tokens ${where}` : "")).filter(Boolean);
  const missing = decision.isl_tokens - held.reduce((sum, tokens) => sum + tokens, 0);
  const label = `${said.join(", ") || "nothing held"}; ${count(missing)} to compute`;
  const parts = TIERS.map(([name], i) => [name, held[i] / decision.isl_tokens]);
  return bar([...parts, ["compute", missing / decision.isl_tokens]], label);
}

/** Return the reasons in up to three sentences, also for screen readers. */
export function because(decision, store) {
  const chosen = decision.shown[0];
  const rest = decision.shown.slice(1);
  const name = store.nameOf(decision.worker_id, decision.dp_rank);
  const full = Math.floor(decision.isl_tokens / decision.block_size);
  const sentences = [
    `The prompt has ${plural(decision.isl_tokens, "token")}: ${full ? plural(full, "full block") : "less than one block"} of ${decision.block_size}.`,
  ];
  if (decision.split) sentences.unshift(splitOf(decision.split));
  const cached = chosen.predicted_cached_blocks;
  if (cached) {
    const tokens = cached * decision.block_size;
    sentences.push(
      `${name} already holds ${cached === full ? "all" : `the first ${count(cached)}`} of them (${percent(cachedShare(chosen, decision))} of the prompt), so ${plural(decision.isl_tokens - tokens, "token is", "tokens are")} left to compute.`,
    );
  } else {
    const holder = rest.find((each) => each.predicted_cached_blocks);
    sentences.push(
      holder
        ? `${name} holds none of it, although ${store.nameOf(holder.worker_id, holder.dp_rank)} holds ${plural(holder.predicted_cached_blocks, "block")}.`
        : "No candidate holds any of it, so the whole prompt has to be computed wherever it goes.",
    );
  }
  sentences.push(...compared(decision, chosen, rest, store));
  return sentences;
}

const SPLIT_BY = {
  session: "its session",
  prompt: "the beginning of the prompt",
  worker: "the worker or selection that it names",
};

function splitOf({ asked_group, routing_group, by, share, skipped = [] }) {
  const none = skipped.length ? ` No worker for it: ${skipped.join(", ")}.` : "";
  return `Requests of group ${asked_group} are split: this one goes to ${routing_group}, whose share is ${percent(share)}, by ${SPLIT_BY[by]}.${none}`;
}

function compared(decision, chosen, rest, store) {
  const next = [...rest].sort((a, b) => a.cost - b.cost)[0];
  if (!next) return ["It was the only candidate."];
  const other = store.nameOf(next.worker_id, next.dp_rank);
  const ahead = chosen.predicted.time_to_first_token_s;
  const time = `The first token is expected after ${seconds(ahead)}; on ${other} it would be ${seconds(next.predicted.time_to_first_token_s)}.`;
  const unit = isInSeconds(chosen) ? seconds : amount;
  if (decision.policy === "round-robin" || decision.policy === "random") return [`The policy ${decision.policy} ignores cost.`, time];
  if (chosen.cost > next.cost) {
    return [time, `${other} would have cost less (${unit(next.cost)} against ${unit(chosen.cost)}): between near equals the choice is random.`];
  }
  const rival = chosen.cost === next.cost ? `equal to that of ${other}` : `the lowest; ${other} comes next with ${unit(next.cost)}`;
  return [time, `Its cost of ${unit(chosen.cost)} is ${rival}.`];
}

/** Create the whole explanation. */
export function explained(decision, store, heading = null) {
  return h(
    "div",
    { class: "explained" },
    h("h3", {}, heading ?? `${store.nameOf(decision.worker_id, decision.dp_rank)} was chosen`),
    h("div", { class: "because" }, because(decision, store).map((sentence) => h("p", {}, sentence))),
    candidatesTable(decision, store),
    keys(decision),
    leftOut(decision, store),
    h(
      "p",
      { class: "note" },
      `${clock(decision.at)} · policy ${decision.policy} · model ${decision.model_name}`,
      decision.routing_group === "default" ? "" : ` · group ${decision.routing_group}`,
      decision.request_id ? ` · request ${decision.request_id}` : "",
    ),
    h("details", {}, h("summary", {}, "Settings used"), settings(decision.settings)),
  );
}

function candidatesTable(decision, store) {
  const shown = decision.shown;
  const positive = (each) => Object.values(each.parts).reduce((sum, part) => sum + Math.max(part, 0), 0);
  const most = Math.max(...shown.map(positive), 1e-12);
  const isByChance = shown.some((each) => each.chance !== null && each.chance > 0 && each.chance < 1);
  const heads = ["Candidate", "Prompt held", isInSeconds(shown[0]) ? "Cost (time)" : "Cost", "First token"];
  if (isByChance) heads.push("Chance");
  const beyond = decision.candidates - shown.length;
  return h(
    "div",
    { class: "scroller", role: "region", tabindex: "0", "aria-label": "Candidates, compared" },
    h(
      "table",
      { class: "candidates stack" },
      h("caption", { class: "unseen" }, "Candidates of this decision, the chosen one first"),
      h("thead", {}, h("tr", {}, heads.map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, shown.map((each, i) => candidateRow(each, i, decision, store, most, isByChance))),
    ),
    beyond > 0 ? h("p", { class: "note" }, `and ${plural(beyond, "candidate")} with a higher cost`) : null,
  );
}

function candidateRow(each, i, decision, store, most, isByChance) {
  const unit = isInSeconds(each) ? seconds : amount;
  const parts = Object.entries(each.parts).filter(([, value]) => value > 0);
  const label = Object.entries(each.parts)
    .filter(([, value]) => value)
    .map(([name, value]) => `${PARTS[name]?.[0] ?? name}: ${unit(value)}`)
    .join(", ");
  const track = bar(parts.map(([name, value]) => [PARTS[name]?.[1] ?? "part-6", value / most]), label || "nothing", "bar track");
  return h(
    "tr",
    { "data-chosen": i === 0 ? "true" : "false" },
    h(
      "th",
      { scope: "row" },
      store.nameOf(each.worker_id, each.dp_rank),
      i === 0 ? h("span", { class: "sub" }, "✓ chosen") : null,
      each.trust.state === "exact"
        ? null
        : h("span", { class: "sub" }, h("span", { class: "trust", "data-trust": each.trust.state }, each.trust.state)),
    ),
    h(
      "td",
      { class: "wide", "data-label": "Prompt held" },
      heldBar(each, decision),
      h("span", { class: "note" }, `${percent(cachedShare(each, decision))}, ${plural(each.predicted_cached_blocks, "block")}`),
    ),
    h("td", { class: "wide", "data-label": "Cost" }, track, h("span", { class: "note" }, unit(each.cost))),
    h(
      "td",
      { "data-label": "First token" },
      seconds(each.predicted.time_to_first_token_s),
      h("span", { class: "note" }, plural(each.active_requests, "request")),
    ),
    isByChance ? h("td", { "data-label": "Chance" }, each.chance === null ? "–" : percent(each.chance)) : null,
  );
}

function keys(decision) {
  const names = [...new Set(decision.shown.flatMap((each) => Object.keys(each.parts).filter((name) => each.parts[name])))];
  const used = TIERS.filter((_, i) => decision.shown.some((each) => heldTokens(each, decision)[i]));
  return h(
    "div",
    {},
    h(
      "ul",
      { class: "key", "aria-label": "Colours of what is held" },
      used.map(([name, where]) => h("li", {}, h("i", { class: name }), `held ${where}`)),
      h("li", {}, h("i", { class: "compute" }), "to compute"),
    ),
    h(
      "ul",
      { class: "key", "aria-label": "Colours of the cost's parts" },
      names.map((name) => h("li", {}, h("i", { class: PARTS[name]?.[1] ?? "part-6" }), PARTS[name]?.[0] ?? name)),
    ),
  );
}

function leftOut(decision, store) {
  if (!decision.removed.length) return null;
  const names = (ranks) =>
    ranks.slice(0, 8).map((rank) => store.nameOfAbout(rank)).join(", ") + (ranks.length > 8 ? " …" : "");
  return h(
    "div",
    { class: "left-out" },
    h("h4", {}, "Could not be chosen"),
    h(
      "ul",
      {},
      decision.removed.map((each) =>
        h("li", {}, `${plural(each.count, "rank")} (${names(each.ranks)}): ${FILTERS[each.filter] ?? each.filter}`),
      ),
    ),
  );
}

function settings(values) {
  return h(
    "dl",
    { class: "settings" },
    Object.entries(values).flatMap(([name, value]) => [
      h("dt", {}, name),
      h("dd", {}, typeof value === "object" ? JSON.stringify(value) : String(value)),
    ]),
  );
}

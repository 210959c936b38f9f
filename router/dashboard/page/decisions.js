// The list of the latest decisions, and the explanation of one of them.

import { byId, h, Keyed, replace, say } from "./dom.js";
import { cachedShare, explained, heldBar } from "./explain.js";
import { clock, count, percent, plural, seconds } from "./format.js";

export class Decisions {
  constructor(store) {
    this.store = store;
    this.list = new Keyed(byId("decisions"), (seen) => this.entry(seen));
    this.chosen = null;
    this.isFollowing = true;
    this.shown = null;
  }

  show() {
    const { decisions, skipped } = this.store;
    const kept = this.chosen && !decisions.includes(this.chosen) ? [...decisions, this.chosen] : decisions;
    this.list.show(kept, (seen) => seen.number);
    if (this.isFollowing) this.chosen = decisions[0] ?? null;
    say(byId("decisions-note"), this.note(decisions, skipped));
    this.mark();
    if (this.shown !== this.chosen || !this.shown) this.explain();
  }

  note(decisions, skipped) {
    if (!decisions.length) return "";
    const sampled = skipped ? `a sample: ${count(skipped)} more are not shown` : "all are shown";
    return this.isFollowing ? `${sampled} · the newest is explained` : `${sampled}`;
  }

  choose(seen) {
    this.chosen = seen;
    this.isFollowing = false;
    this.mark();
    this.explain();
    say(byId("decisions-note"), this.note(this.store.decisions, this.store.skipped));
  }

  follow() {
    this.isFollowing = true;
    this.shown = null;
    this.show();
  }

  mark() {
    for (const [number, { button }] of this.list.known) {
      if (number === this.chosen?.number) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
  }

  explain() {
    this.shown = this.chosen;
    const place = byId("decision");
    if (!this.chosen) {
      replace(place, nobodyAsked());
      return;
    }
    const { decision, is_booked } = this.chosen;
    const element = explained(decision, this.store);
    if (!is_booked) element.append(h("p", { class: "note" }, "A selection only: nothing was reserved."));
    if (!this.isFollowing) {
      element.append(h("button", { type: "button", click: () => this.follow() }, "Follow the newest"));
    }
    replace(place, element);
  }

  entry(seen) {
    const { decision } = seen;
    const chosen = decision.shown[0];
    const button = h(
      "button",
      { type: "button", click: () => this.choose(seen) },
      h("strong", {}, `→ ${this.store.nameOf(decision.worker_id, decision.dp_rank)}`),
      h("span", { class: "note" }, clock(decision.at)),
      h("span", {}, `${plural(decision.isl_tokens, "token")}, ${percent(cachedShare(chosen, decision))} cached`),
      h("span", { class: "note" }, seconds(chosen.predicted.time_to_first_token_s)),
      heldBar(chosen, decision),
    );
    return { element: h("li", { class: "fresh" }, button), button, update() {} };
  }
}

function nobodyAsked() {
  return h(
    "div",
    { class: "empty" },
    h("p", {}, "No decisions yet."),
    h("p", {}, "Send a request through the router, or try a prompt, which books nothing."),
  );
}

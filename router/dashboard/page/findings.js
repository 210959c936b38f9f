// Likely misconfigurations: predictions that engines do not meet, one card per cause.

import { byId, h, replace } from "./dom.js";
import { plural } from "./format.js";

export class Findings {
  constructor(store) {
    this.store = store;
    this.said = "";
  }

  show() {
    const cards = byCause(this.store.mispredicted);
    const said = JSON.stringify(cards, (name, value) => (name === "since_s" ? undefined : value));
    byId("findings").hidden = cards.length === 0;
    if (said === this.said) return;
    this.said = said;
    replace(byId("findings-list"), cards.map((each) => h("li", {}, this.card(each))));
  }

  /** Create the card of a cause, from its widest finding; all findings are listed. */
  card(found) {
    const [cause, ...others] = found[0].causes;
    const also = others.map((each) => h("li", {}, h("b", {}, words(each.name)), `: ${each.because}. What to do: ${each.remedy}.`));
    return [
      h("p", {}, h("strong", {}, `Likely ${words(cause.name)}`), `: ${cause.because}.`),
      h("p", {}, `What to do: ${cause.remedy}.`),
      h("ul", { class: "concerned", "aria-label": "Concerned" }, found.map((each) => h("li", {}, this.concerned(each)))),
      also.length ? h("details", {}, h("summary", {}, "What else it may be"), h("ul", {}, also)) : null,
    ];
  }

  concerned({ model_name, routing_group, worker_id, tenant, requests }) {
    const whose = [`model ${model_name}`];
    if (routing_group !== "default") whose.push(`group ${routing_group}`);
    if (worker_id !== null) whose.push(this.store.nameOf(worker_id));
    if (tenant !== null) whose.push(`tenant ${tenant}`);
    return `${whose.join(", ")} (${plural(requests, "request")})`;
  }
}

/** Group the findings by cause, in the order of each cause's first one. */
function byCause(findings) {
  const cards = new Map();
  for (const each of findings) {
    const name = each.causes[0].name;
    cards.set(name, [...(cards.get(name) ?? []), each]);
  }
  return [...cards.values()];
}

const words = (name) => `the ${name.replaceAll("_", " ")}`;

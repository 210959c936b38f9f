// What is likely wired wrongly: predictions that engines do not meet.

import { byId, h, replace } from "./dom.js";
import { plural } from "./format.js";

export class Findings {
  constructor(store) {
    this.store = store;
    this.said = "";
  }

  show() {
    const found = this.store.mispredicted;
    const said = JSON.stringify(found.map(({ since_s, ...rest }) => rest));
    byId("findings").hidden = found.length === 0;
    if (said === this.said) return;
    this.said = said;
    replace(byId("findings-list"), found.map((each) => h("li", {}, this.finding(each))));
  }

  finding({ model_name, routing_group, worker_id, tenant, requests, causes }) {
    const whose = [`model ${model_name}`];
    if (routing_group !== "default") whose.push(`group ${routing_group}`);
    if (worker_id !== null) whose.push(this.store.nameOf(worker_id));
    if (tenant !== null) whose.push(`tenant ${tenant}`);
    const [first, ...others] = causes;
    const also = others.map((each) => h("li", {}, h("b", {}, words(each.name)), `: ${each.because}. What to do: ${each.remedy}.`));
    return [
      h("p", {}, h("strong", {}, `${whose.join(", ")}: likely ${words(first.name)}`), ` (${plural(requests, "request")} say so)`),
      h("p", {}, `${first.because}.`),
      h("p", {}, `What to do: ${first.remedy}.`),
      also.length ? h("details", {}, h("summary", {}, "What else it may be"), h("ul", {}, also)) : null,
    ];
  }
}

const words = (name) => `the ${name.replaceAll("_", " ")}`;

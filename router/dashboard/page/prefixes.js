// The prefixes that save most tokens in caches.

import { bar, byId, h, Keyed, replace, say } from "./dom.js";
import { compact, count, percent, plural } from "./format.js";
import { ask } from "./stream.js";

export class Prefixes {
  constructor(store) {
    this.store = store;
    const heads = ["Prefix", "Length", "Found in", "Held by"];
    replace(byId("prefixes").tHead, h("tr", {}, heads.map((text) => h("th", { scope: "col" }, text))));
    this.body = new Keyed(byId("prefixes").tBodies[0], (prefix) => this.row(prefix));
  }

  show() {
    const { decisions, top } = this.store.prefixes;
    const most = Math.max(1, ...top.map((each) => each.count * each.tokens));
    this.body.show(top.map((each) => ({ ...each, most, decisions })), (each) => each.sequence_hash);
    byId("prefixes").hidden = top.length === 0;
    byId("prefixes-empty").hidden = top.length > 0;
    say(byId("prefixes-note"), top.length ? `of ${plural(decisions, "sampled decision")}` : "");
    say(byId("prefixes-empty"), "No prefix has been found in a cache twice yet.");
  }

  row(prefix) {
    const length = h("td");
    const found = h("td");
    const holders = h("td");
    const name = h("th", { scope: "row" }, h("code", { title: prefix.sequence_hash }, `…${prefix.sequence_hash.slice(-8)}`));
    if (prefix.model_name !== "default") name.append(h("span", { class: "sub" }, prefix.model_name));
    const button = h("button", { type: "button", "aria-label": `Show the ranks that hold the prefix ${prefix.sequence_hash}` }, "Show");
    const answer = h("p", { class: "holders", role: "status" });
    button.addEventListener("click", () => this.find(prefix, answer));
    holders.append(button, answer);
    return {
      element: h("tr", {}, name, length, found, holders),
      update: (now) => {
        replace(length, `${compact(now.tokens)} tokens`, h("span", { class: "sub" }, plural(now.blocks, "block")));
        const share = now.decisions ? now.count / now.decisions : 0;
        const least = now.excess ? `, at least ${count(now.count - now.excess)}` : "";
        replace(
          found,
          bar([["device", (now.count * now.tokens) / now.most]], `saves ${compact(now.count * now.tokens)} tokens`),
          h("span", { class: "sub" }, `${plural(now.count, "prompt")}${least} (${percent(Math.min(share, 1))}), ${compact(now.count * now.tokens)} tokens`),
        );
      },
    };
  }

  async find(prefix, place) {
    try {
      const { holders } = await ask(`blocks/${BigInt(`0x${prefix.sequence_hash}`)}`);
      const names = holders.map((each) => `${this.store.nameOf(each.worker_id, each.dp_rank)} (${each.fastest_tier.replace("_", " ")})`);
      const first = names.slice(0, 6).join(", ");
      say(place, names.length ? `${first}${names.length > 6 ? ` and ${names.length - 6} more` : ""}` : "no rank any more");
    } catch (error) {
      say(place, error.message);
    }
  }
}

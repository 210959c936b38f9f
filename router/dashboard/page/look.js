// Preview of a prompt's placement, without a reservation.

import { byId, h, replace, say } from "./dom.js";
import { because, explained } from "./explain.js";
import { plural } from "./format.js";
import { ask } from "./stream.js";

const HELP = {
  text: "Tokenized by an engine that serves the model (/tokenize).",
  chat: "Rendered and tokenized by an engine that serves the model, as the first message of a chat (/tokenize).",
  tokens: "Numbers, separated by commas or spaces.",
};

export class LookBox {
  constructor(store, announce) {
    this.store = store;
    this.announce = announce;
    this.scopes = "";
    this.splits = [];
    byId("drawer-button").addEventListener("click", () => this.open());
    byId("drawer-close").addEventListener("click", () => byId("drawer").close());
    byId("look-kind").addEventListener("change", () => say(byId("prompt-help"), HELP[byId("look-kind").value]));
    byId("look").addEventListener("submit", (event) => {
      event.preventDefault();
      this.look();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("look").requestSubmit();
    });
  }

  async open() {
    byId("drawer").showModal();
    byId("prompt").focus();
    try {
      const loads = await ask("loads");
      this.splits = loads.flatMap(({ model_name, split_from = [] }) => split_from.map((group) => [model_name, group]));
      this.showScopes();
    } catch {
      // Groups without workers of their own are missing from the choice.
    }
  }

  /** Show the models that may be selected, and groups of which only a split knows. */
  showScopes() {
    const scopes = this.store.scopes(this.splits);
    const key = JSON.stringify(scopes);
    if (key === this.scopes) return;
    this.scopes = key;
    const select = byId("look-scope");
    const before = select.value;
    const all = scopes.length ? scopes : [["default", "default"]];
    replace(
      select,
      all.map(([model, group]) =>
        h("option", { value: JSON.stringify([model, group]) }, group === "default" ? model : `${model} (${group})`),
      ),
    );
    if (all.some((scope) => JSON.stringify(scope) === before)) select.value = before;
  }

  async look() {
    const place = byId("look-answer");
    const button = byId("look").querySelector("button[type=submit]");
    try {
      const body = this.body();
      button.disabled = true;
      say(button, "Requesting …");
      const answer = await ask("dashboard/look", {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(body),
      });
      const where = `It would go to ${this.store.nameOf(answer.decision.worker_id, answer.decision.dp_rank)}`;
      replace(place, tokensNote(answer), explained(answer.decision, this.store, where));
      this.announce(`${where}. ${because(answer.decision, this.store).join(" ")}`);
    } catch (error) {
      replace(place, h("p", { class: "refusal", role: "alert" }, error.message));
    }
    button.disabled = false;
    say(button, "Show me");
  }

  body() {
    const kind = byId("look-kind").value;
    const text = byId("prompt").value;
    const [model_name, routing_group] = JSON.parse(byId("look-scope").value || '["default","default"]');
    const said = { model_name, routing_group };
    if (kind === "tokens") said.token_ids = tokenIds(text);
    else Object.assign(said, { text, is_chat: kind === "chat" });
    const optional = { cache_salt: "look-salt", lora_name: "look-lora" };
    for (const [field, id] of Object.entries(optional)) if (byId(id).value) said[field] = byId(id).value;
    if (byId("look-output").value) said.expected_output_tokens = Number(byId("look-output").value);
    if (byId("look-policy").value) said.router_config_override = { policy: byId("look-policy").value };
    return said;
  }
}

function tokenIds(text) {
  const words = text.replace(/[[\]]/g, " ").split(/[\s,]+/).filter(Boolean);
  const wrong = words.find((word) => !/^\d{1,10}$/.test(word) || Number(word) > 4_294_967_295);
  if (wrong !== undefined) throw new Error(`“${wrong.slice(0, 40)}” is not a token id: a whole number from 0 to 4294967295.`);
  if (!words.length) throw new Error("Enter at least one token id.");
  return words.map(Number);
}

function tokensNote({ tokenized_by, first_tokens, decision }) {
  const first = `${first_tokens.join(", ")}${decision.isl_tokens > first_tokens.length ? ", …" : ""}`;
  const whose = tokenized_by === null ? "As given" : `Tokenized by the engine of ${tokenized_by}`;
  return h("p", { class: "note" }, `${whose}: ${plural(decision.isl_tokens, "token")} (${first}).`);
}

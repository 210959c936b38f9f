// The stream of the router's frames, by fetch: EventSource cannot send a token.

import { parse } from "./format.js";

const TOKEN = "kv-router-token";
const PATIENCE_MS = 15_000;
const FIRST_WAIT_S = 1;
const LONGEST_WAIT_S = 30;

export const token = {
  get: () => sessionStorage.getItem(TOKEN) ?? "",
  set: (value) => (value ? sessionStorage.setItem(TOKEN, value) : sessionStorage.removeItem(TOKEN)),
};

export function authorized(headers = {}) {
  return token.get() ? { ...headers, authorization: `Bearer ${token.get()}` } : headers;
}

/** Send a request; return the response, or throw an Error with its `status` and `code`. */
export async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: authorized(options.headers) });
  } catch {
    throw new Error("The router does not respond.");
  }
  const text = await answer.text();
  let said = null;
  try {
    said = parse(text);
  } catch {
    // Not JSON: only the status is known.
  }
  if (!answer.ok) {
    throw Object.assign(new Error(said?.error ?? `The router responded ${answer.status}.`), {
      status: answer.status,
      code: said?.code,
    });
  }
  return said;
}

/** A stream that reconnects until `stop`; calls `onFrame(frame)` and `onState(state, detail)`. */
export class Watching {
  constructor(onFrame, onState) {
    this.onFrame = onFrame;
    this.onState = onState;
    this.waitS = FIRST_WAIT_S;
    this.controller = null;
    this.timer = null;
  }

  async start() {
    clearTimeout(this.timer);
    this.controller?.abort();
    const controller = (this.controller = new AbortController());
    this.onState("connecting");
    let problem = { text: "The connection ended." };
    try {
      const answer = await fetch("dashboard/stream", {
        headers: authorized({ accept: "text/event-stream" }),
        signal: controller.signal,
        cache: "no-store",
      });
      if (answer.ok) await this.read(answer.body.getReader(), controller);
      else problem = { status: answer.status, text: parse(await answer.text()).error };
    } catch (error) {
      problem = { text: error.name === "AbortError" ? "No data for a while." : "The router does not respond." };
    }
    if (controller !== this.controller) return;
    if (problem.status === 401 || problem.status === 403) {
      this.onState("refused", problem);
      return;
    }
    this.onState("lost", { ...problem, waitS: this.waitS });
    this.timer = setTimeout(() => this.start(), this.waitS * 1000);
    this.waitS = Math.min(this.waitS * 2, LONGEST_WAIT_S);
  }

  async read(reader, controller) {
    const decoder = new TextDecoder();
    let text = "";
    for (;;) {
      const silence = setTimeout(() => controller.abort(), PATIENCE_MS);
      const { done, value } = await reader.read().finally(() => clearTimeout(silence));
      if (done) return;
      text += decoder.decode(value, { stream: true });
      for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
        if (!text.startsWith("data: ")) continue;
        this.waitS = FIRST_WAIT_S;
        this.onFrame(parse(text.slice(6, end)));
      }
    }
  }
}

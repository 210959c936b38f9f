// The page's main module: it applies frames to the store, and renders the store.

import { Decisions } from "./decisions.js";
import { byId, h, replace, say, set } from "./dom.js";
import { Events } from "./events.js";
import { Findings } from "./findings.js";
import { clock } from "./format.js";
import { showGlance } from "./glance.js";
import { LookBox } from "./look.js";
import { Prefixes } from "./prefixes.js";
import { Store } from "./store.js";
import { ask, token, Watching } from "./stream.js";
import { WorkerDetail } from "./worker.js";
import { Workers } from "./workers.js";

const THEME = "kv-router-theme";

const store = new Store();
const decisions = new Decisions(store);
const detail = new WorkerDetail(store, announce);
const workers = new Workers(store, (worker_id) => detail.open(worker_id));
const prefixes = new Prefixes(store);
const events = new Events(store);
const findings = new Findings(store);
const lookBox = new LookBox(store, announce);
let isPaused = false;
let isDue = false;

function announce(text) {
  say(byId("announce"), text);
}

function show() {
  isDue = false;
  if (isPaused || !store.totals) return;
  say(byId("router-name"), store.router);
  say(byId("version"), `kv-router ${store.version} ·`);
  document.title = `${store.router} · kv-router`;
  showGlance(store);
  showReadiness(store.totals);
  findings.show();
  workers.show();
  decisions.show();
  prefixes.show();
  events.show();
  lookBox.showScopes();
}

/** Render at most once per animation frame: frames may arrive faster. */
function showSoon() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(show);
}

function state(name, text) {
  const pill = byId("status");
  set(pill, "data-state", name);
  if (pill.textContent !== text) announce(text);
  say(pill, text);
}

function showReadiness({ ready, reasons, degraded }) {
  if (!ready) state("not-ready", `Not ready: ${[...reasons, ...degraded].join("; ")}`);
  else if (store.mispredicted.length) state("degraded", "Ready, but something looks misconfigured");
  else if (degraded.length) state("degraded", `Ready, but ${degraded.join("; ")}`);
  else state("ready", "Ready");
}

function banner(severity, ...children) {
  const place = byId("banner");
  place.hidden = children.length === 0;
  place.dataset.severity = severity;
  replace(place, children);
}

/** Fetch the decisions from before this page was opened. */
async function remember() {
  try {
    store.remember(await ask("dashboard/decisions"));
    showSoon();
  } catch {
    // The stream has the newest ones, and says what is wrong.
  }
}

const watching = new Watching(
  (frame) => {
    store.take(frame);
    if (frame.is_whole) remember();
    document.body.dataset.live = "yes";
    byId("sign-in").hidden = true;
    banner("");
    showSoon();
  },
  (name, problem) => {
    if (name === "refused") askForToken(problem);
    if (name === "lost") {
      document.body.dataset.live = "no";
      state("lost", "Not connected");
      const since = store.at ? ` Showing data from ${clock(store.at)}.` : "";
      const again = h("button", { type: "button", click: () => watching.start() }, "Try now");
      banner("fault", `${problem.text}${since} Trying again in ${problem.waitS} s.`, again);
    }
  },
);

function askForToken({ status, text }) {
  document.body.dataset.live = "no";
  state("lost", status === 401 ? "Sign in to watch" : "This token may not watch");
  byId("sign-in").hidden = false;
  const known = status === 403 ? " You may still preview where a prompt would go." : "";
  say(byId("sign-in-why"), token.get() ? `${text}.${known}` : "This router requires a bearer token.");
  if (status === 401) byId("token").focus();
}

byId("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set(byId("token").value.trim());
  byId("token").value = "";
  watching.start();
});

byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  set(byId("pause"), "aria-pressed", String(isPaused));
  say(byId("pause"), isPaused ? "Resume" : "Pause");
  announce(isPaused ? "Paused" : "Live");
  show();
});

byId("theme").value = localStorage.getItem(THEME) ?? "";
byId("theme").addEventListener("change", () => {
  localStorage.setItem(THEME, byId("theme").value);
  showTheme();
});

function showTheme() {
  const theme = byId("theme").value;
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

byId("help-button").addEventListener("click", () => byId("help").showModal());

/** Let arrows go from the search through the workers that it found, and back; return whether they did. */
function arrows(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const found = [byId("workers-find"), ...document.querySelectorAll("#workers tbody th button")];
  const from = found.indexOf(document.activeElement);
  if (!step || from < 0 || document.querySelector("dialog[open]") || !found[from + step]) return false;
  found[from + step].focus();
  event.preventDefault();
  return true;
}

document.addEventListener("keydown", (event) => {
  const isTyping = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName);
  if (arrows(event)) return;
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.key === "/") byId("workers-find").focus();
  else if (event.key === "?") byId("help").showModal();
  else if (event.key === "t") lookBox.open();
  else return;
  event.preventDefault();
});

showTheme();
lookBox.showScopes();
workers.show();
decisions.show();
prefixes.show();
events.show();
watching.start();

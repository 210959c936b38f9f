// Faults and resyncs: a timeline of the last half hour, and a list.

import { byId, h, Keyed, replace, say, svg } from "./dom.js";
import { ago, clock, count } from "./format.js";

const SPAN_S = 1800;
const LEVELS = { fault: 12, warning: 12, note: 24, good: 24 };
const SHAPES = {
  fault: (x, y) => `M${x - 5} ${y - 5}l5 5 5-5 2 2-5 5 5 5-2 2-5-5-5 5-2-2 5-5-5-5z`,
  warning: (x, y) => `M${x} ${y - 6}l6.5 11h-13z`,
  note: (x, y) => `M${x - 4} ${y - 4}h8v8h-8z`,
  good: (x, y) => `M${x - 5} ${y}a5 5 0 1 0 10 0a5 5 0 1 0-10 0z`,
};

export class Events {
  constructor(store) {
    this.store = store;
    this.list = new Keyed(byId("events"), () => this.entry());
    byId("events-kind").addEventListener("change", () => this.show());
  }

  show() {
    const isBad = byId("events-kind").value === "bad";
    const events = [...this.store.events.values()]
      .filter((each) => !isBad || each.severity === "fault" || each.severity === "warning")
      .sort((a, b) => b.at - a.at || b.entry_id - a.entry_id);
    this.list.show(events, (each) => each.entry_id);
    byId("events-empty").hidden = events.length > 0;
    say(byId("events-empty"), "Nothing has gone wrong.");
    this.line(events);
  }

  entry() {
    const time = h("time");
    const severity = h("span", { class: "severity" });
    const text = h("p");
    return {
      element: h("li", {}, time, severity, text),
      update: (each) => {
        time.dateTime = new Date(each.at * 1000).toISOString();
        time.title = time.dateTime;
        say(time, clock(each.at));
        severity.dataset.severity = each.severity;
        say(severity, each.severity);
        const about = each.about ? `${this.store.nameOfAbout(each.about)}: ` : "";
        say(text, `${about}${each.text}${each.count > 1 ? ` (${count(each.count)} times)` : ""}`);
      },
    };
  }

  line(events) {
    const now = this.store.at;
    const place = byId("events-line");
    const width = place.clientWidth || 600;
    const x = (at) => width - ((now - at) / SPAN_S) * width;
    const recent = events.filter((each) => now - each.at < SPAN_S);
    const marks = recent.map((each) =>
      svg(
        "path",
        { d: SHAPES[each.severity](x(each.at), LEVELS[each.severity]), class: `mark-${each.severity}` },
        svg("title", {}, `${clock(each.at)} ${each.text}`),
      ),
    );
    const ticks = [0, 10, 20, 30].flatMap((minutes) => {
      const at = x(now - minutes * 60);
      const anchor = minutes === 0 ? "end" : minutes === 30 ? "start" : "middle";
      return [
        svg("line", { x1: at, x2: at, y1: 30, y2: 36 }),
        svg("text", { x: at, y: 47, "text-anchor": anchor }, minutes ? `${minutes} min ago` : "now"),
      ];
    });
    const bad = recent.filter((each) => each.severity === "fault" || each.severity === "warning");
    const newest = bad.length ? `, the last ${ago(bad[0].at, now)}` : "";
    const label = `The last half hour: ${bad.length} faults and warnings${newest}, ${recent.length - bad.length} other events`;
    replace(
      place,
      svg(
        "svg",
        { viewBox: `0 0 ${width} 50`, role: "img", "aria-label": label },
        svg("line", { x1: 0, x2: width, y1: 33, y2: 33 }),
        ...ticks,
        ...marks,
      ),
    );
  }
}

// Formats of numbers and times for readers.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (n) => (n === null || n === undefined ? "–" : whole.format(n));
export const compact = (n) => (Math.abs(n) < 10_000 ? count(n) : short.format(n));
/** Format a share; only 1 is shown as 100%, and only 0 as 0%. */
export function percent(share) {
  if (share === null || share === undefined) return "–";
  if (share <= 0 || share >= 1) return share > 0 ? "100%" : "0%";
  return `${Math.min(99, Math.max(1, Math.round(share * 100)))}%`;
}

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 100) return `${count(value)} s`;
  if (size >= 1) return `${value.toFixed(size >= 10 ? 1 : 2)} s`;
  if (size >= 0.001) return `${(value * 1000).toFixed(size >= 0.1 ? 0 : 1)} ms`;
  return size === 0 ? "0 s" : size < 5e-8 ? "below 0.1 µs" : `${(value * 1e6).toFixed(size >= 1e-5 ? 0 : 1)} µs`;
}

export function rate(value) {
  return value >= 100 ? count(value) : value >= 10 ? value.toFixed(0) : value.toFixed(1);
}

export function amount(value) {
  if (Number.isInteger(value)) return count(value);
  return Math.abs(value) >= 100 ? count(value) : String(Number(value.toPrecision(3)));
}

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

export function ago(at, now) {
  const passed = Math.max(0, now - at);
  if (passed < 5) return "now";
  if (passed < 60) return `${Math.floor(passed)} s ago`;
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  return passed < 86_400 ? `${Math.floor(passed / 3600)} h ago` : clock(at);
}

/** Parse JSON with large integers as strings: ids have 64 bits, numbers only 53. */
export function parse(text) {
  return JSON.parse(text, (_, value, context) =>
    typeof value === "number" && !Number.isSafeInteger(value) && /^\d{16,}$/.test(context?.source ?? "")
      ? context.source
      : value,
  );
}

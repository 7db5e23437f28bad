// The time of each token as a row of bars.
import { makeSvg } from "./dom.js";

const BARS = 80;
const HEIGHT = 24;
const STEP = 2; // pixels of a bar and of the gap after it

/** Milliseconds between tokens: the newest ones while they come, all of them in groups afterwards. */
export function drawPlot(gaps, live) {
  const bars = live ? gaps.slice(-BARS) : groupMeans(gaps);
  const top = 1.15 * quantile(gaps, 0.95) || 1; // an outlier is cut rather than the rest made flat
  const line = bars.map((gap, at) => `M${at * STEP + 0.5} ${HEIGHT}V${(HEIGHT - 1 - (HEIGHT - 2) * Math.min(1, gap / top)).toFixed(1)}`);
  return makeSvg(
    "svg",
    { class: "plot", width: bars.length * STEP, height: HEIGHT, role: "img" },
    makeSvg("title", {}, describe(gaps)),
    makeSvg("path", { d: line.join("") }),
  );
}

/** The plot in words. */
export function describe(gaps) {
  const [middle, slow] = [0.5, 0.95].map((share) => quantile(gaps, share).toFixed(1));
  return `Milliseconds per token: median ${middle}, 95th percentile ${slow}`;
}

export function quantile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? 0;
}

function groupMeans(values) {
  const size = Math.max(1, Math.ceil(values.length / BARS));
  const groups = [];
  for (let at = 0; at < values.length; at += size) {
    const group = values.slice(at, at + size);
    groups.push(group.reduce((sum, value) => sum + value, 0) / group.length);
  }
  return groups;
}

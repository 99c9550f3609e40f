// Prometheus' text format, and what a dashboard asks of it. Nothing here touches the page.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Return the samples by name: [{ labels, value }]. */
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const parts = line[0] === "#" ? null : line.match(LINE);
    if (!parts) continue;
    const labels = {};
    for (const [, name, value] of (parts[2] || "").matchAll(LABEL)) {
      labels[name] = value.replace(/\\(.)/g, (_, mark) => (mark === "n" ? "\n" : mark));
    }
    if (!found.has(parts[1])) found.set(parts[1], []);
    found.get(parts[1]).push({ labels, value: parts[3] === "+Inf" ? Infinity : Number(parts[3]) });
  }
  return found;
}

/** Return the names of the engines: the models that others generate with. */
export const engineNames = samples =>
  [...new Set((samples.get("slipstream_requests_running") || []).map(({ labels }) => labels.model))].sort();

const ofModel = (samples, name, model) =>
  (samples.get(name) || []).filter(({ labels }) => !model || labels.model === model);

/** Return the sum of a metric over an engine, or all. 0 where there is none. */
export const sumOf = (samples, name, model) =>
  ofModel(samples, name, model).reduce((sum, { value }) => sum + value, 0);

/** Return the growth of a counter in each second between two samples. */
export function rateOf(before, after, name, model, seconds) {
  return seconds > 0 ? Math.max(0, sumOf(after, name, model) - sumOf(before, name, model)) / seconds : 0;
}

/** Return the counts of a histogram by their upper bounds: [[bound, count], …], cumulative. */
function bucketsOf(samples, name, model) {
  const sums = new Map();
  for (const { labels, value } of ofModel(samples, `${name}_bucket`, model)) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    sums.set(bound, (sums.get(bound) || 0) + value);
  }
  return [...sums].sort(([one], [other]) => one - other);
}

/** Return a quantile of what a histogram has counted between two samples; null where it was nothing. */
export function quantileOf(before, after, name, model, quantile) {
  const former = new Map(bucketsOf(before, name, model));
  const buckets = bucketsOf(after, name, model).map(([bound, count]) => [bound, count - (former.get(bound) || 0)]);
  const total = buckets.length ? buckets.at(-1)[1] : 0;
  if (total <= 0) return null;
  const wanted = quantile * total;
  let lower = 0, below = 0;
  for (const [bound, count] of buckets) {
    if (count >= wanted) {
      if (bound === Infinity) return lower;
      return lower + (bound - lower) * ((wanted - below) / Math.max(count - below, 1e-9));
    }
    [lower, below] = [bound, count];
  }
  return lower;
}

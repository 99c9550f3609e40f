// The dashboard: figures of the metrics as plots, and the engine's last steps. It reads them while it is shown.

import { at } from "./elements.js";
import { make } from "./nodes.js";
import { Plot, short } from "./plots.js";
import { engineNames, parseMetrics, quantileOf, rateOf, sumOf } from "./prometheus.js";
import { STEPS, Timeline } from "./timeline.js";

const PERIOD_MILLISECONDS = 1000;
const POINTS = 300;
const LATENCY_SECONDS = 30;  // latencies are those of so long a time
const TILES = [
  ["Running", now => now.running], ["Waiting", now => now.waiting],
  ["Tokens/s", now => now.output], ["KV cache", now => `${(now.cache * 100).toFixed(0)} %`],
  ["From cache", now => `${(now.hits * 100).toFixed(0)} %`], ["Finished", now => now.finished],
];

export class Dashboard {
  constructor(server) {
    this.server = server;
    this.samples = [];  // { time, metrics }
    this.points = [];
    this.steps = new Map();  // engine → its last steps
    this.timelines = new Map();
    this.timer = 0;
    this.round = {};
    this.build();
  }

  build() {
    this.engine = make("select", { id: "dashboard-engine" }, make("option", { value: "", text: "all engines" }));
    this.engine.addEventListener("change", () => { this.points = []; this.samples.splice(0, this.samples.length - 1); });
    this.problem = make("p", { class: "hint", role: "status" });
    this.tiles = TILES.map(() => make("dd", { text: "–" }));
    this.plots = [
      [new Plot("Requests", "", ["running", "waiting"], 4), now => [now.running, now.waiting]],
      [new Plot("Tokens", "tokens/s", ["output", "prompt"], 10), now => [now.output, now.prompt]],
      [new Plot("KV cache", "% of its blocks", ["used", "kept for reuse"], 100), now => [now.cache * 100, now.kept * 100]],
      [new Plot("Time to first token", "ms", ["p50", "p90", "p99"], 10), now => now.first],
      [new Plot("Time between tokens", "ms", ["p50", "p90", "p99"], 10), now => now.between],
      [new Plot("Time in the queue", "ms", ["p50", "p90", "p99"], 10), now => now.queue],
    ];
    this.place = make("div");
    at("dashboard").append(
      make("div", { class: "row" }, make("label", { for: "dashboard-engine", text: "Engine" }), this.engine, this.problem),
      make("dl", { class: "tiles" }, ...TILES.map(([name], i) => make("div", { class: "tile" }, make("dt", { text: name }), this.tiles[i]))),
      make("div", { class: "plots" }, ...this.plots.map(([plot]) => plot.element)), this.place);
  }

  /** Read the metrics from now on, or no longer. */
  watch(shown) {
    clearTimeout(this.timer);
    this.round = {};  // a reading of the time before does not go on
    if (shown) this.readOften(this.round);
  }

  async readOften(round) {
    if (!document.hidden) await this.read();
    if (round === this.round) this.timer = setTimeout(() => this.readOften(round), PERIOD_MILLISECONDS);
  }

  async read() {
    try {
      const [metrics, steps] = await Promise.all([
        this.server.request("dashboard/metrics").then(response => response.text()),
        this.server.request(`dashboard/steps?after=${this.latestStep()}`).then(response => response.json()),
      ]);
      this.problem.textContent = "";
      this.take(performance.now() / 1000, parseMetrics(metrics));
      this.takeSteps(steps.engines);
    } catch (problem) {
      this.problem.textContent = `No figures: ${problem.message}`;
      if (problem.status === 401 || problem.status === 403) this.server.onRefused();
    }
  }

  latestStep() {
    return Math.max(0, ...[...this.steps.values()].map(steps => (steps.length ? steps.at(-1)[0] : 0)));
  }

  take(time, metrics) {
    this.offerEngines(engineNames(metrics));
    this.samples.push({ time, metrics });
    this.samples = this.samples.filter(one => time - one.time <= LATENCY_SECONDS);
    const before = this.samples.at(-2) || this.samples.at(-1);
    const now = figures(this.engine.value, before, this.samples[0], this.samples.at(-1));
    this.points = [...this.points, { time, now }].slice(-POINTS);
    TILES.forEach(([, read], i) => {
      const value = read(now);
      this.tiles[i].textContent = typeof value === "number" ? short(value) : value;
    });
    for (const [plot, read] of this.plots) {
      plot.show(this.points.map(point => ({ time: point.time, values: read(point.now) })));
    }
  }

  offerEngines(names) {
    const shown = [...this.engine.options].slice(1).map(option => option.value);
    if (names.join("\n") === shown.join("\n")) return;
    const chosen = this.engine.value;
    this.engine.replaceChildren(this.engine.options[0], ...names.map(name => make("option", { value: name, text: name })));
    this.engine.value = names.includes(chosen) ? chosen : "";
  }

  takeSteps(engines) {
    for (const { model, version, replica, steps } of engines) {
      const name = `${model} ${version}${replica ? `, replica ${replica}` : ""}`;
      const kept = [...(this.steps.get(name) || []), ...steps].slice(-STEPS);
      const isNew = !this.timelines.has(name);
      this.steps.set(name, kept);
      if (isNew) {
        this.timelines.set(name, new Timeline(`The last ${STEPS} steps of ${name}`));
        this.place.append(this.timelines.get(name).element);
      }
      if (isNew || steps.length) this.timelines.get(name).show(kept);
    }
  }
}

/** Return the figures of an engine, or of all, between samples of its metrics. */
function figures(engine, before, first, last) {
  const sum = name => sumOf(last.metrics, name, engine);
  const rate = name => rateOf(before.metrics, last.metrics, name, engine, last.time - before.time);
  const engines = engine ? [engine] : engineNames(last.metrics);
  const quantiles = name => [0.5, 0.9, 0.99].map(quantile => {
    // the engine's own series count the requests of all its models
    const values = engines.map(one => quantileOf(first.metrics, last.metrics, name, one, quantile)).filter(value => value !== null);
    return values.length ? Math.max(...values) * 1000 : null;
  });
  const used = sum("slipstream_kv_blocks_used"), blocks = used + sum("slipstream_kv_blocks_free");
  const prompt = sum("slipstream_prompt_tokens_total");
  return {
    running: sum("slipstream_requests_running"),
    waiting: sum("slipstream_requests_waiting"),
    output: rate("slipstream_output_tokens_total"),
    prompt: rate("slipstream_prompt_tokens_total"),
    cache: blocks ? used / blocks : 0,
    kept: blocks ? sum("slipstream_kv_blocks_cached") / blocks : 0,
    hits: prompt ? sum("slipstream_prompt_tokens_cached_total") / prompt : 0,
    finished: sum("slipstream_requests_finished_total"),
    first: quantiles("slipstream_time_to_first_token_seconds"),
    between: quantiles("slipstream_inter_token_latency_seconds"),
    queue: quantiles("slipstream_queue_seconds"),
  };
}

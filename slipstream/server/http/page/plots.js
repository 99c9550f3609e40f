// Line plots over time, drawn as SVG.

import { draw, make } from "./nodes.js";

const WIDTH = 420, HEIGHT = 170;
const LEFT = 48, RIGHT = 8, TOP = 8, BOTTOM = 20;
const MOST_TICKS = 4;  // above 0

/** Return a number in few characters: 0.012, 1.2, 34, 5.6k. */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (Math.abs(value) >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (Math.abs(value) >= 100 || Number.isInteger(value)) return value.toFixed(0);
  return Math.abs(value) >= 1 ? value.toFixed(1) : value.toPrecision(2);
}

/** Return the ticks of an axis from 0 to at least `most`: multiples of a round number. `whole`: of a whole one. */
export function ticksTo(most, whole = false) {
  const end = most > 0 ? most : 1, least = end / MOST_TICKS;
  const power = 10 ** Math.floor(Math.log10(least));
  const round = (whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map(step => step * power);
  const step = Math.max(round.find(one => one >= least * 0.9999), whole ? 1 : 0);
  const count = Math.max(1, Math.ceil((end / step) * 0.9999));
  return Array.from({ length: count + 1 }, (_, i) => i * step);
}

export class Plot {
  /** `unit`: empty for a count. `series`: the names of its lines. `least`: the least upper end of the axis. */
  constructor(title, unit, series, least = 0) {
    this.title = title;
    this.unit = unit;
    this.series = series;
    this.least = least;
    this.points = [];
    this.svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    this.values = series.map(() => make("span"));
    const legend = make("ul", { class: "legend" }, ...series.map((name, i) => make("li", {},
      draw("svg", { viewBox: "0 0 10 6", "aria-hidden": "true" }, draw("rect", { width: 10, height: 6, class: `series-${i}` })),
      name ? `${name} ` : "", this.values[i])));
    this.element = make("figure", {}, make("figcaption", { text: unit ? `${title} (${unit})` : title }), this.svg, legend);
    this.svg.addEventListener("pointermove", event => this.point(event));
    this.svg.addEventListener("pointerleave", () => { this.at = null; this.drawAll(); });
    this.drawAll();  // an empty plot has its name and axis, too
  }

  /** Show these points: { time, values }, times in seconds. */
  show(points) {
    this.points = points;
    this.drawAll();
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    this.at = Math.max(0, Math.min(1, (x - LEFT) / (WIDTH - LEFT - RIGHT)));
    this.drawAll();
  }

  drawAll() {
    const { points } = this;
    const end = points.length ? points.at(-1).time : 0, start = points.length ? points[0].time : 0;
    const most = Math.max(this.least, ...points.flatMap(({ values }) => values.map(value => value || 0)));
    const ticks = ticksTo(most, !this.unit), top = ticks.at(-1);
    const x = time => LEFT + ((time - start) / Math.max(end - start, 1)) * (WIDTH - LEFT - RIGHT);
    const y = value => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (const value of ticks) {
      parts.push(draw("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value), class: "grid" }));
      parts.push(draw("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end", text: short(value) }));
    }
    parts.push(draw("text", { x: LEFT, y: HEIGHT - 5, text: `${Math.round(end - start)} s ago` }));
    parts.push(draw("text", { x: WIDTH - RIGHT, y: HEIGHT - 5, "text-anchor": "end", text: "now" }));
    this.series.forEach((_, i) => parts.push(...this.lines(i, x, y)));
    const chosen = this.chosen(start, end);
    if (chosen && this.at !== null && this.at !== undefined) {
      parts.push(draw("line", { x1: x(chosen.time), x2: x(chosen.time), y1: TOP, y2: HEIGHT - BOTTOM, class: "cursor" }));
    }
    this.svg.replaceChildren(...parts);
    this.describe(chosen);
  }

  /** Return the lines of a series, with a gap where it has no value. */
  lines(index, x, y) {
    const runs = [[]];
    for (const { time, values } of this.points) {
      if (values[index] === null) runs.push([]);
      else runs.at(-1).push(`${x(time).toFixed(1)},${y(values[index]).toFixed(1)}`);
    }
    return runs.filter(run => run.length).map(run =>
      draw("polyline", { points: (run.length > 1 ? run : [run[0], run[0]]).join(" "), class: `line series-${index}`, "stroke-linecap": "round" }));
  }

  chosen(start, end) {
    if (this.at === null || this.at === undefined) return this.points.at(-1);
    const time = start + this.at * (end - start);
    return this.points.reduce((best, one) => (Math.abs(one.time - time) < Math.abs(best.time - time) ? one : best), this.points[0]);
  }

  describe(chosen) {
    const values = this.series.map((_, i) => short(chosen ? chosen.values[i] : null));
    this.values.forEach((element, i) => { element.textContent = values[i]; });
    const read = this.series.map((name, i) => `${name} ${values[i]}`.trim()).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}${this.unit ? ` in ${this.unit}` : ""}: ${read}`);
  }
}

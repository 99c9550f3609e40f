// The engine's last steps: a column for each step, a line for each row of the batch, and a colour for
// what the row computed. A request keeps its row, so its life is a bar from left to right.

import { make } from "./nodes.js";

export const STEPS = 200;
const LINE = 14, LEFT = 46, FOOT = 18, LEAST_LINES = 4;
const KINDS = [["prompt", "--number"], ["one token", "--strong"], ["several tokens", "--string"]];

/** Return what a row did in a step: 0 for prompt tokens, 1 for one token, 2 for draft tokens. */
export function kindOf(count, samples, known) {
  if (!samples || !known) return 0;
  return count > 1 ? 2 : 1;
}

/** Return the steps as columns of cells { row, request, count, kind }. */
export function layOut(steps) {
  const sampled = new Set();  // requests whose prompt is computed
  return steps.map(([started, rows, epochs, counts, samples]) => {
    const cells = rows.map((row, i) => {
      const request = `${row}:${epochs[i]}`;
      const first = !sampled.has(request);
      const kind = kindOf(counts[i], samples[i], !first || counts[i] === 1);
      if (samples[i]) sampled.add(request);
      return { row, request, count: counts[i], kind };
    });
    return { started, cells };
  });
}

export class Timeline {
  constructor(title) {
    this.columns = [];
    this.canvas = make("canvas", { role: "img", "aria-label": "No step yet" });
    this.note = make("p", { class: "hint", text: "A column is a step, a line is a row of the batch." });
    const legend = make("ul", { class: "legend" }, ...KINDS.map(([name, colour]) => {
      const mark = make("span", { text: "■ " });
      mark.style.color = `var(${colour})`;
      return make("li", {}, mark, name);
    }));
    this.element = make("figure", { class: "timeline" }, make("figcaption", { text: title }), this.canvas, legend, this.note);
    this.canvas.addEventListener("pointermove", event => this.point(event));
  }

  show(steps) {
    this.columns = layOut(steps);
    const requests = new Set(this.columns.flatMap(({ cells }) => cells.map(({ request }) => request)));
    const busiest = Math.max(0, ...this.columns.map(({ cells }) => cells.length));
    this.canvas.setAttribute("aria-label",
      `The last ${this.columns.length} steps: ${requests.size} requests, at most ${busiest} in one step`);
    this.draw();
  }

  draw() {
    const rows = [...new Set(this.columns.flatMap(({ cells }) => cells.map(({ row }) => row)))].sort((one, other) => one - other);
    this.lineOf = new Map(rows.map((row, line) => [row, line]));
    const width = this.canvas.clientWidth || 800, height = Math.max(LEAST_LINES, rows.length) * LINE + FOOT;
    const scale = devicePixelRatio || 1;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.height = `${height}px`;
    const style = getComputedStyle(this.canvas);
    const colours = KINDS.map(([, name]) => colourOf(this.canvas, name));
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    context.font = `11px ${style.fontFamily}`;
    context.fillStyle = colourOf(this.canvas, "--quiet");
    for (const [row, line] of this.lineOf) context.fillText(`row ${row}`, 0, line * LINE + LINE - 3);
    context.fillText(this.spanText(), LEFT, height - 4);
    this.step = (width - LEFT) / STEPS;
    this.columns.forEach(({ cells }, column) => {
      const x = LEFT + (column + STEPS - this.columns.length) * this.step;
      for (const { row, kind } of cells) {
        context.fillStyle = colours[kind];
        context.fillRect(x, this.lineOf.get(row) * LINE + 2, Math.max(this.step - 0.5, 0.5), LINE - 4);
      }
    });
  }

  spanText() {
    if (this.columns.length < 2) return "no steps yet: ask something";
    const seconds = (this.columns.at(-1).started - this.columns[0].started) / 1e6;
    return `${this.columns.length} steps in ${seconds.toFixed(2)} s`;
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - LEFT) / this.step) - (STEPS - this.columns.length);
    const found = this.columns[column];
    if (!found) return;
    const line = Math.floor((event.clientY - box.top) / LINE);
    const cell = found.cells.find(({ row }) => this.lineOf.get(row) === line);
    const tokens = found.cells.reduce((sum, { count }) => sum + count, 0);
    const what = cell ? ` Row ${cell.row}: ${cell.count} token${cell.count === 1 ? "" : "s"}, ${KINDS[cell.kind][0]}.` : "";
    this.note.textContent = `Step at ${new Date(found.started / 1000).toLocaleTimeString()}: ${found.cells.length} rows, ${tokens} tokens.${what}`;
  }
}

/** Return a colour of the style sheet as the browser resolves it for this element. */
function colourOf(element, name) {
  element.style.color = `var(${name})`;
  const colour = getComputedStyle(element).color;
  element.style.color = "";
  return colour;
}

// The tokens of an answer: how likely each was, and what else the model could have said.

import { make } from "./nodes.js";

const UNSURE = 0.5, UNLIKELY = 0.1;  // probabilities below which a token is marked

export const percent = logprob => {
  const value = Math.exp(logprob) * 100;
  return value < 0.1 ? "< 0.1 %" : `${value.toFixed(1)} %`;
};

const visible = text => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "∅";
const markOf = logprob => {
  const probability = Math.exp(logprob);
  if (probability < UNLIKELY) return "unlikely";
  return probability < UNSURE ? "unsure" : "";
};

/** Return the view of these tokens. Hovering, or the arrow keys, show the alternatives of one. */
export function tokenView(tokens) {
  const view = make("div", {
    class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens with probabilities: move with the arrow keys",
  });
  const details = make("div", { class: "alternatives", role: "status", hidden: true });
  const spans = tokens.map(({ text, logprob }) => make("span", { class: markOf(logprob), text }));
  let chosen = -1;

  function choose(index) {
    if (chosen >= 0) spans[chosen].classList.remove("chosen");
    chosen = index;
    details.hidden = index < 0;
    if (index < 0) return;
    spans[index].classList.add("chosen");
    details.replaceChildren(describe(tokens[index]));
    place(details, spans[index]);
  }

  spans.forEach((span, index) => span.addEventListener("pointerenter", () => choose(index)));
  view.addEventListener("pointerleave", () => choose(-1));
  view.addEventListener("blur", () => choose(-1));
  view.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || !spans.length) return;
    event.preventDefault();
    choose(Math.min(spans.length - 1, Math.max(0, chosen + step)));
  });
  view.append(...spans, details);
  return view;
}

function describe({ text, logprob, top }) {
  const shown = top.some(([one]) => one === text) ? top : [[text, logprob], ...top];
  const rows = shown.map(([one, value]) => {
    const meter = make("meter", { min: 0, max: 1, value: Math.exp(value), "aria-label": "probability" });
    const name = one === text ? make("strong", { text: visible(one) }) : visible(one);
    return make("tr", {}, make("td", {}, name), make("td", { text: percent(value) }), make("td", {}, meter));
  });
  return make("table", {}, make("tbody", {}, ...rows));
}

function place(details, span) {
  const parent = details.offsetParent;
  if (!parent) return;
  const box = span.getClientRects()[0], outer = parent.getBoundingClientRect();
  details.style.top = `${box.bottom - outer.top + 4}px`;
  details.style.left = `${Math.max(0, Math.min(box.left - outer.left, outer.width - details.offsetWidth - 8))}px`;
}

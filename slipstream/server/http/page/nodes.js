// Elements of plain nodes. Elements are made one by one, from lists of tags and attributes: no text of a
// model is ever read as HTML.

import { highlight } from "./highlight.js";
import { parseMath } from "./math.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const SVG = "http://www.w3.org/2000/svg";
const TAGS = new Set(("a blockquote br code del em h3 h4 h5 h6 hr li ol p span strong table tbody td th thead tr " +
  "ul").split(" "));
const MATH_TAGS = new Set(("math mrow mi mn mo mtext mspace msup msub msubsup mover munder munderover mfrac msqrt " +
  "mroot mtable mtr mtd").split(" "));
const MATH_ATTRIBUTES = new Set(("accent class display fence largeop linethickness lspace rspace stretchy " +
  "width").split(" "));

/** Return an element. `attributes`: `text`, `on` (event → function), properties of aria and others. */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Return an element of SVG. */
export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, { text, on, ...attributes }, children) {
  if (text !== undefined) element.textContent = text;
  for (const [event, call] of Object.entries(on || {})) element.addEventListener(event, call);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined && value !== null) element.setAttribute(name, String(value));
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

/** Return the element, or the text, of a node of markdown.js. */
export function build(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const { tag, attributes, children } = node;
  if (tag === "pre") return buildCode(children[0], attributes.language);
  if (tag === "math") return buildMath(parseMath(children[0], attributes.display));
  const element = make(tagOf(tag));
  if (tag === "a") {
    element.setAttribute("href", attributes.href);
    element.setAttribute("target", "_blank");
    element.setAttribute("rel", "noopener noreferrer");
  }
  if (attributes.align) element.className = attributes.align;
  if (attributes.start !== undefined && attributes.start !== 1) element.setAttribute("start", attributes.start);
  if (attributes.task) {
    const done = attributes.task === "done";
    element.className = "task";
    element.append(make("span", { role: "img", "aria-label": done ? "done" : "to do", text: done ? "☑ " : "☐ " }));
  }
  element.append(...children.map(build));
  if (tag === "table") return make("div", { class: "wide", tabindex: 0, role: "group", "aria-label": "Table" }, element);
  return element;
}

/** Return the tag of an element. A heading within a quote or a list is a line in bold. */
function tagOf(tag) {
  if (/^h[12]$/.test(tag)) return "strong";
  return TAGS.has(tag) ? tag : "span";
}

function buildCode(text, language) {
  const code = make("code");
  for (const [kind, piece] of highlight(text, language)) {
    code.append(kind ? make("span", { class: `code-${kind}`, text: piece }) : piece);
  }
  const copy = make("button", { type: "button", class: "small", text: "Copy code" });
  copy.addEventListener("click", () => copyText(text, copy));
  const head = make("div", { class: "code-head" }, make("span", { text: language || "text" }), copy);
  const pre = make("pre", { tabindex: 0, role: "group", "aria-label": `Code: ${language || "text"}` }, code);
  return make("div", { class: "code" }, head, pre);
}

function buildMath(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const element = document.createElementNS(MATHML, MATH_TAGS.has(node.tag) ? node.tag : "mrow");
  for (const [name, value] of Object.entries(node.attributes)) {
    if (MATH_ATTRIBUTES.has(name)) element.setAttribute(name, value);
  }
  element.append(...node.children.map(buildMath));
  return element;
}

/** Copy a text, and say so on the button that asked for it. */
export async function copyText(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // browsers allow it to pages of this machine and of https only
    const area = make("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    if (!copied) {
      button.textContent = "Not copied: the browser does not allow it";
      return;
    }
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = before; }, 1500);
}

/** Shows blocks, and replaces those only that have changed. */
export class Blocks {
  constructor(element) {
    this.element = element;
    this.shown = [];
  }

  show(blocks) {
    const wanted = blocks.map(block => JSON.stringify(block));
    let same = 0;
    while (same < wanted.length && wanted[same] === this.shown[same]) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    this.element.append(...blocks.slice(same).map(build));
    this.shown = wanted;
  }
}

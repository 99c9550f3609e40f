// Markdown as a tree of plain nodes: a string, or { tag, attributes, children }. Nothing here touches
// the page, so node can run it; nodes.js makes elements from an allow-list of these tags.
//
// A line break of a paragraph is kept, because models write lists of lines without blank lines.

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MATH_OPEN = { "$$": "$$", "\\[": "\\]" };
const TAB = "    ";
const DEEPEST = 20;  // of quotes and lists within each other

const node = (tag, children = [], attributes = {}) => ({ tag, attributes, children });

/** Return the blocks of a text. A block that is still being written counts as complete. */
export function parseMarkdown(text, depth = 0) {
  const lines = text.replace(/\r\n?/g, "\n").replace(/\t/g, TAB).split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at += 1; continue; }
    const [block, next] = parseBlock(lines, at, depth);
    blocks.push(block);
    at = next;
  }
  return blocks;
}

function parseBlock(lines, at, depth) {
  const line = lines[at];
  const fence = line.match(FENCE);
  if (fence) return parseFence(lines, at, fence);
  const opening = Object.keys(MATH_OPEN).find(mark => line.trim().startsWith(mark));
  if (opening) {
    const found = parseMath(lines, at, opening);
    if (found) return found;
  }
  const heading = line.match(HEADING);
  if (heading) return [node(`h${heading[1].length}`, parseInline(heading[2])), at + 1];
  if (RULE.test(line)) return [node("hr"), at + 1];
  if (QUOTE.test(line) && depth < DEEPEST) return parseQuote(lines, at, depth);
  if (ITEM.test(line) && depth < DEEPEST) return parseList(lines, at, depth);
  if (startsTable(lines, at)) return parseTable(lines, at);
  return parseParagraph(lines, at);
}

function parseFence(lines, at, [, indent, mark, language]) {
  const closing = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`);
  const body = [];
  let next = at + 1;
  while (next < lines.length && !closing.test(lines[next])) {
    body.push(lines[next].startsWith(indent) ? lines[next].slice(indent.length) : lines[next]);
    next += 1;
  }
  return [node("pre", [body.join("\n")], { language: language.toLowerCase() }), next + 1];
}

function parseMath(lines, at, opening) {
  const closing = MATH_OPEN[opening];
  const body = [];
  for (let next = at; next < lines.length; next += 1) {
    const line = next === at ? lines[next].trim().slice(opening.length) : lines[next];
    const end = line.indexOf(closing);
    if (end >= 0) {
      if (line.slice(end + closing.length).trim()) return null;  // text follows: it is a paragraph
      body.push(line.slice(0, end));
      return [node("math", [body.join("\n").trim()], { display: "block" }), next + 1];
    }
    body.push(line);
  }
  return null;
}

function parseQuote(lines, at, depth) {
  const body = [];
  let next = at;
  while (next < lines.length && (QUOTE.test(lines[next]) || (lines[next].trim() && !startsBlock(lines, next)))) {
    body.push(lines[next].replace(QUOTE, ""));
    next += 1;
  }
  return [node("blockquote", parseMarkdown(body.join("\n"), depth + 1)), next];
}

const widthOf = text => text.length - text.trimStart().length;

function parseList(lines, at, depth) {
  const [, indent, mark] = lines[at].match(ITEM);
  const ordered = /\d/.test(mark);
  const items = [];
  let next = at;
  while (next < lines.length) {
    const found = lines[next].match(ITEM);
    if (!found || found[1].length > indent.length + 1 || /\d/.test(found[2]) !== ordered) break;
    if (found[1].length < indent.length || RULE.test(lines[next])) break;
    const [item, after] = parseItem(lines, next, found, depth);
    items.push(item);
    next = after;
    let blank = next;
    while (blank < lines.length && !lines[blank].trim()) blank += 1;
    const following = blank < lines.length && lines[blank].match(ITEM);
    if (blank > next && !(following && /\d/.test(following[2]) === ordered)) break;
    next = blank;
  }
  const start = ordered ? { start: parseInt(mark, 10) } : {};
  return [node(ordered ? "ol" : "ul", items, start), next];
}

function parseItem(lines, at, [whole, indent, mark, first], depth) {
  const width = Math.min(whole.length - first.length, indent.length + mark.length + 4);
  const body = [first];
  let next = at + 1;
  for (; next < lines.length; next += 1) {
    const line = lines[next];
    if (!line.trim()) {
      const after = lines.slice(next).find(one => one.trim());
      if (after === undefined || widthOf(after) < Math.min(width, indent.length + 2)) break;
      body.push("");
    } else if (widthOf(line) >= width) {
      body.push(line.slice(width));
    } else if (widthOf(line) >= indent.length + 2 && ITEM.test(line)) {
      body.push(line.trimStart());  // a list within, by fewer spaces than its text
    } else if (startsBlock(lines, next)) {
      break;
    } else {
      body.push(line.trimStart());
    }
  }
  const task = body[0].match(/^\[([ xX])\]\s+(.*)$/);
  if (task) body[0] = task[2];
  let children = parseMarkdown(body.join("\n"), depth + 1);
  if (children.length && children[0].tag === "p") children = [...children[0].children, ...children.slice(1)];
  return [node("li", children, task ? { task: task[1] === " " ? "open" : "done" } : {}), next];
}

const startsTable = (lines, at) =>
  lines[at].includes("|") && at + 1 < lines.length && TABLE_RULE.test(lines[at + 1]) &&
  cells(lines[at]).length === cells(lines[at + 1]).length;

/** Return the texts between the bars of a line. A bar in code, or after a backslash, is text. */
function cells(line) {
  const found = [""];
  let code = false;
  const text = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      found[found.length - 1] += "|";
      at += 1;
    } else if (text[at] === "|" && !code) {
      found.push("");
    } else {
      if (text[at] === "`") code = !code;
      found[found.length - 1] += text[at];
    }
  }
  return found.map(cell => cell.trim());
}

function parseTable(lines, at) {
  const aligns = cells(lines[at + 1]).map(cell => {
    if (!cell.endsWith(":")) return "";
    return cell.startsWith(":") ? "center" : "right";
  });
  const row = (line, tag) => {
    const found = cells(line);
    return node("tr", aligns.map((align, i) => node(tag, parseInline(found[i] || ""), align ? { align } : {})));
  };
  const body = [];
  let next = at + 2;
  while (next < lines.length && lines[next].includes("|") && lines[next].trim()) {
    body.push(row(lines[next], "td"));
    next += 1;
  }
  return [node("table", [node("thead", [row(lines[at], "th")]), node("tbody", body)]), next];
}

const startsBlock = (lines, at) =>
  FENCE.test(lines[at]) || HEADING.test(lines[at]) || RULE.test(lines[at]) || QUOTE.test(lines[at]) ||
  ITEM.test(lines[at]) || startsTable(lines, at) || /^\s*(\$\$|\\\[)/.test(lines[at]);

function parseParagraph(lines, at) {
  const body = [lines[at].trim()];
  let next = at + 1;
  while (next < lines.length && lines[next].trim() && !startsBlock(lines, next)) {
    body.push(lines[next].trim());
    next += 1;
  }
  return [node("p", parseInline(body.join("\n"))), next];
}

/** Return the blocks with headings that go on from level 2, that of the message, without a gap. */
export function levelHeadings(blocks) {
  let last = 2;
  return blocks.map(block => {
    const level = block.tag.match(/^h([1-6])$/);
    if (!level) return block;
    last = Math.min(6, last + 1, Number(level[1]) + 2);
    return { ...block, tag: `h${last}` };
  });
}

// -- within a line

const INLINE = [
  [/^\\([!-/:-@[-`{-~])/, ([, mark]) => mark],
  [/^(`+)([^`]|[^`][^]*?[^`])\1(?!`)/, ([, , code]) => node("code", [code.replace(/\n/g, " ").replace(/^ (.*) $/, "$1")])],
  [/^!?\[((?:[^[\]\\]|\\.|\[[^\]]*\])*)\]\(\s*<?([^\s()<>]*(?:\([^\s()]*\)[^\s()]*)*)>?(?:\s+["'][^]*?["'])?\s*\)/,
    ([, text, address], depth) => link(parseInline(text, depth + 1), address)],
  [/^<(https?:\/\/[^\s<>]+)>/, ([, address]) => link([address], address)],
  [/^https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]*_~]/, ([address]) => link([address], address)],
  [/^(\*\*|__)(?=\S)([^]*?\S)\1(?!\*)/, ([, , text], depth) => node("strong", parseInline(text, depth + 1))],
  [/^\*(?=[^\s*])([^]*?[^\s*])\*(?!\*)/, ([, text], depth) => node("em", parseInline(text, depth + 1))],
  [/^\*(\S)\*(?!\*)/, ([, text]) => node("em", [text])],
  [/^_(?=[^\s_])([^]*?[^\s_]|\S)_(?!\w)/, ([, text], depth) => node("em", parseInline(text, depth + 1))],
  [/^~~(?=\S)([^]*?\S)~~/, ([, text], depth) => node("del", parseInline(text, depth + 1))],
  [/^\n/, () => node("br")],
];
const INLINE_MATH = [/^\$\$([^$]+)\$\$/, /^\$(?=\S)([^$\n]*[^\s$\\])\$(?!\d)/, /^\\\(([^]*?)\\\)/, /^\\\[([^]*?)\\\]/];
const SPECIAL = /[\\`!\[<*_~\n$]|https?:\/\//;
const LONGEST_INLINE = 8000;  // characters of a paragraph that is searched for marks

/** Return the nodes of a text within a block. */
export function parseInline(text, depth = 0) {
  if (depth > DEEPEST || text.length > LONGEST_INLINE) return [text];
  const found = [];
  const add = piece => {
    if (typeof piece === "string" && typeof found.at(-1) === "string") found[found.length - 1] += piece;
    else if (piece !== "") found.push(piece);
  };
  let before = "";
  for (let rest = text; rest;) {
    const skip = rest.search(SPECIAL);
    if (skip < 0) { add(rest); break; }
    if (skip > 0) {
      add(rest.slice(0, skip));
      before = rest[skip - 1];
      rest = rest.slice(skip);
    }
    const [piece, length] = matchInline(rest, before, depth);
    add(piece);
    before = rest[length - 1];
    rest = rest.slice(length);
  }
  return found;
}

function matchInline(rest, before, depth) {
  const inWord = /\w/.test(before);
  if ((inWord && rest[0] === "_") || /^\*\d/.test(rest) && /\d/.test(before)) return [rest[0], 1];  // a_b, 2*3
  if (!(inWord && rest[0] === "$")) {
    for (const pattern of INLINE_MATH) {
      const found = rest.match(pattern);
      if (found) return [node("math", [found[1].trim()], { display: "inline" }), found[0].length];
    }
  }
  for (const [pattern, make] of INLINE) {
    const found = rest.match(pattern);
    if (found) return [make(found, depth), found[0].length];
  }
  return [rest[0], 1];
}

/** Return a link, or its text where the address is not one of the web or of mail. */
function link(children, address) {
  if (/^(https?:\/\/|mailto:)/i.test(address)) return node("a", children, { href: address });
  return node("span", children);
}

// -- reasoning

/** Return the text within <think> at the start of an answer, and the text after it. */
export function splitThinking(text) {
  const start = text.match(/^\s*<(think|thinking|reasoning)>/);
  if (!start) return { thought: "", answer: text, open: false };
  const closing = `</${start[1]}>`;
  const end = text.indexOf(closing);
  const body = text.slice(start[0].length, end < 0 ? undefined : end);
  return { thought: body.trim(), answer: end < 0 ? "" : text.slice(end + closing.length).trimStart(), open: end < 0 };
}

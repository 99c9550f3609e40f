// Source code as pieces [kind, text]: comment, string, number, keyword, name of a call, or "" for the rest.
// One pattern for each language, from its comments, strings and keywords: enough to read by.

const words = text => new Set(text.split(" "));
const C_LIKE = "break case catch class const continue default delete do else enum extends false final finally " +
  "for if implements import in instanceof interface new null package private protected public return static " +
  "struct super switch this throw throws true try typedef using var void while";

const KEYWORDS = {
  python: words("and as assert async await break class continue def del elif else except False finally for from " +
    "global if import in is lambda match case None nonlocal not or pass raise return True try while with yield self"),
  javascript: words(C_LIKE + " async await export from function let of typeof undefined yield type readonly"),
  java: words(C_LIKE + " abstract boolean byte char double float int long short String var record"),
  c: words(C_LIKE + " auto bool char double explicit extern float include define inline int long namespace " +
    "nullptr operator short signed sizeof template typename union unsigned virtual volatile constexpr std"),
  go: words("break case chan const continue default defer else fallthrough false for func go if import interface " +
    "map nil package range return select struct switch true type var string int error bool byte"),
  rust: words("as async await break const continue crate else enum extern false fn for if impl in let loop match " +
    "mod move mut pub ref return self Self static struct super trait true type unsafe use where while"),
  shell: words("if then else elif fi for while until do done case esac in function return export local echo cd " +
    "sudo set unset source exit read"),
  sql: words("select from where and or not in is null as join left right inner outer on group by order having " +
    "limit insert into values update set delete create table drop alter primary key foreign references distinct " +
    "union all case when then else end count sum avg min max"),
  json: words("true false null"),
  html: new Set(),
  css: words("important"),
};
const ALIASES = {
  py: "python", python3: "python", js: "javascript", ts: "javascript", jsx: "javascript", tsx: "javascript",
  typescript: "javascript", mjs: "javascript", "c++": "c", cpp: "c", cc: "c", h: "c", hpp: "c", cuda: "c", cs: "java",
  csharp: "java", kotlin: "java", kt: "java", swift: "java", scala: "java", php: "javascript", golang: "go", rs: "rust",
  bash: "shell", sh: "shell", zsh: "shell", console: "shell", yaml: "shell", yml: "shell", toml: "shell", ini: "shell",
  dockerfile: "shell", makefile: "shell", ruby: "python", rb: "python", r: "python", xml: "html", svg: "html",
  vue: "html", scss: "css", jsonc: "json", json5: "json", mysql: "sql", postgresql: "sql",
};
const HASH = "#[^\\n]*", SLASHES = "\\/\\/[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)", MARKUP = "<!--[^]*?(?:-->|$)";
const COMMENTS = { python: HASH, shell: HASH, sql: "--[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)", html: MARKUP, json: "\\/\\/[^\\n]*" };
const STRINGS = {
  python: "\"\"\"[^]*?(?:\"\"\"|$)|'''[^]*?(?:'''|$)|",
  javascript: "`(?:[^`\\\\]|\\\\[^])*(?:`|$)|",
};
const DOUBLE = "\"(?:[^\"\\\\\\n]|\\\\[^])*\"?", SINGLE = "'(?:[^'\\\\\\n]|\\\\[^])*'?";
const NUMBER = "\\b(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b";
const LONGEST = 50000;  // characters that are coloured

const patterns = new Map();

function patternOf(language) {
  if (!patterns.has(language)) {
    // 'a is a lifetime in Rust
    const strings = language === "rust" ? DOUBLE : `${STRINGS[language] || ""}${DOUBLE}|${SINGLE}`;
    const word = language === "html" ? "<\\/?[\\w:-]+|\\/?>" : "[A-Za-z_$][\\w$]*";
    patterns.set(language, new RegExp(`(${COMMENTS[language] || SLASHES})|(${strings})|(${NUMBER})|(${word})`, "g"));
  }
  return patterns.get(language);
}

/** Return [kind, text] pairs whose texts joined are the code. */
export function highlight(code, name) {
  const language = ALIASES[name] || name;
  if (!KEYWORDS[language] || code.length > LONGEST) return [["", code]];
  const pieces = [];
  let written = 0;
  for (const found of code.matchAll(patternOf(language))) {
    if (found.index > written) pieces.push(["", code.slice(written, found.index)]);
    written = found.index + found[0].length;
    pieces.push([kindOf(found, language, code[written]), found[0]]);
  }
  if (written < code.length) pieces.push(["", code.slice(written)]);
  return pieces;
}

function kindOf([text, comment, string, number], language, next) {
  if (comment) return "comment";
  if (string) return language === "json" && next === ":" ? "call" : "string";
  if (number) return "number";
  if (language === "html") return "keyword";
  if (KEYWORDS[language].has(language === "sql" ? text.toLowerCase() : text)) return "keyword";
  return next === "(" ? "call" : "";
}

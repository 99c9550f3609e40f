// LaTeX's formulas as MathML nodes, of the form of markdown.js: the commands that answers of models use.
// A command that is not known stays readable: its name is shown as text.

const SYMBOLS = {
  alpha: "α", beta: "β", gamma: "γ", delta: "δ", epsilon: "ϵ", varepsilon: "ε", zeta: "ζ", eta: "η", theta: "θ",
  vartheta: "ϑ", iota: "ι", kappa: "κ", lambda: "λ", mu: "μ", nu: "ν", xi: "ξ", pi: "π", rho: "ρ", sigma: "σ",
  tau: "τ", upsilon: "υ", phi: "ϕ", varphi: "φ", chi: "χ", psi: "ψ", omega: "ω", Gamma: "Γ", Delta: "Δ", Theta: "Θ",
  Lambda: "Λ", Xi: "Ξ", Pi: "Π", Sigma: "Σ", Phi: "Φ", Psi: "Ψ", Omega: "Ω", infty: "∞", partial: "∂", nabla: "∇",
  ell: "ℓ", hbar: "ℏ", Re: "ℜ", Im: "ℑ", emptyset: "∅", varnothing: "∅", angle: "∠", prime: "′",
};
const OPERATORS = {
  cdot: "⋅", times: "×", div: "÷", pm: "±", mp: "∓", ast: "∗", star: "⋆", circ: "∘", bullet: "∙", oplus: "⊕",
  otimes: "⊗", le: "≤", leq: "≤", ge: "≥", geq: "≥", ne: "≠", neq: "≠", approx: "≈", sim: "∼", simeq: "≃", equiv: "≡",
  propto: "∝", ll: "≪", gg: "≫", in: "∈", notin: "∉", ni: "∋", subset: "⊂", subseteq: "⊆", supset: "⊃", supseteq: "⊇",
  cup: "∪", cap: "∩", setminus: "∖", land: "∧", wedge: "∧", lor: "∨", vee: "∨", neg: "¬", lnot: "¬", forall: "∀",
  exists: "∃", to: "→", rightarrow: "→", leftarrow: "←", leftrightarrow: "↔", Rightarrow: "⇒", implies: "⟹",
  Leftarrow: "⇐", Leftrightarrow: "⇔", iff: "⟺", mapsto: "↦", uparrow: "↑", downarrow: "↓", ldots: "…", dots: "…",
  cdots: "⋯", vdots: "⋮", ddots: "⋱", mid: "∣", parallel: "∥", perp: "⊥", langle: "⟨", rangle: "⟩", lfloor: "⌊",
  rfloor: "⌋", lceil: "⌈", rceil: "⌉", lbrace: "{", rbrace: "}", vert: "|", Vert: "‖", therefore: "∴", because: "∵",
};
const LARGE = {
  sum: "∑", prod: "∏", coprod: "∐", int: "∫", iint: "∬", iiint: "∭", oint: "∮", bigcup: "⋃", bigcap: "⋂",
};
const FUNCTIONS = new Set(("arccos arcsin arctan arg cos cosh cot csc deg det dim exp gcd inf ker lg lim ln log max " +
  "min Pr sec sin sinh sup tan tanh").split(" "));
const ABOVE = { hat: "^", widehat: "^", bar: "‾", overline: "‾", vec: "→", tilde: "~", dot: "˙", ddot: "¨" };
const SPACES = { ",": "0.17em", ":": "0.22em", ";": "0.28em", " ": "0.3em", "!": "0em", quad: "1em", qquad: "2em" };
const TEXTS = new Set(["text", "mathrm", "textbf", "textit", "mbox", "operatorname", "textrm", "mathit"]);
const ALPHABETS = { mathbb: "double-struck", mathbf: "bold", boldsymbol: "bold", mathcal: "script", mathfrak: "fraktur" };
const LETTERS = { "double-struck": 0x1d538, bold: 0x1d400, script: 0x1d49c, fraktur: 0x1d504 };
const EXCEPTIONS = {  // letters that had a place in Unicode before the others
  "double-struck": { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" },
  script: { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" },
  fraktur: { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" },
};
const TOKEN = /\\(?:[A-Za-z]+|[^])|\d+(?:\.\d+)?|\s+|[^]/g;
const DEEPEST = 40;  // of groups within each other

const node = (tag, children, attributes = {}) => ({ tag, attributes, children });

/** Return the <math> node of a formula. */
export function parseMath(text, display) {
  const reader = new Reader(text);
  const row = reader.readRow(() => false);
  return node("math", [row], display === "block" ? { display } : {});
}

class Reader {
  constructor(text) {
    this.tokens = text.match(TOKEN) || [];
    this.at = 0;
    this.depth = 0;
  }

  /** The next token that is not a space. Spaces count within \text{…} only. */
  get next() {
    while (this.tokens[this.at] !== undefined && !this.tokens[this.at].trim()) this.at += 1;
    return this.tokens[this.at];
  }

  take() {
    const token = this.next;
    this.at += 1;
    return token;
  }

  /** Return the parts up to a token that `ends` accepts. */
  readRow(ends) {
    const parts = [];
    this.depth += 1;
    while (this.next !== undefined && !ends(this.next) && this.depth < DEEPEST) {
      const part = this.readScripts();
      if (part) parts.push(part);
    }
    this.depth -= 1;
    return parts.length === 1 ? parts[0] : node("mrow", parts);
  }

  readScripts() {
    const large = this.next.slice(1) in LARGE || this.next === "\\lim";
    let base = ["^", "_"].includes(this.next) ? node("mrow", []) : this.readOne();
    const scripts = {};
    while (base && ["^", "_", "'"].includes(this.next)) {
      const mark = this.take();
      if (mark === "'") scripts["^"] = node("mo", ["′"]);
      else if (this.next !== undefined) scripts[mark] = this.readOne() || node("mrow", []);
    }
    const { _: below, "^": above } = scripts;
    if (below && above) return node(large ? "munderover" : "msubsup", [base, below, above]);
    if (below) return node(large ? "munder" : "msub", [base, below]);
    return above ? node(large ? "mover" : "msup", [base, above]) : base;
  }

  readOne() {
    if (this.depth >= DEEPEST) {
      this.at = this.tokens.length;
      return null;
    }
    this.depth += 1;
    const part = this.readToken(this.take());
    this.depth -= 1;
    return part;
  }

  readToken(token) {
    if (token === undefined) return null;
    if (token === "{") return this.readGroupRest();
    if (/^\d/.test(token)) return node("mn", [token]);
    if (/^\p{L}$/u.test(token)) return node("mi", [token]);
    if (token[0] === "\\" && token.length > 1) return this.readCommand(token.slice(1));
    return token === "}" || token === "&" ? null : node("mo", [token === "-" ? "−" : token]);
  }

  readGroupRest() {
    const row = this.readRow(token => token === "}");
    this.take();
    return row;
  }

  readArgument() { return this.readOne() || node("mrow", []); }

  /** Return the text of a group as it was written. */
  readText() {
    if (this.next !== "{") return this.take() || "";
    let depth = 0, text = "";
    do {
      const token = this.tokens[this.at++];
      if (token === undefined) break;
      if (token === "{") depth += 1;
      else if (token === "}") depth -= 1;
      else text += token;
    } while (depth > 0);
    return text;
  }

  readCommand(name) {
    if (name in SYMBOLS) return node("mi", [SYMBOLS[name]]);
    if (name in OPERATORS) return node("mo", [OPERATORS[name]]);
    if (name in LARGE) return node("mo", [LARGE[name]], { largeop: "true" });
    if (FUNCTIONS.has(name)) return node("mo", [name], { lspace: "0.17em", rspace: "0.17em" });
    if (name in SPACES) return node("mspace", [], { width: SPACES[name] });
    if (TEXTS.has(name)) return node("mtext", [this.readText()]);
    if (name in ALPHABETS) return node("mi", [inAlphabet(this.readText(), ALPHABETS[name])]);
    if (name in ABOVE) return node("mover", [this.readArgument(), node("mo", [ABOVE[name]])], { accent: "true" });
    if (["frac", "dfrac", "tfrac"].includes(name)) return node("mfrac", [this.readArgument(), this.readArgument()]);
    if (name === "binom") return this.readBinomial();
    if (name === "sqrt") return this.readRoot();
    if (name === "left" || name === "right") return this.readFence();
    if (name === "begin") return this.readEnvironment();
    if (name === "boxed") return node("mrow", [this.readArgument()], { class: "boxed" });
    if (name === "underline") return this.readArgument();
    if (["displaystyle", "textstyle", "limits", "nolimits", "big", "Big", "bigg", "Bigg", "\\", "end"].includes(name)) {
      return null;
    }
    return /^[A-Za-z]/.test(name) ? node("mtext", [`\\${name}`]) : node("mo", [name]);
  }

  readBinomial() {
    const fraction = node("mfrac", [this.readArgument(), this.readArgument()], { linethickness: "0" });
    return node("mrow", [node("mo", ["("]), fraction, node("mo", [")"])]);
  }

  readRoot() {
    if (this.next !== "[") return node("msqrt", [this.readArgument()]);
    this.take();
    const degree = this.readRow(token => token === "]");
    this.take();
    return node("mroot", [this.readArgument(), degree]);
  }

  readFence() {
    const token = this.take();
    if (token === undefined || token === ".") return null;
    const name = token.slice(1);
    return node("mo", [token[0] === "\\" ? OPERATORS[name] || name : token], { fence: "true", stretchy: "true" });
  }

  readEnvironment() {
    const name = this.readText();
    const rows = [[]];
    if (name === "array" && this.next === "{") this.readText();
    while (this.next !== undefined && this.next !== "\\end") {
      const cell = this.readRow(token => token === "&" || token === "\\\\" || token === "\\end");
      rows.at(-1).push(node("mtd", [cell]));
      if (this.next === "\\\\") rows.push([]);
      if (this.next !== "\\end") this.take();
    }
    this.take();
    this.readText();
    const table = node("mtable", rows.filter(row => row.length).map(row => node("mtr", row)));
    const [open, close] = FENCES[name] || ["", ""];
    return node("mrow", [node("mo", [open]), table, node("mo", [close])].filter(one => one.children[0] !== ""));
  }
}

const FENCES = { pmatrix: ["(", ")"], bmatrix: ["[", "]"], vmatrix: ["|", "|"], Bmatrix: ["{", "}"], cases: ["{", ""] };

function inAlphabet(text, alphabet) {
  return [...text].map(letter => {
    const place = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz".indexOf(letter);
    const exception = (EXCEPTIONS[alphabet] || {})[letter];
    return exception || (place < 0 ? letter : String.fromCodePoint(LETTERS[alphabet] + place));
  }).join("");
}

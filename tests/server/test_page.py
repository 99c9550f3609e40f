"""The page at `/`: its files, its security headers, that it fits the API, and its modules under node."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from grpc_support import recorded_registry
from http_support import Answer, RunningServer, get

from slipstream.server.http.pages import PAGES
from slipstream.server.kserve.access import Access, Restriction
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.openai.fields import ChatFields, CompletionFields
from slipstream.server.services import create_app, create_context

HTTP = Path(__file__).parents[2] / "slipstream" / "server" / "http"
FOLDER = HTTP / "page"
MODULES = sorted(FOLDER.glob("*.js"))
CONTROLS = {"input", "select", "textarea"}
MAX_LINES = 500


class Elements(HTMLParser):
    """The elements with their attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.found.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag in self.texts and data.strip():
            self.texts[self._tag].append(data)

    def values(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.found if name in attributes]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with RunningServer(create_app(recorded_registry()[0], ServerState([]))) as server:
        yield server.port


@pytest.fixture(scope="module")
def page() -> Elements:
    return Elements((FOLDER / "index.html").read_text("utf-8"))


def policy(answer: Answer) -> dict[str, list[str]]:
    parts = (answer.header("content-security-policy") or "").split("; ")
    return {name: values for name, *values in map(str.split, parts)}


def content_type(file: str) -> str:
    kind = {".html": "html", ".js": "javascript", ".css": "css"}[Path(file).suffix]
    return f"text/{kind}; charset=utf-8"


@pytest.mark.parametrize("path", sorted(PAGES))
def test_files_are_served_unchanged_with_a_policy(port: int, path: str) -> None:
    answer = get(port, path)
    assert (answer.status, answer.header("content-type")) == (200, content_type(PAGES[path]))
    assert answer.body == (HTTP / PAGES[path]).read_bytes()
    assert answer.header("x-content-type-options") == "nosniff"
    rules = policy(answer)
    assert (rules["default-src"], rules["connect-src"]) == (["'none'"], ["'self'"])
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
    assert (rules["require-trusted-types-for"], rules["trusted-types"]) == (
        ["'script'"],
        ["'none'"],
    )


def test_a_script_of_the_docs_is_allowed_by_its_hash_and_others_by_their_server(port: int) -> None:
    answer = get(port, "/docs")
    for tag in ("script", "style"):
        (text,) = Elements(answer.body.decode()).texts[tag]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy(answer)[f"{tag}-src"] == [f"'sha256-{digest}'"]
    rules = policy(get(port, "/"))
    assert (rules["script-src"], rules["style-src"]) == (["'self'"], ["'self'"])


def test_every_file_of_the_page_has_a_route() -> None:
    served = {Path(file).name for file in PAGES.values()}
    assert {path.name for path in FOLDER.iterdir()} <= served


def test_the_page_has_no_code_of_its_own_and_loads_its_server_only(page: Elements) -> None:
    assert page.texts == {"script": [], "style": []}
    assert page.values("src") == ["page/app.js"]
    assert set(page.values("href")) == {"data:,", "docs", "page/style.css", "#text"}
    attributes = {name for _, found in page.found for name in found}
    assert not {name for name in attributes if name.startswith("on") or name == "style"}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_modules_read_no_text_as_html_and_import_each_other_only(module: Path) -> None:
    text = module.read_text("utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|import\(",
        text,
    )
    addresses = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}
    assert addresses == set()
    imported = re.findall(r'^import [^"]*"([^"]+)"', text, re.MULTILINE)
    assert {one.removeprefix("./") for one in imported} <= {path.name for path in MODULES}


def test_every_control_has_a_label_and_every_reference_a_target(page: Elements) -> None:
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    controls = {attributes["id"] for tag, attributes in page.found if tag in CONTROLS}
    wrapped = {"probabilities", "plain"}  # within their labels
    assert controls - wrapped == set(page.values("for"))
    referred = page.values("aria-describedby") + page.values("form") + page.values("aria-controls")
    assert set(referred) | set(page.values("aria-labelledby")) <= set(ids)
    text = "\n".join(path.read_text("utf-8") for path in MODULES)
    assert set(re.findall(r'\bat\("([\w-]+)"\)', text)) <= set(ids)
    (html,) = [attributes for tag, attributes in page.found if tag == "html"]
    assert html["lang"] == "en"
    roles = set(page.values("role"))
    assert {"log", "status", "alert", "tablist", "tab", "tabpanel"} <= roles


def test_the_routes_and_fields_that_the_page_uses_exist(port: int) -> None:
    text = (FOLDER / "api.js").read_text("utf-8")
    asked = set(re.findall(r'"(v1/[\w/]+)"', text))
    assert asked == {"v1/models", "v1/chat/completions", "v1/completions"}
    assert {f"/{path}" for path in asked} <= set(
        json.loads(get(port, "/openapi.json").body)["paths"]
    )
    numbers = json.loads(re.search(r"NUMBERS = (\[[^\]]*\])", text)[1])
    sent = {*numbers, "model", "stop", "stream", "stream_options", "logprobs"}
    chat = {"messages", "top_logprobs", "tools", "tool_choice", "response_format"}
    assert sent | chat | {"structured_outputs"} <= set(ChatFields.__struct_fields__)
    assert sent | {"prompt"} <= set(CompletionFields.__struct_fields__)


def test_sampling_is_greedy_by_default(page: Elements) -> None:
    """The default is that of `slipstream chat`: sampled answers of small models are incoherent."""
    (temperature,) = [
        attributes for _, attributes in page.found if attributes.get("id") == "temperature"
    ]
    assert temperature["value"] == "0"


@pytest.mark.parametrize(
    "access",
    [
        Access(api_key="user-key"),
        Access(http_restrictions={"metadata": Restriction("pass", "word")}),
    ],
    ids=["key", "restricted"],
)
def test_the_files_need_no_key_and_the_models_do(access: Access) -> None:
    app = create_app(ModelRegistry(), ServerState([]), create_context(access=access))
    with RunningServer(app) as server:
        assert {get(server.port, path).status for path in PAGES} == {200}
        assert get(server.port, "/v1/models").status in (401, 403)


# -- the modules under node

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    for module in MODULES:
        shutil.copy(module, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


def node(modules: Path, code: str, argument: object = None) -> Any:
    """Return the JSON that this code prints. It gets the argument as JSON."""
    file = modules / "case.js"
    file.write_text(code)
    done = subprocess.run(
        ["node", str(file), json.dumps(argument)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


MARKDOWN = {
    "# Title": "h1(Title)",
    "a **b** `c*d*` _e_ snake_case 2*3*4": "p(a strong(b) code(c*d*) em(e) snake_case 2*3*4)",
    "one\ntwo": "p(one br() two)",
    "- a\n  - b\n    1. c\n- d": "ul(li(a ul(li(b ol(li(c))))) li(d))",
    "1. a\n\n   b\n2. c": "ol(li(a p(b)) li(c))",
    "- [x] done\n- [ ] not": "ul(li(done) li(not))",
    "| a | b |\n|--|-:|\n| `|` | 2 |": "table(thead(tr(th(a) th(b))) tbody(tr(td(code(|)) td(2))))",
    "```py\nx = 1": "pre(x = 1)",
    "> a\n> > b": "blockquote(p(a) blockquote(p(b)))",
    "$x^2$ costs $5 and $6": "p(math(x^2) costs $5 and $6)",
    "\\[\na\n\\]": "math(a)",
    "[a](https://b.c/d_(e)) [f](javascript:g)": "p(a(a) span(f))",
    "<b onclick=x>y</b>": "p(<b onclick=x>y</b>)",
    "\\*not\\*": "p(*not*)",
}


@needs_node
def test_markdown_becomes_a_tree(modules: Path) -> None:
    found = node(
        modules,
        """import { parseMarkdown } from "./markdown.js";
        const write = node => typeof node === "string" ? node.trim()
          : `${node.tag}(${node.children.map(write).filter(Boolean).join(" ")})`;
        const texts = JSON.parse(process.argv[2]);
        console.log(JSON.stringify(texts.map(text => parseMarkdown(text).map(write).join(" "))));
        """,
        list(MARKDOWN),
    )
    assert dict(zip(MARKDOWN, found, strict=True)) == MARKDOWN


@needs_node
def test_headings_have_no_gap_for_readers_of_the_outline(modules: Path) -> None:
    found = node(
        modules,
        """import { levelHeadings, parseMarkdown } from "./markdown.js";
        const text = ["### a", "# b", "###### c", "d", "## e"].join("\\n");
        console.log(JSON.stringify(levelHeadings(parseMarkdown(text)).map(({ tag }) => tag)));
        """,
    )
    assert found == ["h3", "h3", "h4", "p", "h4"]


@needs_node
def test_long_and_deep_texts_end(modules: Path) -> None:
    """Marks without a partner, and nesting without an end, must not hold the page up."""
    found = node(
        modules,
        """import { parseMarkdown } from "./markdown.js";
        import { parseMath } from "./math.js";
        const marks = ["**", "[", "_a", "`", "> ", "- ", "$", "*a ", "\\\\(", "[a](", "| ", "<https://"];
        const sizes = marks.map(mark => parseMarkdown(mark.repeat(5000)).length);
        const formulas = ["{", "\\\\sqrt", "x^", "\\\\frac", "\\\\begin{matrix}"];
        for (const part of formulas) parseMath(part.repeat(5000), "inline");
        console.log(JSON.stringify(sizes));
        """,
    )
    assert min(found) >= 1


@needs_node
def test_code_keeps_its_text_and_formulas_become_mathml(modules: Path) -> None:
    found = node(
        modules,
        """import { highlight } from "./highlight.js";
        import { parseMath } from "./math.js";
        const codes = { python: "def f(x):\\n  return 'a' + 1  # b", json: '{"a": [1, true]}',
          html: "<p class='x'>1</p>", sql: "SELECT 'a' -- b", rust: "fn f<'a>() {}", nothing: "x = 1" };
        const write = node => typeof node === "string" ? node : `${node.tag}(${node.children.map(write).join("")})`;
        console.log(JSON.stringify({
          same: Object.entries(codes).map(([name, code]) => highlight(code, name).map(([, text]) => text).join("") === code),
          python: highlight(codes.python, "py").filter(([kind]) => kind),
          sum: write(parseMath("\\\\sum_{i=1}^n \\\\frac{x_i}{2}", "block")),
          text: write(parseMath("x \\\\text{ if } \\\\unknown", "inline")),
        }));
        """,
    )
    assert found["same"] == [True] * 6
    assert found["python"] == [
        ["keyword", "def"],
        ["call", "f"],
        ["keyword", "return"],
        ["string", "'a'"],
        ["number", "1"],
        ["comment", "# b"],
    ]
    assert found["sum"] == (
        "math(mrow(munderover(mo(∑)mrow(mi(i)mo(=)mn(1))mi(n))mfrac(msub(mi(x)mi(i))mn(2))))"
    )
    assert found["text"] == "math(mrow(mi(x)mtext( if )mtext(\\unknown)))"


@needs_node
def test_conversations_branch_and_survive_export(modules: Path) -> None:
    found = node(
        modules,
        """import * as tree from "./conversation.js";
        import { MemoryStorage, Store } from "./store.js";
        const talk = tree.createConversation();
        const one = tree.addMessage(talk, null, { role: "user", content: "What is a *tree*?" });
        const first = tree.addMessage(talk, one.id, { role: "assistant", content: "A plant." });
        const second = tree.addMessage(talk, one.id, { role: "assistant", content: "A graph." });
        const next = tree.addMessage(talk, second.id, { role: "user", content: "More." });
        const texts = () => tree.pathTo(talk).map(message => message.content);
        const before = texts();
        tree.showBranch(talk, first.id);
        const other = texts();
        tree.showBranch(talk, second.id);
        const copy = tree.fork(talk, second.id);
        const store = new Store(new MemoryStorage());
        store.save(talk);
        const file = store.exportText();
        const elsewhere = new Store(new MemoryStorage());
        const count = elsewhere.importText(file) + elsewhere.importText(file);
        const problems = ["x", "{}", '{"format": "slipstream-conversations", "conversations": [{"messages": [{"role": "system"}]}]}',
          JSON.stringify({ format: "slipstream-conversations", conversations: [{ leaf: "a", messages: [
            { id: "a", parent: "b", role: "user", content: "" }, { id: "b", parent: "a", role: "user", content: "" }] }] })]
          .map(text => { try { return store.importText(text); } catch (problem) { return problem.message; } });
        const branches = tree.branches(talk, second);
        tree.removeMessage(talk, second.id);
        console.log(JSON.stringify({ before, other, after: texts(), title: tree.titleOf(talk), count, problems,
          index: branches.index, copied: tree.pathTo(copy).map(message => message.content), kept: elsewhere.list().length,
          found: [elsewhere.list("tree PLANT").length, elsewhere.list("tree nothing").length],
          left: talk.messages.length, read: tree.pathTo(elsewhere.list()[0]).map(message => message.content) }));
        """,
    )
    question = "What is a *tree*?"
    assert found["before"] == [question, "A graph.", "More."] == found["read"]
    assert found["other"] == [question, "A plant."] == found["after"]
    assert found["copied"] == [question, "A graph."]
    assert (found["title"], found["index"], found["left"]) == (question, 1, 2)
    assert (found["count"], found["kept"], found["found"]) == (2, 2, [2, 0])
    assert found["problems"] == [
        "the file is not JSON",
        "the file has no conversations: its format must be slipstream-conversations",
        "a message needs a role, user or assistant, and a text",
        "the messages of a conversation form a circle",
    ]


@needs_node
def test_a_browser_without_storage_keeps_nothing_and_works(modules: Path) -> None:
    found = node(
        modules,
        """import { Store, openStorage } from "./store.js";
        Object.defineProperty(globalThis, "localStorage", { configurable: true, get() { throw new Error("not allowed"); } });
        const store = new Store(openStorage());
        const full = new Store({ getItem: () => "{", setItem() { throw new Error("full"); } });
        console.log(JSON.stringify([store.set("a", 1), store.get("a", 0), store.set("a", null), store.get("a", 0),
          full.set("a", 1), full.get("a", 2)]));
        """,
    )
    assert found == [True, 1, True, 0, False, 2]


@needs_node
def test_requests_and_answers(modules: Path) -> None:
    found = node(
        modules,
        """import { Answer, curlCommand, describeStats, offered, readEvents, requestBody } from "./api.js";
        const settings = { model: "m", mode: "chat", system: " Be brief. ", temperature: "0", top_p: "", stop: "a\\n\\nb", probabilities: true };
        const messages = [{ role: "user", content: "it's", id: "x" }];
        let clock = 1000;
        const answer = new Answer(0, () => clock);
        const chunk = (delta, more = {}) => ({ choices: [{ delta, ...more }] });
        const scored = { logprobs: { content: [{ token: "a", logprob: -0.1, top_logprobs: [{ token: "b", logprob: -3 }] }] } };
        const events = [chunk({ role: "assistant" }), chunk({ content: "Hé" }, scored), chunk({ reasoning_content: "hm" }),
          chunk({ tool_calls: [{ index: 0, function: { name: "f", arguments: "{" } }] }),
          chunk({ tool_calls: [{ index: 0, function: { arguments: "}" } }] }, { finish_reason: "length" }),
          { choices: [], usage: { completion_tokens: 5, prompt_tokens: 9, prompt_tokens_details: { cached_tokens: 4 } } }];
        const bytes = new TextEncoder().encode(events.map(event => `data: ${JSON.stringify(event)}\\n\\n`).join("") + "data: [DONE]\\n\\n");
        const cut = bytes.indexOf(0xc3) + 1;  // within a character
        const body = new ReadableStream({ start(stream) { stream.enqueue(bytes.slice(0, cut)); stream.enqueue(bytes.slice(cut)); stream.close(); } });
        for await (const event of readEvents({ status: 200, body })) { answer.take(event); clock += 500; }
        console.log(JSON.stringify({
          body: requestBody(settings, messages), completion: requestBody({ ...settings, mode: "completion" }, messages),
          offered: [offered(["ensemble", "mine", "tensorrt_llm_bls"]), offered(["ensemble", "tensorrt_llm_bls"])],
          curl: curlCommand("http://h/v1", { a: "it's" }, true),
          text: answer.text, thought: answer.thought, calls: answer.calls, tokens: answer.tokens, stats: describeStats(answer.stats()) }));
        """,
    )
    assert found["body"] == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "it's"},
        ],
        "temperature": 0,
        "stop": ["a", "b"],
        "logprobs": True,
        "top_logprobs": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (found["completion"]["prompt"], found["completion"]["logprobs"]) == ("it's", 5)
    assert found["offered"] == [["mine"], ["ensemble", "tensorrt_llm_bls"]]
    assert found["curl"].endswith("""-d '{"a":"it'\\''s"}'""")
    assert "$SLIPSTREAM_API_KEY" in found["curl"]
    assert (found["text"], found["thought"]) == ("Hé", "hm")
    assert found["calls"] == [{"name": "f", "arguments": "{}"}]
    assert found["tokens"] == [{"text": "a", "logprob": -0.1, "top": [["b", -3]]}]
    assert found["stats"] == (
        "5 tokens · 2.7 tokens/s · first token after 1.50 s · "
        "9 prompt tokens (4 from the cache) · ended at the limit of tokens"
    )


@needs_node
def test_metrics_become_rates_and_quantiles(modules: Path) -> None:
    """The quantiles are those of Prometheus' histogram_quantile."""
    found = node(
        modules,
        """import { engineNames, parseMetrics, quantileOf, rateOf, sumOf } from "./prometheus.js";
        import { ticksTo, short } from "./plots.js";
        const text = (running, counts) => ["# HELP x y", `slipstream_requests_running{model="a",version="1"} ${running}`,
          'slipstream_requests_running{model="b \\\\"q\\\\"",version="1"} 2', "up 1",
          ...["0.1", "0.2", "+Inf"].map((le, i) => `h_bucket{model="a",le="${le}"} ${counts[i]}`)].join("\\n");
        const before = parseMetrics(text(10, [5, 5, 5])), after = parseMetrics(text(16, [9, 13, 15]));
        console.log(JSON.stringify({
          names: engineNames(after), sums: [sumOf(after, "slipstream_requests_running"), sumOf(after, "up"), sumOf(after, "none")],
          rate: rateOf(before, after, "slipstream_requests_running", "a", 2), back: rateOf(after, before, "slipstream_requests_running", "a", 2),
          quantiles: [0.2, 0.6, 0.99].map(one => quantileOf(before, after, "h", "a", one)), none: quantileOf(after, after, "h", "a", 0.5),
          ticks: [0, 0.03, 7, 100, 1234].map(most => ticksTo(most)),
          counts: [0, 1, 4, 5, 182].map(most => ticksTo(most, true)), short: [null, 0, 0.01234, 1.26, 250.4, 12345, 2e6].map(short) }));
        """,
    )
    assert found["names"] == ["a", 'b "q"']
    assert (found["sums"], found["rate"], found["back"]) == ([18, 1, 0], 3, 0)
    assert found["quantiles"] == pytest.approx([0.05, 0.15, 0.2])
    assert found["none"] is None
    assert [pytest.approx(ticks) for ticks in found["ticks"]] == [
        [0, 0.25, 0.5, 0.75, 1],
        [0, 0.01, 0.02, 0.03],
        [0, 2, 4, 6, 8],
        [0, 25, 50, 75, 100],
        [0, 500, 1000, 1500],
    ]
    assert found["counts"] == [
        [0, 1],
        [0, 1],
        [0, 1, 2, 3, 4],
        [0, 2, 4, 6],
        [0, 50, 100, 150, 200],
    ]
    assert found["short"] == ["–", "0", "0.012", "1.3", "250", "12.3k", "2.0M"]


@needs_node
def test_steps_are_laid_out_by_what_their_rows_computed(modules: Path) -> None:
    found = node(
        modules,
        """import { layOut } from "./timeline.js";
        const steps = [[10, [0], [7], [32], [false]], [20, [0, 1], [7, 3], [8, 1], [true, true]],
          [30, [0, 1], [7, 3], [1, 3], [true, true]], [40, [0], [8], [5], [true]]];
        console.log(JSON.stringify(layOut(steps).map(({ cells }) => cells.map(({ request, kind }) => [request, kind]))));
        """,
    )
    prompt, token, drafts = range(3)
    assert found == [
        [["0:7", prompt]],
        [["0:7", prompt], ["1:3", token]],
        [["0:7", token], ["1:3", drafts]],
        [["0:8", prompt]],
    ]


# -- colours


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_both_colour_schemes_have_enough_contrast() -> None:
    """The ratios are those of WCAG 2: 4.5 for text, 3 for the edges of controls."""
    style = (FOLDER / "style.css").read_text("utf-8")
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", style)
    for scheme in (1, 2):
        colours = {pair[0]: pair[scheme] for pair in pairs}
        for text in ("text", "quiet", "bad"):
            for ground in ("page", "mine", "theirs"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        for text in ("comment", "string", "number", "keyword", "call", "strong"):
            assert contrast(colours[text], colours["page"]) >= 4.5, text
        for ground in ("unsure", "unlikely"):
            assert contrast(colours["text"], colours[ground]) >= 4.5, ground
        assert contrast(colours["on-strong"], colours["strong"]) >= 4.5
        assert contrast(colours["line"], colours["page"]) >= 3

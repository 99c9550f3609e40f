"""The page at `/` in a real browser. Needs chromium, chromedriver and axe-core:

    apt-get install chromium chromium-driver && npm install axe-core
    SLIPSTREAM_AXE=node_modules/axe-core/axe.min.js pytest -m browser

With SLIPSTREAM_PICTURES, a folder, the pictures of the documentation are written there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="pip install selenium")
from browser import Browser, running_browser
from openai_server import running
from page_server import PageServer
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.browser

PICTURES = os.environ.get("SLIPSTREAM_PICTURES", "")
KEY = "secret-key"
MARKDOWN = """## Two ways

Both **work**, but `sorted` makes a *new* list:

```python
names = ["Bo", "Al"]
for name in sorted(names):  # in order
    print(name)
```

| way | cost |
|-----|-----:|
| sort | $O(n \\log n)$ |

1. First
   - within
2. Second"""
HTML = '<img src=x onerror="window.hacked=1"> <script>window.hacked=1</script> [go](javascript:window.hacked=1) <b>bold</b>'
TEXTS = {
    "Show me Markdown": MARKDOWN,
    "Show me HTML": HTML,
    "Think": "<think>First I look. Then I say it.</think>\n\nThe answer is 4.",
    "Count": " ".join(f"w{number}" for number in range(300)),
}


@pytest.fixture(scope="module")
def browser_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def browser(browser_folder: Path) -> Iterator[Browser]:
    with running_browser(browser_folder) as found:
        yield found


@pytest.fixture
def downloads(browser_folder: Path) -> Path:
    return browser_folder / "downloads"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    found = PageServer(tmp_path_factory.mktemp("server"), TEXTS)
    yield found
    found.close()


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    folder = tmp_path_factory.mktemp("locked")
    (folder / "key").write_text(KEY)
    found = PageServer(folder / "server", TEXTS, "--api-key", str(folder / "key"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a tiny real engine, which gives log-probabilities."""
    with running(tmp_path_factory.mktemp("real")) as serving:
        yield f"http://127.0.0.1:{serving.port}/"


@pytest.fixture(autouse=True)
def no_errors(browser: Browser) -> Iterator[None]:
    """A test that does not look at the errors of the console has none."""
    browser.problems()
    yield
    assert browser.problems() == []


def open_page(browser: Browser, url: str, **window: object) -> None:
    browser.open(url, **window)
    browser.wait(lambda: browser.run("return document.getElementById('model').value"), "a model")


def set_field(browser: Browser, field: str, value: object) -> None:
    """Change a setting, also one of a panel that is closed."""
    browser.run(
        "const field = document.getElementById(arguments[0]);"
        "if (field.type === 'checkbox') field.checked = arguments[1]; else field.value = arguments[1];"
        "field.dispatchEvent(new Event('input', { bubbles: true }))",
        field,
        value,
    )


def ask(browser: Browser, server: PageServer, question: str) -> None:
    """Ask, and wait for the end of the answer."""
    set_field(browser, "max_tokens", server.tokens[question])
    browser.type("#text", question + Keys.ENTER)
    finish(browser)


def finish(browser: Browser) -> None:
    browser.wait(lambda: browser.texts("#status") == ["The answer is complete."], "an answer")


def picture(browser: Browser, name: str) -> None:
    if PICTURES:
        browser.picture(Path(PICTURES) / f"{name}.png")


def test_markdown_is_shown(browser: Browser, server: PageServer) -> None:
    open_page(browser, server.url)
    ask(browser, server, "Show me Markdown")
    assert browser.texts(".answer h3") == ["Two ways"]
    assert browser.texts(".answer strong, .answer em") == ["work", "new"]
    assert browser.texts(".code-keyword") == ["for", "in"]
    assert browser.texts(".code-comment") == ["# in order"]
    assert browser.texts(".answer th") == ["way", "cost"]
    assert browser.run("return document.querySelectorAll('.answer td math mi').length") == 3
    assert browser.texts(".answer ol > li > ul > li") == ["within"]
    assert browser.one(".message.assistant .stats").text.startswith(
        f"{server.tokens['Show me Markdown']} tokens · "
    )
    picture(browser, "chat-answer")


def test_html_of_an_answer_is_text_and_never_runs(browser: Browser, server: PageServer) -> None:
    open_page(browser, server.url)
    ask(browser, server, "Show me HTML")
    shown = browser.one(".message.assistant .answer")
    assert shown.text == HTML.replace("[go](javascript:window.hacked=1)", "go")
    assert browser.all("#conversation img, #conversation script, #conversation b, .answer a") == []
    assert browser.run("return window.hacked === undefined") is True
    # even code of the page could not read a text as HTML
    assert browser.run(
        "try { document.createElement('p').innerHTML = '<b>x</b>'; return 'read' }"
        "catch (problem) { return problem.name }"
    ) in ("TypeError",)
    browser.problems()  # the refusal


def test_reasoning_is_folded(browser: Browser, server: PageServer) -> None:
    open_page(browser, server.url)
    ask(browser, server, "Think")
    assert browser.texts(".answer")[-1] == "The answer is 4."
    assert browser.texts(".thought .plain") == []
    browser.one(".thought summary").click()
    assert browser.texts(".thought .plain") == ["First I look. Then I say it."]


def test_an_answer_streams_and_escape_stops_it(browser: Browser, server: PageServer) -> None:
    open_page(browser, server.url)
    set_field(browser, "max_tokens", 299)
    set_field(browser, "seed", 20)  # the engine takes 20 ms for a token
    browser.type("#text", "Count" + Keys.ENTER)
    browser.wait(lambda: "w3" in browser.texts(".answer")[-1], "the beginning of the answer")
    assert "w299" not in browser.texts(".answer")[-1]
    assert browser.one("#conversation").get_attribute("aria-busy") == "true"
    browser.one("#text").send_keys(Keys.ESCAPE)
    browser.wait(lambda: browser.texts("#status") == ["Stopped."], "the end")
    assert "stopped" in browser.texts(".message.assistant .stats")[0]
    assert browser.one("#send").is_enabled()
    shown = browser.texts(".answer")[-1]
    browser.reload()
    assert browser.one(".message.assistant .answer").text == shown


def test_edit_regenerate_and_branch(browser: Browser, server: PageServer) -> None:
    open_page(browser, server.url)
    ask(browser, server, "Think")
    browser.button("Regenerate").click()
    browser.wait(lambda: "2/2" in browser.one(".branches").text, "a second version")
    finish(browser)
    browser.button("Previous version").click()
    assert "1/2" in browser.one(".branches").text
    set_field(browser, "max_tokens", server.tokens["Show me HTML"])
    browser.button("Edit", ".message.user").click()
    browser.type(".message.user textarea", "Show me HTML")
    browser.button("Save and send").click()
    browser.wait(lambda: "<b>bold</b>" in browser.texts(".answer")[-1], "the other answer")
    finish(browser)
    assert "2/2" in browser.one(".message.user .branches").text
    browser.button("Branch").click()
    browser.wait(lambda: len(browser.texts("#conversations .open")) == 2, "two conversations")
    assert browser.all(".message .branches") == []
    assert [one.partition("\n")[0] for one in browser.texts("#conversations .open")] == [
        "Think (branch)",
        "Think",
    ]


def test_conversations_are_kept_found_renamed_exported_and_imported(
    browser: Browser, server: PageServer, tmp_path: Path
) -> None:
    open_page(browser, server.url)
    for question in ("Think", "Show me HTML"):
        browser.one("#new").click()
        ask(browser, server, question)
    browser.reload()
    assert browser.one(".message.user .answer").text == "Show me HTML"
    browser.type("#search", "answer is 4")
    browser.wait(lambda: browser.texts("#conversations .open") == ["Think"], "what was found")
    browser.button("Rename: Think").click()
    browser.type("#ask-text", "Thoughts of mine")
    browser.one("#ask-yes").click()
    browser.wait(lambda: browser.texts("#conversations .open") == ["Thoughts of mine"], "the title")
    kept = browser.run(
        "return Object.keys(localStorage).filter(key => key.includes('conversation.'))"
        ".map(key => JSON.parse(localStorage.getItem(key)))"
    )
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps({"format": "slipstream-conversations", "conversations": kept}))
    browser.run("document.getElementById('search').value = ''")
    browser.one("#delete-all").click()
    browser.one("#ask-yes").click()
    browser.wait(lambda: browser.texts("#conversations") == ["No conversation yet."], "no more")
    browser.all("#import-file")[0].send_keys(str(file))
    browser.wait(lambda: len(browser.texts("#conversations .open")) == 2, "both again")
    file.write_text("[]")
    browser.all("#import-file")[0].send_keys(str(file))
    browser.wait(lambda: "no conversations" in browser.one("#problem").text, "the problem")


def test_copy_puts_an_answer_into_the_clipboard(browser: Browser, server: PageServer) -> None:
    browser.driver.execute_cdp_cmd(
        "Browser.grantPermissions",
        {"origin": server.url.rstrip("/"), "permissions": ["clipboardReadWrite"]},
    )
    open_page(browser, server.url)
    ask(browser, server, "Show me Markdown")
    browser.button("Copy", ".message.assistant").click()
    copied = browser.driver.execute_async_script(
        "const done = arguments[0]; navigator.clipboard.readText().then(done, error => done(String(error)))"
    )
    assert copied == MARKDOWN


def test_export_downloads_a_file_that_import_reads(
    browser: Browser, server: PageServer, downloads: Path
) -> None:
    open_page(browser, server.url)
    ask(browser, server, "Think")
    before = set(downloads.glob("*"))
    browser.button("Export all").click()
    browser.wait(lambda: set(downloads.glob("*.json")) - before, "the file")
    (file,) = set(downloads.glob("*.json")) - before
    document = json.loads(file.read_text("utf-8"))
    assert document["format"] == "slipstream-conversations"
    (conversation,) = document["conversations"]
    assert "The answer is 4." in json.dumps(conversation)
    browser.one("#delete-all").click()
    browser.one("#ask-yes").click()
    browser.wait(lambda: browser.texts("#conversations") == ["No conversation yet."], "no more")
    browser.all("#import-file")[0].send_keys(str(file))
    browser.wait(lambda: browser.texts("#conversations .open") == ["Think"], "the conversation")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_routes_show_their_fields(browser: Browser, real: str, dark: bool) -> None:
    browser.open(f"{real}docs", dark=dark)
    browser.wait(lambda: len(browser.all("main > details")) > 20, "the routes")
    routes = {
        one.find_element("tag name", "summary").text: one for one in browser.all("main > details")
    }
    chat = next(one for name, one in routes.items() if "/v1/chat/completions" in name)
    chat.find_element("tag name", "summary").click()
    fields = browser.run(
        "return [...arguments[0].querySelectorAll('details:first-of-type tbody tr')]"
        ".map(row => [...row.children].map(cell => cell.textContent))",
        chat,
    )
    rows = {name: rest for name, *rest in fields}
    assert rows["messages"][:2] == ["array of object", "required"]
    assert rows["max_tokens"][:2] == ["integer", ""]
    assert rows["stream_options.include_usage"][0] == "boolean"
    assert browser.overflow() <= 0
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(18, 18, 18)" if dark else "rgba(0, 0, 0, 0)")
    assert browser.accessibility_problems() == []


def test_settings_and_presets_are_kept(browser: Browser, server: PageServer) -> None:
    open_page(browser, server.url)
    set_field(browser, "temperature", "0.7")
    browser.one("#preset").send_keys("Teacher")
    assert "patient teacher" in browser.one("#system").get_attribute("value")
    browser.type("#system", "Be brief.")
    browser.one("#preset-save").click()
    browser.type("#ask-text", "Mine")
    browser.one("#ask-yes").click()
    browser.reload()
    assert browser.one("#temperature").get_attribute("value") == "0.7"
    assert browser.one("#system").get_attribute("value") == "Be brief."
    assert "Mine" in browser.one("#preset").text
    browser.one("#reset").click()
    assert browser.one("#temperature").get_attribute("value") == "0"


def test_only_models_to_talk_to_are_offered(browser: Browser, server: PageServer) -> None:
    open_page(browser, server.url)
    assert browser.one("#model").text.split() == ["counter"]


def test_the_key_is_asked_for_and_kept(browser: Browser, locked: PageServer) -> None:
    browser.open(locked.url)
    assert browser.one("#ask-title").text == "This server needs an API key"
    browser.type("#ask-text", "wrong")
    browser.one("#ask-yes").click()
    browser.wait(
        lambda: browser.one("#ask-title").text == "The server refuses this API key", "the question"
    )
    browser.type("#ask-text", KEY)
    browser.one("#ask-yes").click()
    browser.wait(lambda: browser.run("return document.getElementById('model').value"), "a model")
    browser.reload()
    browser.wait(lambda: browser.run("return document.getElementById('model').value"), "a model")
    ask(browser, locked, "Think")
    assert browser.texts(".answer")[-1] == "The answer is 4."
    assert all("401" in problem for problem in browser.problems())


def test_a_server_that_is_gone_is_named_and_the_question_kept(
    browser: Browser, tmp_path: Path
) -> None:
    server = PageServer(tmp_path / "gone", TEXTS)
    open_page(browser, server.url)
    server.close()
    browser.type("#text", "Think" + Keys.ENTER)
    browser.wait(lambda: browser.one("#problem").text == "the server cannot be reached", "the text")
    browser.wait(lambda: browser.one("#text").get_attribute("value") == "Think", "the question")
    browser.problems()  # the refused connection


def test_an_error_of_the_server_is_shown(browser: Browser, server: PageServer) -> None:
    open_page(browser, server.url)
    browser.run("document.getElementById('model').append(new Option('nothing'))")
    set_field(browser, "model", "nothing")
    browser.type("#text", "Think" + Keys.ENTER)
    assert browser.one("#problem").text.startswith("404: The model 'nothing' does not exist")
    assert all("404" in problem for problem in browser.problems())


def test_token_probabilities(browser: Browser, real: str) -> None:
    open_page(browser, real)
    set_field(browser, "probabilities", True)
    set_field(browser, "max_tokens", 8)
    browser.type("#text", "hello" + Keys.ENTER)
    finish(browser)
    browser.button("Tokens").click()
    tokens = browser.all(".tokens > span")
    assert len(tokens) == 8
    browser.one(".tokens").send_keys(Keys.ARROW_RIGHT)
    rows = browser.texts(".alternatives tr")
    assert len(rows) == 5
    assert all("%" in row for row in rows)
    browser.one(".tokens").send_keys(Keys.ARROW_RIGHT)
    assert "chosen" in tokens[1].get_attribute("class")
    picture(browser, "tokens")


def test_compare(browser: Browser, real: str) -> None:
    open_page(browser, real)
    browser.one("#tab-compare").click()
    for side, tokens in (("A", 3), ("B", 6)):
        set_field(browser, f"compare-max_tokens-{side}", tokens)
    browser.type("#compare-text", "hello" + Keys.ENTER)
    browser.wait(
        lambda: (
            [text.split()[0] for text in browser.texts(".contender > .stats") if text] == ["3", "6"]
        ),
        "both answers",
    )


def test_answers_of_a_schema_and_calls_of_tools(browser: Browser, real: str) -> None:
    open_page(browser, f"{real}#schema")
    schema = {"type": "object", "properties": {"a": {"enum": [True]}}, "required": ["a"]}
    set_field(browser, "max_tokens", 60)
    set_field(browser, "schema-text", json.dumps(schema | {"additionalProperties": False}))
    browser.one("#schema-send").click()
    browser.wait(lambda: browser.one("#schema-send").is_enabled(), "the end")
    shown = browser.run("return document.querySelector('#schema-output code').textContent")
    assert json.loads(shown) == {"a": True}
    set_field(browser, "schema-text", "{")
    browser.one("#schema-send").click()
    assert browser.one("#schema-status").text.startswith("JSON schema: ")


def test_the_dashboard(browser: Browser, real: str) -> None:
    open_page(browser, real)
    for tokens in (20, 12):
        set_field(browser, "max_tokens", tokens)
        set_field(browser, "seed", tokens)
        browser.type("#text", "hello" + Keys.ENTER)
        finish(browser)
    browser.one("#tab-dashboard").click()
    browser.wait(lambda: "requests" in timeline(browser), "the steps")
    assert timeline(browser).endswith("at most 1 in one step")
    browser.wait(lambda: len(browser.all("#dashboard polyline")) >= 4, "lines")
    titles = [title.partition(" (")[0] for title in browser.texts("#dashboard .plots figcaption")]
    assert titles == [
        "Requests",
        "Tokens",
        "KV cache",
        "Time to first token",
        "Time between tokens",
        "Time in the queue",
    ]
    tiles = dict(zip(browser.texts(".tile dt"), browser.texts(".tile dd"), strict=True))
    assert int(tiles["Finished"]) >= 2
    assert browser.accessibility_problems() == []
    picture(browser, "dashboard")


def timeline(browser: Browser) -> str:
    shown = browser.all(".timeline canvas")
    return (shown[0].get_attribute("aria-label") or "") if shown else ""


def test_the_keyboard_is_enough(browser: Browser, server: PageServer) -> None:
    open_page(browser, server.url)
    browser.one("#tab-chat").send_keys(Keys.ARROW_RIGHT)
    assert browser.run("return document.activeElement.id") == "tab-compare"
    assert browser.one("#compare").is_displayed()
    browser.one("#show-list").send_keys(Keys.SHIFT + Keys.TAB)
    assert browser.run("return document.activeElement.textContent") == "Skip to the message"


def focused(browser: Browser) -> str:
    """Return the name of the element that has the focus, as a screen reader reads it."""
    return browser.run(
        "const one = document.activeElement;"
        "return one.getAttribute('aria-label') || (one.labels && one.labels[0] || one).textContent"
    ).strip()


def tab_to(browser: Browser, name: str, key: str = Keys.TAB) -> None:
    """Press a key until the focus is on the element of this name."""
    for _ in range(80):
        if focused(browser) == name:
            return
        browser.press(key)
    raise AssertionError(f"no way to {name!r} with the keyboard; at {focused(browser)!r}")


def test_a_conversation_needs_only_the_keyboard(browser: Browser, server: PageServer) -> None:
    open_page(browser, server.url)
    set_field(browser, "max_tokens", server.tokens["Think"])
    assert focused(browser) == "Message"
    browser.press("Think", Keys.ENTER)
    finish(browser)
    assert focused(browser) == "Message"
    set_field(browser, "max_tokens", 299)
    set_field(browser, "seed", 20)  # the engine takes 20 ms for a token
    tab_to(browser, "New conversation", Keys.SHIFT + Keys.TAB)
    browser.press(Keys.ENTER)
    assert focused(browser) == "Message"
    browser.press("Count")
    tab_to(browser, "Send")
    browser.press(Keys.ENTER)
    browser.wait(lambda: focused(browser) == "Stop", "the button Stop")
    browser.wait(lambda: "w3" in browser.texts(".answer")[-1], "the beginning of the answer")
    browser.press(Keys.ENTER)
    browser.wait(lambda: browser.texts("#status") == ["Stopped."], "the end")
    assert focused(browser) == "Message"
    tab_to(browser, "Think", Keys.SHIFT + Keys.TAB)
    browser.press(Keys.ENTER)
    browser.wait(lambda: browser.texts(".message.user .answer") == ["Think"], "the conversation")
    assert focused(browser) == "Think"
    tab_to(browser, "Rename: Think")
    browser.press(Keys.ENTER)
    assert focused(browser) == "Title"
    browser.press(Keys.CONTROL + "a", "Mine", Keys.ENTER)
    browser.wait(lambda: "Mine" in browser.texts("#conversations .open"), "the title")
    browser.wait(lambda: focused(browser) == "Rename: Mine", "the focus")
    tab_to(browser, "Delete: Mine")
    browser.press(Keys.ENTER)
    browser.wait(lambda: focused(browser) == "Delete", "the question")
    browser.press(Keys.ENTER)
    browser.wait(lambda: browser.texts("#conversations .open") == ["Count"], "one conversation")
    assert focused(browser) == "Delete: Count"


def test_a_question_of_the_welcome_is_sent(browser: Browser, server: PageServer) -> None:
    open_page(browser, server.url)
    set_field(browser, "max_tokens", 2)
    question = browser.texts(".starts button")[0]
    browser.button(question).click()
    finish(browser)
    assert browser.texts(".message.user .answer") == [question]
    assert browser.texts(".starts") == []


def test_counts_have_whole_ticks(browser: Browser, server: PageServer) -> None:
    open_page(browser, f"{server.url}#dashboard")
    requests = "#dashboard .plots figure:first-child"
    browser.wait(lambda: len(browser.texts(f"{requests} svg text")) > 4, "the axis")
    *ticks, begin, now = browser.texts(f"{requests} svg text")
    assert [int(tick) for tick in ticks] == [0, 1, 2, 3, 4]
    assert (begin.endswith("s ago"), now) == (True, "now")
    assert browser.texts(f"{requests} figcaption") == ["Requests"]
    tops = {tile.location["y"] for tile in browser.all(".tile")}
    assert len(tops) == 1, "all tiles are in one line"
    assert browser.texts(".side") == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390], ids=["wide", "phone"])
def test_every_view_is_accessible_and_fits(
    browser: Browser, server: PageServer, width: int, dark: bool
) -> None:
    open_page(browser, server.url, width=width, height=844, dark=dark)
    ask(browser, server, "Show me Markdown")
    for view in ("chat", "compare", "schema", "dashboard"):
        browser.one(f"#tab-{view}").click()
        assert browser.accessibility_problems() == []
        assert browser.overflow() == 0
    browser.one("#tab-chat").click()
    name = f"chat-{'phone' if width < 600 else 'wide'}-{'dark' if dark else 'light'}"
    picture(browser, name)
    if width < 600:
        browser.one("#show-settings").click()
        assert browser.accessibility_problems() == []
        assert browser.overflow() == 0


def test_on_a_phone_the_panels_open_above_the_page(browser: Browser, server: PageServer) -> None:
    open_page(browser, server.url, width=390, height=844)
    ask(browser, server, "Think")
    for panel in ("list", "settings"):
        assert not browser.all(f"#{panel}")[0].is_displayed()
        button = browser.one(f"#show-{panel}")
        button.click()
        assert browser.one(f"#{panel}").is_displayed()
        assert button.get_attribute("aria-expanded") == "true"
        browser.run("return document.activeElement").send_keys(Keys.ESCAPE)
        assert not browser.all(f"#{panel}")[0].is_displayed()
    browser.one("#show-list").click()
    browser.one("#new").click()
    browser.wait(lambda: not browser.all("#list")[0].is_displayed(), "the closed list")
    assert browser.one(".welcome").text.startswith("Ask something.")


def test_nothing_is_fetched_from_other_servers(browser: Browser, server: PageServer) -> None:
    open_page(browser, server.url)
    ask(browser, server, "Show me Markdown")
    asked = browser.run("return performance.getEntriesByType('resource').map(({ name }) => name)")
    assert asked
    assert [url for url in asked if not url.startswith(server.url)] == []

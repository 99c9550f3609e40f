"""Take the pictures of docs/images from a server with the default model. Needs chromium.

pip install -e '.[browser]' && slipstream start
python docs/pictures.py http://127.0.0.1:8000/
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from browser import Browser, running_browser
from selenium.webdriver.common.keys import Keys

IMAGES = Path(__file__).parent / "images"
QUESTIONS = (
    "What is the capital of Japan?",
    "Give me three tips for good sleep.",
)
ANSWER_SECONDS = 120.0
LOAD_SECONDS = 45.0
STREAMS = 6


def open_page(browser: Browser, url: str, **window: object) -> None:
    browser.open(url, **window)
    browser.wait(lambda: browser.run("return document.getElementById('model').value"), "a model")


def show_probabilities(browser: Browser) -> None:
    browser.run(
        "const field = document.getElementById('probabilities'); field.checked = true;"
        "field.dispatchEvent(new Event('input', { bubbles: true }))"
    )


def ask(browser: Browser, question: str) -> None:
    browser.type("#text", question + Keys.ENTER)
    shown = ["The answer is complete."]
    browser.wait(lambda: browser.texts("#status") != shown and browser.texts("#stop"), "a start")
    deadline = time.monotonic() + ANSWER_SECONDS
    while browser.texts("#status") != shown:
        assert time.monotonic() < deadline, browser.texts("#status")
        time.sleep(0.1)


def take_chat(browser: Browser, url: str) -> None:
    open_page(browser, url, height=760)
    for question in QUESTIONS:
        ask(browser, question)
    browser.picture(IMAGES / "chat.png")


def take_tokens(browser: Browser, url: str) -> None:
    open_page(browser, url, height=520)
    show_probabilities(browser)
    ask(browser, QUESTIONS[0])
    browser.button("Tokens").click()
    browser.hover(browser.all(".tokens span")[3])
    browser.picture(IMAGES / "tokens.png")


def take_dashboard(browser: Browser, url: str) -> None:
    ended = threading.Event()
    streams = [threading.Thread(target=load, args=(url, ended, row)) for row in range(STREAMS)]
    open_page(browser, f"{url}#dashboard", height=850)
    for stream in streams:
        stream.start()
    ended.wait(LOAD_SECONDS)
    browser.picture(IMAGES / "dashboard.png")
    ended.set()
    for stream in streams:
        stream.join()


def load(url: str, ended: threading.Event, row: int) -> None:
    """Ask again and again, with prompts and answers of several lengths."""
    model = httpx.get(f"{url}v1/models").json()["data"][0]["id"]
    turn = 0
    while not ended.is_set():
        turn += 1
        prompt = f"Story {row} {turn}: " + "once upon a time " * (5 * row + turn % 4)
        tokens = 20 + 25 * ((row + turn) % 5)
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        httpx.post(f"{url}v1/completions", json=body, timeout=120).raise_for_status()
        ended.wait(0.4 * (turn % 3))


def main(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder, running_browser(Path(folder)) as browser:
        take_chat(browser, url)
        take_tokens(browser, url)
        take_dashboard(browser, url)


if __name__ == "__main__":
    main(sys.argv[1])

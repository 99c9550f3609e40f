"""Chromium, without a window, as a person uses it: clicks, keys, what is shown."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
AXE = "SLIPSTREAM_AXE"  # the path of axe.min.js
# A browser in a container has no user namespaces for its sandbox, and must not look for updates.
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SECONDS = 20.0


class Browser:
    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Show a page in a window of this size, with nothing kept from before."""
        self.driver.get("about:blank")  # the page before keeps its state when it is left
        self.driver.execute_cdp_cmd(
            "Storage.clearDataForOrigin", {"origin": url, "storageTypes": "all"}
        )
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(url)

    def reload(self) -> None:
        self.driver.refresh()

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        """Return the first element that is shown, once there is one."""
        found: list[WebElement] = []

        def shown() -> bool:
            found[:] = [one for one in self.all(selector) if one.is_displayed()]
            return bool(found)

        self.wait(shown, selector)
        return found[0]

    def button(self, text: str, within: str = "body") -> WebElement:
        found: list[WebElement] = []

        def shown() -> bool:
            found[:] = [
                one
                for one in self.all(f"{within} button")
                if one.is_displayed() and text in (one.text, one.get_attribute("aria-label"))
            ]
            return bool(found)

        self.wait(shown, f"button {text!r} in {within}")
        return found[-1]

    def type(self, selector: str, text: str) -> None:
        """Replace the text of a field."""
        field = self.one(selector)
        field.clear()
        field.send_keys(text)

    def press(self, *keys: str) -> None:
        """Type keys where the focus is. A key with Shift or Control is one text of both."""
        for key in keys:
            actions = ActionChains(self.driver)
            held = key[0] if len(key) > 1 and key[0] in (Keys.SHIFT, Keys.CONTROL) else ""
            if held:
                actions.key_down(held)
            actions.send_keys(key.removeprefix(held))
            if held:
                actions.key_up(held)
            actions.perform()

    def hover(self, element: WebElement) -> None:
        ActionChains(self.driver).move_to_element(element).perform()

    def texts(self, selector: str) -> list[str]:
        return [one.text for one in self.all(selector) if one.is_displayed()]

    def wait(self, condition: Callable[[], Any], what: str = "the condition") -> None:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                if condition():
                    return
            except StaleElementReferenceException:
                pass  # the page has replaced the element meanwhile
            assert time.monotonic() < deadline, f"{what} did not come; problems: {self.problems()}"
            time.sleep(0.02)

    def run(self, code: str, *arguments: object) -> Any:
        return self.driver.execute_script(code, *arguments)

    def problems(self) -> list[str]:
        """Return the errors of the console since the last call."""
        entries = self.driver.get_log("browser")
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def overflow(self) -> int:
        """Return by how many pixels the page is wider than its window."""
        return self.run("return document.documentElement.scrollWidth - innerWidth")

    def accessibility_problems(self) -> list[str]:
        """Return what axe-core finds."""
        self.run(Path(os.environ[AXE]).read_text("utf-8"))
        found = self.driver.execute_async_script(
            "const done = arguments[0]; axe.run(document).then(({ violations }) =>"
            " done(violations.map(({ id, nodes }) => [id, nodes.map(({ html }) => html)])))"
        )
        return [json.dumps(one) for one in found]

    def picture(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(file))


@contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    """Run Chromium with a new profile in this folder."""
    options = webdriver.ChromeOptions()
    assert CHROMIUM is not None
    options.binary_location = CHROMIUM
    for argument in (*ARGUMENTS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.add_experimental_option(
        "prefs", {"download.default_directory": str(folder / "downloads")}
    )
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()

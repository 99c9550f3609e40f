"""A page of another origin, in a real browser, tries all that a page can send."""

from __future__ import annotations

import importlib.util
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from tiny_server import MODEL, TinyServer, make_repository

from gates.table import Row

_CASE = "a page of another origin in Chromium"
_SECONDS = 60
# Each attempt gives what the page could read; `blocked` if nothing.
_PAGE = """<!doctype html><title>foreign</title><body><script>
const server = "%(server)s", generate = server + "/v2/models/%(model)s/generate";
const body = JSON.stringify({text_input: "5", max_tokens: 3});
const found = {};
const load = server + "/v2/repository/models/%(model)s/unload";
async function read(name, url, options) {
  try {
    const answer = await fetch(url, options);
    found[name] = answer.type === "opaque" ? "blocked" : await answer.text();
  } catch (error) { found[name] = "blocked"; }
}
function form(url, type) {
  const frame = document.createElement("iframe");
  frame.name = "f" + Math.random();
  document.body.append(frame);
  const made = document.createElement("form");
  Object.assign(made, {method: "post", action: url, target: frame.name, enctype: type});
  const field = document.createElement("input");
  field.name = '{"text_input":"5","max_tokens":3,"x":"'; field.value = '"}';
  made.append(field);
  document.body.append(made);
  made.submit();
}
function framed(url) {
  const frame = document.createElement("iframe");
  frame.src = url;
  document.body.append(frame);
  return new Promise(done => setTimeout(() => {
    try { done(frame.contentDocument ? frame.contentDocument.body.textContent : "blocked"); }
    catch (error) { done("blocked"); }
  }, 1000));
}
async function attack() {
  const simple = {method: "POST", body};
  const json = {method: "POST", body, headers: {"content-type": "application/json"}};
  await read("read metadata", server + "/v2");
  await read("read models", server + "/v1/models");
  await read("read statistics", server + "/v2/models/stats");
  await read("read metrics", server + "/dashboard/metrics");
  await read("generate as text", generate, simple);
  await read("generate as JSON", generate, json);
  await read("generate without CORS", generate, {...simple, mode: "no-cors"});
  await read("generate as a file", generate, {...simple, body: new Blob([body])});
  await read("unload", load, simple);
  await read("unload without CORS", load, {method: "POST", mode: "no-cors"});
  await read("logging", server + "/v2/logging", {method: "POST", body: '{"log_info":false}', mode: "no-cors"});
  await read("with credentials", server + "/v2", {credentials: "include"});
  navigator.sendBeacon(generate, body);
  navigator.sendBeacon(load, new URLSearchParams({a: "b"}));
  for (const type of ["text/plain", "multipart/form-data", "application/x-www-form-urlencoded"]) {
    form(generate, type);
    form(load, type);
  }
  found["frame of the page"] = await framed(server + "/");
  found["frame of statistics"] = await framed(server + "/v2/models/stats");
  found["socket"] = await new Promise(done => {
    const socket = new WebSocket(server.replace("http", "ws") + "/v2");
    socket.onopen = () => done("open");
    socket.onerror = () => done("blocked");
  });
  window.found = JSON.stringify(found);
}
attack();
</script>"""


def foreign_page(folder: Path) -> Row:
    if importlib.util.find_spec("selenium") is None:
        return Row(_CASE, "selenium is not installed: pip install selenium", None)
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        missing = "chromium is not installed: apt-get install chromium chromium-driver"
        return Row(_CASE, missing, None)
    place = folder / "page"
    place.mkdir()
    server = TinyServer(make_repository(place), place / "tmp")
    try:
        server.wait_started()
        before = _state(server)
        with _serve(_PAGE % {"server": server.url, "model": MODEL}) as origins:
            read = {origin: _visit(place, origin) for origin in origins}
        after = _state(server)
    finally:
        server.close()
    seen = [
        f"{name} from {origin}: {text[:60]}"
        for origin, found in read.items()
        for name, text in found.items()
        if text not in ("blocked", "")
    ]
    attempts = sum(map(len, read.values()))
    text = f"{attempts} attempts from {len(read)} origins, {len(seen)} read something"
    text += ", the server's state is " + ("the same" if before == after else "CHANGED")
    if seen:
        text += f"; {'; '.join(seen[:5])}"
    if before != after:
        text += f"; {before} became {after}"
    return Row(_CASE, text, not seen and before == after and attempts > 0)


def _state(server: TinyServer) -> dict[str, Any]:
    """Return what a page must not change: models, settings and counts of requests."""
    with httpx.Client(base_url=server.url, trust_env=False, timeout=20) as client:
        (model,) = client.get(f"/v2/models/{MODEL}/stats").json()["model_stats"]
        counts = model["inference_stats"]
        return {
            "ready": client.get(f"/v2/models/{MODEL}/ready").status_code,
            "logging": client.get("/v2/logging").json(),
            "counts": [counts[name]["count"] for name in ("success", "fail")],
        }


@contextmanager
def _serve(page: str) -> Iterator[list[str]]:
    """Serve a page; return its origins: another port, and another name of this machine."""

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = page.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *values: object) -> None:
            """Requests are not logged."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        port = server.server_address[1]
        yield [f"http://127.0.0.1:{port}", f"http://foreign.localhost:{port}"]
    finally:
        server.shutdown()
        thread.join(20)
        server.server_close()


def _visit(folder: Path, origin: str) -> dict[str, str]:
    from browser import running_browser

    with running_browser(folder / origin.rpartition("/")[2].replace(":", "-")) as browser:
        browser.driver.get(origin)
        browser.wait(lambda: browser.run("return window.found"), "the end of the attempts")
        found: dict[str, str] = json.loads(browser.run("return window.found"))
    return found

"""Recorded answers of a real Triton server over HTTP."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "conformance" / "golden"


def http_cases() -> dict[str, dict[str, Any]]:
    """Return the recorded requests of `http.jsonl` and their answers by name."""
    lines = (GOLDEN / "http.jsonl").read_text("utf-8").splitlines()
    return {case["case"]: case for case in map(json.loads, lines)}


def recorded_bytes(part: dict[str, Any]) -> bytes:
    """Return the body of a recorded request, response or chunk."""
    if "body_b64" in part:
        return base64.b64decode(part["body_b64"])
    return part.get("body", "").encode()

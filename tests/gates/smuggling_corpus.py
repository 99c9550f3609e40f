"""Ways to write a request that two HTTP parsers may read differently."""

from __future__ import annotations

INNER = b"GET /inner HTTP/1.1\r\nHost: h\r\n\r\n"
_TE = "Transfer-Encoding"
_CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(INNER), INNER)
# Cases that are two requests as they are written.
TWO_REQUESTS = ("no length", "pipelined", "Upgrade, HTTP2-Settings", "CL 0 and a request")


def corpus() -> dict[str, list[bytes]]:
    """Return what a client sends, in pieces with a pause between them."""
    cases = _upgrades() | _codings() | _lengths() | _lines() | _chunks()
    for name in ("Upgrade: h2c", "plain", "CL and TE", "Expect, body at once"):
        whole = cases[name][0]
        end = whole.index(b"\r\n\r\n") + 4
        cases[f"{name}, body later"] = [whole[:end], whole[end:]]
    return cases


def _post(*headers: str, body: bytes = b"", length: bool = True, line: str = "") -> bytes:
    lines = [line or "POST /outer HTTP/1.1", "Host: h", *headers]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def _coded(*headers: str, body: bytes = _CHUNKED) -> bytes:
    return _post(*headers, length=False) + body


def _upgrades() -> dict[str, list[bytes]]:
    upgrade = "Connection: Upgrade"
    return {
        "plain": [_post(body=INNER)],
        "Upgrade: h2c": [_post("Upgrade: h2c", upgrade, body=INNER)],
        "Upgrade: websocket": [_post("Upgrade: websocket", upgrade, body=INNER)],
        "Upgrade: websocket, GET": [
            _post("Upgrade: websocket", upgrade, line="GET /outer HTTP/1.1", body=INNER)
        ],
        "Upgrade without Connection": [_post("Upgrade: h2c", body=INNER)],
        "Upgrade: TLS/1.0": [_post("Upgrade: TLS/1.0", upgrade, body=INNER)],
        "Upgrade, HTTP2-Settings": [
            _post("Upgrade: h2c", "HTTP2-Settings: AAMA", "Connection: Upgrade, HTTP2-Settings"),
            INNER,
        ],
        "Upgrade and chunked": [_coded(f"{_TE}: chunked", "Upgrade: h2c", upgrade)],
        "HTTP/2 preface": [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + INNER],
        "CONNECT": [_post(line="CONNECT other:80 HTTP/1.1", length=False) + INNER],
    }


def _codings() -> dict[str, list[bytes]]:
    return {
        "CL and TE": [_post(f"{_TE}: chunked", body=_CHUNKED)],
        "TE and CL 0": [_coded(f"{_TE}: chunked", "Content-Length: 0")],
        "TE xchunked": [_post(f"{_TE}: xchunked", body=_CHUNKED)],
        "TE identity": [_post(f"{_TE}: identity", body=INNER)],
        "TE twice": [_coded(f"{_TE}: chunked", f"{_TE}: identity")],
        "TE twice, chunked": [_coded(f"{_TE}: chunked", f"{_TE}: chunked")],
        "TE in a list": [_coded(f"{_TE}: identity, chunked")],
        "TE chunked first": [_coded(f"{_TE}: chunked, identity")],
        "TE gzip, chunked": [_coded(f"{_TE}: gzip, chunked")],
        "TE with a space before the colon": [_post(f"{_TE} : chunked", body=_CHUNKED)],
        "TE with a tab": [_coded(f"{_TE}:\tchunked")],
        "TE with a vertical tab": [_post(f"{_TE}: \x0bchunked", body=_CHUNKED)],
        "TE in quotes": [_post(f'{_TE}: "chunked"', body=_CHUNKED)],
        "TE with a comma": [_coded(f"{_TE}: chunked,")],
        "TE empty": [_post(f"{_TE}:", body=INNER)],
        "TE folded": [_coded(f"{_TE}:\r\n chunked")],
        "TE in capitals": [_coded(f"{_TE}: CHUNKED")],
        "TE with an underscore": [_post("Transfer_Encoding: chunked", body=_CHUNKED)],
        "TE in HTTP/1.0": [
            _coded(f"{_TE}: chunked").replace(b"HTTP/1.1", b"HTTP/1.0", 1),
        ],
        "trailers": [
            _coded(
                f"{_TE}: chunked",
                "Trailer: x",
                body=_CHUNKED[:-2] + b"Content-Length: 9\r\n\r\n",
            )
        ],
        "TE: trailers": [_post("TE: trailers", body=INNER)],
    }


def _lengths() -> dict[str, list[bytes]]:
    size = len(INNER)
    written = {
        "with a sign": f"+{size}",
        "negative": "-1",
        "in hexadecimal": "0x20",
        "with zeros": f"000{size}",
        "with a space within": "3 2",
        "with a list": f"0, {size}",
        "with an equal list": f"{size}, {size}",
        "empty": "",
        "of 30 digits": "9" * 30,
        "with a fraction": f"{size}.0",
        "folded": f"\r\n {size}",
    }
    cases = {
        f"CL {name}": [_post(f"Content-Length: {value}", length=False) + INNER]
        for name, value in written.items()
    }
    return cases | {
        "CL twice, equal": [_post(f"Content-Length: {size}", body=INNER)],
        "CL twice, different": [_post("Content-Length: 0", body=INNER)],
        "CL 0 and a request": [_post() + INNER],
        "CL with an underscore": [_post(f"Content_Length: {size}")],
        "no length": [_post(length=False) + INNER],
        "Expect, body at once": [_post("Expect: 100-continue", body=INNER)],
        "Expect twice": [_post("Expect: 100-continue", "Expect: 100-continue", body=INNER)],
        "Expect of something else": [_post("Expect: 200-ok", body=INNER)],
        "Expect and chunked": [_coded("Expect: 100-continue", f"{_TE}: chunked")],
        "Expect without a body": [_post("Expect: 100-continue")],
    }


def _lines() -> dict[str, list[bytes]]:
    targets = {
        "absolute URI": "http://other/outer",
        "absolute URI of https": "https://other/outer",
        "absolute URI with a user": "http://a:b@other/outer",
        "absolute URI with a port": "http://other:81/outer",
        "absolute URI without a path": "http://other",
        "asterisk": "*",
        "no slash": "outer",
        "two slashes": "//other/outer",
        "a fragment": "/outer#/inner",
        "an encoded line": "/outer%0d%0aX:%20y",
    }
    cases = {
        name: [_post(line=f"POST {target} HTTP/1.1", body=INNER)]
        for name, target in targets.items()
    }
    plain = _post(body=INNER)
    return cases | {
        "GET with a body": [plain.replace(b"POST", b"GET", 1)],
        "HEAD with a body": [plain.replace(b"POST", b"HEAD", 1)],
        "GET chunked": [_coded(f"{_TE}: chunked").replace(b"POST", b"GET", 1)],
        "two spaces in the line": [plain.replace(b"POST ", b"POST  ", 1)],
        "a tab in the line": [plain.replace(b"POST ", b"POST\t", 1)],
        "a line before the request": [b"\r\n" + plain],
        "HTTP/1.2": [plain.replace(b"HTTP/1.1", b"HTTP/1.2", 1)],
        "HTTP/0.9": [b"GET /outer\r\n" + INNER],
        "bare line feeds": [plain.replace(b"\r\n", b"\n", 4)],
        "a bare carriage return": [_post("X: a\rContent-Length: 0", body=INNER)],
        "null in a header": [_post("X: a\0b", body=INNER)],
        "folded header": [_post("X: a\r\n b", body=INNER)],
        "folded first header": [plain.replace(b"\r\nHost", b"\r\n Host", 1)],
        "header without a colon": [_post("X", body=INNER)],
        "two Hosts": [_post("Host: other", body=INNER)],
        "no Host": [plain.replace(b"Host: h\r\n", b"", 1)],
        "Connection names Content-Length": [_post("Connection: Content-Length", body=INNER)],
        "HTTP/1.0 with keep-alive": [
            _post("Connection: keep-alive", body=INNER).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        ],
        "pipelined": [_post(body=b"a") + _post(body=b"b")],
    }


def _chunks() -> dict[str, list[bytes]]:
    sizes = {
        "extension": (b"\r\n", b";a=b\r\n"),
        "extension in quotes": (b"\r\n", b';a="b\r\n"\r\n'),
        "bare line feed": (b"\r\n", b"\n"),
        "leading zeros": (b"20", b"00020"),
        "prefix 0x": (b"20", b"0x20"),
        "space before": (b"20", b" 20"),
        "space after": (b"20", b"20 "),
        "sign": (b"20", b"+20"),
        "negative": (b"20", b"-1\r\n20"),
        "huge": (b"20", b"f" * 17 + b"\r\n20"),
        "wraps at 64 bits": (b"20", b"10000000000000020"),
        "no data": (b"20", b"\r\n20"),
        "too long": (b"20", b"21"),
        "too short": (b"20", b"1f"),
    }
    assert _CHUNKED.startswith(b"20\r\n")
    return {
        f"chunk: {name}": [_coded(f"{_TE}: chunked", body=_CHUNKED.replace(old, new, 1))]
        for name, (old, new) in sizes.items()
    }

"""`slipstream batch`: answer the requests of a file in OpenAI's batch format."""

from __future__ import annotations

import asyncio
import secrets
import textwrap
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from slipstream.cli.arguments import CommandError, Parser, UsageError, add_verbose, at_least
from slipstream.cli.connections import add_api_key, choose_model, server_address
from slipstream.cli.engine_flags import add_engine_flags, engine_overrides
from slipstream.cli.keys import read_api_key
from slipstream.cli.log import log
from slipstream.client.batch.files import (
    URLS,
    BatchFileError,
    BatchInput,
    BatchOutput,
    BatchResult,
)
from slipstream.client.batch.sender import BatchSender, ModelName, ServerLost
from slipstream.client.connection import HttpConnection, ServerError
from slipstream.offline.progress import BatchProgress
from slipstream.progress import is_shown

_INTERRUPTED = 130
_PLAIN_STEPS = 10  # lines without a terminal
_MOST_REASONS = 5  # of failures that are printed
_REASON_LENGTH = 300  # characters


def create_parser() -> Parser:
    parser = Parser(
        "slipstream batch",
        "Answer the requests of a file, one JSON object per line in OpenAI's batch format: "
        f"custom_id, method, url and body. The urls are {', '.join(URLS)}. OUTPUT gets a line for "
        "each request when it is answered. The same command goes on after an interruption: what "
        "OUTPUT has is not sent again. Exit code: 0, or 1 if a request has failed. With "
        "--model, the options of `slipstream start` for engines work, too: see --help-all.",
    )
    parser.add_argument("input", type=Path, metavar="INPUT", help="File with the requests.")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="File for the results.")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="Start a server of its own for this model, until the end of the batch: an imported "
        "model, a known name, a folder, a GGUF file, or ORG/NAME on the hub.",
    )
    parser.add_argument(
        "-u",
        "--url",
        metavar="HOST",
        help="Host of a running server, optionally with :PORT (default: localhost, unless --model "
        "is given).",
    )
    parser.add_argument("-p", "--port", type=int, help="Port of the server (default: 8000).")
    add_api_key(parser)
    parser.add_argument(
        "--concurrency",
        type=at_least(1, int),
        default=64,
        metavar="N",
        help="Send at most this many requests at a time.",
    )
    parser.add_argument(
        "--ignore-model-names",
        action="store_true",
        help="Send every request to the one model, whatever model its body names. Requests that "
        "name none are sent to it in any case.",
    )
    parser.add_argument(
        "--retry-failed",
        action="store_true",
        help="Send the requests again whose results in OUTPUT are errors.",
    )
    add_engine_flags(parser, extended=True)
    add_verbose(parser)
    return parser


def run(given: Namespace) -> int:
    if given.model is not None and given.url is not None:
        raise UsageError("--model starts a server of its own: give either --model or --url")
    overrides = engine_overrides(given)
    if overrides and given.model is None:
        raise UsageError("settings of an engine need --model: the running server has its own")
    if given.input.resolve() == given.output.resolve():
        raise UsageError("INPUT and OUTPUT are the same file")
    try:
        requests = BatchInput(given.input)
        with BatchOutput(given.output, given.retry_failed) as output:
            return _run(given, requests, output)
    except BatchFileError as error:
        raise CommandError(str(error)) from error


def _run(given: Namespace, requests: BatchInput, output: BatchOutput) -> int:
    left = sum(identity not in output.done for identity in requests.ids)
    if left < len(requests):
        log("INFO", f"{given.output} has {len(requests) - left} of {len(requests)} results")
    try:
        if left:
            _send_all(given, requests, output)
    except KeyboardInterrupt:
        _say_rest(requests, output)
        return _INTERRUPTED
    except (ServerLost, ServerError) as error:
        _say_rest(requests, output)
        raise CommandError(str(error)) from error
    failed = [identity for identity in requests.ids if not output.done[identity]]
    succeeded = len(requests) - len(failed)
    log("INFO", f"{succeeded} requests succeeded, {len(failed)} failed: {given.output}")
    if failed:
        _say_reasons(output.reasons(set(failed)))
    return 1 if failed else 0


def _say_reasons(reasons: Counter[str]) -> None:
    """Print why requests have failed, the most frequent reason first."""
    for reason, count in reasons.most_common(_MOST_REASONS):
        log("WARNING", f"{count} failed: {textwrap.shorten(reason, _REASON_LENGTH)}")
    rest = reasons.total() - sum(count for _, count in reasons.most_common(_MOST_REASONS))
    if rest:
        log("WARNING", f"{rest} failed for other reasons: see the errors in the file")


def _say_rest(requests: BatchInput, output: BatchOutput) -> None:
    done = sum(identity in output.done for identity in requests.ids)
    log("INFO", f"{done} of {len(requests)} requests are done; the same command sends the others")


def _send_all(given: Namespace, requests: BatchInput, output: BatchOutput) -> None:
    done = len(requests) - sum(identity not in output.done for identity in requests.ids)
    with ExitStack() as stack:
        address, key = stack.enter_context(_server(given))
        name = ModelName(_model_name(address, key), given.ignore_model_names)
        bar = BatchProgress("requests", len(requests), is_shown(None), done)
        stack.enter_context(bar)

        def note(result: BatchResult, tokens: int) -> None:
            output.write(result)
            bar.add(tokens)
            if not is_shown(None):
                _say_progress(bar.done, len(requests))

        sender = BatchSender(f"http://{address}", key, name, given.concurrency, note)
        asyncio.run(sender.run(requests.requests(dict(output.done))))


def _say_progress(done: int, total: int) -> None:
    """Write a line for each tenth of the requests."""
    if done * _PLAIN_STEPS // total > (done - 1) * _PLAIN_STEPS // total:
        log("INFO", f"{done} of {total} requests are done")


@contextmanager
def _server(given: Namespace) -> Iterator[tuple[str, str]]:
    """Yield HOST:PORT of the server, and its key."""
    if given.model is None:
        given.url = given.url or "localhost"
        yield server_address(given, 8000), read_api_key(given.api_key)
        return
    from slipstream.cli.models.run import serving
    from slipstream.cli.models.served_model import prepare_repository

    repository = prepare_repository(given.model, given.weight_only)
    given.http_port = 0
    key = secrets.token_urlsafe(24)  # other users of the machine cannot use the server
    with serving(repository, given, key) as address:
        yield address, key


def _model_name(address: str, key: str) -> str:
    """Return the model of requests that name none."""
    connection = HttpConnection(address, key)
    try:
        return choose_model(connection.models(), None)
    finally:
        connection.close()

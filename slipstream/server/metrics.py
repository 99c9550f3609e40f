"""The metrics port: Triton's names and labels, and only values that are true.

Counters are kept per model by whoever runs inferences (`ModelCounters.record` wraps the answers of one request);
the engine's gauges are read from its last `EngineStats` when somebody scrapes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.engine.messages import EngineInfo, EngineStats
from slipstream.repository.config import ModelConfig
from slipstream.server.errors import Code, InferenceError
from slipstream.server.inference import InferRequest, InferResponse, ServedModel

FAILURE_REASONS = ("OTHER", "BACKEND", "CANCELED", "REJECTED")


class Engine(Protocol):
    info: EngineInfo | None
    stats: EngineStats


@dataclass
class ModelCounters:
    """What happened to the requests of one model."""

    successes: int = 0
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAILURE_REASONS, 0))
    executions: int = 0
    duration_us: int = 0
    pending: int = 0  # came in, and nothing has come out yet

    async def record(self, responses: AsyncGenerator[InferResponse]) -> AsyncGenerator[InferResponse]:
        """Pass on the answers to one request and count how it went."""
        began = time.monotonic_ns()
        self.pending += 1
        waiting = True
        failure: str | None = None
        complete = False  # otherwise the reader has left
        try:
            async with aclosing(responses):
                async for response in responses:
                    if response.error is not None:
                        failure = _reason(response.error)
                    elif waiting:
                        self.pending, self.executions, waiting = self.pending - 1, self.executions + 1, False
                    yield response
            complete = True
        except Exception as error:
            failure = _reason(error)
            raise
        finally:
            self.pending -= waiting
            self._end(failure if failure or complete else "CANCELED", began)

    def _end(self, failure: str | None, began_ns: int) -> None:
        if failure is None:
            self.successes += 1
            self.duration_us += (time.monotonic_ns() - began_ns) // 1000
        else:
            self.failures[failure] += 1


def _reason(error: Exception) -> str:
    """Which of Triton's four reasons for a failure this one is."""
    if not isinstance(error, InferenceError):
        return "OTHER"
    return {Code.UNAVAILABLE: "REJECTED", Code.CANCELLED: "CANCELED"}.get(error.code, "BACKEND")


class CountedModel:
    """A model whose requests are counted."""

    def __init__(self, model: ServedModel, counters: ModelCounters) -> None:
        self._model = model
        self._counters = counters

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def decoupled(self) -> bool:
        return self._model.decoupled

    @property
    def ready(self) -> bool:
        return self._model.ready

    def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse]:
        return self._counters.record(self._model.infer(request))


class ServerMetrics:
    def __init__(self) -> None:
        self._models: dict[tuple[str, str], ModelCounters] = {}
        self._engines: dict[tuple[str, str], Engine] = {}

    def model(self, name: str, version: str = "1") -> ModelCounters:
        return self._models.setdefault((name, version), ModelCounters())

    def watch_engine(self, name: str, engine: Engine, version: str = "1") -> None:
        """`name` is the model that stands for this engine in the repository."""
        self._engines[name, version] = engine

    def render(self) -> str:
        return "".join(family.render() for family in (*self._model_families(), *self._engine_families()))

    def _model_families(self) -> Iterator[_Family]:
        def family(name: str, kind: str, text: str, value: Callable[[ModelCounters], int]) -> _Family:
            samples = [
                ({"model": model, "version": version}, value(counters))
                for (model, version), counters in self._models.items()
            ]
            return _Family(name, kind, text, samples)

        yield family(
            "nv_inference_request_success",
            "counter",
            "Number of successful inference requests, all batch sizes",
            lambda counters: counters.successes,
        )
        yield _Family(
            "nv_inference_request_failure",
            "counter",
            "Number of failed inference requests, all batch sizes",
            [
                ({"model": model, "reason": reason, "version": version}, count)
                for (model, version), counters in self._models.items()
                for reason, count in counters.failures.items()
            ],
        )
        for name, text in (
            ("nv_inference_count", "Number of inferences performed (does not include cached requests)"),
            ("nv_inference_exec_count", "Number of model executions performed (does not include cached requests)"),
        ):
            yield family(name, "counter", text, lambda counters: counters.executions)
        yield family(
            "nv_inference_request_duration_us",
            "counter",
            "Cumulative inference request duration in microseconds (includes cached requests)",
            lambda counters: counters.duration_us,
        )
        yield family(
            "nv_inference_pending_request_count",
            "gauge",
            "Instantaneous number of pending requests awaiting execution per-model.",
            lambda counters: counters.pending,
        )

    def _engine_families(self) -> Iterator[_Family]:
        for name, text, label, read in _ENGINE_FAMILIES:
            samples: list[tuple[dict[str, str], float]] = []
            for (model, version), engine in self._engines.items():
                if engine.info is not None:
                    for category, value in read(engine.info, engine.stats).items():
                        samples.append(({label: category, "model": model, "version": version}, value))
            if samples:
                yield _Family(name, "gauge", text, samples)


def _request_metrics(info: EngineInfo, stats: EngineStats) -> dict[str, float]:
    active = stats.running + stats.waiting
    return {"active": active, "max": info.max_rows, "scheduled": stats.running, "waiting": stats.waiting}


def _block_metrics(info: EngineInfo, stats: EngineStats) -> dict[str, float]:
    used = stats.total_blocks - stats.free_blocks
    return {
        "max": stats.total_blocks,
        "free": stats.free_blocks,
        "used": used,
        "tokens_per": info.block_tokens,
        "reused": stats.cached_prompt_tokens // info.block_tokens,
        "fraction": used / stats.total_blocks if stats.total_blocks else 0.0,
    }


def _batcher_metrics(info: EngineInfo, stats: EngineStats) -> dict[str, float]:
    return {"generation_requests": stats.running, "micro_batch_id": 0}  # one batch at a time, number 0


def _general_metrics(info: EngineInfo, stats: EngineStats) -> dict[str, float]:
    return {"timestamp": int(time.time()), "iteration_counter": stats.steps}


_ReadGauges = Callable[[EngineInfo, EngineStats], dict[str, float]]
_ENGINE_FAMILIES: tuple[tuple[str, str, str, _ReadGauges], ...] = (
    ("nv_trt_llm_request_metrics", "TRT LLM request metrics", "request_type", _request_metrics),
    (
        "nv_trt_llm_kv_cache_block_metrics",
        "TRT LLM KV cache block metrics",
        "kv_cache_block_type",
        _block_metrics,
    ),
    (
        "nv_trt_llm_inflight_batcher_metrics",
        "TRT LLM inflight_batcher-specific metrics",
        "inflight_batcher_specific_metric",
        _batcher_metrics,
    ),
    ("nv_trt_llm_general_metrics", "General TRT LLM metrics", "general_type", _general_metrics),
)


@dataclass(frozen=True)
class _Family:
    name: str
    kind: str
    help: str
    samples: list[tuple[dict[str, str], float]] | list[tuple[dict[str, str], int]]

    def render(self) -> str:
        lines = [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} {self.kind}"]
        for labels, value in self.samples:
            written = ",".join(f'{key}="{_escape(labels[key])}"' for key in sorted(labels))
            lines.append(f"{self.name}{{{written}}} {value}")
        return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def metrics_app(metrics: ServerMetrics) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """The ASGI application of the metrics port. As with Triton, any other path is an empty 200."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        status, content_type, body = 200, b"text/plain; charset=utf-8", b""
        if scope["method"] != "GET":
            status, content_type, body = 405, b"text/plain", b'{"error":"Method Not Allowed"}'
        elif scope["path"] == "/metrics":
            body = metrics.render().encode()
        headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app

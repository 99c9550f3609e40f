"""The response cache: its keys, limits, statistics and metrics."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from slipstream.repository.config import ModelConfig, read_model_config
from slipstream.repository.problems import Problems
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import (
    InferRequest,
    InferResponse,
    ModelRegistry,
    ModelVersion,
    ServedModel,
)
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.metrics.optional_metrics import MetricsConfig
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.metrics.statistics_api import model_statistics
from slipstream.server.metrics.summaries import Summary
from slipstream.server.models.response_cache import (
    ENTRY_BYTES,
    CachedModel,
    ResponseCache,
    request_key,
)

CONFIG = """name: "upper" backend: "python"
input [ { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
CACHED = "response_cache { enable: true }"


def config(folder: Path, more: str = CACHED) -> ModelConfig:
    (folder / "upper" / "1").mkdir(parents=True, exist_ok=True)
    (folder / "upper" / "config.pbtxt").write_text(CONFIG + more)
    found = read_model_config(folder / "upper", Problems())
    assert found is not None
    return found


class Upper(ServedModel):
    """Answers in capitals and counts its executions."""

    ready = True

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.runs = 0

    @property
    def decoupled(self) -> bool:
        return self.config.decoupled

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        self.runs += 1
        text = request.inputs["text_input"].data[0]
        if text == b"fail":
            yield InferResponse(error=InferenceError("no"), final=True)
            return
        yield InferResponse([Tensor("text_output", "BYTES", (1,), [text.upper()])], final=True)


class Serving:
    def __init__(
        self, folder: Path, more: str = CACHED, byte_size: int = 1 << 20, summaries: bool = False
    ) -> None:
        self.cache = ResponseCache(byte_size)
        self.metrics = ServerMetrics(config=MetricsConfig(summary_latencies=summaries))
        self.registry = ModelRegistry()
        self.registry.wrap(self.cache.wrap)
        self.registry.wrap(self.metrics.count)
        self.model = Upper(config(folder, more))
        self.registry.add("upper", 1, self.model)

    async def ask(self, text: str, **fields: Any) -> bytes:
        inputs = {"text_input": Tensor("text_input", "BYTES", (1,), [text.encode()])}
        request = InferRequest("upper", "1", inputs, **fields)
        found = [response async for response in self.registry.find("upper").model.infer(request)]
        assert len(found) == 1
        return b"error" if found[0].error else found[0].outputs[0].data[0]

    def statistics(self) -> dict[str, Any]:
        return model_statistics(self.registry, "upper")[0]

    def metric(self, name: str) -> str:
        lines = [
            line for line in self.metrics.render().splitlines() if line.startswith(f"{name}{{")
        ]
        return lines[0].rsplit(" ", 1)[1] if lines else "absent"


async def test_repeated_request_is_answered_from_the_cache(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    assert [await serving.ask(text) for text in ("a", "a", "b", "a")] == [b"A", b"A", b"B", b"A"]
    assert serving.model.runs == 2
    found = serving.statistics()
    assert (found["inference_count"], found["execution_count"]) == (2, 2)
    stats = found["inference_stats"]
    assert (
        stats["success"]["count"],
        stats["queue"]["count"],
        stats["compute_infer"]["count"],
    ) == (4, 4, 2)
    assert (stats["cache_hit"]["count"], stats["cache_miss"]["count"]) == (2, 2)
    assert stats["cache_hit"]["ns"] > 0
    assert stats["cache_miss"]["ns"] > 0
    assert serving.metric("nv_cache_num_hits_per_model") == "2"
    assert serving.metric("nv_cache_num_misses_per_model") == "2"
    assert serving.metric("nv_inference_request_success") == "4"
    assert serving.metric("nv_inference_count") == "2"


async def test_errors_are_not_cached(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    assert [await serving.ask("fail"), await serving.ask("fail")] == [b"error", b"error"]
    assert serving.model.runs == 2


async def test_outputs_parameters_and_sequence_ids_are_part_of_the_key(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    await serving.ask("a")
    await serving.ask("a", outputs=("text_output",))
    await serving.ask("a", parameters={"tone": "loud"})
    await serving.ask("a", sequence_id=7)
    assert serving.model.runs == 4
    # id and priority are not part of the key
    await serving.ask("a", id="another", priority=1)
    assert serving.model.runs == 4


def test_keys_depend_on_the_borders_of_values_and_on_the_shape() -> None:
    def key(*data: bytes, shape: tuple[int, ...] = (2,), datatype: str = "BYTES") -> bytes:
        return request_key(InferRequest("m", "1", {"a": Tensor("a", datatype, shape, list(data))}))

    assert len({key(b"ab", b"c"), key(b"a", b"bc"), key(b"ab", b"c", shape=(2, 1))}) == 3


async def test_the_least_recently_used_response_is_evicted(tmp_path: Path) -> None:
    entry = ENTRY_BYTES + len(b"A") + 4
    serving = Serving(tmp_path, byte_size=2 * entry)
    for text in ("a", "b", "a", "c", "a"):  # c evicts b, because a was used later
        await serving.ask(text)
    assert serving.model.runs == 3
    assert serving.cache.byte_size == 2 * entry
    await serving.ask("b")
    assert serving.model.runs == 4


async def test_response_larger_than_the_cache_is_not_cached(tmp_path: Path) -> None:
    serving = Serving(tmp_path, byte_size=ENTRY_BYTES)
    await serving.ask("a")
    await serving.ask("a")
    assert (serving.model.runs, serving.cache.byte_size) == (2, 0)


@pytest.mark.parametrize(
    "more", ["", "response_cache { }", CACHED + " model_transaction_policy { decoupled: true }"]
)
async def test_models_without_the_setting_and_decoupled_models_are_not_cached(
    tmp_path: Path, more: str
) -> None:
    serving = Serving(tmp_path, more)
    await serving.ask("a")
    await serving.ask("a")
    assert serving.model.runs == 2
    assert serving.metric("nv_cache_num_hits_per_model") == "absent"
    assert not isinstance(
        ResponseCache(1).wrap(ModelVersion("upper", "1", serving.model)), CachedModel
    )


async def test_summaries_are_exported_only_when_enabled(tmp_path: Path) -> None:
    assert "summary" not in Serving(tmp_path).metrics.render()
    serving = Serving(tmp_path, "", summaries=True)
    for text in ("a", "b", "c"):
        await serving.ask(text)
    rendered = serving.metrics.render()
    assert "# TYPE nv_inference_request_summary_us summary" in rendered
    labels = 'model="upper",version="1"'
    for name in ("request", "queue", "compute_input", "compute_infer", "compute_output"):
        assert f"nv_inference_{name}_summary_us_count{{{labels}}} 3" in rendered
        for quantile in ("0.5", "0.9", "0.95", "0.99", "0.999"):
            assert (
                f'nv_inference_{name}_summary_us{{model="upper",version="1",quantile="{quantile}"}} '
                in rendered
            )
    assert "nv_cache_hit_summary_per_model" not in rendered


async def test_summaries_of_a_cached_model_have_no_request_summary(tmp_path: Path) -> None:
    serving = Serving(tmp_path, summaries=True)
    await serving.ask("a")
    await serving.ask("a")
    rendered = serving.metrics.render()
    assert "nv_inference_request_summary_us" not in rendered
    labels = 'model="upper",version="1"'
    assert f"nv_cache_hit_summary_per_model_count{{{labels}}} 1" in rendered
    assert f"nv_cache_miss_summary_per_model_count{{{labels}}} 1" in rendered
    assert f"nv_inference_queue_summary_us_count{{{labels}}} 2" in rendered
    assert f"nv_inference_compute_infer_summary_us_count{{{labels}}} 1" in rendered


def test_quantiles_of_a_summary_equal_those_of_its_values() -> None:
    summary = Summary()
    assert [value != value for value in summary.quantiles((0.5,))] == [True]
    for value in range(1, 101):
        summary.observe(value)
    assert summary.quantiles((0.0, 0.5, 0.9, 0.99, 1.0)) == [1, 50, 90, 99, 100]
    assert (summary.count, summary.sum) == (100, 5050)

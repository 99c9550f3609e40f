"""Python models and traces: a model sees its trace, and its calls may join it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from http_support import RunningServer, post
from python_model_harness import CONFORMANCE, models_of, write_model
from span_collector import Collector

from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.python_models.factory import PythonModels
from slipstream.server.services import create_app, create_context
from slipstream.server.tracing.export_settings import ExportSettings
from slipstream.server.tracing.settings import TraceSettings

assert CONFORMANCE
UPPER = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "text_input") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text.as_numpy())]) for text in texts]
"""
CALLER = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]
    def answer(self, request):
        given = pb_utils.get_input_tensor_by_name(request, "text_input")
        joined = {"trace": request.trace()} if given.as_numpy()[0] == b"join" else {}
        asked = pb_utils.InferenceRequest(
            model_name="upper", requested_output_names=["text_output"], inputs=[given], **joined)
        assert not asked.exec().has_error()
        context = request.trace().get_context()
        text = np.array(["none" if context is None else context], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)])
"""


def serve(folder: Path, trace: TraceSettings, *texts: str) -> list[str]:
    """Return the answers of the model `caller` to each text, through a server."""
    registry, factory, opened = ModelRegistry(), PythonModels(), []
    registry.wrap(ServerMetrics().count)

    async def load() -> None:
        for name, model in models_of(folder).items():
            served = await factory.load(model, 1, registry)
            opened.append(served)
            registry.add(name, 1, served)

    async def close() -> None:
        await asyncio.gather(*(model.close() for model in opened))

    with RunningServer(
        create_app(registry, ServerState([]), create_context(trace=trace))
    ) as server:
        asyncio.run_coroutine_threadsafe(load(), server.loop).result(30)
        try:
            return [ask(server.port, text) for text in texts]
        finally:
            asyncio.run_coroutine_threadsafe(close(), server.loop).result(30)
            trace.close()


def ask(port: int, text: str) -> str:
    answer = post(port, "/v2/models/caller/generate", json.dumps({"text_input": text}).encode())
    assert answer.status == 200, answer.body
    return json.loads(answer.body)["text_output"]


def repository(folder: Path) -> Path:
    write_model(folder, "upper", UPPER)
    write_model(folder, "caller", CALLER)
    return folder


def test_a_model_sees_its_span_and_its_calls_join_the_trace(tmp_path: Path) -> None:
    with Collector() as collector:
        export = ExportSettings(url=collector.url, delay_ms=20)
        trace = TraceSettings({"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}, export)
        seen, alone = serve(repository(tmp_path), trace, "join", "alone")
        spans = collector.wait(2)
    first, second = [span for span in spans if span.name == "caller"]
    (upper,) = [span for span in spans if span.name == "upper"]
    assert json.loads(seen) == {"traceparent": f"00-{first.trace_id}-{first.id}-01"}
    assert json.loads(alone) == {"traceparent": f"00-{second.trace_id}-{second.id}-01"}
    assert (upper.trace_id, upper.parent_id) == (first.trace_id, first.id)
    assert {span.name for span in spans if span.parent_id == upper.id} == {"compute"}
    assert upper.attributes["triton.trace_parent_id"] == first.attributes["triton.trace_id"]
    assert first.began <= upper.began <= upper.ended <= first.ended


def test_trace_files_have_the_call_as_a_child(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    settings = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_file": str(file)}
    assert serve(repository(tmp_path / "repository"), TraceSettings(settings), "join") == ["none"]
    models = [one for one in json.loads(file.read_text()) if "model_name" in one]
    assert [one["model_name"] for one in models] == ["caller", "upper"]
    assert [one.get("parent_id") for one in models] == [None, models[0]["id"]]


def test_an_untraced_request_has_no_trace(tmp_path: Path) -> None:
    assert serve(repository(tmp_path), TraceSettings(), "join") == ["none"]

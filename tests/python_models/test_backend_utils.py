"""`triton_python_backend_utils`: everything of it that upstream's models and documents use."""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from python_model_harness import (
    MIMIC,
    ask,
    models_of,
    open_models,
    response_texts,
    text_tensor,
    write_model,
)

from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import InferRequest, ModelVersion
from slipstream.server.python_models.calls import PythonModelContext
from slipstream.server.python_models.model import PythonModel

HEAD = """
import asyncio, json, numpy as np
import triton_python_backend_utils as pb_utils
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
def text_of(request): return pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().ravel()[0].decode()
def tensor(text, name="text_output"): return pb_utils.Tensor(name, np.array([text.encode()], dtype=object))
def answer(text): return pb_utils.InferenceResponse(output_tensors=[tensor(text)])
"""
COUNTER = (
    HEAD
    + """
class TritonPythonModel:
    def initialize(self, args):
        self.args = args
    def execute(self, requests):
        return [answer(json.dumps(self.examine(request))) for request in requests]
    def examine(self, request):
"""
)


async def examined(folder: Path, body: str, config: str = "", initialize: str = "") -> object:
    """Run `body` as `examine` of a model; return its result."""
    code = COUNTER.replace("self.args = args", f"self.args = args; {initialize}") + textwrap.indent(
        body, " " * 8
    )
    async with open_models(write_model(folder, "examiner", code, config), "examiner") as models:
        (response,) = await ask(models["examiner"], "x")
        assert response.error is None, response.error
        return json.loads(response.outputs[0].data[0])


async def test_initialize_gets_upstreams_arguments(tmp_path: Path) -> None:
    config = 'instance_group [ { count: 2 kind: KIND_CPU } ]\nparameters { key: "a" value: { string_value: "b" } }'
    found = await examined(tmp_path, "return self.args", config)
    assert isinstance(found, dict)
    model_config = json.loads(found.pop("model_config"))
    name = found.pop("model_instance_name")
    assert name in ("examiner_0_0", "examiner_0_1")
    assert found == {
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
        "model_version": "1",
        "model_name": "examiner",
        "model_repository": str(tmp_path / "examiner"),
    }
    assert model_config["input"][0]["data_type"] == "TYPE_STRING"
    assert model_config["input"][0]["dims"] == [-1]
    assert model_config["parameters"] == {"a": {"string_value": "b"}}
    assert model_config["instance_group"][0]["kind"] == "KIND_CPU"
    assert model_config["default_model_filename"] == "model.py"


async def test_tensors_and_helper_functions_match_upstream(tmp_path: Path) -> None:
    body = """
config = json.loads(self.args["model_config"])
numbers = pb_utils.Tensor("n", np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::-1])
copied = pb_utils.Tensor.from_dlpack("c", numbers.to_dlpack())
again = pb_utils.Tensor.from_dlpack("d", np.ones(2, dtype=np.float32))
failures = []
for make in (lambda: pb_utils.Tensor("a", [1]), lambda: pb_utils.Tensor("a", np.zeros(2, complex)),
             lambda: pb_utils.InferenceResponse([1]), lambda: pb_utils.Tensor("a", np.array(["x"]))):
    try: make()
    except (TypeError, pb_utils.TritonModelException) as error: failures.append(type(error).__name__)
error = pb_utils.TritonError("why", pb_utils.TritonError.NOT_FOUND)
failed = pb_utils.InferenceResponse([], error)
given = request.inputs()[0]
given.as_numpy()[0] = b"changed"
return [
    pb_utils.get_input_config_by_name(config, "text_input")["data_type"],
    pb_utils.get_output_config_by_name(config, "text_output")["name"],
    pb_utils.get_input_config_by_name(config, "nope"), pb_utils.get_input_tensor_by_name(request, "nope"),
    pb_utils.triton_string_to_numpy("TYPE_FP16").__name__, pb_utils.numpy_to_triton_type(np.float32),
    pb_utils.using_decoupled_model_transaction_policy(config), pb_utils.get_model_dir() == self.args["model_repository"] + "/1",
    numbers.name(), numbers.shape(), numbers.triton_dtype(), numbers.is_cpu(), copied.as_numpy().tolist(),
    again.triton_dtype(), failures, failed.has_error(), failed.error().message(), failed.error().code() == error.code(),
    pb_utils.get_output_tensor_by_name(answer("y"), "text_output").as_numpy()[0].decode(),
    request.requested_output_names(), request.is_cancelled(), given.as_numpy()[0].decode(),
]
"""
    assert await examined(tmp_path, body) == [
        "TYPE_STRING",
        "text_output",
        None,
        None,
        "float16",
        "FP32",
        False,
        True,
        "n",
        [2, 3],
        "INT32",
        True,
        [[2, 1, 0], [5, 4, 3]],
        "FP32",
        ["TypeError", "TritonModelException", "TypeError", "TritonModelException"],
        True,
        "why",
        True,
        "y",
        [],
        False,
        "changed",
    ]


CALLER = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        return [answer(json.dumps(self.call(json.loads(text_of(request))))) for request in requests]
    def call(self, order):
        request = pb_utils.InferenceRequest(
            model_name=order["model"], model_version=order.get("version", -1), request_id="inner",
            requested_output_names=["text_output"], inputs=[tensor(order["text"], "text_input")],
            parameters={"foo": 1})
        if order.get("decoupled"):
            return [self.show(response) for response in request.exec(decoupled=True)]
        return self.show(request.exec())
    def show(self, response):
        if response.has_error(): return "! " + response.error().message()
        return [pb_utils.get_output_tensor_by_name(response, "text_output").as_numpy()[0].decode()]
"""
)


async def test_a_model_calls_other_models(tmp_path: Path) -> None:
    write_model(tmp_path, "caller", CALLER)
    async with open_models(MIMIC, "oops", "oops_nd", "multiver") as others:
        inner = [(name, others[name]) for name in ("oops", "oops_nd", "multiver")]
        async with open_models(tmp_path, "caller", others=inner) as models:

            async def call(model: str, text: str, **more: object) -> object:
                order = json.dumps({"model": model, "text": text, **more})
                (response,) = await ask(models["caller"], order)
                assert response.error is None, response.error
                return json.loads(response.outputs[0].data[0])

            assert await call("oops_nd", "hello") == ["hello"]
            (info,) = await call("oops_nd", "reqinfo")  # type: ignore[misc]
            assert json.loads(info)["id"] == "inner"
            assert json.loads(info)["params"] == '{"foo":1}'
            assert await call("oops_nd", "error") == "! injected error nd"
            assert await call("oops", "error_mid", decoupled=True) == [
                ["one"],
                "! injected error mid",
                ["three"],
            ]
            assert await call("oops", "zero", decoupled=True) == []
            assert "decoupled=True" in str(await call("oops", "two"))
            assert await call("nope", "x") == "! Request for unknown model: 'nope' is not found"
            assert "version 2 is not found" in str(await call("multiver", "x", version=2))


ASYNCHRONOUS = (
    HEAD
    + """
class TritonPythonModel:
    async def execute(self, requests):
        return [answer(await self.both(text_of(request))) for request in requests]
    async def both(self, text):
        calls = [pb_utils.InferenceRequest(model_name="slow_nd", inputs=[tensor(text, "text_input")],
                 requested_output_names=["text_output"]).async_exec() for _ in range(2)]
        responses = await asyncio.gather(*calls)
        return "+".join(response.output_tensors()[0].as_numpy()[0].decode() for response in responses)
"""
)


async def test_execute_may_be_a_coroutine(tmp_path: Path) -> None:
    write_model(tmp_path, "caller", ASYNCHRONOUS)
    async with open_models(MIMIC, "slow_nd") as others:
        async with open_models(
            tmp_path, "caller", others=[("slow_nd", others["slow_nd"])]
        ) as models:
            assert response_texts(await ask(models["caller"], "20")) == ["20+20"]


THREADED = (
    HEAD
    + """
import threading
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.later, args=(request.get_response_sender(), text_of(request))).start()
    def later(self, sender, text):
        for word in text.split(): sender.send(answer(word))
        sender.send(flags=FINAL)
        try: sender.send(answer("too late"))
        except pb_utils.TritonModelException as error: pb_utils.Logger.log_error(str(error))
"""
)


async def test_response_senders_work_after_execute_has_returned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path, "threaded", THREADED, "model_transaction_policy { decoupled: True }")
    async with open_models(tmp_path, "threaded") as models:
        answers = await asyncio.gather(
            *(ask(models["threaded"], f"a{n} b{n} c{n}") for n in range(5))
        )
        assert [response_texts(answer) for answer in answers] == [
            [f"a{n}", f"b{n}", f"c{n}"] for n in range(5)
        ]
    assert "Response sender has been closed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("None", "TypeError: execute must return InferenceResponse objects, not NoneType"),
        ("7", "TypeError: execute must return a list of InferenceResponse, not int"),
        ("[]", "ValueError: execute got 1 requests but returned 0 responses"),
        ("['x']", "TypeError: execute must return InferenceResponse objects, not str"),
    ],
)
async def test_wrong_return_values_are_reported(
    tmp_path: Path, returned: str, expected: str
) -> None:
    code = f"class TritonPythonModel:\n    def execute(self, requests): return {returned}"
    async with open_models(write_model(tmp_path, "wrong", code), "wrong") as models:
        prefix = "! Failed to process the request(s) for model 'wrong_0', message: "
        assert response_texts(await ask(models["wrong"], "x")) == [prefix + expected]


async def test_metrics_are_shared_by_the_instances(tmp_path: Path) -> None:
    initialize = (
        "kinds = pb_utils.MetricFamily; "
        "self.served = kinds(name='served', description='How many', kind=kinds.COUNTER).Metric(labels={'by': 'a\"b'}); "
        "self.took = kinds(name='took', description='How long', kind=kinds.HISTOGRAM)"
        ".Metric(labels={}, buckets=[1.0, 2.5])"
    )
    body = (
        "self.served.increment(2); [self.took.observe(v) for v in (0.5, 2.0, 9.0)]\n"
        "try: self.served.set(1)\n"
        "except pb_utils.TritonModelException: pass\n"
        "return self.served.value()"
    )
    code = COUNTER.replace("self.args = args", initialize) + textwrap.indent(body, " " * 8)
    folder = write_model(
        tmp_path, "measured", code, "instance_group [ { count: 2 kind: KIND_CPU } ]"
    )
    async with open_models(folder, "measured") as models:
        for expected in (2, 4):
            (response,) = await ask(models["measured"], "x")
            assert json.loads(response.outputs[0].data[0]) == expected
        assert "".join(
            family.render() for family in models.factory.metrics.families()
        ).splitlines() == [
            "# HELP served How many",
            "# TYPE served counter",
            'served{by="a\\"b"} 4',
            "# HELP took How long",
            "# TYPE took histogram",
            "took_count 6",
            "took_sum 23",
            'took_bucket{le="1"} 2',
            'took_bucket{le="2.5"} 4',
            'took_bucket{le="+Inf"} 6',
        ]


class Control:
    """Records the operations that it is asked for."""

    def __init__(self) -> None:
        self.operations: list[object] = []

    def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        return []

    async def load(
        self,
        name: str,
        override: Mapping[str, Any] | None = None,
        files: Mapping[PurePosixPath, bytes] | None = None,
    ) -> None:
        sent = {str(path): content for path, content in (files or {}).items()}
        self.operations.append(("load", name, override, sent))
        if name == "broken":
            raise InferenceError("load failed", Code.INTERNAL)

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        self.operations.append(("unload", name, unload_dependents))


async def test_a_model_loads_and_unloads_other_models(tmp_path: Path) -> None:
    body = """
pb_utils.load_model("other", config='{"max_batch_size": 2}')
pb_utils.unload_model("other", unload_dependents=True)
failures = []
pb_utils.load_model("other", config="{}", files={"file:1/model.py": b"pass"})
for order in (dict(model_name="broken"), dict(model_name="other", files={"file:../x.py": b"pass"})):
    try: pb_utils.load_model(**order)
    except pb_utils.TritonModelException as error: failures.append(str(error))
return [pb_utils.is_model_ready("examiner"), pb_utils.is_model_ready("nope"), *failures]
"""
    folder = write_model(tmp_path, "examiner", COUNTER + textwrap.indent(body, " " * 8))
    control = Control()

    def find(name: str, version: str) -> ModelVersion:
        if name != "examiner":
            raise InferenceError("unknown", Code.NOT_FOUND)
        return ModelVersion(name, "1", model)

    config = models_of(folder)["examiner"].config
    model = PythonModel(config, folder / "examiner" / "1", PythonModelContext(find, control))
    await model.start()
    try:
        (response,) = await ask(model, "x")
        assert json.loads(response.outputs[0].data[0]) == [
            True,
            False,
            "load failed",
            "the file 'file:../x.py' is outside of the model's folder; give a relative path without "
            "'..', such as 'file:1/model.py'",
        ]
    finally:
        await model.close()
    assert control.operations == [
        ("load", "other", {"max_batch_size": 2}, {}),
        ("unload", "other", True),
        ("load", "other", {}, {"1/model.py": b"pass"}),
        ("load", "broken", None, {}),
    ]


async def test_a_model_completes_its_own_configuration(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "text_input", "data_type": "TYPE_STRING", "dims": [-1]})
        config.add_output({"name": "text_output", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        config.set_model_transaction_policy(dict(decoupled=False))
        return config
    def initialize(self, args): self.config = json.loads(args["model_config"])
    def execute(self, requests): return [answer(str(self.config["max_batch_size"])) for request in requests]
"""
    )
    write_model(tmp_path, "bare", code)
    (tmp_path / "bare" / "config.pbtxt").write_text('name: "bare"\nbackend: "python"\n')
    async with open_models(tmp_path, "bare") as models:
        model = models["bare"]
        assert [(tensor.name, tensor.datatype, tensor.dims) for tensor in model.config.inputs] == [
            ("text_input", "BYTES", (-1,))
        ]
        assert model.config.max_batch_size == 8
        assert model.config.dynamic_batching is not None
        request = InferRequest("bare", "1", {"text_input": text_tensor("x", shape=(1, 1))})
        assert response_texts(await ask(model, request)) == ["8"]
        assert models.registry.configuration("bare")["output"][0]["dims"] == [1]
    async with open_models(tmp_path, "bare", complete_config=False) as models:
        assert models["bare"].config.inputs == ()
        assert response_texts(await ask(models["bare"], InferRequest("bare", "1", {}))) == ["0"]


NAMES = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        self.name = np.array([args["model_instance_name"]], dtype=object)
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text_output", self.name)]) for _ in requests]
"""
ENVIRONMENT = """
import json, os
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        text = np.array([json.dumps(dict(os.environ))], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]) for _ in requests]
"""


async def test_instances_are_named_as_the_real_server_names_them(tmp_path: Path) -> None:
    """Without groups the group has the model's name; the kind AUTO becomes CPU."""
    folder = write_model(tmp_path, "args", NAMES)
    write_model(
        tmp_path, "two", NAMES, "instance_group [ { count: 2 }, { count: 1 kind: KIND_CPU } ]"
    )
    async with open_models(folder, "args", "two") as models:
        assert response_texts(await ask(models["args"], "x")) == ["args_0"]
        seen = {response_texts(await ask(models["two"], "x"))[0] for _ in range(30)}
        groups = {
            name: [
                (group["name"], group["kind"], group["count"])
                for group in document["instance_group"]
            ]
            for name in ("args", "two")
            for document in [models.registry.configuration(name)]
        }
    assert seen <= {"two_0_0", "two_0_1", "two_1_0"}
    assert groups == {
        "args": [("args", "KIND_CPU", 1)],
        "two": [("two_0", "KIND_CPU", 2), ("two_1", "KIND_CPU", 1)],
    }


async def test_the_servers_keys_are_not_in_a_models_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "sesame")
    monkeypatch.setenv("SLIPSTREAM_ADMIN_KEY", "open")
    monkeypatch.setenv("MODEL_SETTING", "kept")
    async with open_models(write_model(tmp_path, "nosy", ENVIRONMENT), "nosy") as models:
        (found,) = response_texts(await ask(models["nosy"], "x"))
    variables = json.loads(found)
    assert variables["MODEL_SETTING"] == "kept"
    assert not {"sesame", "open"} & set(variables.values())

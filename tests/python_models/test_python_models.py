"""The code of the recorded models in processes of this server answers like under Triton."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from python_model_harness import (
    HERE,
    MIMIC,
    ask,
    models_of,
    open_models,
    response_texts,
    text_request,
    text_tensor,
    write_model,
)

from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import InferRequest, ModelRegistry
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.python_models.factory import PythonModels

OOPS = {
    "hello": ["hello"],
    "error_first": ["! injected error first"],
    "error_mid": ["one", "! injected error mid", "three"],
    "error_last": ["one", "two", "! injected error last"],
    "error_only_then_final": ["! injected error then final"],
    "zero": [],
    "two": ["one", "two"],
    "one_then_final": ["one"],
    "unicode": ['h\u00e9llo \u4f60\u597d \U0001f600 "q" \\ \n\t\u0001 </x>'],
    "raise": [
        "! Failed to process the request(s) for model 'oops_0_0', message: RuntimeError: boom from execute\n\n"
        "At:\n  oops/1/model.py(13): execute\n"
    ],
}


async def test_errors_on_demand() -> None:
    async with open_models(MIMIC, "oops") as models:
        for command, expected in OOPS.items():
            assert response_texts(await ask(models["oops"], command)) == expected
        for code in Code:
            (response,) = await ask(models["oops"], f"code:{code.name}")
            assert response.error is not None
            assert (response.error.message, response.error.code) == (f"injected {code.name}", code)
        (odd,) = await ask(models["oops"], "badutf8")
        assert odd.outputs[0].data == [b"\xff\xfeA"]


async def test_only_a_final_flag_of_the_model_marks_the_last_response() -> None:
    async with open_models(MIMIC, "oops") as models:
        assert [response.final for response in await ask(models["oops"], "two")] == [False, True]
        assert [response.final for response in await ask(models["oops"], "one_then_final")] == [
            False
        ]


async def test_request_details_reach_the_model() -> None:
    async with open_models(MIMIC, "oops_nd") as models:
        request = text_request(
            "reqinfo",
            id="rid",
            parameters={"foo": "bar", "n": 5, "f": 1.5, "b": True},
            timeout_microseconds=1000000,
            sequence_id=7,
            sequence_start=True,
            sequence_end=True,
        )
        (response,) = await ask(models["oops_nd"], request)
        assert json.loads(response.outputs[0].data[0]) == {
            "id": "rid",
            "corr": 7,
            "timeout": 1000000,
            "flags": 3,
            "params": '{"foo":"bar","n":5,"f":1.5,"b":true}',
        }
        (raised,) = await ask(models["oops_nd"], "raise")
        assert raised.error is not None
        assert raised.error.code is Code.INTERNAL
        assert raised.error.message.endswith(
            "boom from execute\n\nAt:\n  oops_nd/1/model.py(9): execute\n"
        )


VALUES = {
    "bool": [True, False],
    "uint8": [0, 255],
    "uint16": [0, 65535],
    "uint32": [0, 2**32 - 1],
    "uint64": [0, 2**64 - 1],
    "int8": [-128, 127],
    "int16": [-(2**15), 2**15 - 1],
    "int32": [-(2**31), 2**31 - 1],
    "int64": [-(2**63), 2**63 - 1],
    "fp16": [0.5, -2.0],
    "fp32": [0.10000000149011612, 3.0],
    "fp64": [0.1, -1e300],
    "string": [b"", b"\xff\x00a"],
}


async def test_every_datatype_passes_through_unchanged() -> None:
    async with open_models(MIMIC, "types") as models:
        inputs = {
            f"i_{kind}": Tensor.from_values(
                f"i_{kind}", "BYTES" if kind == "string" else kind.upper(), (2,), values
            )
            for kind, values in VALUES.items()
        }
        (response,) = await ask(models["types"], InferRequest("types", "1", inputs))
        assert {tensor.name: tensor.values() for tensor in response.outputs} == {
            f"o_{kind}": values for kind, values in VALUES.items()
        }
        assert [tensor.datatype for tensor in response.outputs] == [
            tensor.datatype for tensor in inputs.values()
        ]


async def test_versions_are_served_side_by_side() -> None:
    async with open_models(MIMIC, "multiver") as models:
        assert [entry.version for entry in models.registry] == ["1", "3"]
        for version in ("1", "3"):
            assert response_texts(
                await ask(models.registry.find("multiver", version).model, "x")
            ) == [f"v{version}"]


async def test_words_come_one_by_one_when_streamed() -> None:
    async with open_models(MIMIC, "llm", "llm_nd") as models:
        inputs = {
            "text_input": text_tensor("one two three four", shape=(1, 1)),
            "max_tokens": Tensor.from_values("max_tokens", "INT32", (1, 1), [3]),
        }
        streamed = inputs | {"stream": Tensor.from_values("stream", "BOOL", (1, 1), [True])}
        assert response_texts(await ask(models["llm"], InferRequest("llm", "1", inputs))) == [
            "one two three"
        ]
        answers = await ask(models["llm"], InferRequest("llm", "1", streamed))
        assert response_texts(answers) == ["one", " two", " three"]
        assert [tensor.shape for tensor in answers[0].outputs] == [
            (1,),
            (1, 1),
            (1, 1, 1),
            (1, 1, 1),
            (1, 1, 1, 1),
        ]
        refused = await ask(models["llm_nd"], InferRequest("llm_nd", "1", streamed))
        assert response_texts(refused) == ["! Streaming is only supported in decoupled mode."]


async def test_a_failed_start_reports_the_models_reason() -> None:
    model = models_of(HERE / "repos" / "extra")["broken"]
    with pytest.raises(InferenceError) as failure:
        await PythonModels().load(model, 1, ModelRegistry())
    assert failure.value.message == (
        "RuntimeError: no such engine: /engines/x/rank0.engine\n\nAt:\n  broken/1/model.py(4): initialize\n"
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("x = 1", "AttributeError: model.py has no class TritonPythonModel"),
        (
            "class TritonPythonModel: pass",
            "AttributeError: TritonPythonModel has no method execute",
        ),
        (
            "import nonesuch",
            "ModuleNotFoundError: No module named 'nonesuch'\n\nAt:\n  odd/1/model.py(1): <module>\n",
        ),
        (
            "import os; os._exit(3)",
            "the process of model instance 'odd_0' ended while it started: exit code 3",
        ),
    ],
)
async def test_an_invalid_model_file_is_reported(tmp_path: Path, code: str, expected: str) -> None:
    model = models_of(write_model(tmp_path, "odd", code))["odd"]
    with pytest.raises(InferenceError) as failure:
        await PythonModels().load(model, 1, ModelRegistry())
    assert failure.value.message == expected


async def test_only_python_models_with_code_are_claimed(tmp_path: Path) -> None:
    factory, models = PythonModels(), models_of(MIMIC)
    assert {name for name, model in models.items() if not factory.claims(model)} == {"ens"}
    write_model(tmp_path, "empty", "")
    (tmp_path / "empty" / "1" / "model.py").unlink()
    assert not factory.claims(models_of(tmp_path)["empty"])

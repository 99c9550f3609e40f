"""The adapter that a request's fields select, and the errors found before the engine gets it."""

import asyncio

import numpy
import pytest

from slipstream.engine.adapters.cache import AdapterSource
from slipstream.server.fields.adapters import AdapterRegistry
from slipstream.server.fields.values import RequestFields, read_request_fields
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import InferRequest
from slipstream.server.kserve.tensors import Tensor

HALF = numpy.arange(6, dtype=numpy.float16)


def fields(**values) -> RequestFields:
    request = InferRequest("tensorrt_llm", "1", {})
    types = {
        "lora_weights": "FP16",
        "lora_config": "INT32",
        "lora_task_id": "UINT64",
        "lora_name": "BYTES",
    }
    for name, value in values.items():
        if name == "lora_weights":
            request.inputs[name] = Tensor(name, "FP16", (1, 1, len(value)), value)
        else:
            data = value if isinstance(value, list) else [value]
            request.inputs[name] = Tensor.from_values(name, types[name], (1, len(data)), data)
    return read_request_fields(request, {})


def select(registry: AdapterRegistry, **values):
    return asyncio.run(registry.select(fields(**values)))


def test_adapter_tensors_are_passed_on_as_bytes():
    use = select(AdapterRegistry(), lora_weights=HALF, lora_config=[1, 0, 3, 2, 1, 4])
    assert use.source == AdapterSource(
        weights=HALF.tobytes(), datatype="float16", modules=[(1, 0, 3), (2, 1, 4)]
    )
    assert use.name == "the adapter of the request"


def test_adapters_with_equal_content_have_equal_numbers():
    registry = AdapterRegistry()
    first = select(registry, lora_weights=HALF, lora_config=[1, 0, 3])
    assert (
        select(registry, lora_weights=HALF, lora_config=[1, 0, 3], lora_task_id=5).number
        == first.number
    )
    assert (
        select(AdapterRegistry(), lora_weights=HALF, lora_config=[1, 0, 3]).number == first.number
    )
    others = {
        select(registry, lora_weights=HALF + 1, lora_config=[1, 0, 3]).number,
        select(registry, lora_weights=HALF, lora_config=[1, 1, 3]).number,
        first.number,
        0,
    }
    assert len(others) == 4


def test_a_task_id_means_the_adapter_last_sent_with_it():
    registry = AdapterRegistry()
    first = select(registry, lora_weights=HALF, lora_config=[1, 0, 3], lora_task_id=5)
    assert (
        first.name,
        select(registry, lora_task_id=5).number,
        select(registry, lora_task_id=5).source,
    ) == ("LoRA task 5", first.number, None)
    second = select(registry, lora_weights=HALF + 1, lora_config=[1, 0, 3], lora_task_id=5)
    assert select(registry, lora_task_id=5).number == second.number != first.number
    with pytest.raises(InferenceError) as caught:
        select(registry, lora_task_id=6)
    assert (
        caught.value.message
        == "LoRA task 6 not found in cache. Please send LoRA weights with request"
    )


def test_empty_adapter_fields_mean_no_adapter():
    assert select(AdapterRegistry()) is None
    assert select(AdapterRegistry(), lora_task_id=0) is None
    assert select(AdapterRegistry(), lora_name=b"") is None


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"lora_weights": HALF},
            "lora_config is missing: lora_weights and lora_config must be sent together",
        ),
        (
            {"lora_config": [1, 0, 3]},
            "lora_weights is missing: lora_weights and lora_config must be sent together",
        ),
        (
            {"lora_weights": HALF, "lora_config": [1, 0]},
            "lora_config must hold three numbers a module, got 2",
        ),
        (
            {"lora_name": b"x", "lora_task_id": 3},
            "lora_name does not go with lora_task_id: each names an adapter",
        ),
        (
            {"lora_name": b"x"},
            "adapter 'x' not found: no folder of adapters is configured (lora_prefetch_dir)",
        ),
    ],
)
def test_inconsistent_adapter_fields_are_rejected(values, text):
    with pytest.raises(InferenceError) as caught:
        select(AdapterRegistry(), **values)
    assert caught.value.message == text


def test_adapter_names_are_folders_and_never_paths(tmp_path):
    (tmp_path / "adapters" / "french").mkdir(parents=True)
    (tmp_path / "adapters" / "7").mkdir()
    (tmp_path / "secret").mkdir()
    registry = AdapterRegistry(tmp_path / "adapters")
    use = select(registry, lora_name=b"french")
    assert (use.name, use.source) == (
        "adapter 'french'",
        AdapterSource(folder=str(tmp_path / "adapters" / "french")),
    )
    by_task = select(registry, lora_task_id=7)
    assert (by_task.name, by_task.source.folder) == (
        "LoRA task 7",
        str(tmp_path / "adapters" / "7"),
    )
    for name in (b"german", b"../secret", b"..", b".", b"french/..", b"a\0b", b"x" * 5000, b"/etc"):
        with pytest.raises(InferenceError, match=r"not found$") as caught:
            select(registry, lora_name=name)
        assert caught.value.status == 404


def test_a_folder_whose_files_changed_is_another_adapter(tmp_path):
    (tmp_path / "french").mkdir()
    registry = AdapterRegistry(tmp_path)
    first = select(registry, lora_name=b"french").number
    assert select(registry, lora_name=b"french").number == first
    (tmp_path / "french" / "adapter_model.safetensors").write_bytes(b"new")
    assert select(registry, lora_name=b"french").number != first


def test_lora_name_may_be_a_request_parameter():
    request = InferRequest(
        "tensorrt_llm", "1", {}, parameters={"lora_name": "french", "lora_task_id": 4}
    )
    found = read_request_fields(request, {})
    assert (found["lora_name"].value, found["lora_task_id"].value) == (b"french", 4)
    with pytest.raises(InferenceError, match="lora_task_id must be of type UINT64, got '4'"):
        read_request_fields(InferRequest("m", "1", {}, parameters={"lora_task_id": "4"}), {})

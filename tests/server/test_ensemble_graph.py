"""Ensembles of any models: tensor maps, step selection, decoupled steps and invalid graphs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from slipstream.repository.config import ModelConfig, read_model_config
from slipstream.repository.ensembles import check_graph, needed_steps, run_order
from slipstream.repository.problems import Problems
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import (
    InferRequest,
    InferResponse,
    ModelRegistry,
    ServedModel,
)
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.models.ensemble import EnsembleModel

Answer = Callable[[dict[str, int]], list[dict[str, int]]]


def config(
    folder: Path, name: str, inputs: list[str], outputs: list[str], steps: str = "", more: str = ""
) -> ModelConfig:
    def tensors(kind: str, names: list[str]) -> str:
        text = ""
        for tensor in names:
            optional = " optional: true" if tensor.endswith("?") else ""
            text += f'{kind} {{ name: "{tensor.rstrip("?")}" data_type: TYPE_INT32 dims: [ 1 ]{optional} }}\n'
        return text

    (folder / name).mkdir(exist_ok=True)
    platform = (
        f'platform: "ensemble"\nensemble_scheduling {{ {steps} }}\n'
        if steps
        else 'backend: "python"\n'
    )
    text = (
        f'name: "{name}"\n{platform}{more}' + tensors("input", inputs) + tensors("output", outputs)
    )
    (folder / name / "config.pbtxt").write_text(text)
    problems = Problems()
    read = read_model_config(folder / name, problems)
    assert read is not None, problems.errors
    assert not problems.errors
    return read


def step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    def entries(field: str, pairs: dict[str, str]) -> str:
        return " ".join(
            f'{field} {{ key: "{key}" value: "{value}" }}' for key, value in pairs.items()
        )

    maps = f"{entries('input_map', inputs)} {entries('output_map', outputs)}"
    return f'step {{ model_name: "{model}" model_version: -1 {maps} }}'


class Numbers(ServedModel):
    """A model of integers. `answer` maps its inputs to a list of responses."""

    ready = True
    decoupled = False

    def __init__(self, config: ModelConfig, answer: Answer, decoupled: bool = False) -> None:
        self.config = config
        self.answer = answer
        self.decoupled = decoupled
        self.asked: list[dict[str, int]] = []
        self.requests: list[InferRequest] = []

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        given = {name: tensor.first for name, tensor in request.inputs.items()}
        self.asked.append(given)
        self.requests.append(request)
        answers = self.answer(given)
        for position, made in enumerate(answers):
            await asyncio.sleep(0)
            if "error" in made:
                yield InferResponse(error=InferenceError("it broke"))
                continue
            outputs = [
                Tensor.from_values(name, "INT32", (1,), [value]) for name, value in made.items()
            ]
            yield InferResponse(outputs, final=position == len(answers) - 1)


@pytest.fixture
def registry() -> ModelRegistry:
    return ModelRegistry()


def ensemble(
    folder: Path, registry: ModelRegistry, inputs: list[str], outputs: list[str], *steps: str
) -> EnsembleModel:
    made = config(folder, "whole", inputs, outputs, " ".join(steps))
    return EnsembleModel(made, registry.find)


def add(
    folder: Path,
    registry: ModelRegistry,
    name: str,
    inputs: list[str],
    outputs: list[str],
    answer: Answer,
    decoupled: bool = False,
) -> Numbers:
    model = Numbers(config(folder, name, inputs, outputs), answer, decoupled)
    registry.add(name, 1, model)
    return model


async def run(
    model: EnsembleModel, outputs: tuple[str, ...] = (), **inputs: int
) -> list[InferResponse]:
    tensors = {
        name: Tensor.from_values(name, "INT32", (1,), [value]) for name, value in inputs.items()
    }
    request = InferRequest(
        "whole", "1", tensors, id="r7", outputs=outputs, priority=3, parameters={"p": 1}
    )
    return [response async for response in model.infer(request)]


def values(responses: list[InferResponse]) -> list[dict[str, int]]:
    return [{tensor.name: tensor.first for tensor in response.outputs} for response in responses]


async def test_steps_may_be_declared_in_any_order(tmp_path: Path, registry: ModelRegistry) -> None:
    add(tmp_path, registry, "double", ["x"], ["y"], lambda given: [{"y": 2 * given["x"]}])
    add(tmp_path, registry, "plus1", ["x"], ["y"], lambda given: [{"y": given["x"] + 1}])
    add(
        tmp_path, registry, "sum", ["a", "b"], ["c"], lambda given: [{"c": given["a"] + given["b"]}]
    )
    model = ensemble(
        tmp_path,
        registry,
        ["IN"],
        ["OUT"],
        step("sum", {"a": "left", "b": "right"}, {"c": "OUT"}),
        step("double", {"x": "IN"}, {"y": "left"}),
        step("plus1", {"x": "IN"}, {"y": "right"}),
    )
    responses = await run(model, IN=10)
    assert values(responses) == [{"OUT": 31}]
    assert dict(responses[0].parameters) == {
        "sequence_start": False,
        "sequence_id": 0,
        "sequence_end": False,
    }
    assert responses[0].final
    assert not model.decoupled


async def test_only_the_steps_of_requested_outputs_run(
    tmp_path: Path, registry: ModelRegistry
) -> None:
    cheap = add(tmp_path, registry, "cheap", ["x"], ["y"], lambda given: [{"y": 1}])
    costly = add(tmp_path, registry, "costly", ["x"], ["y"], lambda given: [{"y": 2}])
    model = ensemble(
        tmp_path,
        registry,
        ["IN"],
        ["A", "B"],
        step("cheap", {"x": "IN"}, {"y": "A"}),
        step("costly", {"x": "IN"}, {"y": "B"}),
    )
    assert values(await run(model, outputs=("A",), IN=5)) == [{"A": 1}]
    assert (len(cheap.asked), len(costly.asked)) == (1, 0)
    assert values(await run(model, IN=5)) == [{"A": 1, "B": 2}]


async def test_absent_optional_inputs_are_not_passed(
    tmp_path: Path, registry: ModelRegistry
) -> None:
    model = add(
        tmp_path, registry, "m", ["x", "z?"], ["y"], lambda given: [{"y": given.get("z", -1)}]
    )
    whole = ensemble(
        tmp_path,
        registry,
        ["IN", "MORE?"],
        ["OUT"],
        step("m", {"x": "IN", "z": "MORE"}, {"y": "OUT"}),
    )
    assert values(await run(whole, IN=1)) == [{"OUT": -1}]
    assert model.asked == [{"x": 1}]
    assert values(await run(whole, IN=1, MORE=9)) == [{"OUT": 9}]


async def test_each_response_of_a_decoupled_step_runs_the_next_step_in_order(
    tmp_path: Path, registry: ModelRegistry
) -> None:
    add(
        tmp_path,
        registry,
        "count",
        ["x"],
        ["y"],
        lambda given: [{"y": n} for n in range(given["x"])],
        decoupled=True,
    )
    square = add(tmp_path, registry, "square", ["x"], ["y"], lambda given: [{"y": given["x"] ** 2}])
    model = ensemble(
        tmp_path,
        registry,
        ["IN"],
        ["OUT"],
        step("count", {"x": "IN"}, {"y": "n"}),
        step("square", {"x": "n"}, {"y": "OUT"}),
    )
    responses = await run(model, IN=4)
    assert values(responses) == [{"OUT": 0}, {"OUT": 1}, {"OUT": 4}, {"OUT": 9}]
    assert [response.final for response in responses] == [False, False, False, True]
    assert model.decoupled
    assert await run(model, IN=0) == []
    assert [request.id for request in square.requests] == ["r7"] * 4
    assert {(request.priority, request.parameters["p"]) for request in square.requests} == {(3, 1)}


async def test_error_of_a_step_names_the_ensemble_and_ends_the_request(
    tmp_path: Path, registry: ModelRegistry
) -> None:
    add(
        tmp_path,
        registry,
        "breaks",
        ["x"],
        ["y"],
        lambda given: [{"y": 1}, {"error": 1}, {"y": 3}],
        decoupled=True,
    )
    after = add(tmp_path, registry, "after", ["x"], ["y"], lambda given: [{"y": given["x"]}])
    model = ensemble(
        tmp_path,
        registry,
        ["IN"],
        ["OUT"],
        step("breaks", {"x": "IN"}, {"y": "n"}),
        step("after", {"x": "n"}, {"y": "OUT"}),
    )
    responses = await run(model, IN=1)
    assert values(responses[:1]) == [{"OUT": 1}]
    assert responses[1].error is not None
    assert responses[1].error.message == "in ensemble 'whole', it broke"
    assert (len(responses), len(after.asked)) == (2, 1)


async def test_ensemble_with_an_unloaded_step_is_not_ready_and_names_it(
    tmp_path: Path, registry: ModelRegistry
) -> None:
    model = ensemble(tmp_path, registry, ["IN"], ["OUT"], step("gone", {"x": "IN"}, {"y": "OUT"}))
    assert not model.ready
    (response,) = await run(model, IN=1)
    assert response.error is not None
    assert (
        response.error.message
        == "in ensemble 'whole', Request for unknown model: 'gone' is not found"
    )


async def test_an_ensemble_may_contain_ensembles(tmp_path: Path, registry: ModelRegistry) -> None:
    add(tmp_path, registry, "plus1", ["x"], ["y"], lambda given: [{"y": given["x"] + 1}])
    inner = config(tmp_path, "inner", ["I"], ["O"], step("plus1", {"x": "I"}, {"y": "O"}))
    registry.add("inner", 1, EnsembleModel(inner, registry.find))
    model = ensemble(
        tmp_path,
        registry,
        ["IN"],
        ["OUT"],
        step("inner", {"I": "IN"}, {"O": "m"}),
        step("inner", {"I": "m"}, {"O": "OUT"}),
    )
    assert values(await run(model, IN=1)) == [{"OUT": 3}]


def graph_errors(folder: Path, whole: ModelConfig, *models: ModelConfig) -> list[str]:
    problems = Problems()
    check_graph(whole, {model.name: model for model in (whole, *models)}, problems)
    return [problem.text for problem in problems.errors]


def test_all_errors_of_a_graph_are_reported(tmp_path: Path) -> None:
    part = config(tmp_path, "part", ["x", "z"], ["y"])
    whole = config(
        tmp_path,
        "whole",
        ["IN"],
        ["OUT", "NEVER"],
        step("part", {"x": "IN", "q": "IN"}, {"y": "OUT"})
        + step("missing", {}, {})
        + step("part", {"x": "IN", "z": "IN"}, {"y": "OUT"}),
    )
    assert graph_errors(tmp_path, whole, part) == [
        "'part' has no input 'q'",
        "input 'z' of 'part' is not mapped",
        "there is no model 'missing' here",
        "'OUT' already comes from step 0 ('part')",
        "no step makes the ensemble's output 'NEVER'",
    ]


def test_cyclic_steps_are_refused(tmp_path: Path) -> None:
    part = config(tmp_path, "part", ["x"], ["y"])
    circle = step("part", {"x": "b"}, {"y": "a"}) + step("part", {"x": "a"}, {"y": "b"})
    whole = config(tmp_path, "whole", ["IN"], ["a"], circle)
    assert graph_errors(tmp_path, whole, part) == [
        "some steps wait for tensors that no step before them makes"
    ]
    assert run_order(whole.ensemble_steps, whole.input_names) == []
    cyclic = config(tmp_path, "cyclic", ["IN"], ["O"], step("cyclic", {"IN": "IN"}, {"O": "O"}))
    assert graph_errors(tmp_path, cyclic) == ["the ensemble contains itself"]


def test_needed_steps_include_the_steps_before_them(tmp_path: Path) -> None:
    chain = (
        step("p", {"x": "IN"}, {"y": "a"})
        + step("p", {"x": "a"}, {"y": "b"})
        + step("p", {"x": "a"}, {"y": "c"})
    )
    steps = config(tmp_path, "whole", ["IN"], ["b", "c"], chain).ensemble_steps
    order = run_order(steps, ["IN"])
    assert needed_steps(order, ["c"]) == [steps[0], steps[2]]
    assert needed_steps(order, ["a"]) == [steps[0]]

"""An ensemble as a graph of steps: checks that it can run, and the order to run it in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from slipstream.repository.config import EnsembleStep, ModelConfig
from slipstream.repository.problems import Problems, did_you_mean

_MAX_STEPS = 500  # the time to order the steps grows with the square


def check_graph(config: ModelConfig, models: Mapping[str, ModelConfig], problems: Problems) -> None:
    """Report unknown models, unknown or unmapped tensors, tensors with two sources, and cycles."""

    def error(key: str, text: str) -> None:
        problems.error(config.file, config.line(key), key, text)

    if not config.ensemble_steps:
        error("ensemble_scheduling", "an ensemble needs at least one step")
    if len(config.ensemble_steps) > _MAX_STEPS:
        count = len(config.ensemble_steps)
        error("ensemble_scheduling", f"has {count} steps; at most {_MAX_STEPS} are possible")
        return
    sources = {tensor.name: "the ensemble's input" for tensor in config.inputs}
    for position, step in enumerate(config.ensemble_steps):
        key = f"ensemble_scheduling.step[{position}]"
        model = models.get(step.model_name)
        if model is None:
            error(f"{key}.model_name", f"there is no model '{step.model_name}' here")
            continue
        _check_step(step, model, key, error)
        for name in step.output_map.values():
            if name in sources:
                error(f"{key}.output_map", f"'{name}' already comes from {sources[name]}")
            sources[name] = f"step {position} ('{step.model_name}')"
    for name in config.output_names - sources.keys():
        error("output", f"no step makes the ensemble's output '{name}'")
    if len(run_order(config.ensemble_steps, config.input_names)) < len(config.ensemble_steps):
        error("ensemble_scheduling", "some steps wait for tensors that no step before them makes")
    if config.name in _list_reachable(config, models):
        error("ensemble_scheduling", "the ensemble contains itself")


def _check_step(
    step: EnsembleStep, model: ModelConfig, key: str, error: Callable[[str, str], None]
) -> None:
    for tensor in step.input_map.keys() - model.input_names:
        error(
            f"{key}.input_map",
            f"'{model.name}' has no input '{tensor}'{did_you_mean(tensor, model.input_names)}",
        )
    for tensor in step.output_map.keys() - model.output_names:
        error(
            f"{key}.output_map",
            f"'{model.name}' has no output '{tensor}'{did_you_mean(tensor, model.output_names)}",
        )
    for given in model.inputs:
        if not given.optional and given.name not in step.input_map:
            error(f"{key}.input_map", f"input '{given.name}' of '{model.name}' is not mapped")


def _list_reachable(config: ModelConfig, models: Mapping[str, ModelConfig]) -> set[str]:
    """Return the models that an ensemble uses, directly or through other ensembles."""
    found: set[str] = set()
    waiting = [step.model_name for step in config.ensemble_steps]
    while waiting:
        name = waiting.pop()
        if name not in found and name in models:
            found.add(name)
            waiting += [step.model_name for step in models[name].ensemble_steps]
    return found


def run_order(steps: Collection[EnsembleStep], inputs: Collection[str]) -> list[EnsembleStep]:
    """Return the steps in an order in which each has its inputs, without those that never can."""
    known = set(inputs)
    waiting = list(steps)
    order: list[EnsembleStep] = []
    while True:
        ready = [step for step in waiting if known >= set(step.input_map.values())]
        if not ready:
            return order
        for step in ready:
            order.append(step)
            known.update(step.output_map.values())
        waiting = [step for step in waiting if step not in ready]


def needed_steps(order: Collection[EnsembleStep], outputs: Collection[str]) -> list[EnsembleStep]:
    """Return the steps that at least one of the outputs depends on, in the same order."""
    wanted = set(outputs)
    needed = []
    for step in reversed(list(order)):
        if wanted & set(step.output_map.values()):
            needed.append(step)
            wanted.update(step.input_map.values())
    return needed[::-1]

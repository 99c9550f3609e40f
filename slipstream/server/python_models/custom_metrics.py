"""Metrics that Python models define. The server keeps them, so all instances share a metric."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.metrics.prometheus_text import Family
from slipstream.server.metrics.statistics import Histogram
from slipstream.server.python_models.frames import MetricFamilyFrame, MetricFrame

Labels = tuple[tuple[str, str], ...]


@dataclass
class _Metrics:
    """One family of metrics: its samples by their labels."""

    description: str
    kind: str
    values: dict[Labels, float] = field(default_factory=dict)
    histograms: dict[Labels, Histogram] = field(default_factory=dict)


class CustomMetrics:
    def __init__(self) -> None:
        self._metrics: dict[str, _Metrics] = {}

    def add_family(self, frame: MetricFamilyFrame) -> None:
        self._metrics.setdefault(frame.name, _Metrics(frame.description, frame.kind))

    def change(self, frame: MetricFrame) -> None:
        family = self._metrics[frame.family]
        labels = tuple(sorted(frame.labels.items()))
        if frame.action == "create" and family.kind == "histogram":
            family.histograms.setdefault(labels, Histogram(frame.buckets))
        elif frame.action == "observe":
            family.histograms[labels].observe(frame.value)
        elif frame.action == "set":
            family.values[labels] = frame.value
        else:  # create is an increment by 0
            family.values[labels] = family.values.get(labels, 0.0) + frame.value

    def value(self, family: str, labels: dict[str, str]) -> float:
        found = self._metrics[family].values.get(tuple(sorted(labels.items())))
        if found is None:
            raise InferenceError(
                f"the metric family '{family}' has no metric with these labels", Code.NOT_FOUND
            )
        return found

    def families(self) -> Iterator[Family]:
        for name, family in self._metrics.items():
            samples = [(dict(labels), value) for labels, value in family.values.items()]
            histograms = [
                (dict(labels), histogram) for labels, histogram in family.histograms.items()
            ]
            yield Family(name, family.kind, family.description, samples, histograms)

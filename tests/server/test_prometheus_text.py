"""The reader of Prometheus' text format agrees with Prometheus' own library."""

import math
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import ScriptedLoop

from slipstream.client.prometheus import Sample, parse_metrics
from slipstream.engine.messages import EngineStats
from slipstream.server.metrics.optional_metrics import MetricsConfig
from slipstream.server.metrics.server_metrics import ServerMetrics

UNUSUAL = r"""
# HELP requests_total Text with "quotes", a \\ and a \n line end
# TYPE requests_total counter
requests_total{path="a\"b\\c\nd}e,f=g",other=""} 1.5 1731708085210
# a comment
# TYPE plain gauge
plain -3e-05
plain{ a = "b" , } +Inf
untyped{le="0.5"} NaN
# HELP h A histogram
# TYPE h histogram
h_bucket{le="+Inf"} 2
h_sum 0.5
h_count 2
# HELP own_count A counter that ends like a part of a histogram
# TYPE own_count counter
own_count 7
"""


def expected_samples(text: str) -> list[Sample]:
    return [
        Sample(
            sample.name,
            family.documentation,
            dict(sample.labels),
            sample.value,
            family.name,
            family.type,
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def server_text() -> str:
    metrics = ServerMetrics(config=MetricsConfig(summary_latencies=True))
    metrics.model("a model")
    counters = metrics.model('quotes " and \\')
    counters.tokens.first_token_s.observe(0.3)
    metrics.watch_engine("llm", SimpleNamespace(info=ScriptedLoop().info, stats=EngineStats()))
    return metrics.render()


@pytest.mark.parametrize("text", [UNUSUAL, server_text(), ""], ids=["unusual", "server", "empty"])
def test_samples_equal_those_of_the_library(text: str) -> None:
    found = list(parse_metrics(text))
    expected = expected_samples(text)
    nan_free = [sample._replace(value=0) for sample in found]
    assert nan_free == [sample._replace(value=0) for sample in expected]
    for sample, other in zip(found, expected, strict=True):
        both_nan = math.isnan(sample.value) and math.isnan(other.value)
        assert sample.value == other.value or both_nan


@pytest.mark.parametrize(
    "line", ["no_value", "name{a=b} 1", 'name{a="b} 1', "name{} one", "<html>", "9name 1"]
)
def test_invalid_lines_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"not|convert"):
        list(parse_metrics(line))

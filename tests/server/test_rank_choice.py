"""How many ranks run an engine where the settings do not say."""

import logging

import pytest

from slipstream.engine.settings import EngineSettings
from slipstream.model.spec import ModelSpec
from slipstream.server.engine_link.rank_choice import choose_ranks, explain_ranks
from slipstream.weights.parameters import Quantisation


class Config:
    """The part of an engine's configuration that the choice reads."""

    spec = ModelSpec("LlamaForCausalLM", 515, 64, 2, 8, 4, 16, 96, 256)
    quantisation = Quantisation()

    def __init__(self, wanted):
        self.wanted_ranks = wanted


@pytest.mark.parametrize(
    ("settings", "wanted", "gpus", "ranks"),
    [
        ({}, 1, 8, 1),
        ({}, 4, 8, 4),
        ({}, 4, 3, 2),  # 3 ranks do not divide the model
        ({}, 4, 1, 1),
        ({}, 4, 0, 1),  # a CPU
        ({"ranks": 2}, 4, 8, 2),
        ({"ranks": 2}, 1, 0, 2),  # asked for: on a CPU, too
        ({"devices": (0, 3)}, 1, 4, 2),
        ({"devices": (0, 3)}, 1, 0, 1),
        ({"devices": (0, 1, 2, 3), "replicas": 2}, 1, 4, 2),
        ({"replicas": 2}, 4, 4, 2),
        ({"replicas": 8}, 4, 4, 1),
        ({"wanted_ranks": 2}, 4, 4, 2),  # a launcher
        ({"wanted_ranks": 8}, 1, 4, 4),
        ({"wanted_ranks": 8}, 1, 0, 1),
    ],
)
def test_ranks_come_from_settings_then_gpus_of_the_repository_then_the_build(
    settings, wanted, gpus, ranks
):
    assert choose_ranks(EngineSettings(**settings), Config(wanted), gpus).ranks == ranks


def test_another_number_than_that_of_the_build_is_explained(caplog):
    caplog.set_level(logging.INFO)
    explain_ranks("tensorrt_llm", EngineSettings(ranks=1), Config(1))
    explain_ranks("tensorrt_llm", EngineSettings(ranks=4), Config(4))
    assert not caplog.messages
    explain_ranks("tensorrt_llm", EngineSettings(ranks=2), Config(4))
    explain_ranks("tensorrt_llm", EngineSettings(ranks=1, wanted_ranks=8), Config(1))
    explain_ranks("tensorrt_llm", EngineSettings(ranks=4), Config(6))
    assert caplog.messages == [
        "tensorrt_llm was built for 4 ranks, which need as many GPUs: it runs with 2 ranks",
        "tensorrt_llm was started for 8 ranks, which need as many GPUs: it runs with 1 rank",
        "tensorrt_llm was built for 6 ranks, which do not divide this model: it runs with 4 ranks",
    ]

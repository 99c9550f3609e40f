"""Engine settings of the command line, checked against the repository before anything loads."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.engine.settings import EngineSettings
from slipstream.model.spec import ModelSpec
from slipstream.server.engine_link.client import Supervision
from slipstream.server.engine_link.pool import EnginePool
from slipstream.weights.parameters import Quantisation

SPEC = ModelSpec("LlamaForCausalLM", 96, 64, 2, 8, 2, 8, 32, 128)


@dataclass
class Engine:
    name: str
    longest: int = 2048
    settings: EngineSettings = field(default_factory=EngineSettings)

    @property
    def engine_config(self):
        build = SimpleNamespace(max_seq_len=self.longest)
        return SimpleNamespace(
            path=Path(self.name),
            build=build,
            spec=SPEC,
            quantisation=Quantisation(),
            wanted_ranks=1,
        )


def check(overrides, *engines):
    EnginePool(overrides, Supervision(), ()).check(engines)


def test_the_longest_sequence_may_not_exceed_every_build():
    check({"max_sequence_tokens": 4096}, Engine("a"), Engine("b", 4096))
    check({"max_sequence_tokens": 4096})  # a server without engines
    with pytest.raises(ValueError, match="--max-seq-len 4097 is more than the 4096 tokens that"):
        check({"max_sequence_tokens": 4097}, Engine("a"), Engine("b", 4096))


def test_settings_that_contradict_the_repositorys_name_the_engine():
    unchunked = Engine("b", settings=EngineSettings(chunked=False))
    with pytest.raises(ValueError, match="b: target_itl_ms needs prompts in chunks"):
        check({"target_itl_ms": 20.0}, Engine("a"), unchunked)
    check({"target_itl_ms": 20.0, "chunked": True}, Engine("a"), unchunked)

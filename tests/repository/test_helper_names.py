"""Which models are helpers of others."""

from __future__ import annotations

import pytest

from slipstream.repository.templates import FIXED_NAMES, helpers_among

TUTORIAL = {*FIXED_NAMES, "tensorrt_llm_bls"}


@pytest.mark.parametrize(
    ("names", "helpers"),
    [
        ({*FIXED_NAMES, "gpt2"}, set(FIXED_NAMES)),
        ({"ensemble", "gpt2"}, {"ensemble"}),
        ({"gpt2", "gpt2-ensemble", "gpt2-tensorrt_llm"}, {"gpt2-ensemble", "gpt2-tensorrt_llm"}),
        (TUTORIAL, set()),
        ({*TUTORIAL, "my_model"}, set()),
        (set(FIXED_NAMES), set()),
        ({"other-ensemble"}, set()),
    ],
)
def test_helpers_are_the_models_that_an_import_writes_beside_its_own(
    names: set[str], helpers: set[str]
) -> None:
    assert helpers_among(names) == helpers

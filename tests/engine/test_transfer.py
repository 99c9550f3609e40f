"""Numbers copied to the device have the types that torch gives them."""

import pytest
import torch

from slipstream.engine.with_torch.transfer import list_to_device


@pytest.mark.parametrize("values", [[3, 0, 2**32 - 1], [0.1, 1, 2.5], [True, False]], ids=str)
def test_lists_on_the_device_have_the_types_of_torch_tensor(values):
    made, expected = list_to_device(values, torch.device("cpu")), torch.tensor(values)
    assert made.dtype == expected.dtype
    assert torch.equal(made, expected)

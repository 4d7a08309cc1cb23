"""After the module whose fixtures have set something."""

import os

import pytest
import torch


@pytest.mark.ranks(2)
def test_in_another_module():
    assert "OF_THE_MODULE" not in os.environ
    assert "PATH" in os.environ
    assert torch.ones(1).dtype == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()

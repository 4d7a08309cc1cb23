"""What fixtures of a wider scope than one test set holds for all of their tests, and for no other."""

import os
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.ranks(2)


@pytest.fixture(scope="module")
def of_the_module():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OF_THE_MODULE", "yes")
        patch.delenv("PATH")
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.set_default_device("meta")
        yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_default_device(None)


def check_and_spoil(rank):
    assert os.environ["OF_THE_MODULE"] == "yes"
    assert "PATH" not in os.environ
    assert os.environ["RANK"] == str(rank)
    assert torch.ones(1).dtype == torch.float64
    assert torch.ones(1).device.type == "meta"
    assert torch.are_deterministic_algorithms_enabled()
    os.environ["OF_THE_MODULE"] = "spoilt"
    torch.set_default_dtype(torch.float16)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("number", range(3))
def test_of_the_module(of_the_module, rank, number):
    check_and_spoil(rank)


class TestOfAClass:
    @classmethod
    def setup_class(cls):
        cls.folder = Path.cwd()
        os.chdir("/")
        torch.set_num_threads(2)

    @classmethod
    def teardown_class(cls):
        os.chdir(cls.folder)
        torch.set_num_threads(1)

    @pytest.mark.parametrize("number", range(3))
    def test_in_it(self, of_the_module, rank, number):
        assert Path.cwd() == Path("/")
        assert torch.get_num_threads() == 2
        os.chdir(self.folder)
        check_and_spoil(rank)


def test_after_the_class(of_the_module, rank):
    assert Path.cwd() != Path("/")
    assert torch.get_num_threads() == 1
    check_and_spoil(rank)

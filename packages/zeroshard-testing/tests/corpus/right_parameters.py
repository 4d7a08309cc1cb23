"""Parameters and ids of all kinds."""

import enum
import threading
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn, ones

pytestmark = pytest.mark.ranks(2)


class Color(enum.Enum):
    RED = 1


@dataclass(frozen=True)
class Settings:
    name: str
    size: int = 2


class Named:
    is_named_by_conftest = True
    name = "x"


def local_class():
    class Local:
        value = 3

    return Local


@pytest.mark.parametrize("text", ["a", "b"])
def test_texts(text, rank):
    assert text in "ab"


@pytest.mark.parametrize("x", [1, 2.5, None, True, b"bytes", 1j, float("nan"), (1, 2), {"a": 1}, Color.RED])
def test_values(x, request):
    assert request.node.callspec.params["x"] is x or x == request.node.callspec.params["x"]


@pytest.mark.parametrize("function", [lambda x: x + 1, partial(int.__add__, 1), torch.relu, nn.Linear, len])
def test_functions(function):
    assert callable(function)


@pytest.mark.parametrize("cls", [local_class(), local_class()])
def test_local_classes(cls):
    assert cls().value == 3


@pytest.mark.parametrize("x", [threading.Lock(), (number for number in "abc"), object()])
def test_what_cannot_be_pickled(x):
    assert x is not None


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.Sequential(nn.ReLU())], ids=["linear", "relu"])
def test_modules(module):
    assert module(ones(1, 2)).shape == (1, 2)


@pytest.mark.parametrize("x", [torch.arange(3), ones(2, requires_grad=True)])
def test_tensors(x, rank):
    assert x.sum() in (2, 3)


@pytest.mark.parametrize("settings", [Settings("a"), Settings("b", 3)], ids=lambda settings: settings.name)
def test_ids_of_a_function(settings, request):
    assert f"-{settings.name}" in request.node.name


@pytest.mark.parametrize("x", [Named()])
def test_ids_of_a_conftest(x, request):
    assert "named-x" in request.node.name


@pytest.mark.parametrize(
    "text", ["", " ", "a b", "a/b", "a::b", "[x]", "ü", "日本", "\n", "\\", "a-b", "%s", "'", '"', "{}", "<b>", "\x00"]
)
def test_strange_ids(text, tmp_path):
    assert tmp_path.is_dir()


@pytest.mark.parametrize("text", ["\ud800"], ids=["surrogate"])
def test_a_lone_surrogate(text):
    assert text == "\ud800"


@pytest.mark.parametrize("x", ["same", "same"])
def test_ids_that_are_alike(x):
    assert x == "same"


@pytest.mark.parametrize("x", [pytest.param(1, id="first"), pytest.param(2, id="x" * 150)])
def test_ids_that_are_given(x, tmp_path):
    assert x in (1, 2)


@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.parametrize("y", [3, 4])
@pytest.mark.ranks(2, 3)
def test_products(x, y, world_size):
    assert (x, y) != (2, 2)
    assert dist.get_world_size() == world_size


@pytest.mark.parametrize(("x", "expected"), [(1, 2), (2, 4)])
def test_several(x, expected):
    assert 2 * x == expected


@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.ranks(2)), 2])
def test_marks_of_parameters(x):
    assert x in (1, 2)


@pytest.mark.parametrize("backend", ["gloo"])
def test_names_of_the_marker(backend):
    assert dist.get_backend() == backend


@pytest.mark.parametrize("x", range(3))
def test_a_range(x):
    assert x < 3


def pytest_generate_tests(metafunc):
    if "generated" in metafunc.fixturenames:
        metafunc.parametrize("generated", [10, 20])


def test_generated(generated, rank):
    assert generated in (10, 20)


@pytest.mark.parametrize("x", [ones(1000, 1000)])
def test_large(x):
    assert x.sum() == 1_000_000
    x.zero_()
    x.add_(1)


@pytest.mark.parametrize("mutable", [[]])
def test_changed_by_the_test(mutable, rank):
    mutable.append(rank)
    assert mutable == [rank]


def test_defaults(rank, x=3):
    assert x == 3

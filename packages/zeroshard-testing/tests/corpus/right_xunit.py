"""Classes and modules with setup and teardown in the style of xunit."""

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)

log = []


def setup_module(module):
    log.append(f"setup of {module.__name__}")


def teardown_module(module):
    log.append("teardown")


def setup_function(function):
    function.prepared = dist.get_rank()


def teardown_function(function):
    assert function.prepared == dist.get_rank()


def test_module_and_function(rank):
    assert log == [f"setup of {__name__}"]
    assert test_module_and_function.prepared == rank


class TestAll:
    prepared = None

    @classmethod
    def setup_class(cls):
        cls.of_the_class = ["setup"]

    @classmethod
    def teardown_class(cls):
        assert cls.of_the_class == ["setup"]

    def setup_method(self, method):
        self.of_the_test = method.__name__
        x = torch.ones(1)
        dist.all_reduce(x)
        self.summed = x

    def teardown_method(self):
        dist.barrier()
        assert self.of_the_test.startswith("test_")

    def test_method(self):
        assert self.of_the_test == "test_method"
        assert self.summed == 2

    @pytest.mark.parametrize("x", [1, 2])
    def test_parameters(self, x, rank):
        assert self.prepared is None
        self.prepared = x

    @pytest.mark.ranks(3)
    def test_nearer_mark(self, world_size):
        assert dist.get_world_size() == world_size == 3


class TestInherited(TestAll):
    def setup_method(self, method):
        super().setup_method(method)
        self.more = 3

    def test_method(self):
        assert self.more == 3
        super().test_method()


class TestOuter:
    class TestInner:
        @classmethod
        def setup_class(cls):
            cls.value = 5

        def test_nested(self):
            assert self.value == 5


class Mixin:
    @pytest.fixture(autouse=True)
    def prepare(self, rank):
        self.rank = rank

    @property
    def doubled(self):
        return 2 * self.rank


class TestMixedIn(Mixin):
    def test_mixin(self, rank):
        assert self.doubled == 2 * rank

    @staticmethod
    def test_static(rank):
        assert rank in (0, 1)

    @classmethod
    def test_of_the_class(cls, rank):
        assert cls is TestMixedIn


@pytest.mark.ranks(4)
@pytest.mark.parametrize("x", ["a", "b"])
class TestMarked:
    def test_marks(self, x, world_size):
        assert world_size == 4
        assert x in "ab"


class TestUnpicklable:
    def setup_method(self):
        self.closure = lambda: dist.get_rank()
        self.generator = (number for number in range(3))

    def test_attributes(self, rank):
        assert self.closure() == rank
        assert next(self.generator) == 0


class TestCallable:
    def test_called_by_another(self):
        self.test_calls = lambda: 3
        assert self.test_calls() == 3


@pytest.mark.usefixtures("variable_from_conftest")
class TestUsed:
    def test_used(self, monkeypatch):
        monkeypatch.delenv("FROM_CONFTEST")

"""Setup and teardown functions in the style of xunit that fail on a rank."""

import unittest

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2, timeout=30)
says = pytest.mark.says


def setup_function(function):
    if function.__name__ == "test_setup_function":
        assert dist.get_rank() == 0


def teardown_function(function):
    if function.__name__ == "test_teardown_function":
        assert dist.get_rank() == 0


@says(r"rank 1 failed: assert 1 == 0")
def test_setup_function():
    pass


@says(r"rank 1 failed: assert 1 == 0")
def test_teardown_function():
    pass


class TestSetupMethod:
    def setup_method(self):
        assert dist.get_rank() == 0

    @says(r"rank 1 failed: assert 1 == 0")
    def test_setup_method(self):
        pass


class TestTeardownMethod:
    def teardown_method(self):
        assert dist.get_rank() == 0

    @says(r"rank 1 failed: assert 1 == 0")
    def test_teardown_method(self):
        pass


class ChecksInTeardown:
    def setup_method(self, method):
        self.left = []

    def teardown_method(self, method):
        assert not self.left


class TestInheritedTeardownMethod(ChecksInTeardown):
    @says(r"rank 1 failed: assert not \[1\]")
    def test_inherited_teardown_method(self, rank):
        if rank:
            self.left.append(1)

    @says(r"ranks 0, 1 failed: assert not \[1\]")
    def test_inherited_teardown_method_on_all(self):
        self.left.append(1)


class TestSetupClass:
    @classmethod
    def setup_class(cls):
        raise OSError("cannot set up")

    @says(r"ranks 0, 1 failed: OSError: cannot set up")
    def test_setup_class(self):
        pass


class TestTeardownClass:
    @classmethod
    def teardown_class(cls):
        assert dist.get_rank() == 0

    @says(r"rank 1 failed: assert 1 == 0")
    def test_teardown_class(self):
        pass


class TestTeardownClassThatChecks:
    @classmethod
    def setup_class(cls):
        cls.left = []

    @classmethod
    def teardown_class(cls):
        assert not cls.left

    @says(r"rank 1 failed: (AssertionError: )?assert not \[1\]")
    def test_teardown_class_that_checks(self, rank):
        if rank:
            self.left.append(1)


class TestEffect:
    def setup_method(self):
        torch.set_default_dtype(torch.float64)

    def teardown_method(self):
        torch.set_default_dtype(torch.float32)

    @says(r"ranks 0, 1 failed: assert torch.float64 == torch.float32")
    def test_denied_a_default_dtype(self):
        assert torch.ones(1).dtype == torch.float32


class TestAttribute:
    def setup_method(self):
        self.prepared = dist.get_rank()

    @says(r"rank 1 failed: assert 1 == 0")
    def test_denied_an_attribute(self):
        assert self.prepared == 0


class TestCollectiveInSetup:
    def setup_method(self):
        if dist.get_rank() == 0:
            dist.barrier()

    @says(r"rank 0 stuck in barrier \(collective #1 .*\): rank 1 never joins, it has ended")
    def test_left_out_in_setup(self):
        pass


class TestCollectiveInTeardown:
    def teardown_method(self):
        if dist.get_rank() == 0:
            dist.barrier()

    @says(r"rank 0 stuck in barrier \(collective #1 .*\): rank 1 never joins, it has ended")
    def test_left_out_in_teardown(self):
        pass


class TestOfUnittest(unittest.TestCase):
    @says(r"[\s\S]*only functions and methods of plain classes can run on ranks")
    def test_method_of_unittest(self):
        pass


def test_healthy_after_xunit(rank):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.sum() == 6

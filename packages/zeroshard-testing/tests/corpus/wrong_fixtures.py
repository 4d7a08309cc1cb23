"""Fixtures that fail on a rank, and fixtures whose effect on the ranks a test denies."""

import logging
import math
import os
import random
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import ones
from zeroshard_testing import rank_fixture

pytestmark = pytest.mark.ranks(2, timeout=30)
says = pytest.mark.says


@pytest.fixture
def raises_in_setup():
    raise OSError("cannot set up")


@pytest.fixture
def raises_in_setup_on_one(rank):
    if rank:
        raise OSError("cannot set up")


@pytest.fixture
def raises_in_teardown():
    yield
    raise OSError("cannot clean up")


@pytest.fixture
def raises_in_teardown_on_one(rank):
    yield
    if rank:
        raise OSError("cannot clean up")


@pytest.fixture
def checks_in_teardown(rank):
    found = []
    yield found
    assert found == []


@pytest.fixture
def yields_twice():
    yield 1
    yield 2


@pytest.fixture
def never_yields(rank):
    if rank == 0:
        yield


@pytest.fixture
def raises_in_a_finalizer(request, rank):
    request.addfinalizer(lambda: 1 // (1 - rank))


@says(r"ranks 0, 1 failed: OSError: cannot set up")
def test_raised_in_setup(raises_in_setup):
    pass


@says(r"rank 1 failed: OSError: cannot set up")
def test_raised_in_setup_on_one(raises_in_setup_on_one):
    pass


@says(r"rank 1 failed: OSError: cannot set up")
def test_raised_in_setup_while_the_other_waits(raises_in_setup_on_one):
    dist.all_reduce(ones(2))


@pytest.mark.usefixtures("raises_in_setup_on_one")
@says(r"rank 1 failed: OSError: cannot set up")
def test_raised_in_setup_of_a_fixture_that_is_used():
    pass


@says(r"rank 1 failed: OSError: cannot set up")
def test_raised_in_setup_of_a_fixture_that_is_got(request):
    request.getfixturevalue("raises_in_setup_on_one")


@says(r"ranks 0, 1 failed: OSError: cannot clean up")
def test_raised_in_teardown(raises_in_teardown):
    pass


@says(r"rank 1 failed: OSError: cannot clean up")
def test_raised_in_teardown_on_one(raises_in_teardown_on_one):
    pass


@says(r"rank 1 failed: assert \[1\] == \[\]")
def test_found_in_teardown(checks_in_teardown, rank):
    if rank:
        checks_in_teardown.append(1)


@says(r"rank 1 failed: assert 1 == 0")
def test_raised_before_a_teardown_that_raises(raises_in_teardown_on_one, rank):
    assert rank == 0


@says(r"ranks 0, 1 failed: .*more than")
def test_yielded_twice(yields_twice):
    pass


@says(r"rank 1 failed: .*(yield|StopIteration)")
def test_never_yielded(never_yields):
    pass


@says(r"rank 1 failed: ZeroDivisionError: ")
def test_raised_in_a_finalizer(raises_in_a_finalizer):
    pass


@says(r"rank 1 failed: ZeroDivisionError: ")
def test_raised_in_a_finalizer_of_the_test(request, rank):
    request.addfinalizer(lambda: 1 // (1 - rank))


@says(r"[\s\S]*fixture 'missing' not found")
def test_asked_for_what_is_missing(missing):
    pass


@says(r"[\s\S]*missing")
def test_got_what_is_missing(request):
    request.getfixturevalue("missing")


@pytest.fixture
def in_a_circle(in_the_circle):
    pass


@pytest.fixture
def in_the_circle(in_a_circle):
    pass


@says(r"[\s\S]*recursive dependency involving fixture")
def test_asked_in_a_circle(in_a_circle):
    pass


@pytest.fixture(scope="module")
def of_the_module(raises_in_setup):
    pass


@says(r"[\s\S]*ScopeMismatch")
def test_asked_for_a_narrower_scope(of_the_module):
    pass


@pytest.fixture(params=[0, 1])
def parameter(request, rank):
    if rank:
        raise OSError(f"cannot set up {request.param}")


@says(r"rank 1 failed: OSError: cannot set up [01]")
def test_raised_for_each_parameter(parameter):
    pass


@pytest.fixture(params=[0], ids=["none"])
def collective_in_setup(rank):
    if rank == 0:
        dist.barrier()


@says(r"rank 0 stuck in barrier \(collective #1 .*\): rank 1 never joins, it has ended")
def test_left_out_in_setup(collective_in_setup):
    pass


@pytest.fixture
def collective_in_teardown(rank):
    yield
    if rank == 0:
        dist.barrier()


@says(r"rank 0 stuck in barrier \(collective #1 .*\): rank 1 never joins, it has ended")
def test_left_out_in_teardown(collective_in_teardown):
    pass


@pytest.fixture
def message_in_setup(rank):
    if rank == 0:
        dist.isend(ones(2), 1)


@says(r"ranks? \d.*(message|send|sent)")
def test_message_of_a_fixture_that_is_not_received(message_in_setup):
    pass


def test_healthy_after_fixtures_that_raised(rank):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.sum() == 6


@pytest.fixture
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@says(r"ranks 0, 1 failed: assert torch.float64 == torch.float32")
def test_denied_a_default_dtype(double_precision):
    assert ones(1).dtype == torch.float32


@pytest.mark.usefixtures("double_precision")
@says(r"ranks 0, 1 failed: assert torch.float64 == torch.float32")
def test_denied_a_default_dtype_that_is_used():
    assert ones(1).dtype == torch.float32


@pytest.fixture
def warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@says(r"rank 1 failed: UserWarning: careful")
def test_warned_where_a_fixture_forbids_it(warnings_are_errors, rank):
    if rank:
        warnings.warn("careful", stacklevel=1)


@pytest.fixture
def patched():
    with mock.patch("math.pi", 3):
        yield


@says(r"ranks 0, 1 failed: assert 3 > 3.1")
def test_denied_a_patch(patched):
    assert math.pi > 3.1


@mock.patch("math.pi", 3)
@says(r"ranks 0, 1 failed: assert 3 > 3.1")
def test_denied_a_patch_of_its_own():
    assert math.pi > 3.1


@mock.patch("os.getcwd")
@says(r"ranks? [01](, 1)? failed: AssertionError: Expected '\w+' to have been called once")
def test_denied_a_mock(getcwd):
    getcwd.assert_called_once()


@mock.patch.dict(os.environ, {"FOR_THIS_TEST": "yes"})
@says(r"ranks 0, 1 failed: assert 'yes' is None|ranks 0, 1 failed: .*'yes'")
def test_denied_a_patch_of_the_environment():
    assert os.environ.get("FOR_THIS_TEST") is None


@says(r"ranks 0, 1 failed: .*FROM_CONFTEST")
def test_denied_a_variable_of_a_conftest(variable_from_conftest):
    assert "FROM_CONFTEST" not in os.environ


@pytest.fixture
def patched_by_pytest(monkeypatch, rank):
    monkeypatch.setattr(math, "pi", 3 + rank)


@says(r"rank 1 failed: assert 4 == 3")
def test_denied_a_patch_of_pytest(patched_by_pytest):
    assert math.pi == 3


@pytest.fixture
def seeded():
    random.seed(5)


@says(r"ranks 0, 1 failed: assert 0\.62")
def test_denied_a_seed(seeded):
    assert random.random() == 0


@says(r"rank 1 failed: .*assert 1 == 0|rank 1 failed: .*rank")
def test_denied_the_value_of_a_conftest(from_conftest):
    assert from_conftest["rank"] == 0


@says(r"ranks? [01](, 1)? failed: .*assert 'hello from \d\\n' == ''")
def test_denied_what_was_captured(capsys, rank):
    print("hello from", rank)
    assert capsys.readouterr().out == ""


@says(r"rank 1 failed: .*assert (not )?\[<LogRecord|rank 1 failed: assert not")
def test_denied_what_was_logged(caplog, rank):
    if rank:
        logging.getLogger().warning("careful")
    assert not caplog.records


@says(r"rank 1 failed: assert 1 == 0")
def test_denied_what_was_warned_of(recwarn, rank):
    if rank:
        warnings.warn("careful", stacklevel=1)
    assert len(recwarn) == 0


@says(r"ranks 0, 1 failed: .*assert 'test_denied_its_name")
def test_denied_its_name(request):
    assert request.node.name == "another"


class TestAutouse:
    @pytest.fixture(autouse=True)
    def double_precision(self):
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)

    @says(r"ranks 0, 1 failed: assert torch.float64 == torch.float32")
    def test_denied_a_default_dtype(self):
        assert ones(1).dtype == torch.float32


class TestAutouseThatChecks:
    @pytest.fixture(autouse=True)
    def leaves_no_variable(self):
        before = dict(os.environ)
        yield
        assert os.environ.get("LEFT") == before.get("LEFT")

    @says(r"rank 1 failed: .*'yes'")
    def test_found_in_teardown(self, rank):
        if rank:
            os.environ["LEFT"] = "yes"


class TestClassScope:
    @pytest.fixture(scope="class")
    def of_the_class(self):
        yield
        assert dist.is_initialized() and os.environ["RANK"] == "0"

    @says(r"rank 1 failed: .*'1' == '0'")
    def test_found_in_teardown_of_the_class(self, of_the_class):
        pass


class TestClassScopeOfSetup:
    @pytest.fixture(scope="class", autouse=True)
    def of_the_class(self):
        assert os.environ["RANK"] == "0"

    @says(r"rank 1 failed: .*'1' == '0'")
    def test_found_in_setup_of_the_class(self):
        pass


@rank_fixture
def rank_raises_in_setup(rank):
    raise OSError("cannot set up")


@rank_fixture
def rank_raises_in_teardown(rank):
    yield rank
    if rank:
        raise OSError("cannot clean up")


@rank_fixture
def rank_yields_twice(rank):
    yield 1
    yield 2


@rank_fixture
def rank_double_precision(rank):
    torch.set_default_dtype(torch.float64)


@says(r"ranks 0, 1 failed: OSError: cannot set up")
def test_rank_fixture_raised_in_setup(rank_raises_in_setup):
    pass


@says(r"rank 1 failed: OSError: cannot clean up")
def test_rank_fixture_raised_in_teardown(rank_raises_in_teardown):
    pass


@says(r"ranks 0, 1 failed: .*more than")
def test_rank_fixture_yielded_twice(rank_yields_twice):
    pass


@pytest.mark.usefixtures("rank_raises_in_teardown")
@says(r"rank 1 failed: OSError: cannot clean up")
def test_rank_fixture_that_is_used_raised():
    pass


@pytest.mark.usefixtures("rank_double_precision")
@says(r"ranks 0, 1 failed: assert torch.float64 == torch.float32")
def test_denied_a_rank_fixture_that_is_used():
    assert ones(1).dtype == torch.float32


@says(r"rank 1 failed: (AssertionError: )?assert 1 == 0")
def test_denied_a_rank_fixture_that_is_got(request):
    assert request.getfixturevalue("rank_raises_in_teardown") == 0


@says(r"ranks 0, 1 failed: OSError: cannot set up")
def test_got_a_rank_fixture_that_raises(request):
    request.getfixturevalue("rank_raises_in_setup")


def test_healthy_after_fixtures_with_effects(rank):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.sum() == 6
    assert math.pi > 3.1
    assert x.dtype == torch.float32

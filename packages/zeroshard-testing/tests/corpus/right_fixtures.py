"""Fixtures, set up and torn down on each rank as pytest does anywhere."""

import logging
import math
import os
import sys
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers_beside import double
from torch import ones
from zeroshard_testing import rank_fixture

pytestmark = pytest.mark.ranks(2)

events = []


def all_equal(value):
    """Whether a number is the same on all ranks."""
    x = torch.tensor([value, -value])
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x[0] == -x[1]


@pytest.fixture
def of_the_function(rank):
    return [rank]


@pytest.fixture(scope="class")
def of_the_class():
    return {"process": os.getpid()}


@pytest.fixture(scope="module")
def of_the_module():
    events.append("module")
    yield [os.getpid()]
    events.append("end of the module")


@pytest.fixture(scope="package")
def of_the_package():
    return os.getpid()


def test_scopes(of_the_function, of_the_class, of_the_module, of_the_package, of_the_session, rank):
    assert of_the_function == [rank]
    assert {of_the_class["process"], of_the_session["process"], of_the_package, *of_the_module} == {os.getpid()}
    assert events == ["module"]


@pytest.mark.parametrize("turn", [1, 2])
def test_a_function_scope_is_new_each_time(of_the_function, turn):
    of_the_function.append(turn)
    assert len(of_the_function) == 2


class TestClassScope:
    @pytest.fixture(scope="class")
    def counter(self):
        return []

    @pytest.mark.parametrize("turn", [1, 2])
    def test_is_kept_for_the_class(self, counter, turn):
        counter.append(turn)
        assert all_equal(len(counter))


@pytest.mark.parametrize("turn", [1, 2])
def test_a_module_scope_is_kept(of_the_module, turn):
    of_the_module.append(turn)
    assert events == ["module"]
    assert all_equal(len(of_the_module))


@pytest.fixture(scope="module")
def group_of_the_module():
    return []


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_module_state_is_the_same_on_all_ranks(group_of_the_module, turn):
    group_of_the_module.append(turn)
    assert all_equal(len(group_of_the_module))


def scope_by_option(fixture_name, config):
    return "module" if fixture_name == "of_some_scope" else "function"


@pytest.fixture(scope=scope_by_option)
def of_some_scope(request):
    return request.scope


def test_a_dynamic_scope(of_some_scope):
    assert of_some_scope == "module"


@pytest.fixture(autouse=True)
def always(request):
    request.node.user_properties.append(("always", "yes"))
    os.environ["ALWAYS"] = "yes"
    yield
    del os.environ["ALWAYS"]


def test_autouse(request):
    assert os.environ["ALWAYS"] == "yes"
    assert ("always", "yes") in request.node.user_properties


@pytest.fixture(params=["a", "b"], ids=str.upper)
def letter(request):
    return request.param


def test_parameters(letter, request):
    assert letter in "ab"
    assert letter.upper() in request.node.name


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.filterwarnings("error"))])
def number(request, letter):
    yield letter * request.param


def test_parameters_that_combine(number):
    assert number in ("a", "b", "aa", "bb")


@pytest.fixture(scope="module", params=[lambda: 1, lambda: 2])
def function_of_the_module(request):
    return request.param


def test_parameters_of_a_module(function_of_the_module, rank):
    assert function_of_the_module() in (1, 2)


@pytest.fixture
def sized(request):
    return ones(request.param)


@pytest.mark.parametrize("sized", [2, 3], indirect=True)
def test_indirect_parameters(sized, rank):
    dist.all_reduce(sized)
    assert sized[0] == 2


@pytest.mark.parametrize(("sized", "size"), [(2, 2), (3, 3)], indirect=["sized"])
def test_some_indirect_parameters(sized, size):
    assert len(sized) == size


@pytest.fixture
def rank_twice(rank):
    return double(rank)


def test_a_fixture_that_uses_the_rank(rank_twice, rank):
    assert rank_twice == 2 * rank


@pytest.fixture
def summed(rank, process_group):
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=process_group)
    yield x
    dist.barrier()


def test_a_fixture_that_communicates(summed):
    assert summed == 1


@pytest.fixture
def subgroup():
    group = dist.new_group([0, 1])
    yield group
    dist.destroy_process_group(group)


def test_a_fixture_that_makes_a_group(subgroup):
    dist.all_reduce(ones(1), group=subgroup)


@pytest.fixture
def cannot_be_pickled():
    with tempfile.TemporaryFile() as file:
        yield file, (number for number in range(3)), sys._getframe()


def test_a_value_that_cannot_be_pickled(cannot_be_pickled):
    assert list(cannot_be_pickled[1]) == [0, 1, 2]


@pytest.fixture
def make_tensor(rank):
    def make(size):
        return torch.full((size,), float(rank))

    return make


def test_a_factory(make_tensor, rank):
    assert make_tensor(3).sum() == 3 * rank


def test_from_a_conftest(from_conftest, variable_from_conftest, rank):
    assert from_conftest == {"rank": rank}
    assert os.environ["FROM_CONFTEST"] == "yes"


@pytest.fixture
def to_override(to_override):
    return f"{to_override} and module"


def test_overriding(to_override):
    assert to_override == "conftest and module"


class TestOverriding:
    @pytest.fixture
    def to_override(self, to_override):
        return f"{to_override} and class"

    def test_overriding(self, to_override):
        assert to_override == "conftest and module and class"


@pytest.mark.usefixtures("variable_from_conftest")
def test_used(rank):
    assert os.environ["FROM_CONFTEST"] == "yes"


def test_got_by_name(request, rank):
    assert request.getfixturevalue("from_conftest") == {"rank": rank}
    assert request.getfixturevalue("rank") == rank


@pytest.mark.parametrize("name", ["world_size", "rank_twice"])
def test_got_by_a_parameter(request, name):
    assert request.getfixturevalue(name) in (0, 2)


def test_the_request(request, rank):
    assert request.node.name.startswith("test_the_request[")
    assert request.node.originalname == request.function.__name__ == "test_the_request"
    assert request.module.__name__ == __name__
    assert request.cls is request.instance is None
    assert request.path == Path(__file__)
    assert "ranks" in request.keywords
    assert request.node.get_closest_marker("ranks").args == (2,)


class TestRequest:
    @pytest.mark.filterwarnings("ignore")
    def test_of_a_class(self, request):
        assert request.cls is TestRequest
        assert request.instance is self
        assert [mark.name for mark in request.node.iter_markers("filterwarnings")] == ["filterwarnings"]


def test_the_configuration(pytestconfig, request):
    assert pytestconfig is request.config
    assert pytestconfig.getini("python_files") == ["wrong_*.py", "right_*.py"]
    assert pytestconfig.rootpath == Path(__file__).parent


def test_its_own_name():
    assert "::test_its_own_name[" in os.environ["PYTEST_CURRENT_TEST"]


@pytest.fixture
def in_order(request):
    order = []
    request.addfinalizer(lambda: order.append("first") or check(order))
    request.addfinalizer(lambda: order.append("second"))
    return order


def check(order):
    assert order == ["test", "second", "first"]


def test_finalizers(in_order):
    in_order.append("test")


@pytest.fixture
def outer():
    events_here = []
    yield events_here
    assert events_here == ["inner up", "test", "inner down"]


@pytest.fixture
def inner(outer):
    outer.append("inner up")
    yield
    outer.append("inner down")


def test_teardown_in_reverse(outer, inner):
    outer.append("test")


@contextmanager
def double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def default_dtype(request):
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


def test_a_fixture_sets_the_default_dtype(default_dtype):
    assert ones(1).dtype == default_dtype


@pytest.fixture
def doubled():
    with double_precision():
        yield


@pytest.mark.usefixtures("doubled")
def test_a_fixture_with_a_context():
    assert ones(1).dtype == torch.float64


@pytest.fixture
def strict():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_a_fixture_turns_warnings_into_errors(strict):
    with pytest.raises(UserWarning):
        warnings.warn("careful", stacklevel=1)


@pytest.fixture
def patched(rank):
    with mock.patch("math.pi", 3 + rank):
        yield


def test_a_fixture_patches(patched, rank):
    assert math.pi == 3 + rank


@mock.patch("math.e", 2)
@mock.patch("os.getlogin", return_value="nobody")
def test_a_decorator_patches(getlogin, rank, of_the_function):
    assert (os.getlogin(), math.e) == ("nobody", 2)
    getlogin.assert_called_once_with()
    assert of_the_function == [rank]


@mock.patch.object(math, "pi", 3)
class TestPatched:
    def test_a_decorator_patches_a_class(self):
        assert math.pi == 3


@mock.patch.dict(os.environ, {"FOR_THIS_TEST": "yes"})
def test_a_decorator_patches_the_environment():
    assert os.environ["FOR_THIS_TEST"] == "yes"


@pytest.fixture
def patched_by_pytest(monkeypatch, rank, tmp_path):
    monkeypatch.setattr(math, "tau", 6 + rank)
    monkeypatch.setenv("FOR_THIS_TEST", str(rank))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return monkeypatch


@pytest.mark.parametrize("turn", [1, 2])
def test_monkeypatch_in_a_fixture(patched_by_pytest, rank, turn, tmp_path):
    assert math.tau == 6 + rank
    assert os.environ["FOR_THIS_TEST"] == str(rank)
    assert Path.cwd() == tmp_path
    patched_by_pytest.setattr(math, "tau", turn)


def test_monkeypatch_in_a_test(monkeypatch, rank):
    assert math.tau > 6.2
    if rank:
        monkeypatch.setattr(math, "tau", 1)
    assert (math.tau == 1) == (rank == 1)


@pytest.fixture(scope="module")
def patched_for_the_module():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math, "inf", 1)
        yield


class TestPatchedForTheModule:
    def test_patch(self, patched_for_the_module):
        assert math.inf == 1


def test_what_raises(rank):
    with pytest.raises(ValueError, match="of rank") as caught:
        raise ValueError(f"of rank {rank}")
    assert str(caught.value) == f"of rank {rank}"


def test_what_warns(rank):
    with pytest.warns(FutureWarning, match="careful"):
        warnings.warn("careful", FutureWarning, stacklevel=1)
    with pytest.deprecated_call():
        warnings.warn("old", DeprecationWarning, stacklevel=1)


def test_a_warning_on_one_rank(rank):
    if rank:
        warnings.warn("careful", FutureWarning, stacklevel=1)


def test_recorded_warnings(recwarn, rank):
    if rank:
        warnings.warn("careful", stacklevel=1)
    assert len(recwarn) == rank


@pytest.mark.filterwarnings("error:careful")
def test_warnings_that_are_errors():
    with pytest.raises(FutureWarning):
        warnings.warn("careful", FutureWarning, stacklevel=1)


def test_approx(rank):
    assert rank + 0.1 + 0.2 == pytest.approx(rank + 0.3)
    assert {"a": ones(2).tolist()} == {"a": pytest.approx([1, 1])}


def test_logged(caplog, rank):
    with caplog.at_level(logging.INFO, logger="of.the.test"):
        logging.getLogger("of.the.test").info("from rank %d", rank)
    assert caplog.messages == [f"from rank {rank}"]


@pytest.mark.parametrize("turn", [1, 2])
def test_logged_anew(caplog, turn):
    caplog.set_level(logging.DEBUG)
    logging.getLogger().debug("once")
    assert caplog.record_tuples == [("root", logging.DEBUG, "once")]


def test_recorded_properties(record_property, record_testsuite_property):
    record_property("key", "value")


def test_a_folder_that_ranks_share(tmp_path, ranks_tmp_path, rank):
    assert tmp_path == ranks_tmp_path
    (tmp_path / str(rank)).touch()
    dist.barrier()
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


@pytest.mark.parametrize("turn", [1, 2])
def test_a_folder_that_is_new_for_each_test(tmp_path, turn, rank):
    assert not list(tmp_path.iterdir())
    dist.barrier()
    (tmp_path / f"of {rank}").touch()


@pytest.fixture
def file_of_rank_0(tmp_path, rank):
    if rank == 0:
        (tmp_path / "data").write_text("of rank 0")
    dist.barrier()
    return tmp_path / "data"


def test_a_file_that_one_rank_makes(file_of_rank_0):
    assert file_of_rank_0.read_text() == "of rank 0"


def test_folders_of_each_rank(tmp_path_factory, of_the_session, rank):
    folder = tmp_path_factory.mktemp("mine")
    (folder / "data").write_text(str(rank))
    dist.barrier()
    assert (folder / "data").read_text() == str(rank)
    assert of_the_session["folder"].is_dir()


@pytest.mark.skipif(not hasattr(pytest, "Subtests"), reason="subtests came with pytest 9")
@pytest.mark.may_skip("subtests came with pytest 9")
def test_parts(subtests, rank):
    for number in range(3):
        with subtests.test("part", number=number):
            x = ones(1)
            dist.all_reduce(x)
            assert x == 2


@rank_fixture
def lock(rank, from_conftest):
    yield {"rank": rank, "lock": __import__("threading").Lock(), **from_conftest}


@rank_fixture
def of_a_rank_fixture(lock, process_group, world_size):
    assert lock["lock"].acquire()
    yield dist.new_group(range(world_size))
    lock["lock"].release()


def test_rank_fixtures(lock, of_a_rank_fixture, rank):
    assert lock["rank"] == rank
    assert lock["lock"].locked()
    dist.all_reduce(ones(1), group=of_a_rank_fixture)


@pytest.mark.usefixtures("of_a_rank_fixture")
def test_rank_fixtures_that_are_used(lock):
    assert lock["lock"].locked()


def test_rank_fixtures_got_by_name(request, rank):
    assert request.getfixturevalue("lock")["rank"] == rank


@pytest.fixture
def of_a_rank(lock):
    return lock["rank"]


def test_a_fixture_that_asks_for_a_rank_fixture(of_a_rank, rank):
    assert of_a_rank == rank

"""No test sees what another has left: each runs twice, and leaves what it does not expect."""

import decimal
import gc
import locale
import logging
import os
import random
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = [pytest.mark.ranks(2), pytest.mark.parametrize("turn", [1, 2])]


def test_environment(turn):
    assert "LEFT" not in os.environ
    assert "PATH" in os.environ
    os.environ["LEFT"] = "yes"
    del os.environ["PATH"]


def test_working_folder(turn, tmp_path):
    assert Path.cwd() == Path(__file__).parent
    os.chdir(tmp_path)


def test_import_path(turn):
    assert "left" not in sys.path
    sys.path.insert(0, "left")


def test_arguments(turn):
    assert "left" not in sys.argv
    sys.argv.append("left")


def test_seed_of_python(turn, rank):
    found = random.random()
    random.seed(0)
    assert found == random.random()
    random.seed(rank)


def test_seed_of_torch(turn, rank):
    found = torch.rand(1)
    torch.manual_seed(0)
    assert found == torch.rand(1)
    torch.manual_seed(rank)


@pytest.mark.may_skip("needs numpy")
def test_seed_of_numpy(turn, rank):
    numpy = pytest.importorskip("numpy", reason="needs numpy")
    found = numpy.random.random()
    numpy.random.seed(0)
    assert found == numpy.random.random()
    numpy.random.seed(rank)


def test_default_dtype(turn):
    assert torch.get_default_dtype() == torch.float32
    torch.set_default_dtype(torch.float64)


def test_default_device(turn):
    assert torch.get_default_device().type == "cpu"
    torch.set_default_device("meta")


def test_grad_mode(turn):
    assert torch.is_grad_enabled()
    torch.set_grad_enabled(False)


def test_anomaly_mode(turn):
    assert not torch.is_anomaly_enabled()
    torch.autograd.set_detect_anomaly(True)


def test_deterministic_algorithms(turn):
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)


def test_precision_of_products(turn):
    assert torch.get_float32_matmul_precision() == "highest"
    torch.set_float32_matmul_precision("medium")


def test_autocast(turn):
    assert not torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", True)


def test_dtype_of_autocast(turn):
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    torch.set_autocast_dtype("cpu", torch.float16)


def test_denormal_numbers(turn):
    assert torch.tensor(1e-45) / 1 != 0
    torch.set_flush_denormal(True)


def test_memory_that_nobody_has_written(turn):
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False


def test_hooks_of_all_modules(turn):
    calls = []
    torch.nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
    torch.nn.modules.module.register_module_module_registration_hook(lambda *_: None)
    torch.nn.Linear(1, 1)(torch.ones(1))
    assert len(calls) == 1
    assert len(torch.nn.modules.module._global_forward_hooks) == 1
    assert len(torch.nn.modules.module._global_module_registration_hooks) == 1


def test_timeout_of_new_groups(turn):
    assert dist.distributed_c10d.default_pg_timeout.total_seconds() > 60
    dist.distributed_c10d.default_pg_timeout = dist.distributed_c10d.default_pg_timeout / 100


def test_print_options(turn):
    assert "1.2346" in str(torch.tensor([1.23456789]))
    torch.set_printoptions(precision=2)


def test_number_of_threads(turn):
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)


def test_warnings_filters(turn):
    with pytest.warns(UserWarning, match="careful"):
        warnings.warn("careful", stacklevel=1)
    assert ("error", None, UserWarning, None, 0) not in warnings.filters
    warnings.simplefilter("error", UserWarning)


def test_signal_handlers(turn):
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    signal.signal(signal.SIGALRM, lambda *_: None)


@pytest.mark.parametrize("timer", [signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF])
def test_timers(turn, timer):
    assert signal.getitimer(timer) == (0, 0)
    # Longer than a test takes on a busy machine: a timer that strikes within its own test ends the rank.
    signal.setitimer(timer, 60)


def test_profilers(turn):
    assert sys.getprofile() is threading.getprofile() is None
    sys.setprofile(lambda *_: None)
    threading.setprofile(lambda *_: None)


def test_timeout_of_sockets(turn):
    assert socket.getdefaulttimeout() is None
    socket.setdefaulttimeout(30)


@pytest.mark.may_skip("needs numpy")
def test_settings_of_numpy(turn):
    numpy = pytest.importorskip("numpy", reason="needs numpy")
    assert numpy.geterr()["divide"] == "warn"
    assert numpy.get_printoptions()["precision"] == 8
    numpy.seterr(divide="raise")
    numpy.set_printoptions(precision=2)


def test_level_of_logging(turn):
    assert logging.getLogger().level == logging.WARNING
    logging.getLogger().setLevel(logging.DEBUG)


def test_disabled_logging(turn):
    assert logging.root.manager.disable == 0
    logging.disable(logging.CRITICAL)


def test_umask(turn):
    assert os.umask(0o077) != 0o077


def test_limit_of_recursion(turn):
    assert sys.getrecursionlimit() < 5000
    sys.setrecursionlimit(5000)


def test_switch_interval(turn):
    assert sys.getswitchinterval() < 0.01
    sys.setswitchinterval(0.02)


def test_garbage_collection(turn):
    assert gc.isenabled()
    assert gc.get_threshold()[0] < 5000
    gc.disable()
    gc.set_threshold(5000)


def test_context_of_decimals(turn):
    assert decimal.getcontext().prec == 28
    decimal.getcontext().prec = 5


def test_locale(turn):
    assert locale.setlocale(locale.LC_CTYPE) != "C"
    locale.setlocale(locale.LC_CTYPE, "C")


def test_hooks_of_exceptions(turn):
    assert sys.excepthook is not print
    assert threading.excepthook is not print
    sys.excepthook = threading.excepthook = print


def test_standard_streams(turn):
    assert sys.stdout is not sys.stderr
    sys.stdout = sys.stderr


def test_process_groups(turn):
    assert dist.get_world_size() == 2
    assert dist.distributed_c10d._get_default_store().add("left", 1) <= 2
    if turn == 1:
        dist.destroy_process_group()

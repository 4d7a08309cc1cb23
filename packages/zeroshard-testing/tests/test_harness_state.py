"""No state of one test is seen by the next: tests that dirty all that is reset, in random order, on 2 and 4 ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Suite

STATE = """
    import decimal, gc, locale, logging, os, random, signal, sys
    import numpy
    import pytest
    import torch
    import torch.distributed as dist

    ROOT, LOCALE = os.getcwd(), locale.setlocale(locale.LC_ALL)
    PATH = list(sys.path)
    UMASK = os.umask(0o022)
    os.umask(UMASK)
    FIRST = {
        "random": random.Random(0).random(),
        "numpy": float(numpy.random.RandomState(0).rand()),
        "torch": torch.rand(1, generator=torch.Generator().manual_seed(0)).item(),
    }

    def seen():
        return {
            "environment": "DIRTY" in os.environ,
            "folder": os.getcwd(),
            "path": list(sys.path),
            "arguments": "dirty" in sys.argv,
            "random": random.random(),
            "numpy": float(numpy.random.rand()),
            "torch": torch.rand(1).item(),
            "dtype": torch.get_default_dtype(),
            "device": torch.get_default_device().type,
            "grad": torch.is_grad_enabled(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "threads": torch.get_num_threads(),
            "precision": torch.get_float32_matmul_precision(),
            "anomaly": torch.is_anomaly_enabled(),
            "print": str(torch.tensor([1 / 3])),
            "debug": dist.get_debug_level(),
            "signals": signal.getsignal(signal.SIGALRM),
            "streams": (sys.stdout.name, sys.excepthook.__name__ != "<lambda>"),
            "level": logging.getLogger().level,
            "interpreter": (sys.getrecursionlimit(), gc.isenabled(), decimal.getcontext().prec),
            "locale": locale.setlocale(locale.LC_ALL),
            "group": dist.get_world_size(),
        }

    def umask():
        found = os.umask(UMASK)
        os.umask(found)
        return found

    def check(world_size):
        found = seen()
        expected = {
            "environment": False, "folder": ROOT, "path": PATH, "arguments": False, **FIRST, "dtype": torch.float32,
            "device": "cpu", "grad": True, "autocast": False, "deterministic": False, "threads": 1,
            "precision": "highest", "anomaly": False, "print": "tensor([0.3333])",
            "debug": dist.DebugLevel.OFF, "signals": signal.SIG_DFL,
            "streams": (1, True), "level": logging.WARNING,
            "interpreter": (1000, True, 28), "locale": LOCALE, "group": world_size,
        }
        assert len(found) >= 20
        assert {name: found[name] for name in found if found[name] != expected[name]} == {}
        assert umask() == UMASK

    def dirty():
        os.environ["DIRTY"] = "1"
        os.chdir("/")
        sys.path.insert(0, "/dirty")
        sys.argv.append("dirty")
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(2)
        torch.set_float32_matmul_precision("medium")
        torch.autograd.set_detect_anomaly(True)
        torch.set_printoptions(precision=1)
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        signal.signal(signal.SIGALRM, lambda *_: None)
        sys.stdout = open(os.devnull, "w")
        sys.excepthook = lambda *_: None
        logging.getLogger().setLevel(logging.DEBUG)
        sys.setrecursionlimit(2000)
        gc.disable()
        decimal.getcontext().prec = 5
        os.umask(0o077)
"""
TEST = """
    @pytest.mark.ranks({ranks})
    def test_{number}(rank, world_size):
        check(world_size)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == world_size
        dirty()
        assert {number} % 25 != 24 or rank != 1, "one in 25 fails"
"""


def run_in_random_order(suite: Callable[..., Suite], count: int, seed: int) -> dict[str, str]:
    """Return the verdict of each of ``count`` tests, whose number of ranks and order are drawn."""
    draw = random.Random(seed)
    tests = [TEST.format(ranks=2 if number % 3 else 4, number=number) for number in range(count)]
    draw.shuffle(tests)
    done = suite("-q", test_state=STATE + "".join(tests))
    return {name: f"{case.kind}\n{case.text}" for name, case in done.cases.items()}


@pytest.mark.parametrize(("count", "times"), [(50, 1), pytest.param(500, 3, marks=pytest.mark.exhaustive)])
def test_no_state_is_left_and_verdicts_do_not_depend_on_the_order(
    suite: Callable[..., Suite], count: int, times: int
) -> None:
    pytest.importorskip("numpy", reason="its seeds are among what is reset")
    for seed in range(times):
        verdicts = run_in_random_order(suite, count, seed)
        failed = {name: text for name, text in verdicts.items() if not text.startswith("passed")}
        assert len(verdicts) == count
        assert all("rank 1 failed: AssertionError: one in 25 fails" in text for text in failed.values()), failed
        assert len(failed) == count // 25

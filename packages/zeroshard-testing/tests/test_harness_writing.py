"""What of the writing of rank tests test_harness_corpus.py does not see: ids, warnings, import modes, launchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Suite

RunSuite = Callable[..., "Suite"]

RIGHT = """
    import warnings
    import pytest
    import torch
    import torch.distributed as dist
    from zeroshard_testing import assert_replicas_equal

    @pytest.mark.ranks(2, 4, backend="gloo", isolation="group", timeout=30)
    def test_sum(rank, world_size):
        x = torch.full((4,), float(rank))
        dist.all_reduce(x)
        assert x[0] == sum(range(world_size))

    @pytest.mark.ranks(64, backend="fake", fake_rank=5)
    def test_fake(rank):
        assert rank == 5

    @pytest.mark.ranks(2)
    def test_warns():
        warnings.warn("careful", FutureWarning)

    @pytest.mark.ranks(3)
    def test_equal_replicas(rank):
        same = {"weight": torch.arange(6.0).reshape(2, 3), "step": torch.tensor(1), "nan": torch.tensor([torch.nan])}
        same |= {"complex": torch.ones(2) * 1j, "bf16": torch.ones(2).bfloat16(), "empty": torch.ones(0)}
        assert_replicas_equal(same)
        if rank == 2:
            same["weight"][1, 0] = 7
        difference = "'weight' .* in 1 of 6 elements, first at .1, 0.: rank 2 has 7.0, rank 0 has 3.0"
        with pytest.raises(AssertionError, match=difference):
            assert_replicas_equal(same)
        with pytest.raises(AssertionError, match="rank 1 has 2 tensors, rank 0 has 1"):
            assert_replicas_equal([torch.ones(1)] * (2 if rank == 1 else 1))
        with pytest.raises(AssertionError, match="tensor 0 differs: rank 1 has tensor 0 of torch.float32, shape .2,."):
            assert_replicas_equal([torch.ones(1 + (rank == 1))])
        with pytest.raises(AssertionError, match="first at .0,.: rank 1 has -0.0"):
            assert_replicas_equal([torch.tensor([-0.0 if rank == 1 else 0.0])])
"""


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory, run_suite: RunSuite) -> Suite:
    """The suite, run."""
    return run_suite(tmp_path_factory.mktemp("right"), test_right=RIGHT)


def test_everything_passes_that_should(right: Suite) -> None:
    assert {name for name, case in right.cases.items() if case.kind != "passed"} == set(), right.text
    assert right.status == 0


def test_ids_name_ranks_and_backend(right: Suite) -> None:
    assert {"test_sum[2-gloo]", "test_sum[4-gloo]", "test_fake[64-fake-rank5]"} <= set(right.cases)


def test_a_warning_on_the_ranks_is_shown_once(right: Suite) -> None:
    assert right.text.count("FutureWarning: careful") == 1


def test_import_mode_importlib_reaches_modules_that_share_a_name(suite: RunSuite) -> None:
    body = """
        import pytest

        @pytest.mark.ranks(2)
        def test_which(rank):
            assert __file__.endswith("{folder}/test_same.py")
            with pytest.raises(AssertionError, match="assert 1 == 2"):
                assert 1 == 2
    """
    files = {f"{folder}__test_same": body.replace("{folder}", folder) for folder in ("a", "b")}
    done = suite("--import-mode=importlib", **files)
    assert done.status == 0, done.text
    assert "2 passed" in done.text


def test_spawned_workers_do_the_same(suite: RunSuite) -> None:
    body = """
        import os, pytest

        @pytest.mark.ranks(2)
        def test_passes(rank):
            assert rank in (0, 1)

        @pytest.mark.ranks(2)
        def test_dies(rank):
            if rank == 1:
                os._exit(5)
    """
    done = suite("--ranks-launch=spawn", test_spawned=body)
    assert done.cases["test_passes[2-gloo]"].kind == "passed", done.text
    assert done.cases["test_dies[2-gloo]"].text.startswith("rank 1 exited with status 5")


def test_monkeypatch_ends_with_its_test_on_every_rank(suite: RunSuite) -> None:
    body = """
        import math, os
        import pytest

        @pytest.fixture
        def environment(monkeypatch):
            monkeypatch.setenv("FOR_THIS_TEST", "yes")

        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("turn", [1, 2])
        def test_patches(turn, rank, monkeypatch, environment):
            assert math.tau > 6 and math.pi < 4 and os.environ["FOR_THIS_TEST"] == "yes"
            if rank == 1:
                monkeypatch.setattr(math, "tau", turn)
                monkeypatch.setenv("FOR_THIS_TEST", "no")
            assert (math.tau == turn) == (rank == 1)
            assert turn == 1 or rank == 1, "what fails is undone too"

        @pytest.mark.ranks(2)
        def test_afterwards(rank):
            assert math.tau > 6 and 3 < math.pi < 4 and "FOR_THIS_TEST" not in os.environ
    """
    done = suite(test_patching=body)
    kinds = {name: case.kind for name, case in done.cases.items()}
    assert kinds == {
        "test_patches[2-gloo-1]": "passed",
        "test_patches[2-gloo-2]": "failure",
        "test_afterwards[2-gloo]": "passed",
    }, done.text
    assert "what fails is undone too" in done.cases["test_patches[2-gloo-2]"].text

"""Faults, rank fixtures and the comparison with a single process, in a suite run once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Suite

FAULTY = """
    import threading, time
    from datetime import timedelta
    import pytest
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from zeroshard_testing import assert_matches_single_process, rank_fixture

    @pytest.mark.ranks(2)
    def test_survives_a_death(rank, faults):
        faults.kill(rank=1, at="all_reduce#3")
        for _ in range(2):
            dist.all_reduce(torch.ones(2))
        with pytest.raises(RuntimeError, match="onnection"):
            dist.all_reduce(torch.ones(2))

    @pytest.mark.ranks(2)
    def test_has_new_workers_after_a_death(rank):
        dist.barrier()

    @pytest.mark.ranks(2)
    def test_fails_where_the_death_is_not_survived(rank, faults):
        faults.kill(rank=1, at="all_reduce")
        dist.all_reduce(torch.ones(2))

    @pytest.mark.ranks(2)
    def test_survives_a_rank_that_stops(rank, faults):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=0.3))
        faults.stop(rank=1, at="all_reduce")
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(2), group=group)

    @pytest.mark.ranks(2)
    def test_waits_for_a_rank_that_stops_for_a_while(rank, faults):
        faults.stop(rank=1, at="all_reduce", seconds=0.4)
        began = time.monotonic()
        dist.all_reduce(torch.ones(2))
        assert time.monotonic() - began > 0.3

    @pytest.mark.ranks(2)
    def test_delays_every_message(rank, faults):
        faults.delay(rank=1, at="send#*", seconds=(0.1, 0.2), seed=3)
        began = time.monotonic()
        for _ in range(3):
            dist.send(torch.ones(2), 0) if rank else dist.recv(torch.ones(2), 1)
        assert time.monotonic() - began > 0.2

    @pytest.mark.ranks(2)
    def test_raises_in_a_thread(rank, faults):
        faults.raise_(rank=0, at="send#2", error=OSError("cable pulled"))
        seen = []
        def work():
            try:
                for _ in range(2):
                    dist.send(torch.ones(1), 1)
            except OSError as error:
                seen.append(str(error))
        if rank == 0:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            assert seen == ["cable pulled"]
        else:
            dist.recv(torch.ones(1), 0)

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("place", ["allreduce", "all_reduce#0", "all_reduce#x", "nothing"])
    def test_names_what_it_does_not_know(faults, place):
        with pytest.raises(ValueError, match="names no operation"):
            faults.kill(rank=0, at=place)

    events = []

    @pytest.fixture
    def base():
        return 7

    @rank_fixture
    def lock(rank, base):
        events.append(f"lock up on {rank}")
        yield threading.Lock(), rank + base
        events.append("lock down")

    @rank_fixture
    def subgroup(lock, process_group, world_size):
        assert lock[0].acquire()
        events.append("group up")
        yield dist.new_group(range(world_size))
        events.append("group down")

    @pytest.mark.ranks(2)
    def test_has_fixtures_of_each_rank(rank, base, lock, subgroup):
        assert lock[1] == rank + base
        assert lock[0].locked()
        dist.all_reduce(torch.ones(1), group=subgroup)
        assert events == [f"lock up on {rank}", "group up"]

    @pytest.mark.ranks(2)
    def test_they_are_torn_down_in_reverse(rank):
        assert events[2:] == ["group down", "lock down"]

    class TestClass:
        @classmethod
        def setup_class(cls):
            cls.of_the_class = [1]

        def setup_method(self):
            self.of_the_test = 2

        @pytest.mark.ranks(2)
        def test_sees_what_its_setup_has_set(self, rank):
            assert (self.of_the_class, self.of_the_test) == ([1], 2)

    def train(rank, world_size, wrong=0.0):
        torch.manual_seed(1)
        model = DistributedDataParallel(torch.nn.Linear(3, 2, dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = torch.randn(8, 3, dtype=torch.float64)
        for _ in range(3):
            optimizer.zero_grad()
            model(data[rank::world_size]).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            model.module.bias[1] += wrong * (world_size > 1)
        return model.module

    def train_wrong(rank, world_size):
        return train(rank, world_size, wrong=0.25)

    def train_names(rank, world_size):
        return {f"of {world_size}": torch.ones(1), "empty": torch.ones(0, 3, dtype=torch.bfloat16)}

    def train_nothing(rank, world_size):
        return ["text"]

    def test_matches_a_single_process():
        assert_matches_single_process(train, ranks=(2, 4), atol=1e-14)

    def test_differs_from_a_single_process():
        assert_matches_single_process(train_wrong, atol=1e-14)

    def test_has_other_names():
        assert_matches_single_process(train_names)

    def test_has_no_tensors():
        assert_matches_single_process(train_nothing)

    def test_trains_in_a_function_of_its_own():
        pytest.importorskip("cloudpickle", reason="pickle takes functions of modules alone")
        assert_matches_single_process(lambda rank, world_size: [torch.ones(2)])

    @pytest.mark.ranks(2)
    def test_compares_on_a_rank(rank):
        assert_matches_single_process(train)

    @pytest.mark.ranks(2)
    def test_knows_its_own_name(rank):
        import os
        assert os.environ["PYTEST_CURRENT_TEST"] == "test_faulty.py::test_knows_its_own_name[2-gloo] (call)"
"""

WRONG = {
    "test_fails_where_the_death_is_not_survived[2-gloo]": "rank 0 failed: RuntimeError",
    "test_differs_from_a_single_process": "tensor 'bias' on rank 0 of 2 differs from the single process's: largest "
    "difference 0.25 at (1,)",
    "test_has_other_names": "returned tensors ['of 2', 'empty'], but ['of 1', 'empty'] in a single process",
    "test_has_no_tensors": "train_nothing returned a str for '0'; it must return tensors",
    "test_compares_on_a_rank[2-gloo]": "call it in an ordinary test, not on a rank",
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory, run_suite: Callable[..., Suite]) -> Suite:
    """The suite, run."""
    folder = tmp_path_factory.mktemp("faulty")
    return run_suite(folder, f"--ranks-logs={folder / 'logs'}", test_faulty=FAULTY)


def test_what_should_pass_passes(faulty: Suite) -> None:
    failed = {name: case.text for name, case in faulty.cases.items() if case.kind != "passed" and name not in WRONG}
    assert not failed
    assert len(faulty.cases) > 20


@pytest.mark.parametrize("name", WRONG)
def test_what_should_fail_says_why(faulty: Suite, name: str) -> None:
    assert faulty.cases[name].kind == "failure"
    assert WRONG[name] in faulty.cases[name].text


def test_a_log_file_holds_what_happened_on_its_rank(faulty: Suite) -> None:
    text = faulty.cases["test_differs_from_a_single_process"].text
    folder = Path(text.rpartition("A log file for each rank: ")[2].strip())
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.log", "rank1.log"]
    assert "tensor 'bias' on rank 1 of 2" in (folder / "rank1.log").read_text()

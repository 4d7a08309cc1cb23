"""A slow rank is not a dead one: what looks like a stall but is not passes, however long it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Suite

PATIENT = """
    import signal, subprocess, threading, time
    from concurrent.futures import ThreadPoolExecutor
    from datetime import timedelta
    from unittest import mock
    import pytest
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.join import Join
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel

    @pytest.mark.ranks(2)
    def test_a_rank_that_sleeps(rank):
        if rank:
            time.sleep(0.6)
        dist.all_reduce(torch.ones(2))

    @pytest.mark.ranks(2)
    def test_a_rank_that_computes(rank):
        if rank:
            end = time.monotonic() + 0.6
            while time.monotonic() < end:
                torch.ones(300, 300) @ torch.ones(300, 300)
        dist.all_reduce(torch.ones(2))

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(0.6)
            return grad

    @pytest.mark.ranks(2)
    def test_a_rank_that_sleeps_in_backward(rank):
        model = DistributedDataParallel(torch.nn.Linear(3, 3))
        y = model(torch.ones(2, 3))
        (Slow.apply(y) if rank else y).sum().backward()

    @pytest.mark.ranks(2)
    def test_a_rank_that_waits_for_a_process(rank):
        if rank:
            subprocess.run(["sleep", "0.6"], check=True)
        dist.barrier()

    @pytest.mark.ranks(2)
    def test_a_thread_that_brings_what_the_main_thread_waits_for(rank):
        def help():
            time.sleep(0.6)
            dist.send(torch.ones(2), 1 - rank)
        thread = threading.Thread(target=help)
        thread.start()
        dist.recv(torch.ones(2), 1 - rank)
        thread.join()

    @pytest.mark.ranks(2)
    def test_a_pool_that_brings_it(rank):
        with ThreadPoolExecutor(2) as pool:
            late = pool.submit(lambda: (time.sleep(0.6), dist.send(torch.ones(2), 1 - rank)))
            pool.submit(dist.recv, torch.ones(2), 1 - rank).result()
            late.result()

    @pytest.mark.ranks(2)
    def test_a_wait_with_a_timeout_of_its_own(rank):
        if rank == 0:
            work = dist.irecv(torch.ones(2), 1)
            with pytest.raises(RuntimeError):
                work.wait(timedelta(seconds=0.6))

    @pytest.mark.ranks(2)
    def test_a_group_with_a_timeout_of_its_own(rank):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=0.6))
        if rank == 0:
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(2), group=group)

    @pytest.mark.ranks(2)
    def test_a_barrier_that_names_who_is_missing(rank):
        if rank == 0:
            with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier"):
                dist.monitored_barrier(timeout=timedelta(seconds=0.6))

    @pytest.mark.ranks(2)
    def test_inputs_that_end_unevenly(rank):
        model = DistributedDataParallel(torch.nn.Linear(3, 3))
        with Join([model]):
            for _ in range(2 + 2 * rank):
                model(torch.ones(2, 3)).sum().backward()

    @pytest.mark.ranks(2)
    def test_a_process_group_made_anew(rank):
        store = dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore("anew", store), rank=rank, world_size=2)
        dist.all_reduce(torch.ones(2))

    @pytest.mark.ranks(2)
    def test_many_in_flight_and_callbacks(rank):
        works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(100)]
        for work in works:
            work.wait()
        future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        assert future.then(lambda done: done.value()[0] * 2).wait()[0] == 4

    @pytest.mark.ranks(2)
    def test_objects_of_different_sizes(rank):
        pytest.importorskip("numpy", reason="collectives of objects need numpy")
        dist.broadcast_object_list([None], src=0)
        found = [None, None]
        dist.all_gather_object(found, "x" * (1 + 1000 * rank))
        assert len(found[1]) == 1001

    @pytest.mark.ranks(2)
    def test_a_message_from_anyone(rank):
        if rank:
            dist.send(torch.ones(2), 0)
        else:
            assert dist.recv(torch.ones(2)) == 1

    @pytest.mark.ranks(2)
    def test_a_mesh_and_distributed_tensors(rank):
        mesh = init_device_mesh("cpu", (2,))
        cut = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
        assert cut.redistribute(mesh, [Replicate()]).to_local().sum() == 28

    @pytest.mark.ranks(2)
    def test_threads_with_groups_of_their_own(rank):
        groups = [dist.new_group([0, 1]) for _ in range(3)]
        def work(group):
            for _ in range(20):
                dist.all_reduce(torch.ones(100), group=group)
        threads = [threading.Thread(target=work, args=[group]) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @pytest.mark.ranks(2)
    def test_keys_of_a_file_store_that_is_looked_at_now_and_then(rank, ranks_tmp_path):
        store = dist.FileStore(str(ranks_tmp_path / "store"), 2)
        for number in range(150):
            if rank:
                store.set(f"key {number}", "1")
            else:
                store.wait([f"key {number}"])
            dist.barrier()

    @pytest.mark.ranks(2)
    def test_a_signal_that_wakes_the_main_thread(rank):
        awake = threading.Event()
        signal.signal(signal.SIGALRM, lambda *_: awake.set())
        if rank:
            signal.setitimer(signal.ITIMER_REAL, 0.6)
            thread = threading.Thread(target=dist.recv, args=(torch.ones(1), 0))
            thread.start()
            awake.wait()
            dist.send(torch.ones(1), 0)
            thread.join()
        else:
            dist.recv(torch.ones(1), 1)
            dist.send(torch.ones(1), 1)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    @pytest.mark.ranks(2)
    def test_a_clock_that_stands_still(rank):
        with mock.patch("time.time", return_value=4e9):
            if rank == 0:
                store = dist.distributed_c10d._get_default_store()
                with pytest.raises(RuntimeError):
                    store.wait(["missing"], timedelta(seconds=0.6))
        dist.barrier()

    @pytest.mark.ranks(2)
    def test_a_call_that_is_refused_on_one_rank(rank):
        if rank == 0:
            with pytest.raises((RuntimeError, ValueError)):
                dist.all_gather([torch.ones(3), torch.ones(2)], torch.ones(2))
        dist.barrier()

    @pytest.mark.ranks(2)
    def test_a_group_that_gives_up_inside_a_backward(rank):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=0.6))
        model = DistributedDataParallel(torch.nn.Linear(3, 3), process_group=group)
        loss = model(torch.ones(2, 3)).sum()
        if rank == 0:
            with pytest.raises(RuntimeError):
                loss.backward()

    @pytest.mark.ranks(2)
    def test_a_wait_between_threads_with_a_timeout(rank):
        if rank == 0:
            threading.Event().wait(0.6)
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(torch.ones(2), 0)

    @pytest.mark.ranks(2)
    def test_a_key_that_comes_late(rank):
        store = dist.distributed_c10d._get_default_store()
        if rank:
            time.sleep(0.6)
            store.set("late", "1")
        else:
            assert store.get("late") == b"1"

    @pytest.mark.ranks(4)
    def test_groups_made_and_used_one_after_the_other(rank):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        for number in range(20):
            if rank in (0, 2) and number % 7 == 0:
                time.sleep(0.05)
            dist.all_reduce(torch.ones(2), group=pairs[rank // 2])
        dist.barrier()

    @pytest.mark.ranks(2)
    def test_a_large_tensor(rank):
        dist.all_reduce(torch.ones(32 << 20))

    @pytest.mark.ranks(2)
    def test_different_shapes_where_they_may_differ(rank):
        parts = [torch.ones(3), torch.ones(3)]
        dist.gather(torch.ones(3), parts if rank == 0 else None, dst=0)
        dist.scatter(torch.empty(3), parts if rank == 0 else None, src=0)
        dist.all_to_all_single(torch.empty(2 + 2 * rank), torch.ones(3), [1 + rank] * 2, [1, 2])
        dist.broadcast(torch.ones(2, 3) if rank else torch.ones(6), src=0)

    @pytest.mark.ranks(2)
    def test_a_daemon_thread_that_idles(rank):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory, run_suite: Callable[..., Suite]) -> Suite:
    """The suite, run."""
    return run_suite(tmp_path_factory.mktemp("patient"), test_patient=PATIENT)


def test_whatever_can_still_complete_is_waited_for(patient: Suite) -> None:
    failed = {name: case.text for name, case in patient.cases.items() if case.kind not in ("passed", "skipped")}
    assert not failed
    assert len(patient.cases) == PATIENT.count("def test_")

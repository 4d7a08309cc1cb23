"""A slow rank is not a dead one: what looks like a stall but can still complete is waited for."""

import ctypes
import gc
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import ones
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Join
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.ranks(2)


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.6)
        return grad


def test_a_rank_that_sleeps(rank):
    if rank:
        time.sleep(0.6)
    dist.all_reduce(ones(2))


def test_a_rank_that_computes(rank):
    if rank:
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            ones(300, 300) @ ones(300, 300)
    dist.all_reduce(ones(2))


def test_a_rank_that_sleeps_in_backward(rank):
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    y = model(ones(2, 3))
    (Slow.apply(y) if rank else y).sum().backward()


def test_a_short_timeout_within_a_call(rank):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    if rank == 0:
        with pytest.raises(RuntimeError, match="failed to pass monitoredBarrier in 500 ms"):
            dist.barrier(group)
    _get_default_store().set(f"{rank} has ended", "")
    _get_default_store().wait(["0 has ended", "1 has ended"])


def test_a_rank_that_waits_for_a_process(rank):
    if rank:
        subprocess.run(["sleep", "0.6"], check=True)
    dist.barrier()


def test_a_rank_that_waits_for_a_process_of_python(rank):
    if rank:
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=[0.6])
        process.start()
        process.join()
    dist.barrier()


def test_a_rank_that_waits_on_a_store_for_its_own_child(rank):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    body = (
        "import time, torch.distributed as dist; time.sleep(0.3); "
        f"dist.TCPStore('127.0.0.1', {store.port}, is_master=False).set('done', '1')"
    )
    if rank:
        with subprocess.Popen([sys.executable, "-c", body]):
            assert store.get("done") == b"1"
    dist.barrier()


def test_a_rank_that_waits_on_a_file_store_for_its_own_child(rank, tmp_path):
    path = str(tmp_path / "store")
    if rank:
        body = f"import torch.distributed as dist; dist.FileStore({path!r}, 2).set('done', '1')"
        with subprocess.Popen([sys.executable, "-c", body]):
            assert dist.FileStore(path, 2).get("done") == b"1"


def test_a_thread_that_brings_what_the_main_thread_waits_for(rank):
    def help_out():
        time.sleep(0.6)
        dist.send(ones(2), 1 - rank)

    thread = threading.Thread(target=help_out)
    thread.start()
    dist.recv(ones(2), 1 - rank)
    thread.join()


def test_a_pool_that_brings_it(rank):
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(lambda: (time.sleep(0.6), dist.send(ones(2), 1 - rank)))
        pool.submit(dist.recv, ones(2), 1 - rank).result()
        late.result()


def test_a_wait_with_a_timeout_of_its_own(rank):
    if rank == 0:
        work = dist.irecv(ones(2), 1)
        with pytest.raises(RuntimeError):
            work.wait(timedelta(seconds=0.6))


def test_a_group_with_a_timeout_of_its_own(rank):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.6))
    if rank == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(ones(2), group=group)


def test_a_rendezvous_with_a_timeout_while_collectives_are_pending(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    first, second = groups if rank == 0 else groups[::-1]
    early = dist.all_reduce(ones(1), group=first, async_op=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RuntimeError):
        next(dist.rendezvous(f"tcp://127.0.0.1:{port}", rank=0, world_size=3, timeout=timedelta(seconds=1)))
    late = dist.all_reduce(ones(1), group=second, async_op=True)
    early.wait()
    late.wait()


_KEPT = []


def test_a_callback_that_issues_when_the_test_has_ended(rank):
    other = dist.new_group([0, 1])

    def go_on(future):
        time.sleep(0.6)
        _KEPT.append(dist.all_reduce(ones(2), group=other, async_op=True))

    if rank == 0:
        _KEPT.append(dist.all_reduce(ones(2), async_op=True).get_future().then(go_on))
    else:
        time.sleep(0.2)
        dist.all_reduce(ones(2))
        dist.all_reduce(ones(2), group=other)


def test_collection_that_the_test_turns_off_and_on(rank):
    for _ in range(200):
        gc.disable()
        dist.all_reduce(ones(1))
        assert not gc.isenabled()
        gc.enable()
        dist.all_reduce(ones(1))
        assert gc.isenabled()


def test_a_barrier_that_names_who_is_missing(rank):
    if rank == 0:
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier"):
            dist.monitored_barrier(timeout=timedelta(seconds=0.6))


def test_inputs_that_end_unevenly(rank):
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    with Join([model]):
        for _ in range(2 + 2 * rank):
            model(ones(2, 3)).sum().backward()


def test_a_process_group_made_anew(rank):
    store = _get_default_store()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("anew", store), rank=rank, world_size=2)
    dist.all_reduce(ones(2))


@pytest.fixture
def late_out_of_its_group(rank, monkeypatch):
    """Keep rank 0 in the constructor of a group when the others have left it, asleep in C as in a wait of gloo's."""
    make = distributed_c10d._new_process_group_helper

    def slowly(*args, **kwargs):
        made = make(*args, **kwargs)
        time.sleep(3)
        return made

    if rank == 0:
        monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", slowly)


@pytest.mark.ranks(1, 3)
def test_a_group_that_is_made_slowly(late_out_of_its_group, world_size):
    dist.new_group(sorted({0, world_size - 1}))


@pytest.mark.ranks(1, 2, init=False)
def test_a_default_group_that_is_made_slowly(late_out_of_its_group):
    dist.init_process_group("gloo")


@pytest.mark.ranks(3, init=False)
def test_a_default_group_of_some_ranks_that_is_made_slowly(late_out_of_its_group, rank):
    if rank != 1:
        dist.init_process_group("gloo", init_method="env://", rank=rank // 2, world_size=2)


def test_many_in_flight_and_callbacks(rank):
    works = [dist.all_reduce(ones(1000), async_op=True) for _ in range(100)]
    for work in works:
        work.wait()
    future = dist.all_reduce(ones(2), async_op=True).get_future()
    assert future.then(lambda done: done.value()[0] * 2).wait()[0] == 4


@pytest.fixture
def sleeps_when_told(rank):
    """Make SIGQUIT stop rank 0 for 3 s wherever it is, as a busy machine does, and tell how to send it."""
    libc = ctypes.CDLL(None)
    store = _get_default_store()
    if rank == 0:
        # A signal's number is the argument of its handler, and here that of sleep.
        libc.signal(signal.SIGQUIT, libc.sleep)
        store.set("process", str(os.getpid()))
    yield lambda: os.kill(int(store.get("process")), signal.SIGQUIT)
    if rank == 0:
        libc.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.mark.parametrize("wait", [lambda work: work.wait(), lambda work: work.get_future().wait()])
def test_a_rank_that_is_slow_to_wake_up(rank, wait, sleeps_when_told):
    if rank == 0:
        first, second = (dist.all_reduce(ones(2), async_op=True) for _ in range(2))
        wait(first)
        dist.send(ones(2), 1)
        second.wait()
    else:
        time.sleep(0.3)
        sleeps_when_told()
        dist.all_reduce(ones(2))
        dist.recv(ones(2), 0)
        dist.all_reduce(ones(2))


def test_threads_with_groups_of_their_own(rank):
    groups = [dist.new_group([0, 1]) for _ in range(3)]

    def work(group):
        for _ in range(20):
            dist.all_reduce(ones(100), group=group)

    threads = [threading.Thread(target=work, args=[group]) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_keys_of_a_file_store_that_is_looked_at_now_and_then(rank, ranks_tmp_path):
    store = dist.FileStore(str(ranks_tmp_path / "store"), 2)
    for number in range(150):
        if rank:
            store.set(f"key {number}", "1")
        else:
            store.wait([f"key {number}"])
        dist.barrier()


def test_a_signal_that_wakes_the_main_thread(rank):
    awake = threading.Event()
    signal.signal(signal.SIGALRM, lambda *_: awake.set())
    if rank:
        signal.setitimer(signal.ITIMER_REAL, 0.6)
        thread = threading.Thread(target=dist.recv, args=(ones(1), 0))
        thread.start()
        awake.wait()
        dist.send(ones(1), 0)
        thread.join()
    else:
        dist.recv(ones(1), 1)
        dist.send(ones(1), 1)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def test_a_clock_that_stands_still(rank):
    with mock.patch("time.time", return_value=4e9):
        if rank == 0:
            with pytest.raises(RuntimeError):
                _get_default_store().wait(["missing"], timedelta(seconds=0.6))
    dist.barrier()


def test_a_call_that_is_refused_on_one_rank(rank):
    if rank == 0:
        with pytest.raises((RuntimeError, ValueError)):
            dist.all_gather([ones(3), ones(2)], ones(2))
    dist.barrier()


def test_a_group_that_gives_up_inside_a_backward(rank):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.6))
    model = DistributedDataParallel(torch.nn.Linear(3, 3), process_group=group)
    loss = model(ones(2, 3)).sum()
    if rank == 0:
        with pytest.raises(RuntimeError):
            loss.backward()


def test_a_wait_between_threads_with_a_timeout(rank):
    if rank == 0:
        threading.Event().wait(0.6)
        dist.send(ones(2), 1)
    else:
        dist.recv(ones(2), 0)


def test_a_key_that_comes_late(rank):
    store = _get_default_store()
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
        dist.all_reduce(ones(2), group=pairs[rank // 2])
    dist.barrier()


def test_a_large_tensor(rank):
    dist.all_reduce(ones(32 << 20))


def test_a_daemon_thread_that_idles(rank):
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def test_a_thread_that_idles(rank):
    if rank:
        threading.Thread(target=time.sleep, args=[60], name="sleeper").start()


@pytest.mark.parametrize("turn", [1, 2])
def test_a_timer_that_is_still_to_strike(rank, turn):
    timer = threading.Timer(30, print)
    timer.start()


_POOL = ThreadPoolExecutor(2)


@pytest.mark.parametrize("turn", [1, 2])
def test_a_pool_of_the_module_that_idles(rank, turn):
    assert _POOL.submit(lambda: turn + 1).result() == turn + 1


def test_a_pool_that_is_never_shut_down(rank):
    assert ThreadPoolExecutor(1).submit(lambda: 1).result() == 1


def test_a_pool_of_processes(rank):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        assert pool.submit(abs, -1).result() == 1


def test_a_child_that_outlives_the_test(rank):
    subprocess.Popen(["sleep", "1"], stdout=subprocess.DEVNULL)


def test_a_thread_that_computes_while_the_main_thread_waits(rank):
    stop = threading.Event()

    def compute():
        while not stop.is_set():
            ones(100, 100) @ ones(100, 100)

    thread = threading.Thread(target=compute)
    thread.start()
    if rank:
        time.sleep(0.4)
    dist.barrier()
    stop.set()
    thread.join()


def test_a_thread_that_idles_while_ranks_wait(rank):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    if rank:
        time.sleep(0.6)
    dist.barrier()


def test_keys_that_ranks_look_for_again_and_again(rank):
    store = _get_default_store()
    if rank:
        time.sleep(0.4)
        store.set("ready", "1")
    else:
        while not store.check(["ready"]):
            time.sleep(0.01)


def test_a_store_of_its_own_that_a_thread_serves(rank):
    store = dist.HashStore()
    thread = threading.Timer(0.4, store.set, ["done", "1"])
    thread.start()
    assert store.get("done") == b"1"
    thread.join()


def test_a_dataloader_with_workers(rank):
    dataset = torch.utils.data.TensorDataset(torch.arange(8.0))
    sampler = torch.utils.data.DistributedSampler(dataset, shuffle=False)
    loader = torch.utils.data.DataLoader(dataset, 2, sampler=sampler, num_workers=1, multiprocessing_context="fork")
    found = torch.cat([x for (x,) in loader])
    dist.all_reduce(found)
    assert found.sum() == 28


def test_a_dataloader_whose_workers_live_on(rank):
    loader = torch.utils.data.DataLoader(
        list(range(4)), num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    assert len(list(loader)) == 4
    dist.barrier()


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler")
@pytest.mark.may_skip("needs a C++ compiler")
@pytest.mark.exhaustive
@pytest.mark.ranks(2, timeout=300)
def test_a_function_compiled_with_a_cold_cache(rank, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    if rank == 0:
        x = torch.arange(4.0)
        torch.testing.assert_close(torch.compile(torch.sinc)(x), torch.sinc(x))
    dist.barrier()


def test_a_key_that_a_process_of_another_rank_sets(rank):
    ports = [None]
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ports = [store.port]
    dist.broadcast_object_list(ports)
    program = (
        "import time, torch.distributed as dist; time.sleep(0.6); "
        f"dist.TCPStore('127.0.0.1', {ports[0]}, is_master=False).set('done', '1')"
    )
    if rank:
        subprocess.Popen([sys.executable, "-c", program])
    else:
        assert store.get("done") == b"1"


@pytest.mark.ranks(2, timeout=1)
def test_imports_for_longer_than_its_timeout(rank, tmp_path):
    if rank:
        (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(1.5)\n")
        sys.path.insert(0, str(tmp_path))
        import slow_to_import

        assert slow_to_import.time is time
    dist.barrier()

"""What a test returns instead of running, or leaves behind."""

import os
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2, timeout=30)
says = pytest.mark.says


async def asserts_nothing(rank):
    assert rank is None


@says(r"(ranks 0, 1 failed: )?.*(async def functions are not natively supported|body never ran|coroutine)")
async def test_coroutine(rank):
    assert rank is None


@says(r"(ranks 0, 1 failed: )?.*(async def functions are not natively supported|body never ran|async)")
async def test_asynchronous_generator(rank):
    assert rank is None
    yield


@says(r"(ranks 0, 1 failed: )?.*(async def functions are not natively supported|body never ran|coroutine)")
def test_returned_a_coroutine(rank):
    return asserts_nothing(rank)


class TestCoroutine:
    @says(r"(ranks 0, 1 failed: )?.*(async def functions are not natively supported|body never ran|coroutine)")
    async def test_coroutine_of_a_class(self, rank):
        assert rank is None


@pytest.mark.filterwarnings("error::pytest.PytestReturnNotNoneWarning")
@says(r"ranks 0, 1 failed: .*(PytestReturnNotNoneWarning|returned)")
def test_returned_a_value(rank):
    return False


@pytest.mark.filterwarnings("error::pytest.PytestReturnNotNoneWarning")
@says(r"rank 1 failed: .*(PytestReturnNotNoneWarning|returned)")
def test_returned_a_value_on_one(rank):
    return rank or None


@pytest.mark.filterwarnings("error::pytest.PytestReturnNotNoneWarning")
@says(r"ranks? [01](, 1)? failed: .*(PytestReturnNotNoneWarning|returned|body never ran)")
def test_returned_a_generator(rank):
    return (assertion for assertion in [0])


@pytest.fixture
async def asynchronous():
    return 1


@says(r"(ranks 0, 1 failed: )?.*(requested an async fixture|async)")
def test_asked_for_a_coroutine(asynchronous):
    pass


@says(r"rank 1 failed: .*(end of|closed file|I/O)")
def test_closed_its_output(rank):
    if rank:
        sys.stdout.close()
        print("lost")


@says(r"rank 1 failed: FileNotFoundError")
def test_removed_its_folder(rank, tmp_path):
    folder = tmp_path / str(rank)
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()
    if rank:
        os.getcwd()  # noqa: PTH109


@says(r"rank [01] (returned without|stuck|left)")
def test_left_a_collective_in_a_thread(rank):
    if rank == 0:
        threading.Thread(target=dist.barrier).start()
        time.sleep(0.2)


@says(r"ranks? \d.*(message|recv|receive)")
def test_left_a_receive_in_a_thread(rank):
    if rank == 0:
        threading.Thread(target=dist.recv, args=[torch.ones(2), 1], daemon=True).start()
        time.sleep(0.2)


def test_healthy_after_what_was_left(rank):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.sum() == 6

"""Point-to-point messages that arrive."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import ones

pytestmark = pytest.mark.ranks(2)


def test_send_and_receive(rank):
    x = torch.full((3,), float(rank))
    if rank:
        assert dist.recv(x, 0) == 0
        assert x.sum() == 0
    else:
        dist.send(x, 1)


def test_a_message_from_anyone(rank):
    if rank:
        dist.send(ones(2), 0)
    else:
        assert dist.recv(ones(2)) == 1


@pytest.mark.ranks(3)
def test_messages_from_anyone(rank):
    if rank:
        dist.send(ones(2) * rank, 0)
    else:
        assert {dist.recv(ones(2)), dist.recv(ones(2))} == {1, 2}


@pytest.mark.ranks(3)
def test_messages_from_one_and_from_anyone(rank):
    if rank:
        dist.send(ones(2) * rank, 0)
    else:
        dist.recv(ones(2), 2)
        assert dist.recv(ones(2)) == 1


def test_messages_that_no_rank_waits_for(rank):
    x = ones(2)
    work = dist.irecv(x, 0) if rank else dist.isend(x, 1)
    dist.barrier()
    assert work is not None


works = []


def test_a_message_that_is_on_its_way_as_the_test_ends(rank):
    works.append(dist.irecv(ones(2), 0) if rank else dist.isend(ones(2), 1))


def test_a_message_received_before_it_is_sent(rank):
    x = torch.zeros(2)
    if rank:
        work = dist.irecv(x, 0)
        dist.barrier()
        work.wait()
        assert x.sum() == 2
    else:
        dist.barrier()
        dist.send(ones(2), 1)


def test_both_at_once(rank):
    x = torch.zeros(2)
    works = [dist.isend(ones(2), 1 - rank), dist.irecv(x, 1 - rank)]
    for work in works:
        work.wait()
    assert x.sum() == 2


def test_large_ones_both_at_once(rank):
    x = torch.zeros(1 << 20)
    works = [dist.irecv(x, 1 - rank), dist.isend(ones(1 << 20), 1 - rank)]
    for work in works:
        work.wait()
    assert x.sum() == 1 << 20


def test_tags_in_order(rank):
    for tag in range(5):
        x = torch.tensor([tag])
        if rank:
            dist.recv(x, 0, tag=tag)
        else:
            dist.send(x, 1, tag=tag)
        assert x == tag


def test_tags_out_of_order(rank):
    if rank:
        found = [torch.zeros(1) for _ in range(4)]
        works = [dist.irecv(found[tag], 0, tag=tag) for tag in (2, 0, 3, 1)]
        for work in works:
            work.wait()
        assert [x.item() for x in found] == [0, 1, 2, 3]
    else:
        works = [dist.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in range(4)]
        for work in works:
            work.wait()


def test_many_of_one_tag_keep_their_order(rank):
    for number in range(50):
        x = torch.tensor([number])
        if rank:
            dist.recv(x, 0)
            assert x == number
        else:
            dist.send(x, 1)


def test_shapes_of_one_size(rank):
    if rank:
        dist.recv(ones(6), 0)
    else:
        dist.send(ones(2, 3), 1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.bfloat16, torch.bool, torch.complex64])
def test_dtypes(rank, dtype):
    if rank:
        x = torch.zeros(3, dtype=dtype)
        dist.recv(x, 0)
        assert x.bool().all()
    else:
        dist.send(ones(3, dtype=dtype), 1)


def test_empty_ones(rank):
    if rank:
        dist.recv(ones(0), 0)
    else:
        dist.send(ones(0), 1)


def test_a_batch(rank):
    x = torch.zeros(2)
    batch = [dist.P2POp(dist.isend, ones(2), 1 - rank), dist.P2POp(dist.irecv, x, 1 - rank)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert x.sum() == 2


@pytest.mark.ranks(4)
def test_a_ring(rank, world_size):
    x = torch.empty(1)
    work = dist.isend(torch.tensor([float(rank)]), (rank + 1) % world_size)
    dist.recv(x, (rank - 1) % world_size)
    work.wait()
    assert x == (rank - 1) % world_size


@pytest.mark.ranks(4)
def test_a_pipeline(rank, world_size):
    for number in range(5):
        x = torch.tensor([float(number)])
        if rank:
            dist.recv(x, rank - 1)
        if rank < world_size - 1:
            dist.send(x + 1, rank + 1)
        assert x == number + rank


@pytest.mark.ranks(3)
def test_in_a_subgroup(rank):
    group = dist.new_group([0, 2])
    if rank == 0:
        dist.send(ones(2), 2, group=group)
    elif rank == 2:
        dist.recv(ones(2), 0, group=group)


@pytest.mark.ranks(3)
def test_by_the_rank_in_a_subgroup(rank):
    group = dist.new_group([1, 2])
    if rank == 1:
        dist.send(ones(2), group=group, group_dst=1)
    elif rank == 2:
        dist.recv(ones(2), group=group, group_src=0)


def test_in_two_groups_with_one_tag(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups:
        if rank:
            dist.recv(ones(2), 0, group=group, tag=3)
        else:
            dist.send(ones(2), 1, group=group, tag=3)


def test_between_collectives(rank):
    for _ in range(3):
        dist.all_reduce(ones(2))
        if rank:
            dist.recv(ones(2), 0)
        else:
            dist.send(ones(2), 1)
    dist.barrier()


def test_a_collective_while_a_message_waits(rank):
    work = dist.irecv(ones(2), 1 - rank)
    dist.all_reduce(ones(2))
    dist.send(ones(2), 1 - rank)
    work.wait()


def test_from_threads(rank):
    def send():
        for tag in range(5):
            dist.send(ones(2), 1 - rank, tag=tag)

    thread = threading.Thread(target=send)
    thread.start()
    for tag in range(5):
        dist.recv(ones(2), 1 - rank, tag=tag)
    thread.join()


def test_from_a_pool(rank):
    with ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(dist.send, ones(2), 1 - rank, tag=tag) for tag in range(4)]
        received = [pool.submit(dist.recv, ones(2), 1 - rank, tag=tag) for tag in range(4)]
        for future in (*sent, *received):
            future.result()


@pytest.mark.may_skip("messages of objects need numpy")
def test_objects(rank):
    pytest.importorskip("numpy", reason="messages of objects need numpy")
    if rank:
        found = [None, None]
        dist.recv_object_list(found, 0)
        assert found == [1, "two"]
    else:
        dist.send_object_list([1, "two"], 1)


@pytest.mark.parametrize("turn", [1, 2])
def test_counted_anew_in_each_test(rank, turn):
    if rank:
        dist.recv(ones(2), 0)
    else:
        dist.send(ones(2), 1)


def test_messages_in_a_thread_beside_collectives(rank):
    def exchange():
        for tag in range(300):
            sent, received = (issue(ones(1), 1 - rank, tag=tag) for issue in (dist.isend, dist.irecv))
            sent.wait()
            received.wait()

    thread = threading.Thread(target=exchange)
    thread.start()
    for size in range(1, 300):
        dist.all_reduce(ones(size))
    thread.join()

"""Point-to-point messages that are sent and not received, asked for and not sent, or that do not fit."""

import pytest
import torch
import torch.distributed as dist
from torch import complex64, float32, float64, int32, ones

pytestmark = pytest.mark.ranks(2, timeout=30)
says = pytest.mark.says


@says(r"ranks? \d.*(message|send|sent)")
def test_isend_that_is_not_received(rank):
    if rank == 0:
        dist.isend(ones(3), 1)


@says(r"ranks? \d.*(message|send|sent)")
def test_isend_that_is_waited_for_and_not_received(rank):
    if rank == 0:
        dist.isend(ones(3), 1).wait()


@says(r"ranks? \d.*(message|send|sent)")
def test_send_that_is_not_received(rank):
    if rank == 0:
        dist.send(ones(3), 1)


@says(r"rank 0 stuck waiting for rank 1 to receive message 1|ranks? \d.*(message|send|sent)")
def test_large_send_that_is_not_received(rank):
    if rank == 0:
        dist.send(ones(8 << 20), 1)


@says(r"ranks? \d.*(message|recv|receive)")
def test_irecv_that_is_not_sent(rank):
    if rank == 0:
        dist.irecv(ones(3), 1)


@says(r"rank 0 stuck waiting for message 1 from rank 1")
def test_recv_that_is_not_sent(rank):
    if rank == 0:
        dist.recv(ones(3), 1)


@says(r"rank 0 stuck waiting for message 1 from rank 1 in the default group: rank 1 waits for something else")
def test_both_receive(rank):
    dist.recv(ones(3), 1 - rank)


@says(r"ranks? \d.*(stuck|message|send|sent)")
def test_both_send(rank):
    dist.send(ones(8 << 20), 1 - rank)


@says(r"rank 0 stuck waiting for message 1 from anyone")
def test_recv_from_anyone_that_is_not_sent(rank):
    if rank == 0:
        dist.recv(ones(3))


@pytest.mark.ranks(3, timeout=30)
@says(r"ranks? \d.*message 1 from rank")
def test_ring_of_receives(rank):
    dist.recv(ones(3), (rank + 1) % 3)


@says(r"rank \d (stuck )?.*tag [12]")
def test_tags_that_differ(rank):
    if rank:
        dist.recv(ones(3), 0, tag=1)
    else:
        dist.send(ones(3), 1, tag=2)


@says(r"ranks? \d.*tag [12]")
def test_tags_that_differ_and_no_rank_waits(rank):
    if rank:
        dist.irecv(ones(3), 0, tag=1)
    else:
        dist.isend(ones(3), 1, tag=2)


@says(r"ranks? \d.*tag 2")
def test_second_tag_that_differs(rank):
    if rank:
        dist.recv(ones(3), 0, tag=1)
    else:
        dist.send(ones(3), 1, tag=1)
        dist.isend(ones(3), 1, tag=2)


@says(r"ranks? \d.*float32\[4\].*int32\[4\]|ranks? \d.*int32\[4\].*float32\[4\]")
def test_dtypes_of_one_size(rank):
    if rank:
        dist.recv(ones(4, dtype=int32), 0)
    else:
        dist.send(ones(4), 1)


@says(r"ranks? \d.*float32\[4\].*float64\[2\]|ranks? \d.*float64\[2\].*float32\[4\]")
def test_dtypes_of_as_many_bytes(rank):
    if rank:
        dist.recv(ones(2, dtype=float64), 0)
    else:
        dist.send(ones(4), 1)


@says(r"ranks? \d.*float32\[4\].*int32\[4\]|ranks? \d.*int32\[4\].*float32\[4\]")
def test_dtypes_of_a_batch(rank):
    x = [ones(4), ones(4, dtype=int32 if rank else float32)]
    sends = [dist.P2POp(dist.isend, x[0], 1 - rank), dist.P2POp(dist.irecv, x[1], 1 - rank)]
    for work in dist.batch_isend_irecv(sends):
        work.wait()


@says(r"ranks? \d.*float32\[4\].*float32\[5\]|ranks? \d.*float32\[5\].*float32\[4\]")
def test_longer_than_what_is_sent(rank):
    if rank:
        dist.recv(ones(5), 0)
    else:
        dist.send(ones(4), 1)


# gloo aborts, and says why on stderr.
@says(
    r"(?s)rank 1 was killed by SIGABRT: rank 0 sends float32\[4\], and rank 1 receives it as float32\[3\], message 1, "
    r"in the default group.*test_shorter_than_what_is_sent"
)
def test_shorter_than_what_is_sent(rank):
    if rank:
        dist.recv(ones(3), 0)
    else:
        dist.send(ones(4), 1)


@pytest.mark.unchecked("dtype and size of a message that a receive from any source gets")
def test_dtypes_of_a_message_from_anyone(rank):
    if rank:
        dist.recv(ones(4, dtype=int32))
    else:
        dist.send(ones(4), 1)


@pytest.mark.unchecked("complex numbers against pairs of real ones")
def test_complex_and_real_numbers(rank):
    if rank:
        dist.recv(ones(2, 2), 0)
    else:
        dist.send(ones(2, dtype=complex64), 1)


@says(r"ranks? \d.*(message|send|sent)")
def test_one_more_sent_than_received(rank):
    for _ in range(2):
        if rank:
            dist.recv(ones(3), 0)
        else:
            dist.send(ones(3), 1)
    if rank == 0:
        dist.isend(ones(3), 1)


@says(r"ranks? \d.*(message|recv|receive)")
def test_one_more_received_than_sent(rank):
    works = [dist.irecv(ones(3), 0) if rank else dist.isend(ones(3), 1) for _ in range(2 + rank)]
    works[1].wait()


@pytest.mark.ranks(3, timeout=30)
@says(r"ranks? \d.*(message|send|sent)")
def test_sent_to_the_wrong_rank(rank):
    if rank == 0:
        dist.isend(ones(3), 1)
    elif rank == 2:
        dist.irecv(ones(3), 0)


@says(r"ranks? \d.*(message|send|sent)")
def test_sent_in_another_group(rank):
    group = dist.new_group([0, 1])
    if rank == 0:
        dist.isend(ones(3), 1, group=group)
    else:
        dist.irecv(ones(3), 0)


@says(r"ranks? \d.*(message|send|sent)")
def test_batch_without_a_receiver(rank):
    if rank == 0:
        dist.batch_isend_irecv([dist.P2POp(dist.isend, ones(3), 1)])


@says(r"ranks? \d.*(message|send|sent)")
def test_not_received_before_a_barrier(rank):
    if rank == 0:
        dist.isend(ones(3), 1)
    dist.barrier()


@pytest.mark.may_skip("messages of objects need numpy")
@says(r"ranks? \d.*(message|send|sent)")
def test_objects_that_are_not_received(rank):
    pytest.importorskip("numpy", reason="messages of objects need numpy")
    if rank == 0:
        dist.send_object_list([1], 1)


@says(r"ranks? \d.*(message|send|sent)")
def test_not_received_before_the_group_was_destroyed(rank):
    if rank == 0:
        dist.isend(ones(3), 1)
    dist.barrier()
    dist.destroy_process_group()


def test_healthy_after_lost_messages(rank):
    x = torch.zeros(3)
    if rank:
        dist.recv(x, 0)
    else:
        dist.send(ones(3), 1)
    assert x.sum() == 3 * rank

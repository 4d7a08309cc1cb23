"""Process groups: made, split, destroyed and made anew, of other backends, and none at all."""

import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import ones
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
from zeroshard_testing import raises_on

pytestmark = pytest.mark.ranks(2)


def test_the_default_group(rank, world_size, process_group, device):
    assert process_group is dist.group.WORLD
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, world_size, "gloo")
    assert device == torch.device("cpu")


@pytest.mark.ranks(1)
def test_one_rank_alone(rank):
    dist.all_reduce(ones(2))
    dist.barrier()
    assert (rank, dist.get_world_size()) == (0, 1)


@pytest.mark.ranks(4)
def test_halves(rank):
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=halves[rank // 2])
    assert x == (1 if rank < 2 else 5)


@pytest.mark.ranks(4)
def test_subgroups_of_a_size(rank):
    group, _ = dist.new_subgroups(2)
    x = ones(1)
    dist.all_reduce(x, group=group)
    assert x == 2


@pytest.mark.ranks(3)
def test_a_group_that_a_rank_is_no_member_of(rank):
    group = dist.new_group([0, 2])
    if rank == 1:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
    else:
        x = ones(1)
        dist.all_reduce(x, group=group)
        assert x == 2
        assert dist.get_rank(group) == rank // 2


@pytest.mark.ranks(3)
def test_a_root_of_a_subgroup(rank):
    group = dist.new_group([1, 2])
    if rank:
        x = torch.tensor([rank])
        dist.broadcast(x, src=2, group=group)
        assert x == 2


@pytest.mark.ranks(4)
def test_a_group_that_its_members_alone_make(rank):
    if rank in (1, 3):
        group = dist.new_group([1, 3], use_local_synchronization=True)
        x = ones(1)
        dist.all_reduce(x, group=group)
        assert x == 2


def test_groups_of_one(rank):
    group = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(ones(1), group=group)
    dist.barrier(group=group)


def test_two_groups_of_the_same_ranks_used_in_another_order(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    works = [dist.all_reduce(ones(2), group=group, async_op=True) for group in (groups if rank else groups[::-1])]
    for work in works:
        work.wait()


@pytest.mark.ranks(4)
def test_more_collectives_in_one_group_than_in_another(rank):
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for _ in range(1 + 3 * (rank // 2)):
        dist.all_reduce(ones(1), group=halves[rank // 2])


@pytest.mark.ranks(4)
def test_a_mesh(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=mesh["inner"].get_group())
    assert x == (1 if rank < 2 else 5)
    dist.all_reduce(x, group=mesh.get_group("outer"))
    assert x == 6


def test_a_group_destroyed(rank):
    group = dist.new_group([0, 1])
    dist.all_reduce(ones(1), group=group)
    dist.destroy_process_group(group)
    dist.all_reduce(ones(1))


def test_all_groups_destroyed(rank):
    dist.all_reduce(ones(1))
    dist.destroy_process_group()
    assert not dist.is_initialized()


def test_made_anew_by_a_file(rank, tmp_path):
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=rank, world_size=2)
    x = ones(1)
    dist.all_reduce(x)
    assert x == 2


def test_made_anew_twice(rank):
    store = _get_default_store()
    for name in ("one", "two"):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=2)
        dist.all_reduce(ones(1))
        dist.barrier()


def test_a_group_with_a_short_timeout(rank):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    dist.all_reduce(ones(2), group=group)


def test_a_group_in_a_thread(rank):
    made = []
    thread = threading.Thread(target=lambda: made.append(dist.new_group([0, 1])))
    thread.start()
    thread.join()
    dist.all_reduce(ones(2), group=made[0])


def test_a_key_of_the_default_store(rank):
    store = _get_default_store()
    store.set(f"of {rank}", "1")
    assert store.get(f"of {1 - rank}") == b"1"
    assert store.add("counter", 1) in (1, 2)


@pytest.mark.parametrize("turn", [1, 2])
def test_a_store_that_is_new_for_each_test(rank, turn):
    assert _get_default_store().add("counter", 1) <= 2


@pytest.mark.ranks(2, init=False)
def test_no_group(rank, world_size):
    assert not dist.is_initialized()
    assert (rank, world_size) == (int(os.environ["RANK"]), 2)


@pytest.mark.ranks(2, 4, init=False)
def test_a_group_made_from_the_environment(rank, world_size):
    dist.init_process_group("gloo")
    x = ones(1)
    dist.all_reduce(x)
    assert (x, dist.get_rank()) == (world_size, rank)


@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("turn", [1, 2])
def test_a_group_made_from_the_environment_and_destroyed(turn):
    dist.init_process_group("gloo", init_method="env://")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.ranks(2, init=False)
def test_a_group_that_numbers_the_ranks_otherwise(rank):
    dist.init_process_group("gloo", init_method="env://", rank=1 - rank, world_size=2)
    if rank == 0:
        dist.send(ones(1), 0)
    else:
        dist.recv(ones(1), 1)


@pytest.mark.ranks(2, init=False)
def test_a_world_of_one_before_that_of_all():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    dist.barrier()


@pytest.mark.ranks(2, init=False)
def test_a_mesh_that_makes_the_group(rank):
    mesh = init_device_mesh("cpu", (2,))
    dist.all_reduce(ones(1), group=mesh.get_group())
    assert dist.get_rank() == rank


def test_the_environment_of_a_launcher(rank, world_size):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert [int(os.environ[name]) for name in names] == [rank, rank, world_size, world_size]
    assert os.environ["MASTER_ADDR"]
    assert int(os.environ["MASTER_PORT"]) > 0


def test_made_anew_from_the_environment(rank):
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    dist.all_reduce(ones(1))


@pytest.mark.ranks(64, backend="fake", fake_rank=5)
def test_fake(rank, world_size, device):
    assert (rank, world_size, dist.get_rank(), dist.get_world_size()) == (5, 64, 5, 64)
    dist.all_reduce(ones(1, device=device))


@pytest.mark.ranks(4096, backend="fake")
def test_fake_of_many_ranks(rank):
    dist.all_gather_into_tensor(torch.empty(4096), ones(1))
    dist.send(ones(1), 17)
    assert rank == 0


@pytest.mark.ranks(2, backend=["gloo", "fake"])
def test_two_backends(rank, world_size):
    dist.all_reduce(ones(1))
    assert dist.get_world_size() == world_size == 2


@pytest.mark.ranks(2, isolation="process")
@pytest.mark.parametrize("turn", [1, 2])
def test_fresh_processes(turn):
    assert not hasattr(torch, "left_behind")
    torch.left_behind = True


@pytest.mark.ranks(2, isolation="none")
@pytest.mark.parametrize("turn", [1, 2, 3])
def test_one_group_of_the_module(turn):
    x = ones(1)
    dist.all_reduce(x)
    assert x == 2
    assert _get_default_store().add("seen", 1) <= 6


class TestGroupOfTheModuleThatATestDestroys:
    pytestmark = pytest.mark.ranks(3, isolation="none")

    @pytest.mark.parametrize("destroyers", [(0, 1, 2), (1,)])
    def test_destroyed(self, rank, destroyers):
        if rank in destroyers:
            dist.destroy_process_group()

    @pytest.mark.parametrize("turn", [1, 2])
    def test_there_again(self, turn):
        dist.barrier()

    @pytest.mark.ranks(3, isolation="none", init=False)
    def test_destroyed_by_one_that_makes_its_own(self):
        dist.destroy_process_group()

    def test_there_once_more(self):
        dist.barrier()


def test_groups_of_one_rank_each(rank):
    dist.all_reduce(ones(1), group=dist.new_group([rank]))
    dist.barrier()


@pytest.mark.ranks(2, isolation="group")
@pytest.mark.parametrize("turn", [1, 2])
def test_a_fresh_group(turn):
    dist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.ranks(3)
def test_two_marks(world_size):
    dist.barrier()
    assert world_size in (2, 3)


@pytest.mark.ranks(2, timeout=9.5)
def test_a_short_timeout(rank):
    dist.barrier()


def test_after_an_error_that_is_expected_on_all_ranks(rank):
    with pytest.raises((RuntimeError, ValueError), match="nvalid"):
        dist.broadcast(ones(1), src=7)
    dist.barrier()


@pytest.mark.ranks(2, init=False)
def test_a_default_group_that_one_rank_cannot_make(rank):
    with raises_on(RuntimeError, ranks=0):
        if rank == 0:
            dist.init_process_group("gloo", timeout=timedelta(seconds=0.2))


def test_the_group_after_one_that_was_not_made(world_size):
    x = ones(1)
    dist.all_reduce(x)
    assert x == world_size

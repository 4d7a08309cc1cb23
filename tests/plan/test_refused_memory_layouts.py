"""Parameters that lie in memory in unusual ways are refused on every rank, as are conversions once there is state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.combinations import FLAG, WHERE, each_of
from support.ddp_training import HOOKS, register, steps_in_backward
from support.refusals import assert_blames, is_mine
from support.training import assert_bitwise_equal, convolutions, cutting, set_gradients, twin_optimizers, twins
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError
from zeroshard_testing import assert_replicas_equal

Tensors = list[torch.Tensor]
SHAPE = (192, 192)


def values(seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def pair() -> Tensors:
    return [values(1), values(2)]


def side_by_side(tensors: Tensors, step: int) -> Tensors:
    """The same values as columns of one matrix: every ``step``-th column belongs to a tensor."""
    width = SHAPE[1]
    together = torch.zeros(SHAPE[0], 2 * width)
    places = [slice(0, None, 2), slice(1, None, 2)] if step == 2 else [slice(0, width), slice(width, None)]
    for tensor, place in zip(tensors, places, strict=True):
        together[:, place] = tensor
    return [together[:, place] for place in places]


def windows(size: int) -> torch.Tensor:
    """Rows that begin where the middle of the row before lies."""
    return values().view(-1)[: size * 8].as_strided((size, 16), (8, 1))


def module(tensors: Tensors) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.ones(40)), *map(nn.Parameter, tensors), nn.Parameter(torch.ones(70))])


def distributed() -> torch.Tensor:
    alone = DeviceMesh("cpu", [dist.get_rank()], _init_backend=False)
    return DTensor.from_local(values(), alone, [Replicate()], run_check=False)


def overlapping() -> Tensors:
    rows = torch.zeros(SHAPE[0] + 10, SHAPE[1])
    return [rows[:100], rows[99:]]


def sparse() -> torch.Tensor:
    return torch.eye(SHAPE[0]).to_sparse()


GAPS = r"has gaps in memory, or elements that share memory: call p.data = p.data.contiguous\(\) first"
VIEW = r"is a conjugate or negative view: call p.data = p.data.resolve_conj\(\).resolve_neg\(\) first"
REFUSED: dict[str, tuple[Callable[[], Tensors], Callable[[], Tensors], type[Exception], str]] = {
    "gaps": (lambda: side_by_side(pair(), 1), pair, ValueError, f"parameter 1 of group 0.*{GAPS}"),
    "columns in turn": (lambda: side_by_side(pair(), 2), pair, ValueError, GAPS),
    "expanded": (lambda: [values()[:1].expand(SHAPE)], lambda: [values()], ValueError, GAPS),
    "expanded, one element": (lambda: [torch.zeros(1).expand(4)], lambda: [torch.zeros(4)], ValueError, GAPS),
    "windows": (lambda: [windows(40)], lambda: [windows(40).clone()], ValueError, GAPS),
    "a conjugate view": (
        lambda: [values(1, torch.complex64).conj()],
        lambda: [values(1, torch.complex64)],
        ValueError,
        VIEW,
    ),
    "a negative view": (lambda: [torch._neg_view(-values())], lambda: [values()], ValueError, VIEW),
    "rows that two have": (
        overlapping,
        lambda: [tensor.clone() for tensor in overlapping()],
        ValueError,
        "parameter 1 of group 0 and parameter 2 of group 0 share memory",
    ),
    "sparse": (
        lambda: [sparse()],
        lambda: [sparse().to_dense()],
        ValueError,
        "is a torch.sparse_coo tensor: sparse parameters are not supported",
    ),
    "a DTensor": (lambda: [distributed()], lambda: [values()], TypeError, "parameter 1 of group 0.* is a DTensor"),
}


def refused(name: str, *, unusual: bool) -> nn.ParameterList:
    return module(REFUSED[name][0 if unusual else 1]())


@pytest.mark.ranks(2, backend="gloo")
@each_of("name", REFUSED, partition=["whole", "split"], as_bucket_view=FLAG, where=WHERE)
def test_unusual_memory_is_refused_at_construction(
    rank: int, where: str, partition: str, as_bucket_view: bool, name: str
) -> None:
    *_, error, words = REFUSED[name]
    params = refused(name, unusual=is_mine(where, rank))
    places = [param.data_ptr() for param in params if not param.is_sparse]
    with pytest.raises(error, match=words) as caught:
        ZeroRedundancyOptimizer(
            params.parameters(), optim.Adam, partition=cutting(partition), parameters_as_bucket_view=as_bucket_view
        )
    assert_blames(caught.value, where)
    assert "\n" not in str(caught.value)
    assert [param.data_ptr() for param in params if not param.is_sparse] == places
    dist.barrier()


@pytest.mark.ranks(2, backend="gloo")
@each_of("name", REFUSED, as_bucket_view=FLAG, where=WHERE)
def test_unusual_memory_is_refused_in_a_group_that_is_added(
    rank: int, where: str, as_bucket_view: bool, name: str
) -> None:
    *_, error, words = REFUSED[name]
    ours, theirs = twins(lambda: module(pair()))
    sharded, plain = twin_optimizers((ours, theirs), optim.Adam, as_bucket_view=as_bucket_view)
    added = refused(name, unusual=is_mine(where, rank))
    with pytest.raises(error, match=words.replace("group 0", "group 1")) as caught:
        sharded.add_param_group({"params": list(added.parameters())})
    assert_blames(caught.value, where)
    assert len(sharded.param_groups) == len(sharded.optim.param_groups) == 1
    for params, optimizer in ((ours, sharded), (theirs, plain)):
        set_gradients(params.parameters(), 0)
        optimizer.step()
    assert_bitwise_equal(ours, theirs, "after the refused group")


@pytest.mark.ranks(2, backend="gloo")
def test_frozen_parameters_may_lie_anywhere_until_they_are_trained(rank: int) -> None:
    frozen = [nn.Parameter(values()[:1].expand(SHAPE), requires_grad=False), nn.Parameter(values())]
    sharded = ZeroRedundancyOptimizer([*frozen, nn.Parameter(torch.ones(3))], optim.Adam)
    sharded.step()
    frozen[0].requires_grad_(rank == 0)
    with pytest.raises(ValueError, match=f"rank 0: parameter 0 of group 0.*{GAPS}"):
        sharded.step()


REBOUND: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "transposed": (torch.Tensor.t, torch.Tensor.t),
    "another shape": (lambda x: x.view(-1), lambda x: x.view(SHAPE)),
    "narrowed": (lambda x: x[:7], lambda x: x.as_strided(SHAPE, (SHAPE[1], 1))),
    "expanded": (lambda x: x[:1].expand(SHAPE), lambda x: x.as_strided(SHAPE, (SHAPE[1], 1))),
}


@pytest.mark.ranks(2, backend="gloo")
@each_of("name", REBOUND, partition=["whole", "split"], as_bucket_view=FLAG, where=WHERE)
def test_data_that_is_read_otherwise_from_the_same_address_is_refused(
    rank: int, where: str, partition: str, as_bucket_view: bool, name: str
) -> None:
    ours, theirs = twins(lambda: module(pair()))
    sharded, plain = twin_optimizers((ours, theirs), optim.Adam, partition, as_bucket_view)
    for step in range(2):
        for params, optimizer in ((ours, sharded), (theirs, plain)):
            set_gradients(params.parameters(), step)
            optimizer.step()
    change, back = REBOUND[name]
    weight = ours[1]
    before = weight.data.clone()
    if is_mine(where, rank):
        weight.data = change(weight.data)
    set_gradients(ours.parameters(), 2)
    sent = sharded.traffic.of("broadcast").bytes_sent
    refusals = (ValueError, RuntimeError, DisagreementError)
    with pytest.raises(refusals, match=r"tensor 1 'param.1'|parameter 1 of group 0"):
        sharded.step()
    if where == "on all ranks":
        # The state is of no use, nor is a step.
        assert_bitwise_equal(nn.ParameterList([*ours][2:]), nn.ParameterList([*theirs][2:]), "after the refused step")
    assert sharded.traffic.of("broadcast").bytes_sent == sent
    if is_mine(where, rank):
        weight.data = back(weight.data)
    assert where != "on all ranks" or torch.equal(weight, before)
    set_gradients(ours.parameters(), 3)
    sharded.step()
    assert_replicas_equal(ours.parameters())


@pytest.mark.ranks(2, backend="gloo")
@each_of("hook", HOOKS, where=WHERE)
def test_data_with_gaps_is_refused_with_a_communication_hook_too(rank: int, where: str, hook: str) -> None:
    model = nn.Linear(6, 6, bias=False)
    ddp = DistributedDataParallel(model)
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, overlap_with_ddp=steps_in_backward(hook))
    register(hook, ddp, sharded)

    def iterate() -> None:
        sharded.zero_grad()
        ddp(torch.ones(2, 6)).sum().backward()
        sharded.step()

    iterate()
    if is_mine(where, rank):
        model.weight.data = torch.stack([model.weight.data, model.weight.data], dim=-1)[..., 0]
    with pytest.raises(ValueError, match=f"parameter 0 of group 0.*{GAPS}") as caught:
        iterate()
    assert_blames(caught.value, where)


CONVERSIONS: dict[str, tuple[Callable[[nn.Module], object], Callable[[nn.Module], object]]] = {
    "dtype": (nn.Module.double, nn.Module.float),
    "memory format": (
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: model.to(memory_format=torch.contiguous_format),
    ),
}


@pytest.mark.ranks(2, backend="gloo")
@each_of("name", CONVERSIONS, partition=["whole", "split"], as_bucket_view=FLAG, where=WHERE)
def test_a_converted_model_is_refused_once_there_is_state(
    rank: int, partition: str, as_bucket_view: bool, where: str, name: str
) -> None:
    ours, theirs = twins(convolutions)
    sharded, plain = twin_optimizers((ours, theirs), optim.Adam, partition, as_bucket_view)
    convert, back = CONVERSIONS[name]

    def step(number: int) -> None:
        for module, optimizer in ((ours, sharded), (theirs, plain)):
            set_gradients(module.parameters(), number)
            optimizer.step()

    step(0)
    values = [param.detach().clone() for param in ours.parameters()]
    converted = is_mine(where, rank)
    if converted:
        convert(ours)
    set_gradients(ours.parameters(), 1)
    error, words = ValueError, "has optimizer state, and has changed its dtype, device or memory format"
    if as_bucket_view:
        error, words = (
            RuntimeError,
            "is a view of a flat buffer, and its .data was rebound to a tensor of shape .* build",
        )
    for call in (sharded.step, lambda: sharded.load_state_dict(plain.state_dict())):
        with pytest.raises(error, match=rf"^(rank [01]: )?tensor \d 'param.\d' {words}") as caught:
            call()
        assert "rank 0: " not in str(caught.value) or where == "on all ranks"
    # Nothing has changed, and a model that comes back was not converted.
    if converted:
        back(ours)
    assert all(map(torch.equal, ours.parameters(), values))
    step(1)
    assert_bitwise_equal(ours, theirs, "after the refused step")


@pytest.mark.ranks(2, backend="gloo")
def test_parameters_that_share_memory_by_a_rebound_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, parameters_as_bucket_view=True)
    model(torch.ones(2, 4)).sum().backward()
    model[0].weight.data = model[1].weight.data
    with pytest.raises(ValueError, match="share memory"):
        sharded.step()

"""Parameters that lie in memory in unusual ways: stepped as by the unsharded optimizer, or refused on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ddp_training import HOOKS, register
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from training import assert_bitwise_equal, cutting, set_gradients, twins
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError
from zeroshard_testing import assert_replicas_equal

WHERE = pytest.mark.parametrize("where", ["on all ranks", "on rank 1"])
PARTITIONS = pytest.mark.parametrize("partition", ["whole", "split"])
VIEWS = pytest.mark.parametrize("as_bucket_view", [False, True], ids=["params", "views"])
REFUSED_VIEWS = pytest.mark.parametrize(
    "as_bucket_view", [pytest.param(False, id="params"), pytest.param(True, id="views", marks=pytest.mark.exhaustive)]
)
EVERY_HOOK = pytest.mark.parametrize("hook", HOOKS)

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


RIGHT: dict[str, tuple[Callable[[], Tensors], Callable[[], Tensors]]] = {
    "gaps": (lambda: side_by_side(pair(), 1)[:1], lambda: pair()[:1]),
    "blocks of one matrix": (lambda: side_by_side(pair(), 1), pair),
    "columns of one matrix in turn": (lambda: side_by_side(pair(), 2), pair),
    "a conjugate view": (
        lambda: [values(1, torch.complex64).conj().resolve_conj().conj()],
        lambda: [values(1, torch.complex64)],
    ),
    "a negative view": (lambda: [torch._neg_view(-values())], lambda: [values()]),
    "a negative view with gaps": (
        lambda: [torch.complex(values(2), -values()).conj().imag],
        lambda: [values()],
    ),
}
"""What to lay out unusually, and the same values laid out as ever."""


def module(tensors: Tensors) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.ones(40)), *map(nn.Parameter, tensors), nn.Parameter(torch.ones(70))])


@pytest.mark.each_choice
@pytest.mark.ranks(2, backend="gloo")
@WHERE
@VIEWS
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_stepped_as_by_the_unsharded_optimizer(rank: int, where: str, as_bucket_view: bool, name: str) -> None:
    unusual, usual = RIGHT[name]
    ours = module(unusual() if where == "on all ranks" or rank == 1 else usual())
    theirs = module(usual())
    assert all(map(torch.equal, ours, theirs))
    # Adam steps no conjugate views, sharded or not.
    sharded = ZeroRedundancyOptimizer(
        ours.parameters(), optim.SGD, parameters_as_bucket_view=as_bucket_view, lr=0.1, momentum=0.9
    )
    plain = optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for params, optimizer in ((ours, sharded), (theirs, plain)):
            set_gradients(params.parameters(), step)
            optimizer.step()
        assert all(map(torch.equal, ours, theirs)), f"after step {step}"


CANNOT_BE_CUT = {
    "gaps": "has gaps in memory",
    "columns of one matrix in turn": "has gaps in memory",
    "a conjugate view": "is a conjugate or negative view",
    "a negative view": "is a conjugate or negative view",
}


@pytest.mark.ranks(2, backend="gloo")
@WHERE
@pytest.mark.parametrize("name", CANNOT_BE_CUT)
def test_what_cannot_be_cut_is_refused(rank: int, where: str, name: str) -> None:
    unusual, usual = RIGHT[name]
    ours = module(unusual() if where == "on all ranks" or rank == 1 else usual())
    words = rf"partition='split' cuts tensor 1 'param.1', which {CANNOT_BE_CUT[name]}; use partition='whole'"
    with pytest.raises(ValueError, match=words) as caught:
        ZeroRedundancyOptimizer(ours.parameters(), optim.Adam, partition=cutting("split"))
    assert ("rank 1: " in str(caught.value)) == (where == "on rank 1")


def distributed() -> torch.Tensor:
    alone = DeviceMesh("cpu", [dist.get_rank()], _init_backend=False)
    return DTensor.from_local(values(), alone, [Replicate()], run_check=False)


def overlapping(matrix: torch.Tensor) -> Tensors:
    return [matrix[:, :100], matrix[:, 99:]]


OVERLAP = "elements that share memory, as those of an expanded tensor do: give each its own"
REFUSED: dict[str, tuple[Callable[[], Tensors], Callable[[], Tensors], type[Exception], str]] = {
    "expanded": (lambda: [values()[:1].expand(SHAPE)], lambda: [values()], ValueError, OVERLAP),
    "expanded, one element": (lambda: [torch.zeros(1).expand(4)], lambda: [torch.zeros(4)], ValueError, OVERLAP),
    "windows": (lambda: [windows(40)], lambda: [windows(40).clone()], ValueError, OVERLAP),
    "columns that two have": (
        lambda: overlapping(values()),
        lambda: [tensor.clone() for tensor in overlapping(values())],
        ValueError,
        "parameter 1 of group 0 and parameter 2 of group 0 share memory",
    ),
    "a DTensor": (lambda: [distributed()], lambda: [values()], TypeError, "parameter 1 of group 0.* is a DTensor"),
}


def refused(name: str, *, unusual: bool) -> nn.ParameterList:
    return module(REFUSED[name][0 if unusual else 1]())


@pytest.mark.each_choice
@pytest.mark.ranks(2, backend="gloo")
@WHERE
@PARTITIONS
@VIEWS
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_at_construction(
    rank: int, where: str, partition: str, as_bucket_view: bool, name: str
) -> None:
    *_, error, words = REFUSED[name]
    params = refused(name, unusual=where == "on all ranks" or rank == 1)
    places = [param.data_ptr() for param in params]
    with pytest.raises(error, match=words) as caught:
        ZeroRedundancyOptimizer(
            params.parameters(), optim.Adam, partition=cutting(partition), parameters_as_bucket_view=as_bucket_view
        )
    assert ("rank 1: " in str(caught.value)) == (where == "on rank 1")
    assert "\n" not in str(caught.value)
    assert [param.data_ptr() for param in params] == places
    dist.barrier()


@pytest.mark.ranks(2, backend="gloo")
@WHERE
@REFUSED_VIEWS
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_as_a_group(rank: int, where: str, as_bucket_view: bool, name: str) -> None:
    *_, error, words = REFUSED[name]
    ours, theirs = twins(lambda: module(pair()))
    sharded = ZeroRedundancyOptimizer(ours.parameters(), optim.Adam, parameters_as_bucket_view=as_bucket_view)
    plain = optim.Adam(theirs.parameters())
    added = refused(name, unusual=where == "on all ranks" or rank == 1)
    with pytest.raises(error, match=words.replace("group 0", "group 1")) as caught:
        sharded.add_param_group({"params": list(added.parameters())})
    assert ("rank 1: " in str(caught.value)) == (where == "on rank 1")
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
    with pytest.raises(ValueError, match=f"rank 0: parameter 0 of group 0.*{OVERLAP}"):
        sharded.step()


REBOUND: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "transposed": (torch.Tensor.t, torch.Tensor.t),
    "another shape": (lambda x: x.view(-1), lambda x: x.view(SHAPE)),
    "narrowed": (lambda x: x[:7], lambda x: x.as_strided(SHAPE, (SHAPE[1], 1))),
    "expanded": (lambda x: x[:1].expand(SHAPE), lambda x: x.as_strided(SHAPE, (SHAPE[1], 1))),
}


@pytest.mark.ranks(2, backend="gloo")
@WHERE
@PARTITIONS
@REFUSED_VIEWS
@pytest.mark.parametrize("name", REBOUND)
def test_data_that_is_read_otherwise_from_the_same_address(
    rank: int, where: str, partition: str, as_bucket_view: bool, name: str
) -> None:
    ours, theirs = twins(lambda: module(pair()))
    sharded = ZeroRedundancyOptimizer(
        ours.parameters(), optim.Adam, partition=cutting(partition), parameters_as_bucket_view=as_bucket_view
    )
    plain = optim.Adam(theirs.parameters())
    for step in range(2):
        for params, optimizer in ((ours, sharded), (theirs, plain)):
            set_gradients(params.parameters(), step)
            optimizer.step()
    change, back = REBOUND[name]
    weight = ours[1]
    before = weight.data.clone()
    if where == "on all ranks" or rank == 1:
        weight.data = change(weight.data)
    set_gradients(ours.parameters(), 2)
    if (name, where, partition) == ("transposed", "on all ranks", "whole"):
        sharded.step()
        assert_replicas_equal(ours.parameters())
        assert weight.stride() == (1, SHAPE[0])
        return
    sent = sharded.traffic.of("share").bytes_sent
    with pytest.raises((ValueError, DisagreementError), match=r"tensor 1 'param.1'|parameter 1 of group 0"):
        sharded.step()
    if where == "on all ranks":
        # The state is of no use, nor is a step.
        assert_bitwise_equal(nn.ParameterList([*ours][2:]), nn.ParameterList([*theirs][2:]), "after the refused step")
    assert sharded.traffic.of("share").bytes_sent == sent
    if where == "on all ranks" or rank == 1:
        weight.data = back(weight.data)
    assert where != "on all ranks" or torch.equal(weight, before)
    set_gradients(ours.parameters(), 3)
    sharded.step()
    assert_replicas_equal(ours.parameters())


@pytest.mark.each_choice
@pytest.mark.ranks(2, backend="gloo")
@WHERE
@EVERY_HOOK
@pytest.mark.parametrize("when", ["from the start", "later"])
def test_what_a_communication_hook_cannot_exchange_is_refused_on_every_rank(
    rank: int, where: str, hook: str, when: str
) -> None:
    model = nn.Linear(6, 6, bias=False)
    before = model.weight.detach().clone()
    ddp = DistributedDataParallel(model)

    def open_gaps() -> None:
        if where == "on all ranks" or rank == 1:
            model.weight.data = torch.stack([model.weight.data, model.weight.data], dim=-1)[..., 0]

    def train() -> None:
        register(hook, ddp, sharded)
        for step in range(2):
            if step == 1:
                open_gaps()
            sharded.zero_grad()
            ddp(torch.ones(2, 6)).sum().backward()
            sharded.step()

    if when == "from the start":
        open_gaps()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, overlap_with_ddp=hook != "owner")
    words = r"tensor 0 '(param.0|weight)' is sparse, has gaps in memory, or is a conjugate or negative view"
    with pytest.raises(ValueError, match=words) as caught:
        train()
    assert ("rank 1: " in str(caught.value)) == (where == "on rank 1")
    assert when == "later" or torch.equal(model.weight, before)

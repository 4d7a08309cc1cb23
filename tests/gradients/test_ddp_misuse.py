"""Models, optimizers and hooks that do not fit each other are refused by name, on every rank."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
import gc
import re

import pytest
import torch
import torch.distributed as dist
from support.ddp_training import (
    EVERY_HOOK,
    MANY_BUCKETS,
    STEPPING_HOOKS,
    Twins,
    batch,
    each_hook_with,
    register,
    steps_in_backward,
    with_hook,
)
from support.groups import group_of
from support.training import small_model
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError
from zeroshard_integrations.ddp import reduce_to_owner_hook
from zeroshard_testing import assert_replicas_equal, raises_on


def half_of(rank: int, world_size: int) -> dist.ProcessGroup:
    """Every second rank, this one among them."""
    return [group_of(*range(first, world_size, 2)) for first in range(2)][rank % 2]


@pytest.mark.exhaustive_at(4)
@pytest.mark.ranks(2, 4, backend="gloo")
@each_hook_with("narrow", "optimizer", "model", "second model")
def test_a_model_and_an_optimizer_of_different_ranks_are_refused(
    rank: int, world_size: int, hook: str, narrow: str
) -> None:
    everyone, half = group_of(), half_of(rank, world_size)
    of_optimizer, of_model = (half, everyone) if narrow == "optimizer" else (everyone, half)
    model = small_model().double()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optim.SGD,
        process_group=of_optimizer,
        overlap_with_ddp=steps_in_backward(hook),
        lr=0.1,
    )
    if narrow == "second model":
        register(hook, DistributedDataParallel(model, process_group=everyone), optimizer)
    ddp = DistributedDataParallel(model, process_group=of_model)

    def train() -> None:
        register(hook, ddp, optimizer)
        ddp(batch(0)).sum().backward()

    theirs, ours = map(dist.get_process_group_ranks, (of_model, of_optimizer))
    with pytest.raises(ValueError, match=re.escape(f"works on the ranks {theirs}, and the optimizer works on {ours}")):
        train()


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_models_and_hooks_that_do_not_fit_are_refused(rank: int, hook: str) -> None:
    model = small_model()
    ddp = DistributedDataParallel(model)
    without_overlap = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
    params = list(model.parameters())[:-1]
    partly = ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1, overlap_with_ddp=steps_in_backward(hook))
    if hook == "reduce_to_owner_hook":
        # Without the model, this shows in its first backward.
        ddp.register_comm_hook(partly, reduce_to_owner_hook)
        with pytest.raises(ValueError, match="that the optimizer does not have"):
            ddp(torch.ones(2, 40)).sum().backward()
        return
    with pytest.raises(ValueError, match="built with overlap_with_ddp=True"):
        register(hook, ddp, without_overlap)
    with pytest.raises(ValueError, match=r"reduces '4\.weight', which the optimizer does not have"):
        register(hook, ddp, partly)
    alone = [dist.new_group([0]), dist.new_group([1])]
    other = ZeroRedundancyOptimizer(
        model.parameters(), optim.SGD, process_group=alone[rank], lr=0.1, overlap_with_ddp=True
    )
    with pytest.raises(ValueError, match=r"works on the ranks \[0, 1\], and the optimizer works on"):
        register(hook, ddp, other)


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_different_bucket_sizes_are_told(rank: int, hook: str) -> None:
    model = small_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=MANY_BUCKETS, find_unused_parameters=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, overlap_with_ddp=steps_in_backward(hook))
    if rank == 1:
        # Half of the parameters: DDP itself would have noticed; a framework of one's own might not.
        ddp = DistributedDataParallel(model, bucket_cap_mb=100, find_unused_parameters=True)
    else:
        DistributedDataParallel(model, bucket_cap_mb=100, find_unused_parameters=True)
    register(hook, ddp, optimizer)
    with pytest.raises(DisagreementError, match="bucket 0 is"):
        ddp(torch.ones(2, 40)).sum().backward()


# An error breaks off the backward on every rank: what it had announced is never sent.
@pytest.mark.ranks(2, backend="gloo", checks="no:messages")
@each_hook_with("together", True, False, True)
def test_two_models_with_one_optimizer_are_refused(hook: str, together: bool) -> None:
    models = [small_model(), small_model()]
    params = [param for model in models for param in model.parameters()]
    optimizer = ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1, overlap_with_ddp=steps_in_backward(hook))
    ddps = [DistributedDataParallel(model) for model in models]
    for ddp in ddps:
        register(hook, ddp, optimizer)
    first = ddps[0](torch.ones(2, 40)).sum()
    if not together:
        first.backward()
        optimizer.zero_grad()
    last = ddps[1](torch.ones(2, 40)).sum() + (first if together else 0.0)
    with pytest.raises((RuntimeError, ValueError), match="two models"):
        last.backward()


@pytest.mark.ranks(2, backend="gloo")
@STEPPING_HOOKS
def test_several_optimizers_of_a_stepping_hook_are_refused(hook: str) -> None:
    model = small_model()
    ddp, params = DistributedDataParallel(model), list(model.parameters())
    optimizers = [
        ZeroRedundancyOptimizer(part, optim.SGD, overlap_with_ddp=True, lr=0.1) for part in (params[:2], params[2:])
    ]
    with pytest.raises(TypeError, match="expects one optimizer, but got 2"):
        register(hook, ddp, optimizers)  # type: ignore[arg-type]


@pytest.mark.ranks(2, backend="gloo")
def test_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    ddp = DistributedDataParallel(model)
    _kept = with_hook("reduce_to_owner_hook", ddp)
    with pytest.raises(ValueError, match=r"'0\.weight' has sparse gradients"):
        ddp(torch.zeros(2, dtype=torch.long)).sum().backward()


@pytest.mark.ranks(2, backend="gloo")
def test_a_copy_of_ddp_is_refused_and_one_of_its_module_is_not() -> None:
    twins = Twins()
    twins.iterate(0)
    with pytest.raises(TypeError, match=r"copies the state of its communication hook.*AveragedModel\(ddp\.module\)"):
        optim.swa_utils.AveragedModel(twins.ddp)
    averaged = optim.swa_utils.AveragedModel(twins.ddp.module)
    for number in range(3):
        twins.iterate(number)
        averaged.update_parameters(twins.ddp.module)
    twins.check("after averaging")


@pytest.mark.ranks(1, backend="gloo")
@STEPPING_HOOKS
def test_a_hook_whose_optimizer_is_gone_says_so(hook: str) -> None:
    twins = Twins(hook)
    twins.iterate(0)
    twins.optimizer.zero_grad()
    del twins.optimizer
    gc.collect()
    with pytest.raises(RuntimeError, match="is gone: keep a reference to it"):
        twins.backward(twins.ddp, 1)


# ---------------------------------------------------------------------- parameters that DDP does not reduce


class Growing(nn.Module):
    """Gets a second head some day, and uses it where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.uses_head = nn.Linear(40, 8), False

    def grow(self) -> None:
        self.head = nn.Linear(40, 8, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs) + (self.head(inputs) if self.uses_head else 0.0)


@pytest.mark.ranks(2, backend="gloo")
@each_hook_with("where", "on all ranks", "on rank 1", "on all ranks")
def test_a_module_that_ddp_has_never_seen_is_refused(rank: int, hook: str, where: str) -> None:
    model = Growing().double()
    ddp = DistributedDataParallel(model, process_group=group_of())
    model.grow()
    optimizer = ZeroRedundancyOptimizer(
        model.named_parameters(),
        optim.SGD,
        process_group=ddp.process_group,
        overlap_with_ddp=steps_in_backward(hook),
        lr=0.1,
    )

    def iterate() -> None:
        optimizer.zero_grad()
        ddp(batch(0)).sum().backward()
        optimizer.step()

    register(hook, ddp, optimizer)
    # Without a gradient it does no harm.
    iterate()
    model.uses_head = where == "on all ranks" or rank == 1
    with pytest.raises((RuntimeError, ValueError), match=r"'head\.weight'.*does not reduce"):
        iterate()


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_a_parameter_that_ddp_ignores_stays_equal_on_all_ranks(hook: str) -> None:
    model = Growing().double()
    model.grow()
    model.uses_head = True
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["head.weight", "head.bias"])
    ddp = DistributedDataParallel(model)
    optimizer = with_hook(hook, ddp)
    before = model.head.weight.detach().clone()
    for number in range(3):
        optimizer.zero_grad()
        ddp(batch(number)).sum().backward()
        optimizer.step()
    assert_replicas_equal(model.parameters())
    assert not torch.equal(model.head.weight, before)


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend="gloo")
@each_hook_with(
    "when, listed",
    ("from the start", "by torch's function"),
    ("added later", "by torch's function"),
    ("from the start", "by an attribute of the module"),
)
def test_experts_one_per_rank_are_refused(rank: int, hook: str, listed: str, when: str) -> None:
    """In a step all ranks would get the values of the rank that owns them."""
    model, names = Growing().double(), ["head.weight", "head.bias"]
    model.grow()
    for param in model.head.parameters():
        param.data.add_(rank)
    if listed == "by torch's function":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    else:
        model._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment] # torch reads it
    ddp = DistributedDataParallel(model, process_group=group_of())
    first = model.parameters() if when == "from the start" else model.body.parameters()
    arguments = {"process_group": ddp.process_group, "overlap_with_ddp": steps_in_backward(hook), "lr": 0.1}
    optimizer = ZeroRedundancyOptimizer(first, optim.SGD, **arguments)
    words = (
        r"checksum of tensor \d '.*', which DistributedDataParallel ignores \(experts.* need an optimizer of their own"
    )
    if when == "from the start":
        with pytest.raises(DisagreementError, match=words):
            register(hook, ddp, optimizer)
        # As the message says.
        optimizer = ZeroRedundancyOptimizer(model.body.parameters(), optim.SGD, **arguments)
        register(hook, ddp, optimizer)
    else:
        register(hook, ddp, optimizer)
        with pytest.raises(DisagreementError, match=words):
            optimizer.add_param_group({"params": list(model.head.parameters())})
    experts, before = optim.SGD(model.head.parameters(), lr=0.1), model.body.weight.detach().clone()
    for number in range(3):
        for each in (optimizer, experts):
            each.zero_grad()
        ddp(batch(number)).sum().backward()
        for each in (optimizer, experts):
            each.step()
    assert_replicas_equal(model.body.parameters(), group=ddp.process_group)
    assert not torch.equal(model.body.weight, before)


@pytest.mark.ranks(2, backend="gloo")
@each_hook_with("where", "on all ranks", "on rank 1", "on all ranks")
def test_a_group_of_parameters_that_ddp_does_not_reduce_is_refused(rank: int, hook: str, where: str) -> None:
    model = small_model().double()
    model[3].requires_grad_(False)
    named = dict(model.named_parameters())
    late = [(name, named.pop(name)) for name in ("3.weight", "3.bias")]
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        list(named.items()), optim.SGD, overlap_with_ddp=steps_in_backward(hook), lr=0.1
    )
    register(hook, ddp, optimizer)

    def iterate(number: int) -> None:
        optimizer.zero_grad()
        ddp(batch(number)).square().mean().backward()
        optimizer.step()

    iterate(0)
    model[3].requires_grad_(True)
    added = {"params": late, "lr": 0.5}
    if where == "on rank 1":
        # The others add one that DDP was told to ignore.
        harmless = [(name, nn.Parameter(param.detach().clone())) for name, param in late]
        for _, param in harmless:
            param._ddp_ignored = True
        added = added if rank == 1 else {"params": harmless, "lr": 0.5}
    words = r"'3\.weight' was added after the first backward .*\nBuild both with all parameters, .* unfreeze them later"
    with raises_on(ValueError, ranks=(0, 1), match=words):
        optimizer.add_param_group(added)
    assert len(optimizer.param_groups) == 1
    model[3].requires_grad_(False)
    iterate(1)
    assert_replicas_equal(model.parameters())

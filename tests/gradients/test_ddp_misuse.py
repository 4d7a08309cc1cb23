"""Loops and models for which a hook cannot do what it seems to: refused by name, on every rank, and nothing is guessed.

Where something is refused, an error says what it is and what to do; nobody waits for it longer than for its group.
"""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
import copy
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_training import HOOKS, Twins, batch, register, steps_in_backward
from support.training import small_model
from torch import nn, optim
from torch._dynamo.convert_frame import input_codes
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError
from zeroshard_testing import assert_replicas_equal

EVERY_HOOK = pytest.mark.parametrize("hook", HOOKS)
STEPPING_HOOKS = pytest.mark.parametrize("hook", HOOKS[1:])
WHERE = pytest.mark.parametrize("where", ["on all ranks", "on rank 1"])


def group_of(*ranks: int) -> dist.ProcessGroup:
    """Of these ranks, or of all, with a timeout that ends what hangs."""
    return dist.new_group(list(ranks) or None, timeout=timedelta(seconds=20))


def half_of(rank: int, world_size: int) -> dist.ProcessGroup:
    """Every second rank, this one among them."""
    return [group_of(*range(first, world_size, 2)) for first in range(2)][rank % 2]


# ---------------------------------------------------------------------- which ranks


@pytest.mark.by_default(
    "2-optimizer-reduce_to_owner_hook | 2-second model-hook_with_zero_step_interleaved | 4-model-hook_with_zero_step"
)
@pytest.mark.ranks(2, 4, backend="gloo")
@EVERY_HOOK
@pytest.mark.parametrize("narrow", ["optimizer", "model", "second model"])
def test_a_model_and_an_optimizer_of_different_ranks(rank: int, world_size: int, hook: str, narrow: str) -> None:
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


# ---------------------------------------------------------------------- loops that do not step once per backward

TOLD = r"(?=(?s:.*)no_sync)(?=(?s:.*)reduce_to_owner_hook)"


def skip_a_step(twins: Twins, *, wrong: bool) -> None:
    """As a GradScaler does when it finds an infinity."""
    twins.backward(twins.ddp, 2)
    if not wrong:
        twins.optimizer.step()
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 3)


def change_the_rate(twins: Twins, *, wrong: bool) -> None:
    twins.backward(twins.ddp, 2)
    if wrong:
        twins.optimizer.param_groups[0]["lr"] *= 0.5


@pytest.mark.by_default(
    "2-skip_a_step-on all ranks-hook_with_zero_step | 2-change_the_rate-on rank 1-hook_with_zero_step_interleaved"
)
@pytest.mark.ranks(2, backend="gloo")
@STEPPING_HOOKS
@WHERE
@pytest.mark.parametrize("misuse", [skip_a_step, change_the_rate])
def test_step_refuses_what_backward_has_stepped_otherwise(
    rank: int, hook: str, where: str, misuse: Callable[..., None]
) -> None:
    twins = Twins(hook, process_group=group_of())
    twins.iterate(0)
    twins.iterate(1)
    model, state = copy.deepcopy(twins.ddp.state_dict()), copy.deepcopy(twins.plain.state_dict())
    wrong = where == "on all ranks" or rank == 1
    twins.optimizer.zero_grad()
    misuse(twins, wrong=wrong)
    for _ in range(2 if wrong else 0):
        with pytest.raises(RuntimeError, match=TOLD):
            twins.optimizer.step()
    if not wrong:
        twins.optimizer.step()
    # Not only the ranks that did it: parameters of all are wrong.
    for number in (4, 5):
        twins.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=TOLD):
            twins.backward(twins.ddp, number)
        with pytest.raises(RuntimeError, match=TOLD):
            twins.optimizer.step()
    twins.ddp.load_state_dict(model)
    twins.optimizer.load_state_dict(state)
    for number in (6, 7):
        twins.iterate(number)
        twins.check(f"after a state was loaded, in iteration {number}")


TOO_LATE: dict[str, Callable[[Twins], object]] = {
    "a second step()": lambda twins: twins.optimizer.step(),
    "a gradient to None": lambda twins: setattr(next(twins.ddp.parameters()), "grad", None),
    "a gradient to zero": lambda twins: next(twins.ddp.parameters()).grad.zero_(),  # type: ignore[union-attr]
    "zero_grad()": lambda twins: twins.optimizer.zero_grad(),
    "zero_grad() to zeros": lambda twins: twins.ddp.zero_grad(set_to_none=False),
}


@pytest.mark.by_default(
    "1-a second step()-at first-hook_with_zero_step | 1-a gradient to zero-at first-hook_with_zero_step | "
    "1-zero_grad() to zeros-at first-hook_with_zero_step | "
    "2-a gradient to None-later-hook_with_zero_step_interleaved | "
    "2-zero_grad()-later-hook_with_zero_step_interleaved"
)
@pytest.mark.ranks(1, 2, backend="gloo")
@STEPPING_HOOKS
@pytest.mark.parametrize("iterations", [0, 2], ids=["at first", "later"])
@pytest.mark.parametrize("what", TOO_LATE)
def test_what_comes_between_a_backward_that_has_stepped_and_its_step_is_refused(
    hook: str, iterations: int, what: str
) -> None:
    twins = Twins(hook, process_group=group_of())
    for number in range(iterations):
        twins.iterate(number)
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 3)
    TOO_LATE[what](twins)
    told = "called again with the same gradients" if what == "a second step()" else "was removed or set to zero after"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{told}.*{TOLD}"):
            twins.optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
@STEPPING_HOOKS
def test_a_learning_rate_in_a_tensor_that_changes_after_the_backward(hook: str) -> None:
    twins = Twins(hook, process_group=group_of())
    twins.iterate(0)
    rate = twins.optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 1)
    rate.mul_(0.5)
    with pytest.raises(RuntimeError, match=f"a hyperparameter was changed after the backward.*{TOLD}"):
        twins.optimizer.step()


@pytest.mark.by_default(
    "2-True-before the backward-hook_with_zero_step | 2-False-after the step-hook_with_zero_step_interleaved"
)
@pytest.mark.ranks(2, backend="gloo")
@STEPPING_HOOKS
@pytest.mark.parametrize("when", ["before the backward", "after the step"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_may_be_dropped_before_a_backward_and_after_its_step(
    hook: str, when: str, *, set_to_none: bool
) -> None:
    twins = Twins(hook)
    for number in range(4):
        for ddp, optimizer in twins.sides:
            if when == "before the backward":
                optimizer.zero_grad(set_to_none)
            twins.backward(ddp, number)
            optimizer.step()
            if when == "after the step":
                optimizer.zero_grad(set_to_none)
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend="gloo")
@STEPPING_HOOKS
def test_gradients_that_add_up_over_reducing_backwards(hook: str) -> None:
    twins = Twins(hook, process_group=group_of())
    twins.iterate(0)
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 1)
    with pytest.raises(RuntimeError, match=TOLD):
        twins.backward(twins.ddp, 2)
    with pytest.raises(RuntimeError, match=f"the last backward has not stepped: .*{TOLD}"):
        twins.optimizer.step()
    # The step of the first backward; the second has changed nothing.
    twins.plain.zero_grad()
    twins.backward(twins.plain_ddp, 1)
    twins.plain.step()
    twins.check("after the refusal")
    twins.optimizer.load_state_dict(twins.plain.state_dict())
    twins.iterate(2)
    twins.check("after a state was loaded")


@pytest.mark.ranks(2, backend="gloo")
@STEPPING_HOOKS
def test_what_a_scheduler_changes_after_step_is_right(hook: str) -> None:
    twins = Twins(hook)
    for number in range(4):
        twins.iterate(number)
        for _, optimizer in twins.sides:
            optimizer.param_groups[0]["lr"] *= 0.7
        twins.check(f"after iteration {number}")


# ---------------------------------------------------------------------- gradients that are not what was reduced


@pytest.mark.by_default("2-assigned-on all ranks | 2-made under no_sync()-on rank 1")
@pytest.mark.ranks(2, backend="gloo")
@WHERE
@pytest.mark.parametrize("how", ["assigned", "made under no_sync()"])
def test_a_gradient_that_was_replaced_is_told_so_on_every_rank(rank: int, where: str, how: str) -> None:
    twins = Twins("reduce_to_owner_hook", process_group=group_of())
    twins.iterate(0)
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 1)
    param = next(twins.ddp.parameters())
    if where == "on all ranks" or rank == 1:
        if how == "assigned":
            param.grad = torch.ones_like(param)
        else:
            twins.optimizer.zero_grad()
            with twins.ddp.no_sync():
                twins.backward(twins.ddp, 2)
    with pytest.raises(RuntimeError, match=r"tensor \d .* was replaced after backward\(\) had reduced it"):
        twins.optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
@WHERE
def test_a_second_backward_over_one_forward_is_told_so_on_every_rank(rank: int, where: str) -> None:
    twins = Twins("reduce_to_owner_hook", process_group=group_of())
    twins.iterate(0)
    twins.optimizer.zero_grad()
    loss = twins.ddp(batch(1)).square().mean()
    loss.backward(retain_graph=True)
    if where == "on all ranks" or rank == 1:
        with pytest.raises(RuntimeError, match=r"an earlier backward\(\) has reduced, and nothing can be added to it"):
            loss.backward()
    twins.optimizer.step()
    twins.plain.zero_grad()
    twins.backward(twins.plain_ddp, 1)
    twins.plain.step()
    twins.check("after the refusal")


@pytest.mark.ranks(2, backend="gloo")
def test_a_copy_of_ddp_is_refused_and_one_of_its_module_is_not() -> None:
    twins = Twins("reduce_to_owner_hook")
    twins.iterate(0)
    with pytest.raises(TypeError, match=r"copies the state of its communication hook.*AveragedModel\(ddp\.module\)"):
        optim.swa_utils.AveragedModel(twins.ddp)
    averaged = optim.swa_utils.AveragedModel(twins.ddp.module)
    for number in range(3):
        twins.iterate(number)
        averaged.update_parameters(twins.ddp.module)
    twins.check("after averaging")


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


@pytest.mark.by_default(
    "2-on all ranks-reduce_to_owner_hook | 2-on all ranks-hook_with_zero_step_interleaved | "
    "2-on rank 1-hook_with_zero_step"
)
@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
@WHERE
def test_a_module_that_ddp_has_never_seen(rank: int, hook: str, where: str) -> None:
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
def test_a_parameter_that_ddp_ignores(hook: str) -> None:
    model = Growing().double()
    model.grow()
    model.uses_head = True
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["head.weight", "head.bias"])
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, overlap_with_ddp=steps_in_backward(hook), lr=0.1)
    register(hook, ddp, optimizer)
    before = model.head.weight.detach().clone()
    for number in range(3):
        optimizer.zero_grad()
        ddp(batch(number)).sum().backward()
        optimizer.step()
    assert_replicas_equal(model.parameters())
    assert not torch.equal(model.head.weight, before)


@pytest.mark.by_default(
    "2-from the start-by torch's function-reduce_to_owner_hook | "
    "2-from the start-by torch's function-hook_with_zero_step_interleaved | "
    "3-added later-by an attribute of the module-hook_with_zero_step"
)
@pytest.mark.ranks(2, 3, backend="gloo")
@EVERY_HOOK
@pytest.mark.parametrize("listed", ["by torch's function", "by an attribute of the module"])
@pytest.mark.parametrize("when", ["from the start", "added later"])
def test_experts_one_per_rank_are_refused(rank: int, hook: str, listed: str, when: str) -> None:
    """In a step all ranks would get the values of the rank that owns them."""
    model, names = Growing().double(), ["head.weight", "head.bias"]
    model.grow()
    for param in model.head.parameters():
        param.data.add_(rank)
    if listed == "by torch's function" or when == "added later":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    else:
        model._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment] # torch reads it
    ddp = DistributedDataParallel(model, process_group=group_of())
    first = model.parameters() if when == "from the start" else model.body.parameters()
    arguments = {"process_group": ddp.process_group, "overlap_with_ddp": hook != "reduce_to_owner_hook", "lr": 0.1}
    optimizer = ZeroRedundancyOptimizer(first, optim.SGD, **arguments)
    words = (
        r"checksum of tensor \d '.*', which DistributedDataParallel ignores \(give experts.* an optimizer of their own"
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


# ---------------------------------------------------------------------- hooks that reduce in place


def in_place(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """As allreduce_hook, by another name."""
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def power_sgd_state() -> object:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)


INNER: dict[str, dict[str, Any]] = {
    "in place": {"inner": in_place},
    "fp16": {"inner": fp16_compress_hook},
    # One bucket, see test_ddp_hooks.py.
    "PowerSGD": {
        "inner": powerSGD_hook.powerSGD_hook,
        "inner_state": power_sgd_state,
        "exact": False,
        "ddp": {"bucket_cap_mb": 25},
    },
}


@pytest.mark.by_default(
    "2-in place-hook_with_zero_step | 2-fp16-hook_with_zero_step_interleaved | 2-PowerSGD-hook_with_zero_step"
)
@pytest.mark.ranks(2, backend="gloo")
@STEPPING_HOOKS
@pytest.mark.parametrize("name", INNER)
def test_hooks_that_reduce_in_place_beside_gradients_that_are_no_views(hook: str, name: str) -> None:
    arguments = {**INNER[name], "ddp": {"gradient_as_bucket_view": False, **INNER[name].get("ddp", {})}}
    twins = Twins(hook, **arguments)
    for number in range(6):
        twins.iterate(number)
        twins.check(f"after iteration {number}")


# ---------------------------------------------------------------------- backwards that DDP does not finish


class Layers(nn.Module):
    """Leaves one of its layers out where it is told to; each has a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.unused = nn.ModuleList(nn.Linear(40, 40) for _ in range(3)), -1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            inputs = inputs if number == self.unused else layer(inputs)
        return inputs


@pytest.mark.by_default(
    "2-unused-0-reduce_to_owner_hook | 2-unused later-2-hook_with_zero_step | "
    "2-frozen later-0-hook_with_zero_step_interleaved"
)
@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("when", ["unused", "unused later", "frozen later"])
def test_a_parameter_without_a_gradient(hook: str, place: int, when: str) -> None:
    twins = Twins(hook, model=Layers, process_group=group_of(), ddp={"bucket_cap_mb": 0.001})
    layers = twins.ddp.module
    for number in range(0 if when == "unused" else 3):
        twins.iterate(number)
    if when == "frozen later":
        layers.layers[place].requires_grad_(False)
    else:
        layers.unused = place
    twins.optimizer.zero_grad()

    def iterate() -> None:
        # Before the hook was called once there is no sign of it, and it is DDP that finds out, in the second forward.
        for _ in range(2):
            twins.backward(twins.ddp, 5)
            twins.optimizer.step()

    words = r"(?s)^(?!.*(inside no_sync|exception has left)).*find_unused_parameters=True"
    with pytest.raises(RuntimeError, match=words):
        iterate()


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_a_rank_that_is_first_in_step_tells_a_slower_one_what_is_missing(rank: int, hook: str) -> None:
    """The slower one sends its last bucket when the other has raised."""
    twins = Twins(hook, model=Layers, process_group=group_of(), ddp={"bucket_cap_mb": 0.001})
    layers = twins.ddp.module.layers
    for number in range(3):
        twins.iterate(number)
    layers[0].requires_grad_(False)
    layers[1].weight.register_hook(lambda _: time.sleep(0.5 * rank))
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 5)
    with pytest.raises(RuntimeError, match=r"still waits for the gradients of .*find_unused_parameters=True"):
        twins.optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
def test_ranks_that_miss_different_buckets_do_not_wait_for_each_other(rank: int) -> None:
    """No bucket arrives on rank 1, where the first one is not complete."""
    twins = Twins("reduce_to_owner_hook", model=Layers, process_group=group_of(), ddp={"bucket_cap_mb": 0.001})
    for number in range(3):
        twins.iterate(number)
    twins.ddp.module.unused = 2 * rank
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 5)
    with pytest.raises(RuntimeError, match="still waits for the gradients of" if rank == 0 else None):
        twins.optimizer.step()


# ---------------------------------------------------------------------- torch.compile


def deep_model() -> nn.Module:
    """More than the first bucket of DDP, of which torch.compile wants to make graphs of their own."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 300), nn.GELU(), *(nn.Linear(300, 300) for _ in range(3)), nn.Linear(300, 5))


def compiled(function: Any) -> Any:
    # The others need a C++ compiler, and differ in what becomes of a graph alone.
    return torch.compile(function, backend="eager")


def forward_and_backward(ddp: nn.Module, inputs: torch.Tensor) -> None:
    ddp(inputs).square().mean().backward()


def whole_step(ddp: nn.Module, optimizer: optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    forward_and_backward(ddp, inputs)
    optimizer.step()


class CompiledTwins(Twins):
    """Twins of which one part of the sharded one is compiled."""

    def __init__(self, hook: str, what: str) -> None:
        torch._dynamo.reset()
        model = (lambda: compiled(deep_model())) if what == "model" else deep_model
        super().__init__(hook, model=model, ddp={"bucket_cap_mb": 1})
        self.forward = compiled(self.ddp) if what == "DDP" else self.ddp
        self.forward_and_backward = compiled(forward_and_backward) if what == "backward" else forward_and_backward
        self.stepping = compiled(self.optimizer.step) if what == "step()" else self.optimizer.step
        self.whole_step = compiled(whole_step) if what == "whole step" else None

    def iterate(self, seed: int, loss: Any = None) -> None:
        whole_step(self.plain_ddp, self.plain, batch(seed))
        if self.whole_step is not None:
            self.whole_step(self.ddp, self.optimizer, batch(seed))
            return
        self.optimizer.zero_grad()
        self.forward_and_backward(self.forward, batch(seed))
        self.stepping()


# Compiling takes long where others compute too.
@pytest.mark.by_default(
    "2-whole step-reduce_to_owner_hook | 2-model-hook_with_zero_step | 2-DDP-hook_with_zero_step_interleaved"
)
@pytest.mark.ranks(2, backend="gloo", timeout=240)
@pytest.mark.parametrize(
    ("what", "hook"),
    [
        # By default under one of the hooks, in turn; the whole step has a backward and a step() in it.
        pytest.param(what, hook, marks=[] if place < 3 and hook == HOOKS[place] else pytest.mark.exhaustive)
        for place, what in enumerate(["whole step", "model", "DDP", "backward", "step()"])
        for hook in HOOKS
    ],
)
def test_what_is_compiled(what: str, hook: str) -> None:
    twins = CompiledTwins(hook, what)
    for number in range(4):
        twins.iterate(number)
        twins.check(f"after iteration {number}")
    # Of our code it looks into the hooks, and not into the much that they call.
    seen = {Path(code.co_filename).name for code in (seen() for seen in input_codes.seen) if code is not None}
    assert not {"sharded_optimizer.py", "scheduler.py", "buckets.py"} & seen


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_ddp_in_python_is_refused_by_name(hook: str) -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        twins = Twins(hook)
        with pytest.raises((RuntimeError, ValueError, TypeError), match="python_reducer"):
            twins.iterate(0)


class _Undefined(torch.autograd.Function):
    """Gives its second input no gradient on rank 0."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, scale)
        return inputs * scale

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs, scale = ctx.saved_tensors
        [gradient] = gradients
        return gradient * scale, None if dist.get_rank() == 0 else (gradient * inputs).sum().view(1)


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = small_model(), nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(_Undefined.apply(inputs, self.scale))


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_a_gradient_that_one_rank_alone_has_is_stepped_or_told_on_every_rank(hook: str) -> None:
    twins = Twins(hook, model=Scaling, process_group=group_of())
    if hook == "hook_with_zero_step_interleaved":
        with pytest.raises(RuntimeError, match="got no gradient in a backward that steps bucket by bucket"):
            twins.iterate(0)
    else:
        for number in range(3):
            twins.iterate(number)
        twins.check("with a gradient on one rank")


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("order", [0.0, -1.0, -float("inf")])
def test_orders_of_norms_that_are_not_positive_are_refused(order: float) -> None:
    twins = Twins("reduce_to_owner_hook")
    twins.backward(twins.ddp, 0)
    with pytest.raises(ValueError, match="pass a positive order"):
        twins.optimizer.clip_grad_norm_(1.0, order)
    twins.optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
@STEPPING_HOOKS
def test_several_optimizers_of_a_stepping_hook_are_refused(hook: str) -> None:
    model = small_model()
    ddp, params = DistributedDataParallel(model), list(model.parameters())
    optimizers = [
        ZeroRedundancyOptimizer(part, optim.SGD, overlap_with_ddp=True, lr=0.1) for part in (params[:2], params[2:])
    ]
    with pytest.raises(TypeError, match="takes one optimizer of a model, but got 2"):
        register(hook, ddp, optimizers)  # type: ignore[arg-type]

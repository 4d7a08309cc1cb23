"""What an optimizer class finds on a parameter itself: attributes, type, identity, gradient and state."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
from typing import Any, ClassVar

import pytest
import torch
from support.combinations import FLAG, each_of
from support.ddp_training import HOOKS, Twins, batch, register
from support.training import cutting, small_model
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_testing import raises_on


class Scaled(optim.SGD):
    """Scales the rate of each tensor by an attribute of the tensor, as modded-nanogpt does."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] * getattr(param, "lr_mul", 1.0))


def with_attributes(module: nn.Module) -> list[nn.Parameter]:
    params = list(module.parameters())
    for number, param in enumerate(params):
        param.lr_mul = 0.5 * number  # type: ignore[attr-defined]
    return params


@pytest.mark.ranks(2, backend="gloo")
@each_of("hook", HOOKS, partition=["whole", "split"], views=FLAG)
def test_a_class_sees_attributes_of_parameters(hook: str, partition: str, views: bool) -> None:
    twins = Twins(hook, optimizer=Scaled, groups=with_attributes, partition=partition, parameters_as_bucket_view=views)
    for number in range(3):
        twins.iterate(number)
    for ddp, _ in twins.sides:
        next(ddp.parameters()).lr_mul = 3.0  # type: ignore[attr-defined]
    twins.iterate(3)
    twins.check("with a rate for each parameter")


@pytest.mark.ranks(2, backend="gloo")
@each_of("partition", ["whole", "split"], masters=FLAG)
def test_a_class_sees_attributes_of_parameters_without_a_hook(partition: str, masters: bool) -> None:
    made = small_model().to(torch.bfloat16) if masters else small_model()
    params = with_attributes(made)
    before = [param.detach().clone() for param in params]
    optimizer = ZeroRedundancyOptimizer(params, Scaled, partition=cutting(partition), master_weights=masters, lr=1.0)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    for number, (param, old) in enumerate(zip(params, before, strict=True)):
        torch.testing.assert_close(param.detach(), old - 0.5 * number)


class Sphere(nn.Parameter):
    """Stands in for geoopt's ManifoldParameter: its rows have length 1."""


class OnSphere(optim.SGD):
    """Stands in for geoopt's RiemannianSGD: puts rows back on the sphere after each step."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                if isinstance(param, Sphere):
                    param.div_(param.norm(dim=-1, keepdim=True))


def spherical() -> nn.Module:
    model = small_model()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = Sphere(module.weight.detach())
    return model


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("hook", HOOKS[:2])
def test_a_class_sees_types_of_parameters(hook: str) -> None:
    twins = Twins(hook, model=spherical, optimizer=OnSphere)
    assert any(isinstance(param, Sphere) for param in twins.ddp.parameters())
    for number in range(3):
        twins.iterate(number)
    twins.check("with parameters of a type of their own")


@pytest.mark.ranks(2, backend="gloo")
def test_a_class_sees_types_of_parameters_without_a_hook() -> None:
    params = [Sphere(torch.randn(4, 4)) for _ in range(4)]
    optimizer = ZeroRedundancyOptimizer(params, OnSphere, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    for param in params:
        torch.testing.assert_close(param.detach().norm(dim=-1), torch.ones(4))


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("how", ["split", "master weights", "hook_with_zero_step_interleaved"])
def test_types_that_a_shard_cannot_have_are_refused_on_every_rank(how: str) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "split": {"partition": cutting("split")},
        "master weights": {"master_weights": True},
        "hook_with_zero_step_interleaved": {"overlap_with_ddp": True},
    }
    model = nn.Linear(64, 512, bias=False)
    model.weight = Sphere(model.weight.detach())
    if how == "master weights":
        model.weight = Sphere(model.weight.detach().to(torch.bfloat16))
    ddp = DistributedDataParallel(model)

    def build() -> None:
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), OnSphere, lr=0.1, **kinds[how])
        if how == "hook_with_zero_step_interleaved":
            register(how, ddp, optimizer)

    with raises_on(TypeError, ranks=[0, 1], match=r"tensor 0 .* is a Sphere, .*: use partition='whole'"):
        build()


class ById(optim.SGD):
    """Leaves out the tensors in a set of ids, as the overrides of bitsandbytes do."""

    left_out: ClassVar[set[int]] = set()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and id(param) not in self.left_out:
                    param.sub_(param.grad, alpha=group["lr"])


def leave_out_biases(module: nn.Module) -> list[nn.Parameter]:
    params = list(module.parameters())
    ById.left_out |= {id(param) for param in params if param.dim() < 2}
    return params


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("hook", HOOKS[:2])
def test_a_class_finds_whole_tensors_by_their_ids(hook: str) -> None:
    ById.left_out.clear()
    twins = Twins(hook, optimizer=ById, groups=leave_out_biases)
    for number in range(3):
        twins.iterate(number)
    twins.check("with some parameters left out by their ids")


class Curved(optim.SGD):
    """Estimates curvature in a method of its own between backward and step, as Sophia does."""

    elementwise = True

    @torch.no_grad()
    def update_hessian(self, decay: float = 0.9) -> int:
        seen = 0
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    seen += 1
                    state = self.state[param]
                    state.setdefault("hessian", torch.zeros_like(param)).mul_(decay).add_(param.grad.square())
        return seen

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / (1 + self.state[param]["hessian"]), alpha=group["lr"])


@pytest.mark.ranks(2, backend="gloo")
@each_of("hook", ["none", "reduce_to_owner_hook"], partition=["whole", "split"])
def test_a_method_sees_gradients_between_backward_and_step(rank: int, hook: str, partition: str) -> None:
    torch.manual_seed(0)
    model, reference = small_model().double(), small_model().double()
    reference.load_state_dict(model.state_dict())
    ddp, plain_ddp = DistributedDataParallel(model), DistributedDataParallel(reference)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), Curved, partition=cutting(partition), lr=0.1)
    if hook == "reduce_to_owner_hook":
        register(hook, ddp, optimizer)
    plain = Curved(plain_ddp.parameters(), lr=0.1)
    for number in range(4):
        for trained, stepped, update in (
            (ddp, optimizer, optimizer.optim.update_hessian),
            (plain_ddp, plain, plain.update_hessian),
        ):
            stepped.zero_grad()
            trained(batch(number)).square().mean().backward()
            seen = update(decay=0.5)
            stepped.step()
        assert seen == len(plain.param_groups[0]["params"])
    for ours, theirs in zip(ddp.parameters(), plain_ddp.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    owned = len(list(optimizer.plan.of_rank(rank)))
    assert len(optimizer.optim.state) == owned, "no state of what other ranks own"
    assert len(optimizer.param_groups[0]["params"]) == seen


@pytest.mark.ranks(2, backend="gloo")
@each_of("hook", ["none", "reduce_to_owner_hook", "hook_with_zero_step_interleaved"], partition=["whole", "split"])
def test_the_inner_optimizers_state_is_read_by_parameter(rank: int, hook: str, partition: str) -> None:
    if hook == "none":
        params = list(small_model().double().parameters())
        optimizer = ZeroRedundancyOptimizer(params, optim.AdamW, partition=cutting(partition), lr=0.1)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    else:
        twins = Twins(hook, partition=partition)
        twins.iterate(0)
        params, optimizer = list(twins.ddp.parameters()), twins.optimizer
    owned = {shard.tensor for shard in optimizer.plan.of_rank(rank)}
    count = len(optimizer.optim.state)
    for index, param in enumerate(params):
        if index in owned:
            assert optimizer.optim.state[param] is optimizer.state[param]
        else:
            with pytest.raises(KeyError, match=r"does not own: optimizer\.state has the entries"):
                optimizer.optim.state[param]
    assert len(optimizer.optim.state) == count == len(owned)


class Counting(optim.SGD):
    """Counts on the tensors themselves, and scales by what it has counted."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.count = getattr(param, "count", 0) + 1
                    param.sub_(
                        param.grad, alpha=group["lr"] * getattr(param, "mask", torch.ones(())).item() / param.count
                    )


@pytest.mark.ranks(2, backend="gloo")
@each_of("hook", ["reduce_to_owner_hook", "hook_with_zero_step_interleaved"], partition=["whole", "split"])
def test_a_class_may_write_attributes_and_read_tensors_of_them(hook: str, partition: str) -> None:
    twins = Twins(hook, optimizer=Counting, partition=partition)
    for number in range(4):
        for ddp, _ in twins.sides:
            for param in ddp.parameters():
                param.mask = torch.full((), 1.0 + number)  # type: ignore[attr-defined]
        twins.iterate(number)
    twins.check("with attributes that the class and the loop write")


@pytest.mark.ranks(2, backend="gloo")
def test_a_state_dict_that_raises_leaves_the_groups() -> None:
    params = list(small_model().parameters())
    optimizer = ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1, partition=cutting("split"))

    def fail(_: object) -> None:
        raise ZeroDivisionError

    handle = optimizer.optim.register_state_dict_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        optimizer.optim.state_dict()
    handle.remove()
    assert all(map(lambda one, other: one is other, optimizer.param_groups[0]["params"], params))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
def test_a_method_sees_no_gradient_after_zero_grad() -> None:
    twins = Twins("reduce_to_owner_hook", optimizer=Curved, groups=lambda module: list(module.parameters()))
    twins.backward(twins.ddp, 0)
    twins.optimizer.zero_grad()
    assert twins.optimizer.optim.update_hessian() == 0


@pytest.mark.ranks(2, backend="gloo")
def test_the_inner_optimizers_state_is_written_by_parameter(rank: int) -> None:
    params = [nn.Parameter(torch.ones(512, 64)) for _ in range(2)]
    optimizer = ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1, momentum=0.9, partition=cutting("split"))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    inner, shard = optimizer.optim.state, optimizer._engine.local.shards[0]
    inner[params[0]] = {"momentum_buffer": torch.zeros_like(shard.tensor)}
    assert params[0] in inner
    assert len(inner) == 2
    assert optimizer.state[params[0]]["momentum_buffer"].sum() == 0

"""A class that no list knows is tried when an optimizer is built: one that couples tensors is refused everywhere."""

from __future__ import annotations

import functools
import itertools
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.combinations import each_of
from support.stand_ins import ScheduleFree
from support.training import assert_bitwise_equal, set_gradients, small_model, twin_optimizers, twins
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook
from zeroshard import ZeroRedundancyOptimizer
from zeroshard.plan import optimizer_check


def clipping_whole_models(base: type[optim.Optimizer], largest: float) -> type[optim.Optimizer]:
    """Make a class as detectron2 does for ``CLIP_TYPE: full_model``."""

    class FullModelGradientClipping(base):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> None:
            params = itertools.chain(*[group["params"] for group in self.param_groups])
            nn.utils.clip_grad_norm_(params, largest)
            super().step(closure)

    return FullModelGradientClipping


class Each(optim.Optimizer):
    """Steps each tensor by a method."""

    def __init__(self, params: Any, lr: float = 1e-3, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, group)
        return loss

    def update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(grad, alpha=group["lr"])


class LayerwiseAdam(Each):
    """Adam with a trust ratio for each tensor; and, as timm's Lamb, with gradients scaled by one norm."""

    def __init__(self, params: Any, lr: float = 1e-3, max_grad_norm: float | None = None) -> None:
        super().__init__(params, lr=lr, max_grad_norm=max_grad_norm)

    def step(self, closure: Any = None) -> Any:
        largest = self.defaults["max_grad_norm"]
        if largest is not None:
            grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            norm = torch.stack([grad.norm() for grad in grads]).norm() if grads else torch.ones(())
            torch._foreach_div_(grads, (norm / largest).clamp_(min=1.0)) if grads else None
        return super().step(closure)

    def update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        first = state.setdefault("exp_avg", torch.zeros_like(param)).lerp_(grad, 0.1)
        second = state.setdefault("exp_avg_sq", torch.zeros_like(param)).mul_(0.999).addcmul_(grad, grad, value=0.001)
        step = first / second.sqrt().add_(1e-6) + 0.01 * param
        param.sub_(step * (param.norm() / step.norm()).nan_to_num(1.0, 1.0), alpha=group["lr"])


class RateScaling(Each):
    """As LARS: a rate for each tensor, by the norms of its values and gradient."""

    def update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(grad * (param.norm() / grad.norm().clamp(min=1e-12)), alpha=group["lr"])


class RoundingAtRandom(Each):
    """Rounds each tensor to bfloat16, up or down at random."""

    def update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        wanted = (param - group["lr"] * grad).float()
        bits = wanted.view(torch.int32) + torch.randint_like(wanted, 0, 1 << 16, dtype=torch.int32)
        param.copy_((bits & -65536).view(torch.float32))


class Dropping(Each):
    """Leaves out tensors at random, by Python's generator."""

    def update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        if random.random() < 0.5:
            super().update(param, grad, group)


class OfMatrices(Each):
    """As Muon: takes matrices alone."""

    def update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        assert param.dim() == 2
        param.sub_(grad / torch.linalg.matrix_norm(grad, 2), alpha=group["lr"])


class OfAClosure(Each):
    def step(self, closure: Any) -> Any:
        return super().step(lambda: closure())


class Extragradient(Each):
    """Steps by the gradients at the point to which a first step leads."""

    def step(self, closure: Any) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        loss, before = closure(), [param.detach().clone() for param in params]
        super().step()
        closure()
        for param, old in zip(params, before, strict=True):
            param.data.copy_(old)
        super().step()
        return loss


class Unsteady(Each):
    """Depends on the time."""

    def update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(grad, alpha=group["lr"] * (1 + time.perf_counter_ns() % 1000 / 1000))


class Raising(Each):
    def update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        if param.numel() < 25:
            raise RuntimeError("this tensor is too small")
        super().update(param, grad, group)


class Averaging(Each):
    """Sends gradients by itself."""

    def update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        dist.all_reduce(grad)
        super().update(param, grad, group)


class Slow(Each):
    def update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        until = time.thread_time() + 0.15
        while time.thread_time() < until:
            pass
        super().update(param, grad, group)


class Elsewhere(Each):
    def update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        group["flag"] = torch.zeros(1, device="mps")


class Steady(Each):
    """Scales its step by what it was given."""

    def __init__(self, params: Any, scale: Any) -> None:
        super().__init__(params)
        self.scale = scale


COUPLED: dict[str, Callable[..., Any]] = {
    "full model": clipping_whole_models(optim.SGD, 1.0),
    "of a function": lambda params, **given: clipping_whole_models(optim.AdamW, 1.0)(params, **given),
    "Lamb": functools.partial(LayerwiseAdam, max_grad_norm=1.0),
    "extragradient": Extragradient,
}
FINE: dict[str, Callable[..., Any]] = {
    "trust ratio": LayerwiseAdam,
    "LARS": RateScaling,
    "stochastic rounding": RoundingAtRandom,
    "schedule-free": ScheduleFree,
    "closure": OfAClosure,
}
UNTRIED: dict[str, tuple[Callable[..., Any], str]] = {
    "random": (Dropping, "two runs of it with the same seed differ"),
    "time": (Unsteady, "two runs of it with the same seed differ"),
    "takes matrices": (OfMatrices, "AssertionError"),
    "raises": (Raising, "RuntimeError: this tensor is too small"),
    "communicates": (Averaging, "it communicates"),
    "slow": (Slow, "it takes too long"),
    "accelerator": (Elsewhere, "it works on mps"),
    "does not move": (functools.partial(Each, lr=0.0), "no tensor took a value that is new"),
    "objects": (functools.partial(Steady, scale=nn.Linear(2, 2)), "it has arguments that a trial could change"),
}


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_check, "_TRIED", type(optimizer_check._TRIED)())


@pytest.mark.ranks(2, backend="gloo")
@each_of("kind", COUPLED, rate=[0.1, 1e-5])
def test_one_that_couples_tensors_is_refused(kind: str, rate: float) -> None:
    factory, model = COUPLED[kind], small_model()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"couples tensors: it steps two tensors together differently"):
            ZeroRedundancyOptimizer(model.parameters(), factory, lr=rate)
    ZeroRedundancyOptimizer(model.parameters(), factory, lr=rate, coupled="allow")


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("kind", FINE)
def test_one_that_steps_each_tensor_by_itself_is_not(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zeroshard.plan.optimizer_check")
    model, reference = (nn.ParameterList(p for p in each.parameters() if p.dim() == 2) for each in twins())
    sharded, plain = twin_optimizers((model, reference), FINE[kind])
    assert not caplog.messages
    for each in (sharded, plain):
        getattr(each, "train", bool)()
    for step in range(2):
        for module, optimizer in ((model, sharded), (reference, plain)):
            set_gradients(module.parameters(), step)
            optimizer.step(lambda: 0.0) if kind == "closure" else optimizer.step()
    if kind != "stochastic rounding":
        assert_bitwise_equal(model, reference, "after two steps")


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("kind", UNTRIED)
def test_one_that_cannot_be_tried_is_named_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zeroshard.plan.optimizer_check")
    factory, why = UNTRIED[kind]
    for _ in range(2):
        ZeroRedundancyOptimizer(small_model().parameters(), factory)
    [said] = caplog.messages
    assert "may couple tensors: it could not be tried" in said
    assert why in said


@pytest.mark.ranks(2, backend="gloo")
def test_a_rank_that_cannot_try_it_raises_what_another_found(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if rank == 0:
        monkeypatch.setattr(optimizer_check, "thread_time", iter(range(1000)).__next__)
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    with pytest.raises(ValueError, match="rank 1: FullModelGradientClipping couples tensors"):
        ZeroRedundancyOptimizer(params, clipping_whole_models(optim.SGD, 1.0))


@pytest.mark.ranks(2, backend="gloo")
def test_a_group_of_an_unknown_class_is_tried_with_its_settings() -> None:
    class ClippingGroups(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                if group["largest"]:
                    nn.utils.clip_grad_norm_(group["params"], group["largest"])
            return super().step(closure)

    groups = [{"params": [nn.Parameter(torch.ones(3))], "largest": 0.0} for _ in range(3)]
    ZeroRedundancyOptimizer(groups, ClippingGroups)
    groups[1]["largest"] = 0.5
    with pytest.raises(ValueError, match="ClippingGroups couples tensors"):
        ZeroRedundancyOptimizer(groups, ClippingGroups)


@pytest.mark.ranks(2, backend="gloo")
def test_a_trial_leaves_everything_as_it_was() -> None:
    numpy: Any = pytest.importorskip("numpy")

    class Drawing(Each):
        def update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
            param.sub_(grad * torch.rand_like(grad), alpha=group["lr"] * random.random() * numpy.random.rand())

    model, stepped = small_model(), []
    before = [param.detach().clone() for param in model.parameters()]
    handle = register_optimizer_step_post_hook(lambda *given: stepped.append(given))
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1:3]
    torch.set_default_device("meta")
    try:
        ZeroRedundancyOptimizer(model.parameters(), Drawing)
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)
        handle.remove()
    assert not stepped
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert [list(states[2][0]), states[2][1]] == [list(numpy.random.get_state()[1]), numpy.random.get_state()[2]]
    assert all(map(torch.equal, before, model.parameters()))
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.ranks(2, backend="gloo")
def test_a_known_class_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("it was tried")

    monkeypatch.setattr(optimizer_check, "_try_class", fail)
    ZeroRedundancyOptimizer(small_model().parameters(), optim.AdamW)
    ZeroRedundancyOptimizer(small_model().parameters(), functools.partial(optim.SGD, lr=0.1))

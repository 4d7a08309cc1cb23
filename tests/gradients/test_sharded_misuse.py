"""What sharded gradients refuse: by name, on every rank, before anything is sent, and nothing hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.ddp_training import WHERE
from support.groups import group_of
from support.sharded_model import Plain
from support.sharded_training import SMALL_MB, Training
from support.sharded_transports import TRANSPORTS, use_transport
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import GradientSharding, ZeroRedundancyOptimizer, shard_gradients
from zeroshard_comm import DisagreementError, PeerLostError
from zeroshard_integrations.ddp import register_reduce_to_owner
from zeroshard_testing import assert_replicas_equal, rank_fixture


@rank_fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let gradients travel in one of several ways."""
    yield from use_transport(request.param, monkeypatch)


def optimizer_of(model: nn.Module, **settings: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.named_parameters(), optim.SGD, lr=0.1, process_group=group_of(), **settings)


def sharded(**arguments: Any) -> Training:
    """Return a training after two iterations."""
    training = Training(Plain, group=group_of(), **{"bucket_mb": SMALL_MB, **arguments})
    training.iterate()
    training.iterate()
    return training


# ---------------------------------------------------------------------- what cannot be sharded


def lacks_a_parameter() -> GradientSharding:
    model = Plain()
    params = [item for item in model.named_parameters() if item[0] != "b.weight"]
    return shard_gradients(model, ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1, process_group=group_of()))


def has_another_parameter() -> GradientSharding:
    model, other = Plain(), nn.Linear(2, 2)
    params = [*model.named_parameters(), *other.named_parameters("other")]
    return shard_gradients(model, ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1, process_group=group_of()))


def in_ddp() -> GradientSharding:
    model = Plain()
    return shard_gradients(DistributedDataParallel(model), optimizer_of(model))


def overlapped() -> GradientSharding:
    model = Plain()
    return shard_gradients(model, optimizer_of(model, overlap_with_ddp=True))


def twice() -> GradientSharding:
    model = Plain()
    optimizer = optimizer_of(model)
    shard_gradients(model, optimizer)
    return shard_gradients(model, optimizer)


def after_a_hook() -> GradientSharding:
    model = Plain()
    optimizer = optimizer_of(model)
    register_reduce_to_owner(DistributedDataParallel(model, process_group=group_of()), optimizer)
    return shard_gradients(model, optimizer)


def complex_values() -> GradientSharding:
    model = nn.Linear(4, 4, dtype=torch.complex64)
    return shard_gradients(model, optimizer_of(model))


def sparse_embedding() -> GradientSharding:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    return shard_gradients(model, optimizer_of(model))


def given(**arguments: Any) -> Callable[[], GradientSharding]:
    def shard() -> GradientSharding:
        model = Plain()
        return shard_gradients(model, optimizer_of(model), **arguments)

    return shard


REFUSED: dict[str, tuple[Callable[[], GradientSharding], str]] = {
    "a parameter that the optimizer lacks": (lacks_a_parameter, "the optimizer does not have 'b.weight'"),
    "a parameter that the model lacks": (has_another_parameter, r"the model does not have 'other\.weight'"),
    "a model in DDP": (in_ddp, "takes the place of DistributedDataParallel"),
    "an optimizer that a hook steps": (overlapped, "overlap_with_ddp=True"),
    "two calls": (twice, "are reduced already"),
    "a hook of DDP": (after_a_hook, "are reduced already"),
    "complex parameters": (complex_values, "'weight' is complex"),
    "a sparse embedding": (sparse_embedding, "'0' has sparse gradients"),
    "no size of buckets": (given(bucket_mb=0), "bucket_mb=0 is not a size"),
    "norms of a kind": (given(norms=2.0), "norms=2.0 is not supported"),
}


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sharded_is_refused_by_name(name: str) -> None:
    shard, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        shard()


@pytest.mark.ranks(2, backend="gloo")
def test_what_is_neither_a_model_nor_a_sharded_optimizer_is_refused() -> None:
    model = Plain()
    with pytest.raises(TypeError, match=r"expects a zeroshard\.ZeroRedundancyOptimizer"):
        shard_gradients(model, optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expects a torch\.nn\.Module"):
        shard_gradients(list(model.parameters()), optimizer_of(model))  # type: ignore[arg-type]


class Other(Plain):
    """The same parameters in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.b = self._modules.pop("b")


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("problem", ["bucket_mb", "order", "norms", "refused on one rank"])
def test_ranks_that_differ_are_told_and_nothing_is_changed(rank: int, problem: str) -> None:
    model, optimizer, arguments = Plain(), None, {"bucket_mb": 1.0, "norms": True}
    words, error = problem, DisagreementError
    if rank == 1:
        arguments |= {"bucket_mb": {"bucket_mb": 2.0}, "norms": {"norms": False}}.get(problem, {})
        model = Other() if problem == "order" else model
    # The optimizer matches parameters by name, and the order of its own is equal.
    params = sorted(model.named_parameters())
    optimizer = ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1, process_group=group_of())
    if problem == "refused on one rank":
        words, error = "bucket_mb=-1 is not a size", ValueError
        arguments["bucket_mb"] = -1 if rank == 1 else 1.0
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(error, match=words):
        shard_gradients(model, optimizer, **arguments)
    # Nothing was changed, and nothing is left behind.
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    if problem != "order":
        shard_gradients(model, optimizer)
        model(torch.ones(1, 12)).sum().backward()
        optimizer.step()
        assert_replicas_equal(model.parameters())


@pytest.mark.ranks(2, backend="gloo")
def test_a_hook_of_ddp_comes_too_late() -> None:
    model = Plain()
    optimizer = optimizer_of(model)
    sharding = shard_gradients(model, optimizer)
    ddp = DistributedDataParallel(model, process_group=group_of())
    with pytest.raises(ValueError, match=r"call remove\(\) before you register a hook"):
        register_reduce_to_owner(ddp, optimizer)
    with pytest.raises(RuntimeError, match="DistributedDataParallel calls this model"):
        ddp(torch.ones(1, 12))
    sharding.remove()
    register_reduce_to_owner(ddp, optimizer)
    ddp(torch.ones(1, 12)).sum().backward()
    optimizer.step()
    assert_replicas_equal(model.parameters())


# ---------------------------------------------------------------------- what the loop may not do


def convert(training: Training) -> None:
    training.model.float()


def move(training: Training) -> None:
    training.model.to("meta")


def replace(training: Training) -> None:
    training.model.b.weight = nn.Parameter(training.model.b.weight.detach().clone())


def assign(training: Training) -> None:
    training.model.load_state_dict(training.plain.state_dict(), assign=True)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (convert, "moved or converted"),
        (move, "moved or converted|replaced"),
        (replace, "replaced"),
        (assign, "replaced"),
    ],
)
def test_a_model_that_was_changed_afterwards_is_refused(change: Callable[[Training], None], words: str) -> None:
    training = sharded()
    before = training.optimizer.traffic.total()
    change(training)
    with pytest.raises(RuntimeError, match=words):
        training.on_this_rank().output()
    assert training.optimizer.traffic.total() == before


@pytest.mark.ranks(2, backend="gloo")
def test_an_optimizer_that_is_gone_is_told() -> None:
    training = sharded()
    loss = training.on_this_rank().loss()
    del training.optimizer, training.sharding
    with pytest.raises(RuntimeError, match="the optimizer that shards the gradients of this model is gone"):
        training.on_this_rank().output()
    with pytest.raises(RuntimeError, match="the optimizer that shards the gradients of this model is gone"):
        loss.backward()


def create_graph(training: Training) -> None:
    training.on_this_rank().loss().backward(create_graph=True)


def forget_zero_grad(training: Training) -> None:
    training.on_this_rank().loss().backward()
    training.optimizer.step()
    training.on_this_rank().loss(1).backward()


def step_after_no_sync(training: Training) -> None:
    with training.sharding.no_sync():
        training.on_this_rank().loss().backward()
    training.optimizer.step()


def step_after_autograd_grad(training: Training) -> None:
    params = [*training.model.parameters()]
    for param, grad in zip(params, torch.autograd.grad(training.on_this_rank().loss(), params), strict=True):
        param.grad = grad
    training.optimizer.step()


def replace_a_gradient(training: Training) -> None:
    training.on_this_rank().loss().backward()
    training.model.b.weight.grad = torch.ones_like(training.model.b.weight)
    training.optimizer.step()


def unfreeze_while_others_wait(training: Training) -> None:
    training.model.b.requires_grad_(False)
    training.on_this_rank().loss().backward()
    training.model.b.requires_grad_(True)
    training.on_this_rank().loss(1).backward()


LOOPS: dict[str, tuple[Callable[[Training], None], str]] = {
    "create_graph=True": (create_graph, r"create_graph=True\) is not supported with sharded gradients"),
    "no zero_grad()": (forget_zero_grad, "still has the gradient of the last step"),
    "step() after no_sync()": (step_after_no_sync, r"has not been reduced by backward\(\)"),
    "step() after autograd.grad()": (step_after_autograd_grad, r"has not been reduced by backward\(\)"),
    "another gradient": (replace_a_gradient, r"'b\.weight' was replaced after backward"),
    "unfrozen between backwards": (unfreeze_while_others_wait, "were frozen or unfrozen while the gradient of"),
}


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_is_refused_goes_on_afterwards(name: str) -> None:
    loop, words = LOOPS[name]
    training = sharded()
    with pytest.raises(RuntimeError, match=words):
        loop(training)
    training.optimizer.zero_grad()
    if name == "no zero_grad()":
        # One step was made.
        assert_replicas_equal(training.model.parameters())
        return
    training.iterate()


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("name", ["create_graph=True", "step() after autograd.grad()", "another gradient"])
def test_a_loop_that_is_refused_on_one_rank_goes_on_afterwards(rank: int, name: str) -> None:
    loop, words = LOOPS[name]
    training = sharded()

    def train() -> None:
        if rank == 1:
            loop(training)
            return
        if name != "step() after autograd.grad()":
            training.on_this_rank().loss().backward()
        training.optimizer.step()

    with pytest.raises(RuntimeError, match=words):
        train()
    training.optimizer.zero_grad()
    training.iterate()


class Sparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.shape = weight.shape
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.ones(ctx.shape, dtype=torch.float64).to_sparse()


@pytest.mark.ranks(2, backend="gloo", checks="no:messages")
@WHERE
def test_a_sparse_gradient_of_a_dense_parameter_is_refused(rank: int, where: str) -> None:
    training = sharded()
    loss = training.on_this_rank().loss()
    if where == "on all ranks" or rank == 1:
        loss = Sparse.apply(training.model.b.weight)
    with pytest.raises(ValueError, match=r"'b\.weight' has a sparse gradient, which cannot be sharded"):
        loss.backward()


# ---------------------------------------------------------------------- evaluation on one rank


@pytest.mark.ranks(2, backend="gloo")
def test_forwards_without_gradients_send_nothing(rank: int) -> None:
    training = sharded()
    before = training.optimizer.traffic.total()
    if rank == 0:
        with torch.no_grad():
            training.on_this_rank().output()
        training.model.requires_grad_(False)
        with torch.no_grad():
            training.on_this_rank().output()
        training.model.requires_grad_(True)
    assert training.optimizer.traffic.total() == before
    training.iterate()


# ---------------------------------------------------------------------- exceptions within a backward


class Failing(Plain):
    """Fails in the middle of a backward if it was told so."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x))
        if self.fails:
            y = _Fail.apply(y)
        return self.c(torch.tanh(self.b(y)))


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in the middle of backward")


@pytest.mark.by_default(
    "3-messages-forward-on all ranks | 3-messages in turn-step-on rank 1 | 3-reads-clip-on all ranks | "
    "3-collectives-forward-on rank 1"
)
@pytest.mark.ranks(3, backend="gloo", checks="no:messages no:collectives no:deadlock")
@WHERE
@pytest.mark.parametrize("then", ["forward", "step", "clip"])
@pytest.mark.parametrize("transport", TRANSPORTS, indirect=True)
def test_an_exception_in_backward_ends_the_training_on_all_ranks(
    rank: int, where: str, then: str, transport: None
) -> None:
    training = Training(Failing, bucket_mb=SMALL_MB, group=group_of(seconds=8))
    training.iterate()
    raises = where == "on all ranks" or rank == 1
    training.model.fails = raises
    before = [param.detach().clone() for param in training.model.parameters()]
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: training.on_this_rank().output(),
        "step": training.optimizer.step,
        "clip": lambda: training.optimizer.clip_grad_norm_(1.0),
    }
    if raises:
        with pytest.raises(ZeroDivisionError):
            training.on_this_rank().loss().backward()
        with pytest.raises(RuntimeError, match=f"the last backward did not finish on rank {rank}"):
            calls[then]()
    else:
        with pytest.raises(PeerLostError, match=f"rank {rank} lost "):
            training.on_this_rank().loss().backward()
    # Nothing of it is stepped, now or later.
    for call in calls.values():
        with pytest.raises(RuntimeError, match=r"load a checkpoint|Start again from a checkpoint"):
            call()
    assert all(torch.equal(*pair) for pair in zip(training.model.parameters(), before, strict=True))


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("where", ["forward", "loss"])
def test_an_exception_before_the_first_bucket_leaves_nothing(where: str) -> None:
    training = sharded()
    with pytest.raises(ZeroDivisionError):
        _Fail.apply(
            training.on_this_rank().output() if where == "forward" else training.on_this_rank().loss()
        ).sum().backward()
    training.iterate()


@pytest.mark.ranks(2, backend="gloo", checks="no:messages")
@pytest.mark.parametrize("other", ["step", "another backward", "frozen"])
def test_other_calls_on_one_rank_are_told(rank: int, other: str) -> None:
    training = sharded()
    if rank == 1 and other == "frozen":
        training.model.b.requires_grad_(False)

    def train() -> None:
        if rank == 0 or other != "step":
            training.on_this_rank().loss().backward()
        if rank == 1 and other == "another backward":
            training.on_this_rank().loss(1).backward()
        training.optimizer.step()

    words = (
        r"backward number 3 .* buckets"
        if other == "frozen"
        else r"rank \d.* backward\(\).*rank \d.* step\(\)|rank \d.* step"
    )
    with pytest.raises(DisagreementError, match=words):
        train()

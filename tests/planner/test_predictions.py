"""What is predicted from shapes alone is what ranks hold and send: state, bytes sent, and the peak of memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from support.combinations import each_of
from support.ddp_training import register, steps_in_backward
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from zeroshard import Planner, ZeroRedundancyOptimizer, predict, shard_gradients

Batch = Callable[[torch.device], torch.Tensor]


class TiedGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 256)
        sizes = [(256, 768), (256, 256), (256, 1024), (1024, 256)]
        self.blocks = nn.ModuleList([nn.ModuleList([nn.Linear(*each) for each in sizes]) for _ in range(3)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for qkv, out, feed, feed_out in self.blocks:  # type: ignore[misc] # ModuleList is no Iterable of modules
            hidden = hidden + out(sum(qkv(hidden).chunk(3, -1)))
            hidden = hidden + feed_out(feed(hidden).relu())
        return hidden @ self.embedding.weight.t()


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList([nn.Linear(512, 512) for _ in range(4)]).requires_grad_(False)
        self.down = nn.ModuleList([nn.Linear(512, 16, bias=False) for _ in range(4)])
        self.up = nn.ModuleList([nn.Linear(16, 512, bias=False) for _ in range(4)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            hidden = base(hidden) + up(down(hidden))
        return hidden


def convolutions() -> nn.Module:
    layers = [(nn.Conv2d(3 if n == 0 else 128, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU()) for n in range(4)]
    return nn.Sequential(*[module for layer in layers for module in layer], nn.Flatten(), nn.Linear(128 * 16, 128))


def one_large_tensor() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 5000, bias=False), nn.Linear(5000, 20))


MODELS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "tied GPT": (TiedGPT, lambda device: torch.arange(8, device=device)[None]),
    "convolutions with buffers": (convolutions, lambda device: torch.ones(2, 3, 4, 4, device=device)),
    "LoRA": (LoRA, lambda device: torch.ones(2, 512, device=device)),
    "one tensor is most of it": (one_large_tensor, lambda device: torch.ones(2, 300, device=device)),
}
OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (optim.AdamW, {}),
    "fused AdamW": (optim.AdamW, {"fused": True}),
    "SGD": (optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "Adafactor": (optim.Adafactor, {}),
    "Muon and AdamW": (optim.AdamW, {}),
}
PARTITIONS = ("whole", "split", "level")
HOOKS = ("none", "reduce_to_owner_hook", "hook_with_zero_step", "hook_with_zero_step_interleaved", "sharded")
"""How gradients are reduced: by DDP and its hooks, or by shard_gradients()."""
BUCKET_MB = 1
"""For sharded gradients: enough buckets in these small models that few are in flight."""
EVERY = 7
"""Of all combinations one in so many is tested, which no number of values divides, so that every two values meet."""
COMBINATIONS = [
    (model, optimizer, partition, hook)
    for model, optimizer, partition, hook in product(MODELS, OPTIMIZERS, PARTITIONS, HOOKS)
    if partition != "split" or optimizer not in ("Adafactor", "Muon and AdamW")
][::EVERY]


def groups_of(model: nn.Module, optimizer: str) -> list[dict[str, Any]]:
    """One group, or the matrices for Muon and the rest."""
    params = [*model.parameters()]
    if optimizer != "Muon and AdamW":
        return [{"params": params}]
    outer = model.embedding.weight if isinstance(model, TiedGPT) else None
    matrices = [param for param in params if param.dim() == 2 and param is not outer]
    rest = [param for param in params if all(param is not other for other in matrices)]
    groups: list[dict[str, Any]] = [{"params": matrices, "optimizer_class": optim.Muon}, {"params": rest}]
    return [group for group in groups if group["params"]]


def plain_optimizers(groups: list[dict[str, Any]], optimizer: str) -> list[optim.Optimizer]:
    cls, settings = OPTIMIZERS[optimizer]
    return [group.get("optimizer_class", cls)(group["params"], **settings) for group in groups]


def state_bytes(optimizers: list[optim.Optimizer]) -> int:
    values = [value for each in optimizers for entries in each.state.values() for value in entries.values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


class Allocations(TorchDispatchMode):
    """The most memory that is allocated after an operator of the thread that steps."""

    highest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.highest = max(self.highest, torch.accelerator.memory_allocated())
        return result


def bytes_sent(optimizer: ZeroRedundancyOptimizer) -> int:
    """Of gradients and parameters."""
    return sum(optimizer.traffic.of(kind).bytes_sent for kind in ("reduce", "broadcast"))


def reducing(hook: str, model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> nn.Module:
    """What is called in place of the model."""
    if hook == "sharded":
        shard_gradients(model, optimizer, bucket_mb=BUCKET_MB)
        return model
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if hook != "none":
        register(hook, ddp, optimizer)
    return ddp


def asked(hook: str) -> dict[str, Any]:
    """How to predict it."""
    if hook == "sharded":
        return {"shards_gradients": True, "bucket_mb": BUCKET_MB}
    return {"reduces_to_owner": hook != "none", "interleaves": hook == "hook_with_zero_step_interleaved"}


@contextmanager
def peak_of(costs: Callable[[], AbstractContextManager[Any]], found: list[int]) -> Iterator[None]:
    with costs() as cost:
        yield
    found.append(cost.peak_bytes)


def iterations(
    ddp: nn.Module, optimizers: list[Any], batch: torch.Tensor, costs: Callable[[], AbstractContextManager[Any]]
) -> list[tuple[int, int, int]]:
    """For each of four, what is allocated before it, and at the highest in backward and in the step."""
    found = []
    for _ in range(4):
        gc.collect()
        before, peaks = torch.accelerator.memory_allocated(), list[int]()
        with peak_of(costs, peaks):
            ddp(batch).mean().backward()
        with Allocations() as stepping:
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        found.append((before, peaks[0], stepping.highest))
    return found


@pytest.mark.ranks(2, 3, 4, backend="emulated")
@pytest.mark.parametrize(("model", "optimizer", "partition", "hook"), COMBINATIONS)
def test_memory_and_traffic_on_the_device_are_as_predicted(
    rank: int,
    world_size: int,
    device: torch.device,
    device_costs: Callable[[], AbstractContextManager[Any]],
    model: str,
    optimizer: str,
    partition: str,
    hook: str,
) -> None:
    build, make_batch = MODELS[model]
    cls, settings = OPTIMIZERS[optimizer]
    batch = make_batch(device)
    # Given what activations of the model take under plain DDP, gradients that are copied into buckets among them,
    ddp = DistributedDataParallel(build().to(device), gradient_as_bucket_view=True)
    plain = iterations(ddp, plain_optimizers(groups_of(ddp.module, optimizer), optimizer), batch, device_costs)
    activations = plain[-1][1] - plain[-1][0]
    del ddp
    gc.collect()
    # when the same model is trained with its state sharded,
    empty = torch.accelerator.memory_allocated()
    module = build().to(device)
    groups = groups_of(module, optimizer)
    buffers = sum(buffer.nbytes for buffer in module.buffers())
    planner = Planner(groups, cls, buffers=buffers, order=module.parameters(), **settings)
    steps_early = steps_in_backward(hook)
    sharded: Any = ZeroRedundancyOptimizer(groups, cls, partition=partition, overlap_with_ddp=steps_early, **settings)
    model_called = reducing(hook, module, sharded)
    first, *_, _, last = iterations(model_called, [sharded], batch, device_costs)
    before = bytes_sent(sharded)
    iterations(model_called, [sharded], batch, device_costs)
    sent = (bytes_sent(sharded) - before) / 4
    # then state and bytes sent are those predicted,
    predicted = planner.predict(world_size, partition, **asked(hook))
    here = predicted.ranks[rank]
    assert state_bytes([*sharded.local_optimizers]) == here.state
    all_reduced = 2 * here.gradients * (world_size - 1) / world_size if hook == "none" else 0
    assert sent == pytest.approx(predicted.sent[rank] - all_reduced, rel=0.01)
    # and so is the peak. An update comes when activations are gone, but for buckets that are stepped while others come.
    resident, highest = here.total - max(here.temporaries, here.transient), max(last[1:]) - empty
    least, most = [activations, here.temporaries], [activations, here.temporaries]
    if hook == "hook_with_zero_step_interleaved":
        most = [activations + here.temporaries]
    if hook == "sharded":
        # Backward begins without gradients, and most buckets are in flight when many activations are gone.
        least, most = [activations - here.gradients, here.transient, least[1]], [activations + here.transient, most[1]]
    assert 0.9 * (resident + max(least)) <= highest <= 1.1 * (resident + max(most))
    # The first iteration has one bucket for all, and makes the state.
    assert max(first[1:]) - empty <= 1.1 * (resident + activations + here.temporaries)


@pytest.mark.ranks(2, 3, 4, backend="emulated")
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("bucket_mb", [0.5, 1, 25], ids=["alone", "packed", "one bucket"])
def test_the_peak_of_sharded_gradients_is_as_predicted(
    rank: int,
    world_size: int,
    device: torch.device,
    device_costs: Callable[[], AbstractContextManager[Any]],
    partition: str,
    bucket_mb: float,
) -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)]).to(device)
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, partition=partition, fused=True)
    shard_gradients(model, optimizer, bucket_mb=bucket_mb)
    *_, (before, *peaks) = iterations(model, [optimizer], torch.ones(1, 256, device=device), device_costs)
    asked = {"ranks": world_size, "partition": partition, "shards_gradients": True, "bucket_mb": bucket_mb}
    here = predict(model, optim.AdamW, fused=True, **asked).ranks[rank]
    # A layer makes two gradients at once, of which one may belong to the next bucket.
    assert max(peaks) - before == pytest.approx(here.gradients + here.transient, abs=0.05 * here.total)


@pytest.mark.ranks(3, backend="gloo")
@each_of("hook", HOOKS, partition=["whole", "split"], model=["convolutions with buffers", "LoRA"])
def test_state_and_traffic_in_messages_are_as_predicted(
    rank: int, world_size: int, model: str, partition: str, hook: str
) -> None:
    build, make_batch = MODELS[model]
    model_built = build()
    steps_early = steps_in_backward(hook)
    sharded: Any = ZeroRedundancyOptimizer(
        model_built.parameters(), optim.AdamW, partition=partition, overlap_with_ddp=steps_early
    )
    model_called = reducing(hook, model_built, sharded)
    predicted = predict(model_built, optim.AdamW, ranks=world_size, partition=partition, **asked(hook))
    for _ in range(2):
        before = [sharded.traffic.of(kind).bytes_sent for kind in ("reduce", "broadcast")]
        sharded.zero_grad()
        model_called(make_batch(torch.device("cpu"))).mean().backward()
        sharded.step()
    reduced, shared = (
        sharded.traffic.of(kind).bytes_sent - sent for kind, sent in zip(("reduce", "broadcast"), before, strict=True)
    )
    assert state_bytes([sharded.optim]) == predicted.ranks[rank].state
    assert reduced == (predicted.sent_in_backward[rank] if hook != "none" else 0)
    assert shared == predicted.sent_in_step[rank]

"""Train a small GPT on processes of this machine with a plain and with a sharded optimizer, and compare the two.

Start it with: python quickstart.py --ranks 2 --gradients sharded
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer
from zeroshard import ZeroRedundancyOptimizer, shard_gradients
from zeroshard_integrations.ddp import register_reduce_to_owner

SEQUENCES, CONTEXT = 6, 64  # of each rank in a step, and the bytes of each
MUON = "Muon:matrices+AdamW:rest"
CLASSES: dict[str, dict[str, Any]] = {
    "AdamW": {"optimizer_class": AdamW, "lr": 1e-3},
    "Adam": {"optimizer_class": Adam, "lr": 1e-3},
    "SGD": {"optimizer_class": SGD, "lr": 0.1, "momentum": 0.9},
    "Muon": {"optimizer_class": Muon, "lr": 0.02},
}


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer. Each normalizes what it gets, and adds to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width, elementwise_affine=False)
        self.attend, self.attend_out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.feed, self.feed_out = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``(sequences, context, width)`` to the same shape."""
        parts = self.attend(self.norm(hidden)).unflatten(2, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attend_out(attended.transpose(1, 2).flatten(2))
        return hidden + self.feed_out(F.gelu(self.feed(self.norm(hidden))))


class GPT(nn.Module):
    """Predicts bytes. Its weights are the same in every process, and its output layer is its input embedding."""

    def __init__(self, context: int = CONTEXT, width: int = 256, layers: int = 8, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        for name, weight in self.named_parameters():
            nn.init.normal_(weight, std=0.02 / (2 * layers) ** 0.5 if "_out" in name else 0.02)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting ``targets``, both of shape ``(sequences, context)``."""
        hidden = self.bytes(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = F.linear(self.norm(hidden), self.bytes.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text() -> torch.Tensor:
    """Return the sources of Python's standard library as bytes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def draw(text: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw sequences from the text. Return their bytes, and the byte after each of these."""
    starts = torch.randint(len(text) - CONTEXT, (SEQUENCES,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def param_groups(model: GPT, optimizer: str) -> list[dict[str, Any]]:
    """Return a param group for each optimizer class."""
    if optimizer != MUON:
        return [{**CLASSES[optimizer], "params": list(model.named_parameters())}]
    matrices = list(model.blocks.named_parameters(prefix="blocks"))
    rest = [(name, param) for name, param in model.named_parameters() if not name.startswith("blocks.")]
    return [{**CLASSES["Muon"], "params": matrices}, {**CLASSES["AdamW"], "params": rest}]


def build(model: GPT, options: argparse.Namespace, *, is_sharded: bool) -> tuple[nn.Module, list[Optimizer]]:
    """Return what to call in place of the model, and its optimizers."""
    groups = param_groups(model, options.optimizer)
    if not is_sharded:
        plain = [group.pop("optimizer_class")([group]) for group in groups]
        return DistributedDataParallel(model, gradient_as_bucket_view=True), plain
    # One class needs no groups: ZeroRedundancyOptimizer(model.named_parameters(), AdamW, lr=1e-3).
    optimizer = ZeroRedundancyOptimizer(groups, AdamW, partition=options.partition)
    if options.gradients == "sharded":
        shard_gradients(model, optimizer, bucket_mb=4)
        return model, [optimizer]
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    register_reduce_to_owner(ddp, optimizer)
    return ddp, [optimizer]


def train(rank: int, options: argparse.Namespace, folder: Path, part: str, steps: range) -> None:
    """Train on one rank, and write what it needed and the parameters to a file."""
    torch.set_num_threads(1)  # Ranks share the cores, and one thread always adds up in the same order.
    dist.init_process_group("gloo", f"file://{folder}/{part}.store", rank=rank, world_size=options.ranks)
    text, seconds, memory_before = read_text(), [], highest_memory()
    model, checkpoint = GPT(), folder / "checkpoint.pt"
    called, optimizers = build(model, options, is_sharded=part != "plain")
    if part == "resumed":
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizers[0].load_state_dict(saved["optimizer"])  # Each rank keeps its part of the state.
    for step in progress(steps, part) if rank == 0 else steps:
        inputs, targets = draw(text, step * options.ranks + rank)
        dist.barrier()
        started = time.perf_counter()
        model.zero_grad()
        loss = called(inputs, targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        seconds.append(time.perf_counter() - started)
    needed = needed_bytes(model, optimizers)
    needed |= {"memory, MB": (highest_memory() - memory_before) / 1e6, "step, ms": statistics.median(seconds) * 1e3}
    if part == "sharded":
        optimizers[0].consolidate_state_dict(to=0)
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizers[0].state_dict()}, checkpoint)
    parameters = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.save((needed | {"loss": loss.item()}, parameters), folder / f"{part}{rank}.pt")
    del called, loss
    dist.destroy_process_group()


def needed_bytes(model: GPT, optimizers: Sequence[Optimizer]) -> dict[str, float]:
    """Return what this rank holds of state and gradients, and sends in a step."""
    if isinstance(optimizers[0], ZeroRedundancyOptimizer):
        here = optimizers[0].describe()
        state, gradients, sent = here.state_bytes_here, here.gradient_bytes_here, here.backward_bytes + here.step_bytes
    else:
        state = sum(value.nbytes for each in optimizers for entry in each.state.values() for value in entry.values())
        gradients = sum(param.grad.nbytes for param in model.parameters() if param.grad is not None)
        sent = 2 * gradients * (dist.get_world_size() - 1) // dist.get_world_size()  # by a ring all-reduce
    return {"state, MB": state / 1e6, "gradients, MB": gradients / 1e6, "sent, MB": sent / 1e6}


def highest_memory() -> int:
    """Return the most bytes of memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def progress(steps: range, title: str) -> Iterable[int]:
    """Return the steps. If rich is installed, a bar shows the time left."""
    try:
        from rich.progress import track
    except ImportError:
        return steps
    return track(steps, f"{title:8}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train all, and print what was found. The exit status is 1 if parameters differ that must be equal."""
    parser = argparse.ArgumentParser(description="Train a small GPT with a plain and with a sharded optimizer.")
    parser.add_argument("--ranks", type=int, default=2, help="processes that train together")
    parser.add_argument("--steps", type=int, default=30, help="steps before the checkpoint, and after it")
    parser.add_argument("--optimizer", choices=["AdamW", "Adam", "SGD", MUON], default="AdamW")
    parser.add_argument("--partition", choices=["whole", "split", "level"], default="level")
    parser.add_argument("--gradients", choices=["sharded", "ddp"], default="sharded", help="in place of DDP, or in it")
    options = parser.parse_args(arguments)
    steps, ranks = options.steps, range(options.ranks)
    parts = {"sharded": range(steps), "resumed": range(steps, 2 * steps), "plain": range(2 * steps)}
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:  # Each has processes of its own, so that their memory can be compared.
            multiprocessing.spawn(train, (options, Path(folder), part, parts[part]), options.ranks)
        found = {part: [torch.load(Path(folder, f"{part}{rank}.pt")) for rank in ranks] for part in parts}
    print(f"{'':18}" + "".join(f"{title:>15}" for title in found["plain"][0][0]))
    for part, rank in itertools.product(parts, ranks):
        print(f"{f'{part}, rank {rank}':18}" + "".join(f"{number:15.4g}" for number in found[part][rank][0].values()))
    differences = [found["resumed"][rank][1] - found["plain"][rank][1] for rank in ranks]
    difference = torch.cat(differences).abs().max().item()
    print("parameters, resumed and plain:", f"differ by up to {difference:.1e}" if difference else "equal bit for bit")
    return 1 if difference and options.ranks <= 2 else 0


if __name__ == "__main__":
    sys.exit(main())

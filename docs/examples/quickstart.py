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
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Muon, Optimizer
from zeroshard import Planner, ZeroRedundancyOptimizer, shard_gradients
from zeroshard_integrations.ddp import register_reduce_to_owner

SEQUENCES, CONTEXT = 6, 64  # of each rank in a step, and the bytes of each
MUON = "Muon:matrices+AdamW:rest"
MARKS = {"parameters": "=", "gradients": "+", "state": "-"}
CLASSES: dict[str, dict[str, Any]] = {
    "AdamW": {"optimizer_class": AdamW, "lr": 1e-3},
    "SGD": {"optimizer_class": SGD, "lr": 0.1, "momentum": 0.9},
    "Muon": {"optimizer_class": Muon, "lr": 0.02},
}


class GPT(nn.Module):
    """Predicts bytes by blocks of causal attention. Its weights are the same in every process."""

    def __init__(self, width: int = 256, blocks: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, blocks, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting ``targets``, both of shape ``(sequences, CONTEXT)``."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        hidden = self.blocks(self.bytes(inputs) + self.positions.weight, mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


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
    matrices = [(name, param) for name, param in model.blocks.named_parameters(prefix="blocks") if param.ndim == 2]
    rest = [(name, param) for name, param in model.named_parameters() if name not in dict(matrices)]
    return [{**CLASSES["Muon"], "params": matrices}, {**CLASSES["AdamW"], "params": rest}]


def build(model: GPT, options: argparse.Namespace, *, is_sharded: bool) -> tuple[nn.Module, list[Optimizer]]:
    """Return what to call in place of the model, and its optimizers."""
    groups = param_groups(model, options.optimizer)
    if not is_sharded:
        plain = [group.pop("optimizer_class")([group]) for group in groups]
        return DistributedDataParallel(model, gradient_as_bucket_view=True), plain
    # One class needs no groups: ZeroRedundancyOptimizer(model.named_parameters(), AdamW, lr=1e-3, partition="split").
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
    for step in progress(steps, f"{part}: {len(steps)} steps") if rank == 0 else steps:
        inputs, targets = draw(text, step * options.ranks + rank)
        dist.barrier()
        started = time.perf_counter()
        model.zero_grad()
        loss = called(inputs, targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        seconds.append(time.perf_counter() - started)
    needed = needed_memory(model, optimizers) | {"peak": highest_memory() - memory_before}
    needed |= {"step, ms": statistics.median(seconds) * 1e3, "loss": loss.item()}
    if part == "sharded":
        optimizers[0].consolidate_state_dict(to=0)
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizers[0].state_dict()}, checkpoint)
    parameters = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.save((needed, parameters), folder / f"{part}{rank}.pt")
    del called, loss
    dist.destroy_process_group()


def needed_memory(model: GPT, optimizers: Sequence[Optimizer]) -> dict[str, float]:
    """Return the megabytes that this rank holds after a step, by kind, and that it sends in one."""
    parameters = sum(param.nbytes for param in model.parameters())
    if isinstance(optimizers[0], ZeroRedundancyOptimizer):
        here = optimizers[0].describe()
        state, gradients, sent = here.state_bytes_here, here.gradient_bytes_here, here.backward_bytes + here.step_bytes
    else:
        state = sum(value.nbytes for each in optimizers for entry in each.state.values() for value in entry.values())
        gradients = sum(param.grad.nbytes for param in model.parameters() if param.grad is not None)
        sent = 2 * gradients * (dist.get_world_size() - 1) // dist.get_world_size()  # by a ring all-reduce
    return {"parameters": parameters / 1e6, "gradients": gradients / 1e6, "state": state / 1e6, "sent": sent / 1e6}


def highest_memory() -> float:
    """Return the most megabytes of memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e6 / 1024)


def progress(steps: range, title: str) -> Iterable[int]:
    """Return the steps. If rich is installed, a bar shows the time left."""
    try:
        from rich.progress import track
    except ImportError:
        return steps
    return track(steps, f"{title:18}")


def print_memory(plain: dict[str, float], sharded: dict[str, float], options: argparse.Namespace) -> None:
    """Draw what rank 0 holds after a step, and what it would hold if 8 ranks trained."""
    planner = Planner(param_groups(GPT(), options.optimizer), AdamW, backend="gloo")
    predicted = planner.predict(8, options.partition, shards_gradients=options.gradients == "sharded").ranks[0]
    on_8 = {kind: getattr(predicted, kind) / 1e6 for kind in MARKS}
    legend = ", ".join(f"{kind} {mark}" for kind, mark in MARKS.items())
    print(f"\nMB that rank 0 holds after a step, a mark for 2 MB: {legend}")
    count = f"{options.ranks} ranks"
    for name, held in {f"plain, {count}": plain, f"sharded, {count}": sharded, "predicted, 8 ranks": on_8}.items():
        bar = "".join(mark * round(held[kind] / 2) for kind, mark in MARKS.items())
        print(f"{name:19}{sum(held[kind] for kind in MARKS):6.1f}  {bar}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train all, and print what was found. The exit status is 1 if parameters differ that must be equal."""
    parser = argparse.ArgumentParser(description="Train a small GPT with a plain and with a sharded optimizer.")
    parser.add_argument("--ranks", type=int, default=2, help="processes that train together")
    parser.add_argument("--steps", type=int, default=30, help="steps before the checkpoint, and after it")
    parser.add_argument("--optimizer", choices=["AdamW", "SGD", MUON], default="AdamW")
    parser.add_argument("--partition", choices=["whole", "split", "level"], help="split by default, or level with Muon")
    parser.add_argument("--gradients", choices=["sharded", "ddp"], default="sharded", help="in place of DDP, or in it")
    options = parser.parse_args(arguments)
    if min(options.ranks, options.steps) < 1:
        parser.error("--ranks and --steps must be 1 or more")
    options.partition = options.partition or ("level" if options.optimizer == MUON else "split")
    steps, ranks = options.steps, range(options.ranks)
    parts = {"sharded": range(steps), "resumed": range(steps, 2 * steps), "plain": range(2 * steps)}
    print(f"{steps} steps sharded, saved to a file; new processes resume from it; then {2 * steps} steps of DDP.\n")
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:  # Each has processes of its own, so that their memory can be compared.
            multiprocessing.spawn(train, (options, Path(folder), part, parts[part]), options.ranks)
        found = {part: [torch.load(Path(folder, f"{part}{rank}.pt")) for rank in ranks] for part in parts}
    print("\nMB of each rank. The peak is resident memory above that before the model; resumed also loads the file.")
    print(" " * 18 + "".join(f"{title:>11}" for title in found["plain"][0][0]))
    for part, rank in itertools.product(parts, ranks):
        print(f"{f'{part}, rank {rank}':18}" + "".join(f"{number:11.4g}" for number in found[part][rank][0].values()))
    print_memory(found["plain"][0][0], found["sharded"][0][0], options)
    differences = [found["resumed"][rank][1] - found["plain"][rank][1] for rank in ranks]
    difference = torch.cat(differences).abs().max().item()
    order = ": more than 2 ranks and DDP add up gradients in different orders" * (options.ranks > 2)
    result = f"differ by up to {difference:.1e}{order}" if difference else "equal bit for bit"
    print(f"\nparameters, resumed and plain: {result}")
    return 1 if difference and options.ranks <= 2 else 0


if __name__ == "__main__":
    sys.exit(main())

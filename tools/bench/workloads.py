"""What is trained: a model whose forward gives its loss, and its batches, the same for every contender."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

# The quickstart's model and text lie beside the benchmarks; at the end, for its modules are named as they please.
sys.path.append(str(Path(__file__).parents[1] / "quickstart"))

Batch = tuple[torch.Tensor, ...]
SEED = 0
WIDTH = 2000
ROWS = 32
SEQUENCES = 8
TENSORS = 200
_CORPUS_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Workload:
    """A model and its data.

    Attributes:
        name: as it is chosen.
        lr: learning rate, small enough that rounding does not grow into a difference.
        batch: what every rank trains on per iteration, in words.
        build: makes the model with the same weights in every process; its forward takes a batch and gives the loss.
        units: parts of the model that sharding frameworks wrap one by one.
        batches: gives this rank's share of as many batches as asked: ``(count, rank, ranks)``.
    """

    name: str
    lr: float
    batch: str
    build: Callable[[], nn.Module]
    units: Callable[[nn.Module], Sequence[nn.Module]]
    batches: Callable[[int, int, int], list[Batch]]

    def sizes(self) -> list[int]:
        """Return the bytes of each parameter."""
        with torch.device("meta"):
            return [parameter.numel() * parameter.element_size() for parameter in self.build().parameters()]


class Layers(nn.Module):
    """Square linear layers, one after the other; the loss is the mean square of what comes out.

    Args:
        count: number of layers.
        width: features in and out of each.
    """

    def __init__(self, count: int, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the loss of ``(rows, width)`` inputs."""
        loss: torch.Tensor = self.layers(inputs).square().mean()
        return loss


class Tensors(nn.Module):
    """Many parameters of one shape, which each add a little to what comes in; the loss is the mean square.

    Args:
        count: number of parameters.
        shape: ``(rows, columns)`` of each, rows a multiple of columns.
    """

    def __init__(self, count: int, shape: tuple[int, int]) -> None:
        super().__init__()
        drawing = torch.Generator().manual_seed(SEED)
        scale = 0.1 / shape[0] ** 0.5
        self.tensors = nn.ParameterList(torch.randn(shape, generator=drawing) * scale for _ in range(count))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the loss of ``(rows // columns, columns)`` inputs."""
        for tensor in self.tensors:
            inputs = inputs + inputs.view(1, -1) @ tensor
        loss: torch.Tensor = inputs.square().mean()
        return loss


def mlp(layers: int) -> Workload:
    """Return the workload of ``layers`` large linear layers."""
    return Workload(
        name=f"mlp, {layers} x Linear({WIDTH}, {WIDTH})",
        lr=1e-4,
        batch=f"{ROWS} rows",
        build=lambda: Layers(layers),
        units=lambda model: [part for part in model.modules() if isinstance(part, nn.Linear)],
        batches=_rows,
    )


def gpt(**changes: int) -> Workload:
    """Return the workload of the quickstart's language model, on the text of Python's standard library.

    Args:
        **changes: what its shape has other values of.
    """
    from byte_gpt import Block, ByteGPT, Shape

    shape = Shape(**changes)
    return Workload(
        name=f"gpt, {shape.layers} blocks of width {shape.width}",
        lr=1e-4,
        batch=f"{SEQUENCES} sequences of {shape.context} bytes",
        build=lambda: ByteGPT(shape, SEED),
        units=lambda model: [part for part in model.modules() if isinstance(part, Block)],
        batches=partial(_sequences, shape.context),
    )


def tensors(shape: tuple[int, int]) -> Workload:
    """Return the workload of 200 parameters of that shape, in which computing takes little."""
    rows, columns = shape

    def batches(count: int, rank: int, ranks: int) -> list[Batch]:
        drawing = torch.Generator().manual_seed(SEED)
        everyones = (torch.randn(ranks, rows // columns, columns, generator=drawing) for _ in range(count))
        return [(inputs[rank].clone(),) for inputs in everyones]

    return Workload(
        name=f"{TENSORS} tensors of {shape}",
        lr=1e-4,
        batch="1 row",
        build=lambda: Tensors(TENSORS, shape),
        units=lambda _: [],
        batches=batches,
    )


MODELS: dict[str, Callable[[int], Workload]] = {
    "mlp": mlp,
    "gpt": lambda _: gpt(),
    "wide-gpt": lambda _: gpt(context=128, width=512, layers=8, heads=8),
    "tensors": lambda _: tensors((100, 100)),
    "rows": lambda _: tensors((512, 128)),
}


def workload(model: str, layers: int) -> Workload:
    """Return the workload of that name, one of :data:`MODELS`; ``layers`` is for those that have a choice."""
    return MODELS[model](layers)


def _rows(count: int, rank: int, ranks: int) -> list[Batch]:
    drawing = torch.Generator().manual_seed(SEED)
    everyones = (torch.randn(ranks * ROWS, WIDTH, generator=drawing) for _ in range(count))
    return [(rows[rank * ROWS : (rank + 1) * ROWS].clone(),) for rows in everyones]


def _sequences(context: int, count: int, rank: int, ranks: int) -> list[Batch]:
    from corpus import Batches, read_corpus

    text = read_corpus(Path(sysconfig.get_path("stdlib")), least=context + 1, limit=_CORPUS_BYTES)
    batches = Batches(text, SEQUENCES * ranks, context, SEED)
    return [batches.of(step, rank, ranks) for step in range(count)]

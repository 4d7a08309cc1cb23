"""What is trained: a model whose forward gives its loss, and its batches, the same for every contender."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from torch import nn

Batch = tuple[torch.Tensor, ...]
SEED, ROWS, SEQUENCES, BYTES = 0, 32, 8, 256


@dataclass(frozen=True)
class Workload:
    """A model and its data: what builds it with the same weights in every process, and what draws the next batch.

    FSDP2 wraps parts of the kinds in ``units`` one by one. A turn is of ``in_a_row`` iterations.
    """

    title: str
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Batch]
    units: tuple[type[nn.Module], ...] = ()
    in_a_row: int = 1
    fused: bool = True

    def batches(self, count: int, rank: int) -> list[Batch]:
        """Return the first batches of a rank."""
        generator = torch.Generator().manual_seed(SEED + rank)
        return [self.draw(generator) for _ in range(count)]

    def parameter_bytes(self) -> int:
        """Return the size of all parameters."""
        with torch.device("meta"):
            return sum(parameter.nbytes for parameter in self.build().parameters())


class Layers(nn.Module):
    """Square linear layers, one after the other; the loss is the mean square of what comes out."""

    def __init__(self, count: int, width: int, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=bias) for _ in range(count)))
        for parameter in self.parameters():
            # With nn.Linear's own weights values vanish over 200 layers, and denormal numbers take longer.
            nn.init.normal_(parameter, std=width**-0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the loss of ``(rows, width)`` inputs."""
        loss: torch.Tensor = self.layers(inputs).square().mean()
        return loss


class GPT(nn.Module):
    """A GPT over bytes whose output layer is its input embedding."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.bytes = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(context, width)
        nn.init.normal_(self.bytes.weight, std=0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of each byte of ``(sequences, context + 1)`` after those before it."""
        inputs, targets = sequences[:, :-1], sequences[:, 1:]
        hidden = self.bytes(inputs) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return F.cross_entropy(F.linear(hidden, self.bytes.weight).flatten(0, 1), targets.flatten())


def _layers(count: int, width: int, rows: int = 1, *, bias: bool = True, fused: bool = True) -> Workload:
    return Workload(
        f"{count} x Linear({width}, {width}{', bias=False' * (not bias)}), {rows=}, {'fused ' * fused}Adam",
        lambda: Layers(count, width, bias=bias),
        lambda generator: (torch.randn(rows, width, generator=generator),),
        (nn.Linear,) if rows > 1 else (),
        1 if rows > 1 else 5,
        fused,
    )


def _gpt(layers: int, width: int, heads: int, context: int) -> Workload:
    return Workload(
        f"GPT, {layers} blocks of width {width}, {SEQUENCES} sequences of {context} bytes, fused Adam",
        lambda: GPT(layers, width, heads, context),
        lambda generator: (torch.randint(BYTES, (SEQUENCES, context + 1), generator=generator),),
        (nn.TransformerEncoderLayer,),
    )


MODELS: dict[str, Callable[[int], Workload]] = {
    "mlp": lambda layers: _layers(layers, 2000, ROWS),
    "gpt": lambda _: _gpt(layers=6, width=384, heads=6, context=48),
    "wide-gpt": lambda _: _gpt(layers=8, width=512, heads=8, context=128),
    "tensors": lambda _: _layers(200, 100, bias=False),
    "small": lambda _: _layers(250, 64, fused=False),
    "small-fused": lambda _: _layers(250, 64),
    "tiny": lambda _: _layers(2, 8, ROWS),
}
"""By name; the number of layers is for mlp."""

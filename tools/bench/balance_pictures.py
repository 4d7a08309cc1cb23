"""Draw how three partitions balance GPT-2 124M with Muon for hidden matrices and AdamW for the rest on 8 ranks.

Two pictures for docs/muon.md: the work of an update, and the bytes of optimizer state, of each rank as multiples of the
mean. Both are computed from the shapes, as the optimizer does it: nothing is timed, and no rank is started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from drawing import OTHERS, OURS, PLAIN, TEXT, picture
from several_classes import round_robin
from zeroshard_core import GroupCost, Plan, Strategy, TensorSpec, adam, newton_schulz, partition, state_bytes

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
RANKS = 8
GROUPS = (
    GroupCost("Muon", newton_schulz(), state_bytes(torch.optim.Muon), elementwise=False),
    GroupCost("AdamW", adam(), state_bytes(torch.optim.AdamW), elementwise=True),
)
PARTITIONS: Mapping[str, tuple[str | Strategy, str]] = {
    "round-robin": (round_robin, PLAIN),
    "whole": ("whole", OTHERS),
    "level": ("level", OURS),
}
WHAT = {"work": "Work of an update", "state": "Bytes of optimizer state"}


def main(folder: Annotated[Path, typer.Option(help="where the pictures are written")] = PICTURES) -> None:
    """Draw both."""
    plans = {
        name: partition(gpt2(), RANKS, strategy=strategy, groups=GROUPS) for name, (strategy, _) in PARTITIONS.items()
    }
    for kind in WHAT:
        file = folder / f"muon-{kind}.svg"
        shares = {name: shares_of(plan, kind) for name, plan in plans.items()}
        draw(shares, WHAT[kind], file)
        typer.echo(f"{file}: " + ", ".join(f"{name} at most {max(found):.2f}" for name, found in shares.items()))


def gpt2() -> list[TensorSpec]:
    """Return the tensors of GPT-2 124M, whose output head is tied to its embedding; Muon's are group 0."""
    width, layers, vocabulary, positions = 768, 12, 50_257, 1_024
    shapes: dict[str, tuple[int, ...]] = {"wte": (vocabulary, width), "wpe": (positions, width)}
    for layer in range(layers):
        matrices: dict[str, tuple[int, ...]] = {
            "attn": (3 * width, width),
            "proj": (width, width),
            "fc": (4 * width, width),
            "out": (width, 4 * width),
        }
        shapes |= {f"h.{layer}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"h.{layer}.{name}.bias": shape[:1] for name, shape in matrices.items()}
        shapes |= {f"h.{layer}.{norm}.{name}": (width,) for norm in ("ln_1", "ln_2") for name in ("weight", "bias")}
    shapes |= {f"ln_f.{name}": (width,) for name in ("weight", "bias")}
    return [
        TensorSpec(name, shape, torch.float32, group=int(len(shape) != 2 or name in ("wte", "wpe")))
        for name, shape in shapes.items()
    ]


def shares_of(plan: Plan, kind: str) -> list[float]:
    """Return ``"work"`` or ``"state"`` of each rank, relative to the mean."""
    loads = plan.loads if kind == "work" else plan.state_loads
    return [load * len(loads) / sum(loads) for load in loads]


def draw(shares: Mapping[str, Sequence[float]], what: str, file: Path) -> None:
    """Draw a panel of bars for each partition.

    Args:
        shares: by the name of the partition, of each rank, relative to the mean.
        what: is shown.
        file: to write.
    """
    with picture(file, 3.75, 4.0, len(shares), sharex=True, sharey=True) as (figure, panels):
        for panel, (name, found) in zip(panels, shares.items(), strict=True):
            panel.bar(range(len(found)), found, color=PARTITIONS[name][1], width=0.75)
            panel.axhline(1, color=TEXT, linestyle=":", linewidth=1.2)
            for rank, share in enumerate(found):
                # Above the line of the mean too: it would cross out the number.
                panel.annotate(
                    f"{share:.2f}", (rank, max(share, 1)), xytext=(0, 3), textcoords="offset points", ha="center",
                    fontsize=8,
                )  # fmt: skip
            panel.set_title(f"{name}: at most {max(found):.2f}")
            panel.set_yticks([0, 1], ["0", "mean"])
            panel.margins(y=0.18)
            panel.tick_params(axis="x", length=0)
        panels[-1].set_xticks(range(RANKS))
        panels[-1].set_xlabel("rank")
        figure.suptitle(f"{what}, as a multiple of the mean", fontsize=9)


if __name__ == "__main__":
    typer.run(main)

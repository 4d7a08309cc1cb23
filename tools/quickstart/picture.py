"""The picture: loss per step, and optimizer state per rank."""

from __future__ import annotations

from pathlib import Path

from report import MEGA
from verdict import Found

PLAIN, SHARDED, RESUMED = "#f0a35e", "#1f4e79", "#2a9d60"


def draw(found: Found, file: Path) -> None:
    """Draw loss and memory to a PNG file."""
    # A backend without windows, chosen before pyplot is imported.
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    first = found.training[0]
    figure, (loss, memory) = plt.subplots(1, 2, figsize=(12, 4.6), width_ratios=(2, 1), layout="constrained")
    steps = range(1, len(first.plain.losses) + 1)
    # The lines lie on each other: a wide one beneath a thin one shows both.
    loss.plot(steps, first.plain.losses, color=PLAIN, linewidth=7, alpha=0.8, label=f"unsharded {found.classes}")
    loss.plot(steps, first.sharded.losses, color=SHARDED, linewidth=1.6, label=f"zeroshard, {found.ranks} ranks")
    later = range(found.steps + 1, found.steps + 1 + len(found.plain.losses))
    loss.plot(
        later, found.resumed.losses, "o", color=RESUMED, markersize=9, fillstyle="none", markeredgewidth=1.8,
        label=f"resumed on {found.resume_ranks} ranks",
    )  # fmt: skip
    loss.plot(later, found.plain.losses, "x", color="black", markersize=6, label=f"resumed by plain {found.classes}")
    loss.axvline(found.steps + 0.5, color="grey", linewidth=1, linestyle=":")
    loss.annotate(
        "checkpoint", (found.steps + 0.5, 0.4), xycoords=("data", "axes fraction"), xytext=(-4, 0),
        textcoords="offset points", ha="right", va="bottom", color="grey", rotation=90,
    )  # fmt: skip
    loss.set(xlabel="step", ylabel="loss (nats per byte)", xlim=(0.5, len(steps) + 0.5))
    loss.set_title(f"Loss; largest parameter difference {found.difference:.3g}", loc="left")
    loss.xaxis.get_major_locator().set_params(integer=True)
    loss.grid(alpha=0.25)
    loss.legend(loc="upper right", framealpha=1, edgecolor="none")

    width = 0.38
    for offset, color, label, sizes in (
        (-width / 2, PLAIN, "unsharded", [answer.plain.state_bytes / MEGA for answer in found.training]),
        (width / 2, SHARDED, "zeroshard", [answer.sharded.state_bytes / MEGA for answer in found.training]),
    ):
        bars = memory.bar([rank + offset for rank in range(found.ranks)], sizes, width, color=color, label=label)
        memory.bar_label(bars, fmt="%.1f", padding=2)
    memory.set(xlabel="rank", ylabel="optimizer state (MB)", xticks=range(found.ranks))
    memory.set_title("Optimizer state held by each rank", loc="left")
    memory.margins(y=0.25)
    memory.legend(frameon=False, loc="upper right", ncols=2)
    for panel in (loss, memory):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)
    plt.close(figure)

"""The picture of a run of the training benchmark: median times, with their intervals."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from pairs import median_interval
from training_result import DDP, TORCH_ZERO, Result

_PLAIN, _OTHERS, _OURS = "#9aa0a6", "#f0a35e", "#1f4e79"


def draw(result: Result, file: Path, ours: tuple[str, ...]) -> None:
    """Draw horizontal bars of median milliseconds to a PNG file.

    Args:
        result: of the run.
        file: to write.
        ours: contenders of this project, which have a colour of their own.
    """
    # A backend without windows, chosen before pyplot is imported.
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    times = result.times
    figure, panel = plt.subplots(figsize=(9, 1.4 + 0.38 * len(times)), layout="constrained")
    medians = {name: 1e3 * median(seconds) for name, seconds in times.items()}
    ends = {name: [1e3 * end for end in median_interval(seconds)] for name, seconds in times.items()}
    colors = [_OURS if name in ours else _PLAIN if name in (DDP, *TORCH_ZERO) else _OTHERS for name in times]
    lengths = list(medians.values())
    panel.barh(list(medians), lengths, color=colors, height=0.7)
    below = [medians[name] - ends[name][0] for name in times]
    above = [ends[name][1] - medians[name] for name in times]
    panel.errorbar(lengths, range(len(times)), xerr=[below, above], fmt="none", ecolor="black", capsize=3, linewidth=1)
    for number, name in enumerate(times):
        panel.annotate(
            f"{medians[name]:.1f}", (ends[name][1], number), xytext=(6, 0), textcoords="offset points", va="center"
        )
    panel.invert_yaxis()
    panel.margins(x=0.12)
    panel.set_xlabel("ms per iteration: median, and its 95 % interval")
    panel.set_title(result.title, loc="left", fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)
    plt.close(figure)

"""How the documentation's pictures are drawn: SVG files that can be read on a light page and on a dark one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TEXT = "#7b838d"
"""Has nearly the same contrast to white as to the darkest grey of the pages."""
PLAIN, OTHERS, OURS = "#9aa1a9", "#d68f3e", "#3f86c9"
"""Nothing sharded, other projects, and this one."""


@contextmanager
def picture(file: Path, width: float, height: float, panels: int = 1, **arrangement: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 - matplotlib's
    """Make a figure, hand it out to be drawn on, and write it to a file, whose suffix decides how.

    Its text is text, in the size in which the page shows it: no picture needs to be wider than a telephone.

    Args:
        file: to write.
        width: in inches, of 96 pixels.
        height: in inches.
        panels: number of panels, one below the other.
        **arrangement: further arguments of ``subplots``.

    Yields:
        The figure, and its panel, or an array of them.
    """
    # A backend without windows, chosen before pyplot is imported.
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    colors = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    style: Any = dict.fromkeys(colors, TEXT)
    style |= {
        "svg.fonttype": "none", "svg.hashsalt": "zeroshard", "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9,
        "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
        "legend.fontsize": 9,
    }  # fmt: skip
    with mpl.rc_context(style):
        figure, axes = plt.subplots(panels, 1, figsize=(width, height), layout="constrained", **arrangement)
        yield figure, axes
        file.parent.mkdir(parents=True, exist_ok=True)
        # Without the date: the same figures give the same file.
        dated = {"Date": None} if file.suffix == ".svg" else None
        figure.savefig(file, transparent=True, metadata=dated)
        plt.close(figure)

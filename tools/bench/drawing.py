"""How the documentation's pictures are drawn: SVG files that can be read on a light page and on a dark one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TEXT = "#010203"
"""Marks what is drawn in the color of text, which depends on the color scheme of the reader's system."""
_COLORS = "svg {color: #1f2328} @media (prefers-color-scheme: dark) {svg {color: #e6edf3}}"
PLAIN, OTHERS, OURS = "#9aa1a9", "#d68f3e", "#3f86c9"
"""Nothing sharded, other projects, and this one."""


@contextmanager
def picture(file: Path, width: float, height: float) -> Iterator[tuple[Any, Any]]:
    """Make a figure of so many inches, hand out it and its panel to be drawn on, and write it to an SVG file.

    Its text is text, in the size in which the page shows it: no picture needs to be wider than a telephone.
    """
    # A backend without windows, chosen before pyplot is imported.
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    colors = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    style: Any = dict.fromkeys(colors, TEXT)
    style |= {
        "svg.fonttype": "none", "svg.hashsalt": "zeroshard", "font.size": 9, "axes.titlesize": 10, "axes.labelsize": 9,
        "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
        "axes.titleweight": "bold", "legend.fontsize": 9,
    }  # fmt: skip
    with mpl.rc_context(style):
        figure, panel = plt.subplots(figsize=(width, height), layout="constrained")
        yield figure, panel
        file.parent.mkdir(parents=True, exist_ok=True)
        # Without the date: the same figures give the same file.
        figure.savefig(file, transparent=True, metadata={"Date": None})
        plt.close(figure)
    drawn = file.read_text("utf-8").replace("</style>", f" {_COLORS}</style>", 1).replace(TEXT, "currentColor")
    file.write_text(drawn, encoding="utf-8")

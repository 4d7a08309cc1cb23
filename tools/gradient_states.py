"""Draws the states of a gradient, and what leads from one to another: docs/pictures/gradient-states.svg."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.drawing import OURS, TEXT, picture

ROOT = Path(__file__).resolve().parents[1]

BOXES = {
    "ABSENT": (0.0, 0.0, "no rank has a gradient"),
    "ZERO": (0.0, 2.0, "a step uses zeros"),
    "REDUCING": (2.0, 1.0, "on its way to its owners"),
    "REDUCED": (4.0, 2.0, "its owners hold the mean"),
    "USED": (4.0, 0.0, "a step has used it"),
}
"""The states by name, with their place and what they say."""
ARROWS = [
    ("ABSENT", "REDUCING", 0.0),
    ("ZERO", "REDUCING", 0.0),
    ("REDUCING", "REDUCED", 0.0),
    ("REDUCED", "REDUCING", -0.6),
    ("REDUCING", "ABSENT", -0.45),
    ("REDUCED", "USED", 0.0),
    ("REDUCED", "ZERO", 0.25),
    ("USED", "ZERO", 0.6),
    ("REDUCED", "ABSENT", -0.7),
    ("USED", "ABSENT", -0.25),
    ("ZERO", "ABSENT", 0.0),
]
"""From which state to which, and how much the arrow is bent."""
CAUSES = [
    (1.05, 1.75, "its bucket is sent"),
    (1.02, 0.72, "its bucket is sent"),
    (2.75, 1.75, "ranks agree on the\nend of backward"),
    (2.68, 0.3, "sharded gradients:\nthe next bucket"),
    (1.55, 0.05, "no rank has\na gradient"),
    (4.25, 1.0, "step()"),
    (2.0, 2.72, "the loop sets it to zero"),
    (2.2, -0.82, "the loop sets it to None"),
    (-0.38, 1.0, "set to\nNone"),
]
"""What leads from one state to another, beside the arrows."""


def main(file: Path = ROOT / "docs" / "pictures" / "gradient-states.svg") -> None:
    """Draw the picture."""
    with picture(file, 6.6, 3.4) as (_, panel):
        panel.set_axis_off()
        panel.set_xlim(-0.8, 4.9)
        panel.set_ylim(-1.0, 2.9)
        for name, (x, y, says) in BOXES.items():
            panel.text(x, y, f"{name}\n", ha="center", va="center", color=OURS, weight="bold")
            box = {"boxstyle": "round,pad=0.5", "facecolor": "none", "edgecolor": OURS}
            panel.text(x, y, f"\n{says}", ha="center", va="center", bbox=box)
        for here, there, bend in ARROWS:
            style = {"arrowstyle": "-|>", "color": TEXT, "shrinkA": 28, "shrinkB": 28}
            arrow = {**style, "connectionstyle": f"arc3,rad={bend}"}
            panel.annotate("", BOXES[there][:2], BOXES[here][:2], arrowprops=arrow)
        for x, y, cause in CAUSES:
            panel.text(x, y, cause, ha="center", va="center", fontsize=8)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

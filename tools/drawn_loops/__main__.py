"""Trains drawn loops beside plain DDP with the plain optimizer, and compares them bit by bit.

Run as ``python tools/drawn_loops``. With ``--families`` the loops do on purpose what users have done, see ``loop.py``.
With ``--sharded`` all of them train with ``shard_gradients()``, regardless of the mode that was drawn.
``--json`` prints a line of JSON for each loop; ``--compare FILE`` lists the loops whose outcome differs from a file of
such lines, except for the text of an error. The exit status is 1 if a loop is neither equal nor refused as
``expected.py`` says. 300 loops take two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import track

# The ranks also import this folder by its name, in their own processes.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from drawn_loops.expected import problem
from drawn_loops.loop import FAMILIES, SHARDED, draw
from drawn_loops.running import run


def main() -> int:
    """Train the loops of some seeds, print the outcome of each, and return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; each loop has the next one")
    parser.add_argument("--count", type=int, default=20, help="how many loops are drawn (default: %(default)s)")
    parser.add_argument(
        "--families", nargs="*", choices=FAMILIES, help="draw loops of each of these, or of all families"
    )
    parser.add_argument("--sharded", action="store_true", help="train all loops with shard_gradients() and no DDP")
    parser.add_argument("--compare", type=Path, help="a file of results")
    parser.add_argument("--json", action="store_true", help="print results as lines of JSON")
    options = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    lines = options.compare.read_text(encoding="utf-8").splitlines() if options.compare else []
    before = {(row.get("family", ""), row["seed"]): row for row in map(json.loads, lines)}
    families = [""] if options.families is None else options.families or FAMILIES
    seeds, has_problems = range(options.seed, options.seed + options.count), False
    loops = [draw(seed, family) for family in families for seed in seeds]
    if options.sharded:
        loops = [replace(loop, mode=SHARDED) for loop in loops]
    for loop in track(loops, "training loops", console=Console(stderr=True)):
        outcome = run(loop)
        row = {"family": loop.family, "seed": loop.seed, **vars(outcome), "text": outcome.text[:80], "loop": str(loop)}
        print(json.dumps(row) if options.json else " | ".join(map(str, row.values())))
        wrong, known = problem(loop, outcome), before.get((loop.family, loop.seed), row)
        has_problems |= bool(wrong)
        if any(known[key] != row[key] for key in ("kind", "act", "loop")):
            wrong = f"{wrong or 'changed'}, from {json.dumps(known)}"
        if wrong:
            print(f"{loop.family} seed {loop.seed}: {wrong}, to {outcome}: {loop}", file=sys.stderr)
    return int(has_problems)


if __name__ == "__main__":
    raise SystemExit(main())

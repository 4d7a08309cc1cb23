"""Checks zeroshard on a machine with one GPU and writes a report: ``bash tools/gpu_check/gpu_check.sh --help``.

It needs torch, pytest and hypothesis. The packages of this repository need not be installed; pytest-xdist is used if it
is installed. Without a GPU the steps run on substitutes, which the report names, or are skipped with the reason.

To add a step, write a measurement in ``measurements.py``, list it in its ``MEASUREMENTS``, and add a row to the table
in ``steps.py``. If pytest can show it, add only the row. Rows are in order of value, because the budget may end before
the table.

One rank has nothing to reduce, so the steps at one rank show that the sharded optimizer adds no wait, memory or time,
but not that the exchange works. On the fake backend one process acts as one of several ranks and no data moves: it
measures the memory, launches and host time of the collectives.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

# The steps also import this folder by its name, in their own processes.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_check.cli import main

if __name__ == "__main__":
    # The running step ends with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    raise SystemExit(main())

"""Prints tables in Markdown on rank 0 while a measurement runs, and counts the rows that are wrong."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


class Table:
    """Prints a table row by row, so that a measurement that is killed leaves the rows that it finished.

    Attributes:
        failed: how many rows were wrong on this rank.
    """

    def __init__(self, *columns: str) -> None:
        self.failed = 0
        self.row(*columns)
        self.row(*["---"] * len(columns))

    def row(self, *cells: object, failed: bool = False) -> None:
        """Print a row; floats have three decimal places."""
        self.failed += failed
        if dist.get_rank() == 0:
            texts = (f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells)
            print("|", " | ".join(texts), "|", flush=True)

    @contextmanager
    def tried(self, *cells: object) -> Iterator[list[object]]:
        """Print a row that ends with the error that the block raises, or the cells that it adds, or "ok"."""
        found: list[object] = []
        try:
            yield found
        except Exception as error:  # noqa: BLE001 - the other rows are still worth measuring
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            self.row(*cells, f"`{said.replace('`', chr(39)).replace('|', '/')}`", failed=True)
        else:
            self.row(*cells, *(found or ["ok"]))

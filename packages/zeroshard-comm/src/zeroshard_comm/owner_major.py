"""The owner-major layout of a collective: a matrix with one row per rank, which holds what that rank owns.

A reduce-scatter of such a matrix leaves each owner its own row, and an all-gather of the rows fills the matrix, so one
call serves all owners. Rows have equal lengths: shorter ones are padded. Pure numbers, which all ranks derive alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from zeroshard_core import Run

PADDED_AT_MOST = 1.3
"""Whole tensors travel with the parts of cut ones if the matrix has at most this many times their elements."""

_UNIT = 64
"""Rows are a multiple of this many elements, so that each begins at an aligned address."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a run, by its number, in some columns of its owner's row; or padding, of no run."""

    run: int | None
    start: int
    numel: int


@dataclass(frozen=True)
class Chunk:
    """Some columns of the matrix, which travel together, and their pieces row by row, with the padding of each row."""

    columns: range
    pieces: tuple[Piece, ...]

    @property
    def width(self) -> int:
        """How many columns."""
        return len(self.columns)


@dataclass(frozen=True)
class OwnerMajor:
    """Which runs lie in the matrix, and where.

    Attributes:
        world_size: number of rows.
        runs: all runs.
        columns: the first column of each run in its owner's row; None for a run that is not in the matrix.
        width: number of columns; 0 if no run is in the matrix.
    """

    world_size: int
    runs: Sequence[Run]
    columns: Sequence[int | None]
    width: int

    @classmethod
    def of(cls, runs: Sequence[Run], world_size: int) -> OwnerMajor:
        """Put all parts into the matrix, in their order, and whole tensors too, if they fit in with little padding.

        >>> OwnerMajor.of([Run(0, 0, 64, True), Run(1, 64, 128, True), Run(0, 128, 628, False)], 2).columns
        (0, 0, None)
        """
        chosen = [any(run.is_part for run in runs)] * len(runs)
        placed = _columns(runs, chosen, world_size)
        if placed[1] * world_size > PADDED_AT_MOST * sum(run.stop - run.start for run in runs):
            placed = _columns(runs, [run.is_part for run in runs], world_size)
        return cls(world_size, runs, *placed)

    @property
    def outside(self) -> list[int]:
        """The runs that are not in the matrix."""
        return [index for index, column in enumerate(self.columns) if column is None]

    def chunks(self, most_elements: int) -> list[Chunk]:
        """Cut the columns so that a chunk has at most so many elements in all rows, or one unit of columns."""
        step = max(_UNIT, most_elements // self.world_size // _UNIT * _UNIT)
        starts = range(0, self.width, step)
        rows: list[list[list[Piece]]] = [[[] for _ in range(self.world_size)] for _ in starts]
        for index, (run, column) in enumerate(zip(self.runs, self.columns, strict=True)):
            start = run.start
            while column is not None and start < run.stop:
                number, place = divmod(column + start - run.start, step)
                numel = min(run.stop - start, step - place)
                rows[number][run.rank].append(Piece(index, start, numel))
                start += numel
        chunks = []
        for of_chunk, first in zip(rows, starts, strict=True):
            columns = range(first, min(first + step, self.width))
            for row in of_chunk:
                missing = len(columns) - sum([piece.numel for piece in row])
                row += [Piece(None, 0, missing)] if missing else []
            chunks.append(Chunk(columns, tuple(chain.from_iterable(of_chunk))))
        return chunks


def _columns(runs: Sequence[Run], chosen: Sequence[bool], world_size: int) -> tuple[tuple[int | None, ...], int]:
    filled = [0] * world_size
    columns: list[int | None] = []
    for run, is_chosen in zip(runs, chosen, strict=True):
        columns.append(filled[run.rank] if is_chosen else None)
        filled[run.rank] += run.stop - run.start if is_chosen else 0
    return tuple(columns), -(-max(filled) // _UNIT) * _UNIT

"""The owner-major layout of a collective: a matrix with one row per rank, which holds the elements that the rank owns.

A reduce-scatter of such a matrix leaves each owner its own row, and an all-gather of the rows fills the matrix, so one
call serves all owners. Shorter rows are padded. All ranks compute the same layout, from plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zeroshard_core import Run

PADDED_AT_MOST = 1.3
"""Whole tensors are put into the matrix too if it then has at most this many elements per element of its runs."""

_UNIT = 64
"""Rows are a multiple of this many elements, so that each begins at an aligned address."""


@dataclass(frozen=True, slots=True)
class Block:
    """The same columns of a chunk in the rows of consecutive ranks, which are ``stride`` elements apart in the bucket.

    The first row has elements of the run with index ``run``, from ``offset`` on; the next rows have the next runs.
    """

    run: int
    offset: int
    stride: int
    rows: range
    columns: range


@dataclass(frozen=True)
class Chunk:
    """Columns of the matrix that one collective sends, and the blocks in them; the rest is padding."""

    columns: range
    blocks: tuple[Block, ...]

    @property
    def width(self) -> int:
        """Number of columns."""
        return len(self.columns)


@dataclass(frozen=True)
class OwnerMajor:
    """The layout of the runs in a matrix of ``world_size`` rows.

    ``columns`` has, for each run, its first column in its owner's row; None if the run is not in the matrix.
    """

    world_size: int
    runs: Sequence[Run]
    columns: Sequence[int | None]
    width: int

    @classmethod
    def of(cls, runs: Sequence[Run], world_size: int) -> OwnerMajor:
        """Put all parts into the matrix, in order, and also whole tensors if that needs little padding."""
        cut, owned, filled = ([0] * world_size for _ in range(3))
        for run in runs:
            owned[run.rank] += run.stop - run.start
            cut[run.rank] += (run.stop - run.start) * run.is_part
        columns, includes_whole = list[int | None](), _includes_whole(cut, owned)
        for run in runs:
            is_chosen = run.is_part or includes_whole
            columns.append(filled[run.rank] if is_chosen else None)
            filled[run.rank] += (run.stop - run.start) * is_chosen
        return cls(world_size, runs, tuple(columns), row_length(cut, owned))

    @property
    def outside(self) -> list[int]:
        """Indices of the runs that are not in the matrix."""
        return [index for index, column in enumerate(self.columns) if column is None]

    def chunks(self, most_elements: int, follows: Callable[[int], bool]) -> list[Chunk]:
        """Cut the columns into chunks of at most ``most_elements`` over all rows, but at least one unit of columns.

        ``follows`` returns True if the run with an index begins in memory where the run before it ends.
        """
        step = max(_UNIT, most_elements // self.world_size // _UNIT * _UNIT)
        cut: dict[int, list[Block]] = {first: [] for first in range(0, self.width, step)}
        for run, rows, inside in self._blocks(follows):
            for first in range(inside.start // step * step, inside.stop, step):
                columns = range(max(inside.start, first) - first, min(inside.stop, first + step) - first)
                offset = first + columns.start - inside.start
                cut[first].append(Block(run, offset, len(inside), rows, columns))
        return [Chunk(range(first, min(first + step, self.width)), tuple(blocks)) for first, blocks in cut.items()]

    def _blocks(self, follows: Callable[[int], bool]) -> Iterator[tuple[int, range, range]]:
        """Yield the first run, the rows and the columns of each block of the uncut matrix."""
        before: tuple[int, range, range] | None = None
        for number, (run, column) in enumerate(zip(self.runs, self.columns, strict=True)):
            if column is None:
                continue
            rows, columns = range(run.rank, run.rank + 1), range(column, column + run.stop - run.start)
            if before is not None:
                first, above, same = before
                if number == first + len(above) and (above.stop, same) == (run.rank, columns) and follows(number):
                    before = first, range(above.start, rows.stop), columns
                    continue
                yield before
            before = number, rows, columns
        if before is not None:
            yield before


def row_length(cut: Sequence[int], owned: Sequence[int]) -> int:
    """Return the length of the rows, in elements or bytes as the arguments are, rounded up to a multiple of 64.

    ``cut`` has each rank's total size of the parts of cut tensors; ``owned`` includes whole tensors, too.

    >>> row_length(cut=[400, 600], owned=[500, 600]), row_length(cut=[400, 600], owned=[500, 6000])
    (640, 640)
    """
    return _rounded_up(max(owned if _includes_whole(cut, owned) else cut))


def _includes_whole(cut: Sequence[int], owned: Sequence[int]) -> bool:
    return any(cut) and _rounded_up(max(owned)) * len(owned) <= PADDED_AT_MOST * sum(owned)


def _rounded_up(columns: int) -> int:
    return -(-columns // _UNIT) * _UNIT

"""The owner-major layout of a collective: a matrix with one row per rank, which holds what that rank owns.

A reduce-scatter of such a matrix leaves each owner its own row, and an all-gather of the rows fills the matrix, so one
call serves all owners. Rows have equal lengths: shorter ones are padded. Pure numbers, which all ranks derive alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PADDED_AT_MOST = 1.3
"""Whole tensors travel with the parts of cut ones if the matrix has at most this many times their elements."""

_UNIT = 64
"""Rows are a multiple of this many elements, so that each begins at an aligned address."""


@dataclass(frozen=True, slots=True)
class Item:
    """Elements that one rank owns, one after another.

    Attributes:
        owner: group rank.
        numel: how many elements.
        is_part: whether they are of a tensor that is cut over several ranks.
    """

    owner: int
    numel: int
    is_part: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of one item in some columns of its owner's row; or padding.

    Attributes:
        item: index of the item; None for padding.
        start: its first element in the item.
        numel: how many elements.
    """

    item: int | None
    start: int
    numel: int


@dataclass(frozen=True)
class Chunk:
    """Some columns of the matrix, which travel together.

    Attributes:
        columns: their numbers.
        pieces: what lies in them, row by row; each row is filled up with one piece of padding.
    """

    columns: range
    pieces: tuple[Piece, ...]

    @property
    def width(self) -> int:
        """How many columns."""
        return len(self.columns)


@dataclass(frozen=True)
class OwnerMajor:
    """Which items lie in the matrix, and where.

    Attributes:
        world_size: number of rows.
        items: all items.
        columns: the first column of each item in its owner's row; None for an item that is not in the matrix.
        width: number of columns; 0 if no item is in the matrix.
    """

    world_size: int
    items: Sequence[Item]
    columns: Sequence[int | None]
    width: int

    @classmethod
    def of(cls, items: Sequence[Item], world_size: int) -> OwnerMajor:
        """Put all parts into the matrix, and whole items too, if they fit in with little padding.

        >>> OwnerMajor.of([Item(0, 64, True), Item(1, 64, True), Item(0, 500, False)], 2).columns
        (0, 0, None)

        Args:
            items: in the order in which they lie in each row.
            world_size: number of ranks.
        """
        chosen = [any(item.is_part for item in items)] * len(items)
        placed = _columns(items, chosen, world_size)
        if placed[1] * world_size > PADDED_AT_MOST * sum(item.numel for item in items):
            placed = _columns(items, [item.is_part for item in items], world_size)
        return cls(world_size, items, *placed)

    @property
    def outside(self) -> list[int]:
        """The items that are not in the matrix."""
        return [index for index, column in enumerate(self.columns) if column is None]

    def chunks(self, most_elements: int) -> list[Chunk]:
        """Cut the columns so that a chunk has at most so many elements, or one unit of columns.

        Args:
            most_elements: of a chunk, in all rows together.
        """
        step = max(_UNIT, most_elements // self.world_size // _UNIT * _UNIT)
        starts = range(0, self.width, step)
        rows: list[list[list[Piece]]] = [[[] for _ in range(self.world_size)] for _ in starts]
        for index, (item, first) in enumerate(zip(self.items, self.columns, strict=True)):
            if first is None:
                continue
            start, stop = first, first + item.numel
            while start < stop:
                number = start // step
                end = min(stop, (number + 1) * step)
                rows[number][item.owner].append(Piece(index, start - first, end - start))
                start = end
        return [
            Chunk(columns, tuple([piece for row in of_chunk for piece in _padded(row, len(columns))]))
            for of_chunk, columns in zip(rows, [range(at, min(at + step, self.width)) for at in starts], strict=True)
        ]


def _padded(row: list[Piece], width: int) -> Iterator[Piece]:
    yield from row
    missing = width - sum([piece.numel for piece in row])
    if missing:
        yield Piece(None, 0, missing)


def _columns(items: Sequence[Item], chosen: Sequence[bool], world_size: int) -> tuple[tuple[int | None, ...], int]:
    filled = [0] * world_size
    columns: list[int | None] = []
    for item, is_chosen in zip(items, chosen, strict=True):
        columns.append(filled[item.owner] if is_chosen else None)
        filled[item.owner] += item.numel if is_chosen else 0
    return tuple(columns), -(-max(filled) // _UNIT) * _UNIT

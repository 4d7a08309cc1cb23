"""The owner-major layout: every chosen element once, in its owner's row, and nothing else in the matrix but padding."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some
from zeroshard_comm.owner_major import PADDED_AT_MOST, OwnerMajor
from zeroshard_core import Run

WORLD_SIZES = some.integers(1, 5)


@some.composite
def matrices(draw: some.DrawFn) -> OwnerMajor:
    world_size = draw(WORLD_SIZES)
    run = some.tuples(some.integers(0, world_size - 1), some.integers(1, 500), some.booleans())
    runs, end = [], 0
    for owner, numel, is_part in draw(some.lists(run, max_size=20)):
        runs.append(Run(owner, end, end + numel, is_part))
        end += numel + owner
    return OwnerMajor.of(runs, world_size)


@given(matrices(), some.integers(1, 2000))
def test_every_element_lies_once_in_its_owners_row(matrix: OwnerMajor, most: int) -> None:
    found: dict[int, list[int]] = {index: [] for index, column in enumerate(matrix.columns) if column is not None}
    for chunk in matrix.chunks(most):
        place = 0
        for piece in chunk.pieces:
            if piece.run is not None:
                row, column = divmod(place, chunk.width)
                run = matrix.runs[piece.run]
                assert row == run.rank
                first = matrix.columns[piece.run]
                assert first is not None
                assert first + piece.start - run.start == chunk.columns.start + column
                found[piece.run] += range(piece.start, piece.start + piece.numel)
            place += piece.numel
        assert place == chunk.width * matrix.world_size
    assert found == {index: [*range(matrix.runs[index].start, matrix.runs[index].stop)] for index in found}


@given(matrices())
def test_parts_are_in_the_matrix_and_whole_tensors_only_where_they_pad_it_little(matrix: OwnerMajor) -> None:
    inside = [run for run, column in zip(matrix.runs, matrix.columns, strict=True) if column is not None]
    assert [run for run in matrix.runs if run.is_part] == [run for run in inside if run.is_part]
    if any(not run.is_part for run in inside):
        assert any(run.is_part for run in inside)
        assert matrix.width * matrix.world_size <= PADDED_AT_MOST * sum(run.stop - run.start for run in inside)
        assert not matrix.outside


@given(matrices(), some.integers(1, 100_000))
def test_a_chunk_has_at_most_so_many_elements_or_one_unit_of_columns(matrix: OwnerMajor, most: int) -> None:
    chunks = matrix.chunks(most)
    assert [column for chunk in chunks for column in chunk.columns] == [*range(matrix.width)]
    assert all(chunk.width * matrix.world_size <= max(most, 64 * matrix.world_size) for chunk in chunks)

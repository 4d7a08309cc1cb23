"""The owner-major layout: every chosen element once, in its owner's row, and nothing else in the matrix but padding."""

from __future__ import annotations

from functools import partial

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


def follows(matrix: OwnerMajor, number: int) -> bool:
    return matrix.runs[number - 1].stop == matrix.runs[number].start


@given(matrices(), some.integers(1, 2000))
def test_every_element_lies_once_in_its_owners_row(matrix: OwnerMajor, most: int) -> None:
    found: dict[int, list[int]] = {index: [] for index, column in enumerate(matrix.columns) if column is not None}
    for chunk in matrix.chunks(most, partial(follows, matrix)):
        for block in chunk.blocks:
            for place, row in enumerate(block.rows):
                run, first = matrix.runs[block.run + place], matrix.columns[block.run + place]
                assert run.rank == row
                assert first is not None
                assert first + block.offset == chunk.columns.start + block.columns.start
                assert block.columns.stop <= chunk.width
                # Where it lies by the first run and the stride.
                start = matrix.runs[block.run].start + block.offset + place * block.stride
                found[block.run + place] += range(start, start + len(block.columns))
    assert found == {index: [*range(matrix.runs[index].start, matrix.runs[index].stop)] for index in found}


@given(some.integers(2, 9), some.integers(1, 300), some.integers(1, 5))
def test_equal_parts_of_a_tensor_are_one_block(world_size: int, numel: int, tensors: int) -> None:
    owners = [*range(world_size)] * tensors
    runs = [Run(owner, place * numel, (place + 1) * numel, True) for place, owner in enumerate(owners)]
    matrix = OwnerMajor.of(runs, world_size)
    [chunk] = matrix.chunks(1_000_000, partial(follows, matrix))
    assert [block.rows for block in chunk.blocks] == [range(world_size)] * tensors
    [chunk] = matrix.chunks(1_000_000, lambda _: False)
    assert [block.rows for block in chunk.blocks] == [range(owner, owner + 1) for owner in owners]


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
    chunks = matrix.chunks(most, partial(follows, matrix))
    assert [column for chunk in chunks for column in chunk.columns] == [*range(matrix.width)]
    assert all(chunk.width * matrix.world_size <= max(most, 64 * matrix.world_size) for chunk in chunks)

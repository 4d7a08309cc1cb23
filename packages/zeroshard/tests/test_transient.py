"""Memory of buckets in flight is never lent twice, and there are never more than two pieces of it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zeroshard.grads.transient import IN_FLIGHT, TransientBuffers

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@given(
    st.lists(
        st.tuples(st.integers(1, 200) | st.none(), st.sampled_from(DTYPES), st.integers(0, IN_FLIGHT), st.booleans()),
        max_size=20,
    )
)
def test_memory_in_use_keeps_its_values(buckets: list[tuple[int | None, torch.dtype, int, bool]]) -> None:
    """Each bucket has a number of elements, or None for memory of its own, and says how many stay in use before it."""
    buffers, in_use = TransientBuffers(CPU, waits=False), deque[tuple[int, torch.Tensor | None, torch.Tensor | None]]()
    made: list[weakref.ref[torch.Tensor]] = []
    for number, (numel, dtype, left, ends) in enumerate(buckets):
        while len(in_use) > min(left, IN_FLIGHT - 1):
            value, memory, bucket = in_use.popleft()
            assert bucket is None or bool((bucket == value).all())
            buffers.leave(memory)
            del memory, bucket
        buffers.enter(is_cut=False)
        memory = bucket = None
        if numel is not None:
            memory, bucket = buffers.lend(numel, dtype)
            assert (bucket.shape, bucket.dtype) == ((numel,), dtype)
            # torch returns the address 0 for a tensor without elements.
            assert not numel or bucket.data_ptr() == memory.data_ptr()
            bucket.fill_(number)
            made.append(weakref.ref(memory))
        in_use.append((number, memory, bucket))
        assert len({id(each()) for each in made if each() is not None}) <= IN_FLIGHT
        if ends:
            for value, memory, bucket in in_use:
                assert bucket is None or bool((bucket == value).all())
                buffers.leave(memory)
            in_use.clear()
            buffers.clear()
            del memory, bucket
            assert all(each() is None for each in made)


def test_memory_is_lent_again_and_grows() -> None:
    buffers = TransientBuffers(CPU, waits=False)
    small, _ = buffers.lend(10, torch.float32)
    buffers.leave(small)
    again, _ = buffers.lend(5, torch.float64)
    assert again is small
    buffers.leave(again)
    freed = weakref.ref(small)
    del small, again
    larger, _ = buffers.lend(11, torch.float32)
    assert larger.numel() == 44
    assert freed() is None


def enters_after_another_has_left(buffers: TransientBuffers, *, is_cut: bool) -> None:
    entered = threading.Event()

    def enter() -> None:
        buffers.enter(is_cut=is_cut)
        entered.set()

    waiting = threading.Thread(target=enter, daemon=True)
    waiting.start()
    assert not entered.wait(0.1)
    buffers.leave(None)
    assert entered.wait(10)
    waiting.join()


def test_a_third_bucket_waits_until_one_has_left() -> None:
    buffers = TransientBuffers(CPU, waits=True)
    for _ in range(IN_FLIGHT):
        buffers.enter(is_cut=False)
    enters_after_another_has_left(buffers, is_cut=False)


def test_a_bucket_of_cut_tensors_is_alone() -> None:
    buffers = TransientBuffers(CPU, waits=True)
    buffers.enter(is_cut=False)
    enters_after_another_has_left(buffers, is_cut=True)
    buffers.leave(None)
    # All places are free again.
    for _ in range(IN_FLIGHT):
        buffers.enter(is_cut=False)


@pytest.mark.parametrize("is_lent", [True, False])
def test_on_an_accelerator_the_next_bucket_is_packed_after_the_last_one_was_read(
    is_lent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = mock.create_autospec(torch.Stream, instance=True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: CPU)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: stream)
    buffers = TransientBuffers(CPU, waits=False)
    buffers.enter(is_cut=False)
    assert not stream.mock_calls
    buffers.leave(buffers.lend(1, torch.float32)[0] if is_lent else None)
    buffers.enter(is_cut=False)
    assert stream.mock_calls == [mock.call.record_event(), mock.call.wait_event(stream.record_event.return_value)]
    buffers.clear()
    buffers.enter(is_cut=False)
    assert len(stream.mock_calls) == 2

"""Work in parallel to backward: a stream of its own on an accelerator, nothing on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Runs work on an accelerator in parallel to the current stream; the host never waits.

    On a device without streams everything runs at once, in order.

    Args:
        device: whose.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        accelerator = torch.accelerator.current_accelerator()
        has_streams = accelerator is not None and accelerator.type == device.type
        self._stream = torch.Stream(device) if has_streams else None

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Make this the current stream, after everything that the current one has been given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    def join(self) -> None:
        """Order the current stream after everything that this one has been given."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory until this stream has finished the work queued so far, even if the tensor is gone."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

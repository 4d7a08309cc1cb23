"""A side stream orders work beside the current stream, by waits of streams and never of the host."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from zeroshard.grads.stream import SideStream


def test_on_the_cpu_there_is_none() -> None:
    side = SideStream(torch.device("cpu"))
    with side.after_current():
        assert torch.ones(2).sum() == 2
    side.join()
    side.keep(torch.ones(1))


def test_it_begins_behind_the_current_stream_and_is_joined_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = mock.MagicMock()
    current = mock.create_autospec(torch.Stream, instance=True)
    ours = mock.create_autospec(torch.Stream, instance=True)
    for name, stream in (("current", current), ("ours", ours)):
        streams.attach_mock(stream.wait_stream, f"{name}_waits_for")
    streams.attach_mock(ours.__enter__, "begin")
    streams.attach_mock(ours.__exit__, "end")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current)
    monkeypatch.setattr(torch, "Stream", lambda device: ours)
    tensor = mock.create_autospec(torch.Tensor, instance=True)

    side = SideStream(torch.device("cuda:0"))
    with side.after_current():
        streams.work()
    side.join()
    side.keep(tensor)

    assert streams.mock_calls == [
        mock.call.ours_waits_for(current),
        mock.call.begin(),
        mock.call.work(),
        mock.call.end(None, None, None),
        mock.call.current_waits_for(ours),
    ]
    tensor.record_stream.assert_called_once_with(ours)
    # Nothing by which the host waits.
    assert not ours.synchronize.called
    assert not current.synchronize.called

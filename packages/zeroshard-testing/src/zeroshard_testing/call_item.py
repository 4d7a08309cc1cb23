"""A call of ``run_on_ranks`` as pytest on the rank sees it. Runs in workers only."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch


class CallItem(pytest.Item):
    """Calls a function where a test would run; the result is as `torch.load` with ``weights_only=True`` reads it."""

    call: Callable[[], object]
    result = b""

    def runtest(self) -> None:
        """Make the call."""
        __tracebackhide__ = True
        self.result = _dumped(self.call())

    def _traceback_filter(self, info: pytest.ExceptionInfo[BaseException]) -> Any:  # noqa: ANN401 - private to pytest
        """Show what is above the call, as pytest does for a test."""
        return info.traceback.cut(path=__file__).filter(info)


def call_item(session: pytest.Session, title: str, payload: bytes) -> CallItem:
    """Return the item that makes a call: of a function with arguments and named arguments, pickled as payload."""
    # Sent by the controller that started this process, over a socket that no other process has.
    function, args, kwargs = pickle.loads(payload)  # noqa: S301 - see above
    item: CallItem = CallItem.from_parent(session, name=title, nodeid=title)
    item.call = partial(function, *args, **kwargs)
    return item


def _dumped(value: object) -> bytes:
    written = io.BytesIO()
    torch.save(value, written)
    data = written.getvalue()
    try:
        torch.load(io.BytesIO(data), weights_only=True)
    except pickle.UnpicklingError:
        raise TypeError(
            f"run_on_ranks: a {type(value).__name__} cannot be returned: return tensors, numbers, strings, None, and "
            f"lists, tuples or dicts of them"
        ) from None
    return data

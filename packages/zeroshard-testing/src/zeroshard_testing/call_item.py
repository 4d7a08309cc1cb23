"""A call of ``run_on_ranks`` as pytest on the rank sees it. Runs in workers only."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest


class CallItem(pytest.Item):
    """Calls a function where a test would run.

    Attributes:
        result: What it returned, as `torch.load` with ``weights_only=True`` reads it.
    """

    def __init__(self, *, call: Callable[[], object], **kwargs: Any) -> None:  # noqa: ANN401 - as pytest's own
        super().__init__(**kwargs)
        self.result = b""
        self._call = call

    def runtest(self) -> None:
        """Make the call."""
        __tracebackhide__ = True
        self.result = _dumped(self._call())


def call_item(session: pytest.Session, title: str, payload: bytes) -> CallItem:
    """Return the item that makes a call.

    Args:
        session: The worker's session.
        title: What to call it in reports.
        payload: The function, its arguments and its named arguments, pickled.
    """
    # Sent by the controller that started this process, over a socket that no other process has.
    function, args, kwargs = pickle.loads(payload)  # noqa: S301 - see above
    item: CallItem = CallItem.from_parent(
        session, name=function.__name__, nodeid=title, call=lambda: function(*args, **kwargs)
    )
    return item


def _dumped(value: object) -> bytes:
    import torch

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

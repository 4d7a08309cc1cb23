"""Values that only a rank can know, as stand-ins that may travel.

Fixtures run in the controller, where there is no rank, no process group and no device. There these names yield a
stand-in, which pickles as a request to look the value up: wherever it is unpickled in a worker, also deep inside
another fixture's value, the rank's own value takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

RANK_VALUES = ("rank", "process_group", "device", "faults")

_current: dict[str, Any] = {}


class RankValue:
    """Stand-in for a value of the rank, to be handed on but not used in the controller.

    Args:
        name: One of `RANK_VALUES`.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return _look_up, (self._name,)

    def __repr__(self) -> str:
        return f"<{self._name} of each rank>"

    def _refuse(self, *_: object) -> NoReturn:
        __tracebackhide__ = True
        raise TypeError(
            f"{self._name!r} exists on the ranks only: a fixture runs once, before the ranks do. Pass it on, or use it "
            f"in the test itself."
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __bool__ = __int__ = __index__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = _refuse
    __mul__ = __rmul__ = __sub__ = __rsub__ = __mod__ = __floordiv__ = __truediv__ = __hash__ = _refuse
    __str__ = __format__ = _refuse


def set_rank_values(values: Mapping[str, Any]) -> None:
    """Say, in a worker, what the stand-ins stand for until the next call.

    Args:
        values: A value for each of `RANK_VALUES`.
    """
    _current.clear()
    _current.update(values)


def _look_up(name: str) -> Any:  # noqa: ANN401 - a rank's value may be anything
    return _current[name]

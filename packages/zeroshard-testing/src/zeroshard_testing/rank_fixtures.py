"""Fixtures that are set up on the ranks, by each rank for itself."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from zeroshard_testing.rank_values import RankValue

_functions: dict[tuple[str, str], Callable[..., Any]] = {}
_to_tear_down: list[tuple[str, Iterator[Any]]] = []


def rank_fixture(function: Callable[..., Any]) -> Any:  # noqa: ANN401 - pytest's fixture object, whose type is private
    """Make a fixture of a function that runs on each rank, for tests marked with ``ranks``.

    It may use ``rank``, ``process_group`` and ``device``, and make what cannot be pickled: a model, an open file, a
    subgroup. It may ask for any other fixture, and yield instead of return to clean up afterwards. It runs for each
    test anew, in the order in which pytest would run it, after all ordinary fixtures.

    Args:
        function: A module's function, in a test module, a conftest or a module that ranks can import.

    Returns:
        The fixture.

    Raises:
        TypeError: If it is a method or defined inside a function, where ranks cannot find it.

    Example:
        >>> @rank_fixture
        ... def offset(rank):
        ...     return 10 * rank
    """
    if "<locals>" in function.__qualname__ or "." in function.__qualname__:
        raise TypeError(f"rank_fixture: {function.__qualname__} must be a function of its module, for ranks to find it")
    key = function.__code__.co_filename, function.__qualname__
    _functions[key] = function

    def stand_in(**values: object) -> RankFixtureValue:
        return RankFixtureValue(function.__module__, key, values)

    stand_in.__name__ = function.__name__
    stand_in.__doc__ = function.__doc__
    stand_in.__module__ = function.__module__
    stand_in.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # what pytest looks at
    return pytest.fixture(stand_in)


class RankFixtureValue(RankValue):
    """Stand-in for what a rank fixture gives: pickled as a request to set it up.

    Args:
        module: Name of the module that defines the fixture.
        key: File and name of its function.
        values: What it asked for.
    """

    def __init__(self, module: str, key: tuple[str, str], values: dict[str, object]) -> None:
        super().__init__(key[1])
        self._request = module, key, values

    def __reduce__(self) -> tuple[Any, ...]:
        return _set_up, self._request


def begin(name: str, fixture: Iterator[Any]) -> Any:  # noqa: ANN401 - a fixture's value may be anything
    """Set up a fixture that yields, to be torn down behind the test.

    Args:
        name: Of the fixture.
        fixture: Its generator.
    """
    value = next(fixture)
    _to_tear_down.append((name, fixture))
    return value


def tear_down() -> None:
    """Tear down what has been set up since the last call, latest first, whatever fails on the way.

    Raises:
        BaseException: What the first failing fixture raised.
    """
    first: BaseException | None = None
    while _to_tear_down:
        name, generator = _to_tear_down.pop()
        try:
            if next(generator, generator) is not generator:
                pytest.fail(f"rank fixture {name!r} has yielded more than once", pytrace=False)
        except BaseException as error:  # noqa: BLE001 - the others are torn down all the same
            first = first or error
    if first is not None:
        __tracebackhide__ = True
        raise first


def _set_up(module: str, key: tuple[str, str], values: dict[str, object]) -> object:
    if key not in _functions:
        importlib.import_module(module)
    if key not in _functions:
        raise LookupError(f"rank fixture {key[1]!r} of {key[0]} cannot be found on the rank")
    result = _functions[key](**values)
    if not inspect.isgenerator(result):
        return result
    return begin(key[1], result)

"""Runs unchanged test cases for PyTorch's ``MultiProcessTestCase`` on the ranks of this plugin.

Every rank calls ``setUpClass``, ``setUp``, ``tearDown`` and ``tearDownClass`` around each test, and gets the
environment variables that they set on the last rank. Attributes that they set on ``self`` do not reach the body, as
with PyTorch's runner. A body that ends its process on purpose (``special_return_code_checks``,
``skip_return_code_checks``) fails. ``MultiThreadedTestCase`` and ``MultiProcContinuousTest`` are not supported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistStoreError, FileStore  # type: ignore[attr-defined]  # not explicit exports

from zeroshard_testing._torch_private import RUN_CASE, START_PROCESSES, case_modules


def as_rank_tests(
    case_class: type[Any],
    *world_sizes: int,
    methods: Iterable[str] | None = None,
    init: bool = False,
    **marker_options: Any,  # noqa: ANN401 - the arguments of the marker
) -> type:
    """Return a class for pytest that runs the methods of ``case_class`` on ranks; its name must begin with ``Test``.

    Args:
        case_class: a subclass of ``torch.testing._internal.common_distributed.MultiProcessTestCase``. pytest collects
            it as well if the test module binds it to a name; bind the result to the same name to avoid that.
        *world_sizes: numbers of ranks, as in ``@pytest.mark.ranks``; they replace the ``world_size`` of ``case_class``.
        methods: names of the methods to run; by default all methods whose names begin with ``test``.
        init: False if ``case_class`` makes its process groups itself, in its methods or in its ``_run``. True if its
            methods expect the default process group: then the plugin makes it, and does not call ``_run``.
        **marker_options: further arguments of the marker, such as ``backend`` and ``timeout`` (seconds).

    Raises:
        TypeError: if ``case_class`` is not a ``MultiProcessTestCase``.
        AttributeError: if ``case_class`` lacks a method in ``methods``.
    """
    if not issubclass(case_class, case_modules()[0].MultiProcessTestCase):
        raise TypeError(f"as_rank_tests expects a subclass of MultiProcessTestCase, but got {case_class!r}")
    names = [name for name in dir(case_class) if name.startswith("test")] if methods is None else methods
    members = {name: _rank_test(case_class, name, init) for name in names}
    mark = pytest.mark.ranks(*world_sizes, init=init, **marker_options)
    return mark(type(case_class.__name__, (), {**_names_of(case_class), **members}))


def _rank_test(case_class: type[Any], name: str, init: bool) -> Callable[..., None]:
    body = getattr(case_class, name)

    def test(self: object, rank: int, world_size: int, ranks_tmp_path: Path) -> None:  # noqa: ARG001
        _run_as_rank(case_class, name, rank, world_size, ranks_tmp_path, init)

    test.__name__, test.__doc__ = name, body.__doc__
    test.pytestmark = [*getattr(body, "pytestmark", ())]  # type: ignore[attr-defined]  # where pytest keeps marks
    # Attributes that decorators of unittest and of PyTorch set for the runner.
    for noted in (body, case_class):
        if getattr(noted, "__unittest_skip__", False):
            test = pytest.mark.skip(reason=getattr(noted, "__unittest_skip_why__", ""))(test)
    if getattr(body, "__unittest_expecting_failure__", False):
        test = pytest.mark.xfail(strict=True)(test)
    return test


def _run_as_rank(case_class: type[Any], name: str, rank: int, world_size: int, folder: Path, init: bool) -> None:
    """Run on one rank the code of PyTorch's runner process, and within that, the code of its rank processes."""
    rank_class = _rank_class(case_class, world_size, init)
    store = FileStore(str(folder / "store"))
    # On the last rank, because reports begin with rank 0, and the wait below explains no failure.
    is_main = rank == world_size - 1
    before = dict(os.environ)
    with ExitStack() as stack:
        rank_class.setUpClass()
        stack.callback(rank_class.tearDownClass)
        main = rank_class(name)
        stack.enter_context(main.cleanups)
        main.setUp()
        stack.callback(main.tearDown)
        if is_main:
            store.set("set up", json.dumps([main.file_name, dict(os.environ.items() - before.items())]))
        file_name, environment = json.loads(store.get("set up"))
        os.environ.update(environment)
        # If only this rank fails or skips, the others wait for it.
        patience = timedelta(seconds=1)
        try:
            with _exit_codes_understood(rank_class):
                getattr(rank_class, RUN_CASE)(rank, name, file_name, None, fake_pg=getattr(main, "fake_pg", False))
            patience = timedelta(days=1)
        finally:
            store.set(f"{rank} ended", "")
            if is_main:
                # The tearDown of this rank removes resources that the others may still use.
                with suppress(DistStoreError):
                    store.wait([f"{other} ended" for other in range(world_size)], patience)


def _rank_class(case_class: type[Any], world_size: int, init: bool) -> type[Any]:
    """Return ``case_class`` without the parts that need the processes of PyTorch's runner."""
    of_ranks, of_all = case_modules()

    def run_test(self: Any, test_name: str, _: object) -> None:  # noqa: ANN401 - an instance of the class below
        of_all.set_rng_seed()
        with self.cleanups:
            # The constructor has replaced the method. It calls the body if the instance has a rank.
            getattr(self, test_name)()
            type(self).body_returned = True

    def add_cleanup(self: Any, function: Callable[..., object], /, *args: object, **kwargs: object) -> None:  # noqa: ANN401
        # unittest's own method drops the errors of cleanups if it has no runner.
        self.cleanups.callback(function, *args, **kwargs)

    members = {"run_test": run_test, "body_returned": False, "world_size": world_size}
    members |= {"cleanups": cached_property(lambda _: ExitStack()), "addCleanup": add_cleanup}
    members |= dict.fromkeys(START_PROCESSES, lambda *_: None)
    if init:
        # This method makes no process group.
        members[RUN_CASE] = vars(of_ranks.MultiProcessTestCase)[RUN_CASE]
    return type(case_class.__name__, (case_class,), {**_names_of(case_class), **members})


@contextmanager
def _exit_codes_understood(rank_class: type[Any]) -> Iterator[None]:
    """Turn exit codes of PyTorch's decorators into skips; let the `_run` of a class exit with 0."""
    try:
        yield
    except SystemExit as exit_:
        for skip in case_modules()[0].TEST_SKIPS.values():
            if exit_.code == skip.exit_code:
                pytest.skip(skip.message)
        if exit_.code or not rank_class.body_returned:
            raise


def _names_of(case_class: type[Any]) -> dict[str, Any]:
    return {"__module__": case_class.__module__, "__qualname__": case_class.__qualname__, "__doc__": case_class.__doc__}

"""The emulated accelerator in a worker: loads it, and begins and ends its tests. Only the main thread calls this.

A process keeps a loaded device, and torch.accelerator is that device, so workers for other backends never load it.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, as_completed
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from zeroshard_testing.emulated.build import MODULE, BuildError, library
from zeroshard_testing.emulated.device_module import register_device
from zeroshard_testing.emulated.errors import DifferentCollectivesError, RaceError
from zeroshard_testing.emulated.mover import Mover, delay_up_to, live_movers
from zeroshard_testing.emulated.report import Finding, read_findings, to_text
from zeroshard_testing.faults import Faults

BACKEND = "cpu:gloo,emu:emulated"
"""The backend of the default process group, for init_process_group."""
DEVICE = "emu"

_loaded: ModuleType | None = None


def extension() -> Any:  # noqa: ANN401 - the compiled module, which has no stubs
    """Return the compiled module; LookupError if it was not loaded."""
    if _loaded is None:
        raise LookupError("the emulated accelerator is not loaded in this process")
    return _loaded


def load() -> None:
    """Register the device with torch, and the backend ``"emulated"`` with torch.distributed. Safe to call repeatedly.

    Raises BuildError if the extension was not compiled, or cannot be loaded.
    """
    global _loaded
    if _loaded is not None:
        return
    path = library()
    loader = ExtensionFileLoader(MODULE, str(path))
    spec = spec_from_loader(MODULE, loader)
    assert spec is not None
    try:
        module = module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        text = f"{path} cannot be loaded ({error}): delete the folder {path.parent} to compile it again"
        raise BuildError(text) from error
    register_device(DEVICE, module.install)
    dist.Backend.register_backend("emulated", _make_backend, extended_api=True, devices=[DEVICE])
    if (edge := os.environ.get("ZEROSHARD_DROP_EDGE")) is not None:
        module.drop_edge([frame.strip() for frame in edge.split("<") if frame.strip()])
    if delays := os.environ.get("ZEROSHARD_EMULATED_DELAYS"):
        seconds, _, seed = delays.partition(":")
        delay_up_to(float(seconds), int(seed or 0))
    _loaded = module


def begin_test() -> None:
    """Reset the state. The last test and all its operations must have ended."""
    extension().begin_test()


def findings() -> list[Finding]:
    """Return the findings of the checker since the test began."""
    return read_findings(extension().reports())


def end_groups(faults: Faults) -> list[Future[str]]:
    """Compare the end of the test with the other ranks, in every group, unless the test requested faults."""
    return [] if faults.were_asked_for else [mover.end() for mover in live_movers()]


def close_groups() -> None:
    """End the threads of all process groups after their last operation. No more operations may be issued."""
    for mover in live_movers():
        mover.close()


class CheckedTest:
    """Runs a test. If it does not raise, raises the error that was found: DifferentCollectivesError or RaceError.

    Unless a test requested faults, ranks wait for each other at its end, which shows collectives that a rank left out.
    The process group raises torch's DistBackendError, which this replaces with DifferentCollectivesError.
    """

    def __init__(self, faults: Faults, *, checks_races: bool) -> None:
        self._faults, self._checks_races = faults, checks_races

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        __tracebackhide__ = True
        if file := os.environ.get("ZEROSHARD_EDGES"):
            lines = [" < ".join(edge) for edge in extension().edges()]
            Path(f"{file}.{os.getpid()}").write_text("\n".join(lines))
        if isinstance(error, dist.DistBackendError):
            raise DifferentCollectivesError(str(error)).with_traceback(error.__traceback__) from None
        if error is None:
            self._check()

    def _check(self) -> None:
        __tracebackhide__ = True
        # The test has caught these errors, so it expected them.
        known = extension().raised_errors()
        # A rank that failed never ends its other groups.
        for end in as_completed(end_groups(self._faults)):
            if (text := end.result()) and text not in known:
                raise DifferentCollectivesError(text)
        if error := extension().unraised_error():
            raise DifferentCollectivesError(error)
        if self._checks_races and (found := findings()):
            raise RaceError(to_text(found))


def _make_backend(options: Any, _: object) -> Any:  # noqa: ANN401 - torch's own types, which have no public names
    ranks = options.global_ranks_in_group or list(range(options.group_size))
    mover = Mover(options.store, options.group_rank, ranks, options.group_id, options.timeout, extension().complete)
    return extension().EmulatedBackend(options.group_rank, options.group_size, mover)

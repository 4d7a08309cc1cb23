"""Reads a ``ranks`` marker as a value, or explains why it is invalid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

BACKENDS: Mapping[str, str] = {
    "gloo": "gloo-cpu",
    "gloo-cuda": "gloo-cuda",
    "nccl": "nccl",
    "emulated": "emulated",
    "fake": "fake",
}
"""Names of backends on the command line, by their names in the marker. Other names are passed to torch."""

CHECKS = ("deadlock", "collectives", "messages", "faults", "races")
"""Checks besides the outcome of each rank. Each can be turned off by name."""

OPTIONAL_CHECKS = ("order",)
"""Checks that are off unless a marker turns them on by name."""

_ARGUMENTS = ("backend", "isolation", "timeout", "fake_rank", "init", "checks", "reason")


class SpecError(ValueError):
    """Raised if a ``ranks`` marker is invalid. The message says what to write instead."""


@dataclass(frozen=True)
class RanksSpec:
    """The arguments of a ``ranks`` marker for one run of a test.

    ``isolation`` is ``"group"`` for a new process group, ``"process"`` for new processes, ``"none"`` for one group per
    module. ``timeout`` is in seconds; None means the timeout of the run. ``fake_rank`` is the rank of the only process
    of the backend ``"fake"``. ``init`` says whether the default process group is initialized, ``checks_off`` which
    `CHECKS` are off, ``checks_on`` which `OPTIONAL_CHECKS` are on.
    """

    world_size: int
    backend: str = "gloo"
    isolation: str = "group"
    timeout: float | None = None
    fake_rank: int = 0
    init: bool = True
    checks_off: tuple[str, ...] = ()
    checks_on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.world_size, bool) or not isinstance(self.world_size, int) or self.world_size < 1:
            raise SpecError(f"a number of ranks must be a positive int, not {self.world_size!r}")
        if not isinstance(self.backend, str) or not self.backend:
            raise SpecError(f"backend must be a name such as {', '.join(BACKENDS)}, not {self.backend!r}")
        if self.isolation not in ("group", "process", "none"):
            raise SpecError(f"unknown isolation {self.isolation!r}; choose from group, process, none")
        if self.timeout is not None and (type(self.timeout) not in (int, float) or not 0 < self.timeout < math.inf):
            raise SpecError(f"timeout must be a positive number of seconds, not {self.timeout!r}")
        if not isinstance(self.fake_rank, int) or not 0 <= self.fake_rank < self.world_size:
            raise SpecError(f"fake_rank must be one of the {self.world_size} ranks, not {self.fake_rank!r}")
        if self.fake_rank and self.backend != "fake":
            raise SpecError(f'fake_rank needs backend="fake", not {self.backend!r}')

    @property
    def ranks(self) -> list[int]:
        """The ranks that run in worker processes: only ``fake_rank`` with the backend ``"fake"``, otherwise all."""
        return [self.fake_rank] if self.backend == "fake" else list(range(self.world_size))

    @property
    def backend_name(self) -> str:
        """The name of the backend on the command line, such as ``"gloo-cpu"``."""
        return BACKENDS.get(self.backend, self.backend)

    @property
    def test_id(self) -> str:
        """The text in brackets in the test's id, such as ``"2-gloo"``."""
        suffix = f"-rank{self.fake_rank}" if self.fake_rank else ""
        return f"{self.world_size}-{self.backend}{suffix}"


def parse_marker(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[RanksSpec]:
    """Return the specs of one ``@pytest.mark.ranks``, one for each backend and world size."""
    sizes = list(args)
    if not sizes:
        raise SpecError("name at least one world size, as in @pytest.mark.ranks(2)")
    options = dict(kwargs)
    unknown = sorted(set(options) - set(_ARGUMENTS))
    if unknown:
        raise SpecError(f"unknown argument {unknown[0]!r}; there are {', '.join(_ARGUMENTS)}")
    off, on = parse_checks(options.pop("checks", ""))
    reason = options.pop("reason", "")
    if ("races" in off) != bool(reason):
        raise SpecError('checks="no:races" needs reason="...", which says why, and reason needs checks="no:races"')
    backends = options.pop("backend", "gloo")
    names = [backends] if isinstance(backends, str) else list(backends)
    if not names:
        raise SpecError("backend is an empty list")
    options |= {"checks_off": off, "checks_on": on}
    return [RanksSpec(size, name, **options) for name in names for size in sizes]


def parse_checks(text: str | Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the sorted names of the checks that are turned off, and on, by a string or a list."""
    words = text.replace(",", " ").split() if isinstance(text, str) else list(text)
    on = {word for word in words if word in OPTIONAL_CHECKS}
    for word in set(words) - on:
        if word.removeprefix("no:") not in CHECKS or not word.startswith("no:"):
            names = ", ".join(f"no:{name}" for name in CHECKS)
            raise SpecError(
                f"checks: {word!r} turns nothing off; there are {names}, and to turn on {', '.join(OPTIONAL_CHECKS)}"
            )
    return tuple(sorted({word.removeprefix("no:") for word in {*words} - on})), tuple(sorted(on))

"""What a ``ranks`` marker asks for, as a value, and what is wrong with it when it cannot be read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

BACKENDS: Mapping[str, str] = {"gloo": "gloo-cpu", "gloo-cuda": "gloo-cuda", "nccl": "nccl", "fake": "fake"}
"""Backends that the command line knows by another name than the marker, or that stand for more than torch's name.

Any other name is handed to `torch.distributed.init_process_group` as it is.
"""

ISOLATIONS = ("group", "process", "none")

CHECKS: Mapping[str, str] = {
    "deadlock": "ranks that wait for one another for ever fail at once, by proof",
    "collectives": "ranks of a group issue the same collectives: as many, of one kind, dtype, size, root, operation",
    "messages": "what is sent is received, with its tag, dtype and size, and what is awaited is sent",
    "faults": "every fault that a test asks for strikes",
}
"""What is checked beyond what each rank says of itself; each can be turned off by name."""

_DEFAULT_TIMEOUT = 60.0


class SpecError(ValueError):
    """A ``ranks`` marker that means nothing; the text says what to write instead."""


@dataclass(frozen=True)
class RanksSpec:
    """One way in which one test is to run.

    Attributes:
        world_size: Number of ranks.
        backend: A key of `BACKENDS`.
        isolation: ``"group"`` for a fresh process group, ``"process"`` for fresh processes, ``"none"`` for one group
            per module.
        timeout: Seconds until the verdict is a timeout.
        fake_rank: The rank that the one process stands for; 0 unless the backend is ``"fake"``.
        init: Whether the default process group is initialised.
        checks_off: Names of `CHECKS` that are off, in alphabetical order.
    """

    world_size: int
    backend: str = "gloo"
    isolation: str = "group"
    timeout: float = _DEFAULT_TIMEOUT
    fake_rank: int = 0
    init: bool = True
    checks_off: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.world_size, bool) or not isinstance(self.world_size, int) or self.world_size < 1:
            raise SpecError(f"a number of ranks is a positive int, not {self.world_size!r}")
        if not isinstance(self.backend, str) or not self.backend:
            raise SpecError(f"backend is a name such as {', '.join(BACKENDS)}, not {self.backend!r}")
        if self.isolation not in ISOLATIONS:
            raise SpecError(f"unknown isolation {self.isolation!r}; choose from {', '.join(ISOLATIONS)}")
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, (int, float)) or not self.timeout > 0:
            raise SpecError(f"timeout is a positive number of seconds, not {self.timeout!r}")
        if not isinstance(self.fake_rank, int) or not 0 <= self.fake_rank < self.world_size:
            raise SpecError(f"fake_rank must be one of the {self.world_size} ranks, not {self.fake_rank!r}")
        if self.fake_rank and self.backend != "fake":
            raise SpecError(f'fake_rank goes with backend="fake", not with {self.backend!r}')

    @property
    def processes(self) -> int:
        """Number of worker processes that the test needs."""
        return 1 if self.backend == "fake" else self.world_size

    @property
    def backend_name(self) -> str:
        """The backend as the command line names it, such as ``"gloo-cpu"``."""
        return BACKENDS.get(self.backend, self.backend)

    @property
    def test_id(self) -> str:
        """What stands between the brackets of the test's id, such as ``"2-gloo"``."""
        suffix = f"-rank{self.fake_rank}" if self.fake_rank else ""
        return f"{self.world_size}-{self.backend}{suffix}"

    def actual_rank(self, slot: int) -> int:
        """Return the rank that the worker in ``slot`` (0 to ``processes`` - 1) has in the process group."""
        return self.fake_rank if self.backend == "fake" else slot


def parse_marker(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[RanksSpec]:
    """Read the arguments of one ``@pytest.mark.ranks``.

    Args:
        args: World sizes.
        kwargs: ``backend`` (a name or a list of them), ``isolation``, ``timeout`` in seconds, ``fake_rank``, ``init``
            and ``checks``, see `parse_checks`.

    Returns:
        One spec for each backend and world size.

    Raises:
        SpecError: If the marker has no world size, an unknown argument or a value out of range.

    Example:
        >>> [spec.test_id for spec in parse_marker((2, 4), {})]
        ['2-gloo', '4-gloo']
    """
    sizes = list(args)
    if not sizes:
        raise SpecError("name at least one world size, as in @pytest.mark.ranks(2)")
    options = dict(kwargs)
    unknown = set(options) - {"backend", "isolation", "timeout", "fake_rank", "init", "checks"}
    if unknown:
        raise SpecError(
            f"unknown argument {sorted(unknown)[0]!r}; there are backend, isolation, timeout, fake_rank, init, checks"
        )
    options["checks_off"] = parse_checks(options.pop("checks", ""))
    backends = options.pop("backend", "gloo")
    names = [backends] if isinstance(backends, str) else list(backends)
    if not names:
        raise SpecError("backend is an empty list")
    return [RanksSpec(size, name, **options) for name in names for size in sizes]


def parse_checks(text: str | Iterable[str]) -> tuple[str, ...]:
    """Read which checks are turned off.

    Args:
        text: Such as ``"no:messages no:deadlock"``, or a list of such words.

    Returns:
        Names of `CHECKS`, in alphabetical order.

    Raises:
        SpecError: If a word is no ``no:`` and the name of a check.

    Example:
        >>> parse_checks("no:messages no:deadlock")
        ('deadlock', 'messages')
    """
    words = text.replace(",", " ").split() if isinstance(text, str) else list(text)
    for word in words:
        if word.removeprefix("no:") not in CHECKS or not word.startswith("no:"):
            names = ", ".join(f"no:{name}" for name in CHECKS)
            raise SpecError(f"checks: {word!r} turns nothing off; there are {names}")
    return tuple(sorted({word.removeprefix("no:") for word in words}))

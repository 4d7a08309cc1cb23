"""What a ``ranks`` marker asks for, as a value, and what is wrong with it when it cannot be read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

BACKENDS: Mapping[str, str] = {"gloo": "gloo-cpu", "gloo-cuda": "gloo-cuda", "nccl": "nccl", "fake": "fake"}
"""Backends a marker can name, and the names by which ``--ranks-backend`` and ``--ranks-require`` know them."""

ISOLATIONS = ("group", "process", "none")

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
    """

    world_size: int
    backend: str = "gloo"
    isolation: str = "group"
    timeout: float = _DEFAULT_TIMEOUT
    fake_rank: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.world_size, bool) or not isinstance(self.world_size, int) or self.world_size < 1:
            raise SpecError(f"a number of ranks is a positive int, not {self.world_size!r}")
        if self.backend not in BACKENDS:
            raise SpecError(f"unknown backend {self.backend!r}; choose from {', '.join(BACKENDS)}")
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
        return BACKENDS[self.backend]

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
        kwargs: ``backend`` (a name or a list of them), ``isolation``, ``timeout`` in seconds, ``fake_rank``.

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
    unknown = set(options) - {"backend", "isolation", "timeout", "fake_rank"}
    if unknown:
        raise SpecError(f"unknown argument {sorted(unknown)[0]!r}; there are backend, isolation, timeout and fake_rank")
    backends = options.pop("backend", "gloo")
    names = [backends] if isinstance(backends, str) else list(backends)
    if not names:
        raise SpecError("backend is an empty list")
    return [RanksSpec(size, name, **options) for name in names for size in sizes]

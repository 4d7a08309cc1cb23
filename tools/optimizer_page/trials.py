"""What is tried of the optimizers of each package, and how those are built that want more than parameters."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
from zeroshard import check_optimizer
from zeroshard.plan.eligibility import COUPLED, check_shardable, check_uncoupled

PACKAGES: Mapping[str, str] = {
    "torch.optim": "torch",
    "pytorch_optimizer": "pytorch_optimizer",
    "heavyball": "heavyball",
    "schedulefree": "schedulefree",
    "prodigyopt": "prodigyopt",
    "dadaptation": "dadaptation",
}
"""Modules with optimizers, each with the name of the distribution that it comes from."""

_SHARP = ({"base_optimizer": torch.optim.SGD},)
ARGUMENTS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "heavyball.AdamW": ({}, {"gradient_clipping": "global_l2norm_clip"}, {"update_clipping": "global_rmsnorm_clip"}),
    "pytorch_optimizer.Adan": ({}, {"max_grad_norm": 1.0}),
    "pytorch_optimizer.BSAM": ({"num_data": 10},),
    "pytorch_optimizer.FriendlySAM": _SHARP,
    "pytorch_optimizer.Lamb": ({}, {"pre_norm": True}),
    "pytorch_optimizer.LookSAM": _SHARP,
    "pytorch_optimizer.Ranger21": ({"num_iterations": 50, "weight_decay": 0.1},),
    "pytorch_optimizer.SAM": _SHARP,
}
"""What a class is tried with, one after another, if that is not nothing."""

_WRAPPERS = ("Lookahead", "OrthoGrad", "ScheduleFreeWrapper", "TRAC")
_MARKED = ("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon")


@dataclass(frozen=True)
class Trial:
    """One class of a package with one set of arguments; ``number`` counts those of :data:`ARGUMENTS`."""

    package: str
    name: str
    number: int = 0

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments."""
        return ARGUMENTS.get(f"{self.package}.{self.name}", ({},))[self.number]

    @property
    def title(self) -> str:
        """The class as it is called, e.g. ``"Lamb(pre_norm=True)"``."""
        given = [
            f"{key}={value.__name__ if isinstance(value, type) else value}" for key, value in self.arguments.items()
        ]
        return f"{self.name}({', '.join(given)})" if given else self.name


@dataclass(frozen=True)
class Seen:
    """What a trial has shown.

    Attributes:
        trial: which.
        verdict, first_step, reason: as of :class:`zeroshard.OptimizerCheck`.
        refused: whether ZeroRedundancyOptimizer refuses it.
    """

    trial: Trial
    verdict: str
    first_step: int | None = None
    reason: str = ""
    refused: bool = False

    @property
    def sharded(self) -> str:
        """Whether it may be sharded, in a word; empty if that is not known."""
        return "refused" if self.refused else "yes" if self.verdict != "cannot tell" else ""

    @property
    def is_missing(self) -> bool:
        """Whether the table of what couples tensors lacks it."""
        return self.verdict == "coupled" and not self.refused


def trials_of(package: str) -> list[Trial]:
    """List what is to be tried of a package: its own classes, as they are exported.

    Raises:
        ImportError: if it is not installed.
    """
    found = [
        name
        for name, item in vars(importlib.import_module(package)).items()
        if isinstance(item, type) and issubclass(item, torch.optim.Optimizer) and item is not torch.optim.Optimizer
        if item.__module__.partition(".")[0] == package.partition(".")[0]
    ]
    return [
        Trial(package, name, number)
        for name in sorted(found, key=str.lower)
        for number in range(len(ARGUMENTS.get(f"{package}.{name}", ({},))))
    ]


def run(trial: Trial) -> Seen:
    """Try it in this process."""
    kind = getattr(importlib.import_module(trial.package), trial.name)
    build = builder_of(trial.package, kind)
    refused = _is_refused(kind, build, trial.arguments)
    check = check_optimizer(build, **trial.arguments)
    return Seen(trial, check.verdict, check.first_step, check.reason, refused)


def builder_of(package: str, kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Return what builds an optimizer of a class from parameters and arguments: mostly the class itself."""
    if package == "pytorch_optimizer" and kind.__name__ in _WRAPPERS:
        return lambda params, **arguments: cast(Any, kind)(torch.optim.AdamW(params), **arguments)
    if package == "pytorch_optimizer" and kind.__name__ in _MARKED:
        return lambda params, **arguments: kind([{"params": list(params), "use_muon": True}], **arguments)
    return kind


def _is_refused(
    kind: type[torch.optim.Optimizer],
    build: Callable[..., torch.optim.Optimizer],
    arguments: Mapping[str, Any],
) -> bool:
    known = COUPLED.get(f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}")
    if known is not None and not known.arguments:
        return True
    try:
        built = build([torch.nn.Parameter(torch.zeros(2, 2))], **arguments)
    except Exception:  # noqa: BLE001 - a class that cannot be built is neither refused nor of use
        return False
    try:
        check_shardable(kind)
        check_uncoupled(built, arguments, "refuse")
    except ValueError:
        return True
    return False


def serve(connection: Connection) -> None:
    """Answer a package's name with its trials, or the ImportError, and a trial with what it has shown; without end."""
    # What classes print is of no use here.
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - until the process ends
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    while True:
        question = connection.recv()
        try:
            connection.send(run(question) if isinstance(question, Trial) else trials_of(question))
        except ImportError as error:
            connection.send(ImportError(str(error)))

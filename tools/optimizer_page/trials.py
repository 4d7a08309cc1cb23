"""The trials of each package's optimizers, and how to build optimizers that need more than parameters."""

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
from zeroshard.state.placeholder import inner_tensors
from zeroshard_core import StateMapError, TensorSpec, cut_state

PACKAGES: Mapping[str, str] = {
    "torch.optim": "torch",
    "pytorch_optimizer": "pytorch_optimizer",
    "heavyball": "heavyball",
    "schedulefree": "schedulefree",
    "prodigyopt": "prodigyopt",
    "dadaptation": "dadaptation",
    "muon": "muon-optimizer",
    "torchao.optim": "torchao",
    "bitsandbytes.optim": "bitsandbytes",
}
"""Modules with optimizers, each with the name of the distribution that it comes from."""

Build = Callable[..., torch.optim.Optimizer]
"""Builds an optimizer from parameters and arguments."""
_RATE = ({"lr": 0.1, "momentum": 0.9},)
_SHARP = ({"base_optimizer": torch.optim.SGD},)
ARGUMENTS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    **{f"bitsandbytes.optim.{name}{bits}": _RATE for name in ("LARS", "SGD") for bits in ("", "8bit", "32bit")},
    "heavyball.AdamW": ({}, {"gradient_clipping": "global_l2norm_clip"}, {"update_clipping": "global_rmsnorm_clip"}),
    "pytorch_optimizer.Adan": ({}, {"max_grad_norm": 1.0}),
    "pytorch_optimizer.BSAM": ({"num_data": 10},),
    "pytorch_optimizer.FriendlySAM": _SHARP,
    "pytorch_optimizer.Lamb": ({}, {"pre_norm": True}),
    "pytorch_optimizer.LookSAM": _SHARP,
    "pytorch_optimizer.Ranger21": ({"num_iterations": 50, "weight_decay": 0.1},),
    "pytorch_optimizer.SAM": _SHARP,
}
"""The arguments with which a class is tried, one after another; classes that are not listed get none."""

_WRAPPERS = ("Lookahead", "OrthoGrad", "ScheduleFreeWrapper", "TRAC")
_MARKED = {
    "pytorch_optimizer": ("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon"),
    "muon": ("MuonWithAuxAdam", "SingleDeviceMuonWithAuxAdam"),
}
_STEPS = 5
_WHOLE, _CUT_AT = (130, 128), 65
"""The shape of a tensor that is stepped whole and in two parts, and the row at which it is cut: inside a block of 256
elements, which quantized optimizers scale together."""


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
        """The class as it is called, such as ``"Lamb(pre_norm=True)"``."""
        given = [f"{key}={getattr(value, '__name__', value)}" for key, value in self.arguments.items()]
        return f"{self.name}({', '.join(given)})" if given else self.name


@dataclass(frozen=True)
class Seen:
    """What :class:`zeroshard.OptimizerCheck` has, for a trial, and whether ZeroRedundancyOptimizer refuses the class.

    If it does not, the class fits the partition that :func:`partition_of` returns.
    """

    trial: Trial
    verdict: str
    first_step: int | None = None
    reason: str = ""
    refused: bool = False
    fits: str = ""

    @property
    def partition(self) -> str:
        """The partition for the class, or ``"refused"``; empty if unknown."""
        return "refused" if self.refused else self.fits if self.verdict != "cannot tell" else ""

    @property
    def is_missing(self) -> bool:
        """Whether the table of classes that couple tensors lacks the class."""
        return self.verdict == "coupled" and not self.refused


def trials_of(package: str) -> list[Trial]:
    """Return the trials of a package: of the classes that it defines and exports. ImportError if it is missing."""
    found = [
        name
        for name, item in vars(importlib.import_module(package)).items()
        if isinstance(item, type) and issubclass(item, torch.optim.Optimizer) and item is not torch.optim.Optimizer
        if item.__module__.partition(".")[0] == package.partition(".")[0] and not name.startswith("_")
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
    draws = check.verdict == "draws random numbers"
    fits = "" if refused or check.verdict == "cannot tell" else partition_of(build, trial.arguments, draws=draws)
    return Seen(trial, check.verdict, check.first_step, check.reason, refused, fits)


def partition_of(build: Build, arguments: Mapping[str, Any], *, draws: bool = False) -> str:
    """Return the partition that fits: a tensor is stepped whole and in two parts.

    ``"split"`` if both results are bitwise equal and the state can be cut too, ``"whole"`` if some state belongs to no
    tensor, otherwise ``"level"``, also if the class fails, or draws random numbers, which differ for parts.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
            if _has_other_state(build, arguments):
                return "whole"
            return "split" if not draws and _may_be_cut(build, arguments) else "level"
    except Exception:  # noqa: BLE001 - a class may raise any exception
        return "level"


def _has_other_state(build: Build, arguments: Mapping[str, Any]) -> bool:
    param = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = build([param], **arguments)
    getattr(optimizer, "train", bool)()
    param.grad = torch.ones(4, 4)
    optimizer.step()
    return not all(isinstance(key, torch.Tensor) for key in optimizer.state)


def _may_be_cut(build: Build, arguments: Mapping[str, Any]) -> bool:
    spec = TensorSpec("tensor", _WHOLE, torch.float32)
    for scale in (1.0, 1000.0):
        generator = torch.Generator().manual_seed(0)
        whole = torch.nn.Parameter(torch.randn(_WHOLE, generator=generator))
        parts = [torch.nn.Parameter(part.clone()) for part in _parts_of(whole.detach())]
        optimizers = [build(params, **arguments) for params in ([whole], parts)]
        for optimizer in optimizers:
            getattr(optimizer, "train", bool)()
        for _ in range(_STEPS):
            whole.grad = scale * torch.randn(_WHOLE, generator=generator)
            for part, grad in zip(parts, _parts_of(whole.grad), strict=True):
                part.grad = grad.clone()
            for optimizer in optimizers:
                optimizer.step()
            if not torch.equal(whole, torch.cat([part.detach() for part in parts])):
                return False
        entries = optimizers[0].state[whole]
        try:
            cut_state(entries, spec, spec.shard(tensor=0, rank=0, stop=_CUT_AT))
        except StateMapError:
            return False
    return not any(inner_tensors(entry) for entry in entries.values())


def _parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor[:_CUT_AT], tensor[_CUT_AT:]


def builder_of(package: str, kind: type[torch.optim.Optimizer]) -> Build:
    """Return a function that builds an optimizer of a class from parameters and arguments: usually the class itself."""
    if package == "pytorch_optimizer" and kind.__name__ in _WRAPPERS:
        return lambda params, **arguments: cast(Any, kind)(torch.optim.AdamW(params), **arguments)
    if kind.__name__ in _MARKED.get(package, ()):
        return lambda params, **arguments: kind([{"params": list(params), "use_muon": True}], **arguments)
    return kind


def _is_refused(kind: type[torch.optim.Optimizer], build: Build, arguments: Mapping[str, Any]) -> bool:
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
    """Answer a package's name with its trials or the ImportError, and a trial with its result, in an endless loop."""
    # The output of the classes is not needed.
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - until the process ends
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    while True:
        question = connection.recv()
        try:
            connection.send(run(question) if isinstance(question, Trial) else trials_of(question))
        except ImportError as error:
            connection.send(ImportError(str(error)))

"""Decides which optimizers can be sharded, and how: some with cut tensors, some with whole tensors, some not at all.

An optimizer is *elementwise* if the new value of an element depends on that element's own gradient and state (and on
numbers that are the same for the whole tensor, such as a step count). Cutting a tensor then changes nothing. It
*couples* tensors if it reads other tensors, which another rank may own, to update one: such classes are known by name.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import optim

from zeroshard._torch_private import step_post_hooks, step_pre_hooks

OptimizerFactory = Callable[..., optim.Optimizer]

ELEMENTWISE: frozenset[type[optim.Optimizer]] = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
"""The classes of torch.optim that are elementwise. A subclass may not be, so the user must declare it."""


def class_of(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Return the class in a ``functools.partial``, or the class itself."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    return factory


def name_of(factory: Callable[..., Any]) -> str:
    """Return the name of an optimizer class or a strategy, for errors."""
    found = class_of(factory)
    return getattr(found, "__name__", repr(found))


def check_shardable(factory: OptimizerFactory) -> None:
    """Raise a TypeError for an object that cannot be called, and a ValueError for LBFGS."""
    found = class_of(factory)
    if not callable(found):
        raise TypeError(f"`optimizer_class` must be an optimizer class, but got {found!r}")
    if isinstance(found, type) and issubclass(found, optim.LBFGS):
        raise ValueError(
            f"{found.__name__} cannot be sharded: its direction and line search couple all parameters. Use it unsharded"
        )


Coupled = Literal["refuse", "allow"]
"""What to do with an optimizer that couples tensors."""


@dataclass(frozen=True)
class Coupling:
    """The way in which a class couples tensors: always, or with certain arguments, each with a test of the value."""

    # Completes a sentence that begins with "it".
    why: str
    arguments: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)


def _is_global_clip(value: Any) -> bool:  # noqa: ANN401 - a name, a function, or none
    name = value if isinstance(value, str) else name_of(value)
    return name in ("global_l2norm_clip", "global_rmsnorm_clip")


_D_ADAPTED = [f"DAdapt{name}" for name in ("AdaGrad", "Adam", "Adan", "Lion", "SGD")]

COUPLED: Mapping[str, Coupling] = {
    **dict.fromkeys(
        [
            *(f"dadaptation.{name}" for name in _D_ADAPTED),
            *(f"pytorch_optimizer.{name}" for name in [*_D_ADAPTED, "Prodigy"]),
            "prodigyopt.Prodigy",
        ],
        Coupling("estimates its step size from all tensors"),
    ),
    **dict.fromkeys(
        [
            *(f"pytorch_optimizer.{name}SAM" for name in ("", "B", "Friendly", "G", "Look", "W")),
            *(f"schedulefree.{name}ScheduleFreeClosure" for name in ("AdamW", "RAdam", "SGD")),
            "heavyball.SAMWrapper",
        ],
        Coupling("moves all tensors before it asks the closure for gradients"),
    ),
    "heavyball.BaseOpt": Coupling(
        "scales all tensors by one norm", {"gradient_clipping": _is_global_clip, "update_clipping": _is_global_clip}
    ),
    "heavyball.PSGDLRA": Coupling("preconditions all tensors as one vector"),
    "pytorch_optimizer.ASGD": Coupling("computes its learning rate from the norms of all tensors and gradients"),
    "pytorch_optimizer.AdaGC": Coupling("clips all gradients by one norm"),
    "pytorch_optimizer.Adai": Coupling("computes its momentum from the second moments of all tensors"),
    "pytorch_optimizer.AdamS": Coupling("scales weight decay by the second moments of all tensors"),
    "pytorch_optimizer.Adan": Coupling("clips all gradients by one norm", {"max_grad_norm": bool}),
    "pytorch_optimizer.AliG": Coupling("computes its step size from the norm of all gradients"),
    "pytorch_optimizer.AvaGrad": Coupling("scales its step by the second moments of all tensors"),
    "pytorch_optimizer.DeMo": Coupling("sends gradients between the ranks by itself"),
    **dict.fromkeys(
        ["muon.Muon", "muon.MuonWithAuxAdam", "pytorch_optimizer.DistributedMuon"],
        Coupling("partitions its tensors over the ranks by itself"),
    ),
    "pytorch_optimizer.Lamb": Coupling("scales all gradients by one norm", {"pre_norm": bool}),
    "pytorch_optimizer.LoRARite": Coupling("updates tensors in pairs"),
    "pytorch_optimizer.Ranger21": Coupling("scales weight decay by the second moments of all tensors"),
    "pytorch_optimizer.SWATS": Coupling("switches to SGD for all tensors when one of them is ready"),
    "pytorch_optimizer.TRAC": Coupling("scales the updates of all tensors by one number"),
}
"""The classes that couple tensors, by the names of package and class. Their subclasses couple too."""


def check_uncoupled(optimizer: optim.Optimizer, arguments: Mapping[str, Any], coupled: Coupled) -> None:
    """Raise a ValueError if a new optimizer, or one that it wraps, couples tensors and ``coupled`` refuses that."""
    if coupled not in get_args(Coupled):
        raise ValueError(f"`coupled` must be 'refuse' or 'allow', but got {coupled!r}")
    wrapped = [value for value in vars(optimizer).values() if isinstance(value, optim.Optimizer)]
    for built in [optimizer, *wrapped] if coupled == "refuse" else []:
        _check(type(built), [{**vars(built), **arguments, **group} for group in built.param_groups])


def check_class_uncoupled(factory: OptimizerFactory, coupled: Coupled) -> None:
    """Raise a ValueError if a class always couples tensors and ``coupled`` refuses that. Builds nothing."""
    kind = class_of(factory)
    if isinstance(kind, type) and coupled == "refuse":
        _check(kind, [])


def _check(kind: type, given: list[dict[str, Any]]) -> None:
    """Raise a ValueError if a class couples tensors, always or with the settings of a param group."""
    for name in _names(kind):
        coupling = COUPLED.get(name)
        if coupling is None:
            continue
        found = [
            f"{argument}={settings[argument]}"
            for argument, couples in coupling.arguments.items()
            for settings in given
            if argument in settings and couples(settings[argument])
        ]
        if found or not coupling.arguments:
            called, instead = (f"{name} with {found[0]}", f"it without {found[0]}, ") if found else (name, "")
            raise coupling_error(called, coupling.why, instead)


def _names(kind: type) -> list[str]:
    """Return the names of a class and its bases, as in :data:`COUPLED`."""
    return [f"{base.__module__.partition('.')[0]}.{base.__qualname__}" for base in kind.__mro__]


def is_known(kind: type[optim.Optimizer]) -> bool:
    """Return True if a class is torch's own, or :data:`COUPLED` says when it couples tensors."""
    return kind.__module__.startswith("torch.") or any(name in COUPLED for name in _names(kind))


def coupling_error(name: str, why: str, instead: str = "") -> ValueError:
    """Return the error for a class that couples tensors. ``why`` completes a sentence that begins with "it"."""
    return ValueError(
        f"{name} couples tensors: it {why}, but each rank steps only the tensors that it owns. Use {instead}an "
        f"optimizer that updates each tensor by itself, such as torch.optim.AdamW, or this one unsharded; or pass "
        f"coupled='allow' if each rank may see only its own tensors"
    )


STEPPED_IN_PARTS = ELEMENTWISE | {optim.Adafactor, optim.Muon, optim.SparseAdam}
"""The classes of torch.optim that keep all state per tensor. No check detects whether other classes, or subclasses, do.

An optimizer that does not would count its steps once per part, or step all tensors of an optimizer that it wraps.
"""


def may_step_in_parts(inner: optim.Optimizer) -> bool:
    """Return True if an optimizer may step some tensors at a time: by its class, or ``steps_in_pieces = True``."""
    # Its own hooks must run once per step.
    if "step" in vars(inner) or step_pre_hooks(inner) or step_post_hooks(inner):
        return False
    return type(inner) in STEPPED_IN_PARTS or getattr(type(inner), "steps_in_pieces", False) is True


def check_differentiable(optimizer: optim.Optimizer) -> None:
    """Raise a ValueError if a param group of an optimizer has ``differentiable=True``."""
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            f"{type(optimizer).__name__}(differentiable=True) cannot be sharded, because autograd does not work across "
            f"ranks. Leave out differentiable=True, or use the optimizer unsharded"
        )


def warn_of_own_state(optimizer: optim.Optimizer) -> None:
    """Warn if an optimizer adds keys to its state dict, which checkpoints of a sharded optimizer do not hold."""
    added = sorted(optimizer.state_dict().keys() - {"state", "param_groups"})
    if added:
        warnings.warn(
            f"{type(optimizer).__name__} adds {added[0]!r} to its state dict, which checkpoints of a sharded optimizer "
            f"do not hold: after a load it may step differently",
            stacklevel=2,
        )

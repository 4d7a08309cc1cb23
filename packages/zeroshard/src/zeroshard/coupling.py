"""Which optimizers couple tensors: to update one they read others, which another rank may own.

They are known by name, and nothing of them is imported; :func:`zeroshard.check_optimizer` tries out any other class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import optim

from zeroshard.elementwise import name_of

Coupled = Literal["refuse", "allow"]
"""What to do with an optimizer that couples tensors."""


@dataclass(frozen=True)
class Coupling:
    """How a class couples tensors.

    Attributes:
        why: what it does; completes a sentence that begins with "it".
        arguments: if it does so only with certain arguments, these, each with a test of the value.
    """

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
    "pytorch_optimizer.DistributedMuon": Coupling("deals its tensors out to the ranks by itself"),
    "pytorch_optimizer.Lamb": Coupling("scales all gradients by one norm", {"pre_norm": bool}),
    "pytorch_optimizer.LoRARite": Coupling("updates tensors in pairs"),
    "pytorch_optimizer.Ranger21": Coupling("scales weight decay by the second moments of all tensors"),
    "pytorch_optimizer.SWATS": Coupling("turns into SGD for all tensors when one of them is ready for it"),
    "pytorch_optimizer.TRAC": Coupling("scales the updates of all tensors by one number"),
}
"""By the names of package and class. A class that is derived from one of these couples too."""


def check_uncoupled(optimizer: optim.Optimizer, arguments: Mapping[str, Any], coupled: Coupled) -> None:
    """Raise a ValueError if an optimizer, or one that it wraps, is known to couple tensors and may not.

    Args:
        optimizer: just built. Its attributes and param groups are searched for arguments too.
        arguments: what it was built with.
        coupled: whether it may.
    """
    if coupled not in ("refuse", "allow"):
        raise ValueError(f"`coupled` must be 'refuse' or 'allow', but got {coupled!r}")
    wrapped = [value for value in vars(optimizer).values() if isinstance(value, optim.Optimizer)]
    for built in [optimizer, *wrapped] if coupled == "refuse" else []:
        given = [{**vars(built), **arguments, **group} for group in built.param_groups]
        for kind in type(built).__mro__:
            name = f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"
            if name in COUPLED:
                _check(name, COUPLED[name], given)


def _check(name: str, coupling: Coupling, given: list[dict[str, Any]]) -> None:
    found = [
        f"{argument}={settings[argument]}"
        for argument, couples in coupling.arguments.items()
        for settings in given
        if argument in settings and couples(settings[argument])
    ]
    if found or not coupling.arguments:
        called, instead = (f"{name} with {found[0]}", f"it without {found[0]}, ") if found else (name, "")
        raise ValueError(
            f"{called} couples tensors: it {coupling.why}. Each rank steps only the tensors that it owns, so training "
            f"would differ from that of one process, without an error. Use {instead}an optimizer that updates each "
            f"tensor by itself, such as torch.optim.AdamW, or this one unsharded; or pass coupled='allow' if each rank "
            f"may see only its own tensors."
        )

"""Which optimizers are known to couple tensors: by name, here with classes of that name that do nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from zeroshard.plan.eligibility import COUPLED, check_class_uncoupled, check_uncoupled, warn_of_own_state


def named(module: str, name: str, base: type = optim.Optimizer) -> type:
    return type(name, (base,), {"__module__": module, "__qualname__": name})


def built(kind: Callable[..., Any], *, attributes: dict[str, Any] | None = None, **group: Any) -> optim.Optimizer:
    optimizer = kind([{"params": [nn.Parameter(torch.zeros(1))], **group}], {})
    vars(optimizer).update(attributes or {})
    return optimizer


PRODIGY = named("pytorch_optimizer.optimizer.prodigy", "Prodigy")
LAMB = named("pytorch_optimizer.optimizer.lamb", "Lamb")
ADAN = named("pytorch_optimizer.optimizer.adan", "Adan")
HEAVYBALL = named("heavyball", "AdamW", named("heavyball.chainable", "BaseOpt"))


def global_l2norm_clip() -> None: ...


@pytest.mark.parametrize(
    ("optimizer", "arguments", "said"),
    [
        (built(PRODIGY), {}, "pytorch_optimizer.Prodigy couples tensors: it estimates its step size from all tensors"),
        (built(named("__main__", "Mine", PRODIGY)), {}, "pytorch_optimizer.Prodigy couples"),
        (built(LAMB), {"pre_norm": True}, "Lamb with pre_norm=True couples .* Use it without pre_norm=True, "),
        (built(LAMB, attributes={"pre_norm": True}), {}, "Lamb with pre_norm=True"),
        (built(ADAN, max_grad_norm=0.5), {}, "Adan with max_grad_norm=0.5"),
        (
            built(HEAVYBALL),
            {"update_clipping": "global_rmsnorm_clip"},
            "BaseOpt with update_clipping=global_rmsnorm_clip",
        ),
        (built(HEAVYBALL), {"gradient_clipping": global_l2norm_clip}, "BaseOpt with gradient_clipping="),
        (built(optim.Optimizer, attributes={"optimizer": built(PRODIGY)}), {}, "Prodigy"),
    ],
    ids=["always", "derived", "argument", "attribute", "group", "value", "function", "wrapped"],
)
def test_what_couples_is_refused_unless_it_may(optimizer: optim.Optimizer, arguments: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_uncoupled(optimizer, arguments, "refuse")
    check_uncoupled(optimizer, arguments, "allow")


@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [
        (built(named("mine.prodigy", "Prodigy")), {}),
        (built(named("pytorch_optimizer.optimizer.lion", "Lion")), {}),
        (built(LAMB), {"pre_norm": False}),
        (built(LAMB), {"max_grad_norm": 1.0}),
        (built(ADAN, max_grad_norm=0.0), {}),
        (built(HEAVYBALL), {"update_clipping": "l2_clip_", "gradient_clipping": None}),
    ],
    ids=["of another package", "not known", "switched off", "of another class", "zero", "another value"],
)
def test_what_does_not_couple_is_not_refused(optimizer: optim.Optimizer, arguments: Any) -> None:
    check_uncoupled(optimizer, arguments, "refuse")


def test_a_class_that_couples_with_any_arguments_is_refused_before_it_is_built() -> None:
    muon = named("muon", "Muon")
    with pytest.raises(ValueError, match=r"muon\.Muon couples tensors: it partitions its tensors over the ranks"):
        check_class_uncoupled(partial(muon, lr=0.1), "refuse")
    check_class_uncoupled(muon, "allow")
    check_class_uncoupled(LAMB, "refuse")
    check_class_uncoupled(lambda params: muon(params), "refuse")


def test_a_class_with_more_than_state_and_groups_in_its_state_dict_is_warned_of(
    recwarn: pytest.WarningsRecorder,
) -> None:
    class Counting(optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "count": 3}

    warn_of_own_state(optim.SGD([nn.Parameter(torch.zeros(1))]))
    assert not recwarn
    with pytest.warns(UserWarning, match="Counting adds 'count' to its state dict, which checkpoints .* do not hold"):
        warn_of_own_state(Counting([nn.Parameter(torch.zeros(1))]))


def test_a_choice_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="`coupled` must be 'refuse' or 'allow', but got 'yes'"):
        check_uncoupled(built(PRODIGY), {}, "yes")  # type: ignore[arg-type]


def test_names_are_those_of_a_package_and_a_class() -> None:
    assert all(name.count(".") == 1 for name in COUPLED)

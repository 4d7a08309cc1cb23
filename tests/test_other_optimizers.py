"""Optimizers of other packages, where they are installed: sharded they give, bit for bit, what they give unsharded."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import optim
from training import assert_bitwise_equal, set_gradients, twins
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_testing import assert_replicas_equal

STEPS = 5


def classes(*given: tuple[str, dict[str, Any]]) -> Any:
    """Parametrize by class and arguments; what is not installed is skipped by name."""
    return pytest.mark.parametrize(
        ("name", "arguments"),
        [
            pytest.param(
                name,
                arguments,
                id="-".join([name, *arguments]),
                marks=pytest.mark.skipif(
                    importlib.util.find_spec(name.partition(".")[0]) is None,
                    reason=f"{name.partition('.')[0]} is not installed",
                ),
            )
            for name, arguments in given
        ],
    )


def found(name: str) -> type[optim.Optimizer]:
    package, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(package), kind)


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """Compile nothing: that takes a minute for some."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.ranks(3, backend="gloo")
@classes(
    ("heavyball.AdamW", {}),
    ("heavyball.LaProp", {}),
    ("heavyball.SOAP", {}),
    ("pytorch_optimizer.ADOPT", {}),
    ("pytorch_optimizer.AdaBelief", {}),
    ("pytorch_optimizer.Adan", {}),
    ("pytorch_optimizer.CAME", {}),
    ("pytorch_optimizer.LARS", {}),
    ("pytorch_optimizer.Lamb", {}),
    ("pytorch_optimizer.Lion", {}),
    ("pytorch_optimizer.SOAP", {}),
    ("pytorch_optimizer.ScalableShampoo", {}),
    ("pytorch_optimizer.StableAdamW", {}),
)
@pytest.mark.parametrize("as_bucket_view", [False, True], ids=["params", "views"])
def test_it_is_equal_to_one_process(name: str, arguments: dict[str, Any], as_bucket_view: bool) -> None:
    model, reference = twins()
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), found(name), parameters_as_bucket_view=as_bucket_view, **arguments
    )
    plain = found(name)(reference.parameters(), **arguments)
    for step in range(STEPS):
        for module, optimizer in ((model, sharded), (reference, plain)):
            set_gradients(module.parameters(), step)
            optimizer.step()
        assert_bitwise_equal(model, reference, f"after step {step}")


@pytest.mark.ranks(3, backend="gloo")
@classes(("heavyball.Muon", {}), ("pytorch_optimizer.SPAM", {}))
def test_one_that_draws_random_numbers_leaves_replicas_equal(name: str, arguments: dict[str, Any], rank: int) -> None:
    model, _ = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), found(name), **arguments)
    torch.manual_seed(rank)
    for step in range(STEPS):
        set_gradients(model.parameters(), step)
        sharded.step()
        assert_replicas_equal(model.parameters())


@pytest.mark.ranks(3, backend="gloo")
@classes(
    ("dadaptation.DAdaptAdam", {}),
    ("heavyball.AdamW", {"gradient_clipping": "global_l2norm_clip"}),
    ("heavyball.PSGDLRA", {"rank": 4}),
    ("prodigyopt.Prodigy", {}),
    ("pytorch_optimizer.ASGD", {}),
    ("pytorch_optimizer.Adai", {}),
    ("pytorch_optimizer.Adan", {"max_grad_norm": 1.0}),
    ("pytorch_optimizer.Lamb", {"pre_norm": True}),
    ("pytorch_optimizer.SWATS", {}),
    ("schedulefree.SGDScheduleFreeClosure", {}),
)
def test_one_that_couples_tensors_is_refused(name: str, arguments: dict[str, Any]) -> None:
    model, _ = twins()
    with pytest.raises(ValueError, match="couples tensors"):
        ZeroRedundancyOptimizer(model.parameters(), found(name), **arguments)
    ZeroRedundancyOptimizer(model.parameters(), found(name), coupled="allow", **arguments)


@pytest.mark.ranks(3, backend="gloo")
@classes(("prodigyopt.Prodigy", {}), ("pytorch_optimizer.Prodigy", {}))
def test_one_that_may_couple_tensors_leaves_replicas_equal(name: str, arguments: dict[str, Any]) -> None:
    model, _ = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), found(name), coupled="allow", **arguments)
    for step in range(STEPS):
        set_gradients(model.parameters(), step)
        sharded.step()
        assert_replicas_equal(model.parameters())

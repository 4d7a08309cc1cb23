"""Optimizers of other packages, where they are installed: sharded they give, bit for bit, what they give unsharded.

Whole, cut by ``"split"`` if they are elementwise, and by ``"level"`` if they step the matrices of a model.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from support.listed_state import assert_same
from support.training import assert_bitwise_equal, cutting, set_gradients, twin_optimizers, twins
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer, split_state_dict
from zeroshard_core import adam, newton_schulz
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


def language_model() -> nn.Sequential:
    """An embedding that may be cut, three matrices, norms and biases."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24)) for _ in range(3)]
    return nn.Sequential(nn.Embedding(3072, 24), *layers, nn.Linear(24, 40))


def parted(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The hidden matrices, and the rest."""
    named = dict(model.named_parameters())
    hidden = [name for name, param in named.items() if param.dim() == 2 and name[0] in "123"]
    return [named[name] for name in hidden], [param for name, param in named.items() if name not in hidden]


def train_equally(
    model: nn.Module, sharded: optim.Optimizer, reference: nn.Module, plain: Sequence[optim.Optimizer]
) -> None:
    """Step both with the same gradients, and compare their parameters bitwise after each step."""
    for step in range(STEPS):
        for module, optimizers in ((model, [sharded]), (reference, plain)):
            set_gradients(module.parameters(), step)
            for optimizer in optimizers:
                optimizer.step()
        assert_bitwise_equal(model, reference, f"after step {step}")


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
    ("pytorch_optimizer.StableAdamW", {}),
)
def test_a_sharded_one_is_equal_to_one_process(name: str, arguments: dict[str, Any]) -> None:
    model, reference = twins()
    sharded, plain = twin_optimizers((model, reference), found(name), as_bucket_view=True, **arguments)
    train_equally(model, sharded, reference, [plain])


@pytest.mark.ranks(3, backend="gloo")
@classes(
    ("pytorch_optimizer.ADOPT", {}),
    ("pytorch_optimizer.AdaBelief", {}),
    ("pytorch_optimizer.Lion", {}),
    ("pytorch_optimizer.Tiger", {}),
    ("schedulefree.AdamWScheduleFreeReference", {}),
    ("schedulefree.SGDScheduleFree", {}),
)
def test_an_elementwise_one_is_cut_and_equal_to_one_process(name: str, arguments: dict[str, Any], rank: int) -> None:
    model, reference = twins()
    options: dict[str, Any] = {"partition": cutting("split"), "elementwise": True}
    sharded = ZeroRedundancyOptimizer(model.parameters(), found(name), **options, **arguments)
    assert sharded.plan.is_cut(4)
    plain = found(name)(reference.parameters(), **arguments)
    for each in (sharded, plain):
        getattr(each, "train", bool)()
    train_equally(model, sharded, reference, [plain])
    sharded.consolidate_state_dict(to=0)
    if rank == 0:
        assert_same(sharded.state_dict(), plain.state_dict())


@pytest.mark.ranks(3, backend="gloo")
@classes(
    ("heavyball.SOAP", {}),
    ("pytorch_optimizer.SOAP", {"precondition_frequency": 2}),
    ("pytorch_optimizer.Shampoo", {"preconditioning_compute_steps": 2}),
    ("muon.SingleDeviceMuon", {}),
)
def test_it_steps_the_matrices_and_adamw_the_rest(name: str, arguments: dict[str, Any], rank: int) -> None:
    model, reference = twins(language_model)
    (hidden, rest), (plain_hidden, plain_rest) = parted(model), parted(reference)
    work = newton_schulz() if "Muon" in name else adam()
    matrices = {"params": hidden, "optimizer_class": found(name), "optimizer_defaults": arguments, "cost": work}
    sharded = ZeroRedundancyOptimizer([matrices, {"params": rest}], optim.AdamW, partition="level")
    plain = [found(name)(plain_hidden, **arguments), optim.AdamW(plain_rest)]
    assert sharded.plan.is_cut(3)
    assert {sharded.plan.owners[index] for index in range(3)} == {(0,), (1,), (2,)}
    train_equally(model, sharded, reference, plain)
    sharded.consolidate_state_dict(to=0)
    # heavyball counts its steps in the state of the first tensor that a rank has.
    if rank == 0 and not name.startswith("heavyball"):
        for part, each in zip(split_state_dict(sharded.state_dict(), [0, 1]), plain, strict=True):
            assert_same(part, each.state_dict())


@pytest.mark.ranks(3, backend="gloo")
@classes(
    ("muon.SingleDeviceMuonWithAuxAdam", {}),
    ("pytorch_optimizer.AdaMuon", {}),
    ("pytorch_optimizer.Muon", {}),
    ("pytorch_optimizer.NorMuon", {}),
    ("timm.optim.Muon", {}),
)
def test_one_that_treats_groups_differently_by_a_flag_is_cut_where_that_is_elementwise(
    name: str, arguments: dict[str, Any], rank: int
) -> None:
    def groups(of: nn.Module, *options: dict[str, Any]) -> list[dict[str, Any]]:
        matrices, rest = options or ({}, {})
        hidden, others = parted(of)
        return [
            {"params": hidden, "use_muon": True, **matrices},
            {"params": others, "use_muon": False, "lr": 0.01, **rest},
        ]

    model, reference = twins(language_model)
    given = groups(model, {"cost": newton_schulz()}, {"cost": adam(), "elementwise": True})
    sharded = ZeroRedundancyOptimizer(given, found(name), partition="level", **arguments)
    plain = found(name)(groups(reference), **arguments)
    assert [sharded.plan.is_cut(index) for index in range(4)] == [False, False, False, True]
    train_equally(model, sharded, reference, [plain])
    sharded.consolidate_state_dict(to=0)
    if rank == 0:
        assert_same(sharded.state_dict(), plain.state_dict())


QUANTIZED = [("bitsandbytes.optim.AdamW8bit", {}), ("bitsandbytes.optim.Lion8bit", {})]
WRAPPED = [("support.stand_ins.QuantizedSGD", {}), ("torchao.optim.AdamW8bit", {})]


@pytest.mark.ranks(3, backend="gloo")
@classes(*QUANTIZED, *WRAPPED)
def test_quantized_state_stays_whole_and_is_counted_as_it_is(name: str, arguments: dict[str, Any], rank: int) -> None:
    model, reference = twins(language_model)
    (hidden, rest), (plain_hidden, plain_rest) = parted(model), parted(reference)
    quantized = {"params": rest, "optimizer_class": found(name), "optimizer_defaults": arguments}
    sharded = ZeroRedundancyOptimizer([quantized, {"params": hidden}], optim.AdamW, partition="level")
    plain = [found(name)(plain_rest, **arguments), optim.AdamW(plain_hidden)]
    assert not sharded.plan.is_cut(0)
    train_equally(model, sharded, reference, plain)
    described = sharded.describe()
    assert described.state_bytes_here == pytest.approx(sharded.plan.state_loads[rank], abs=8 * len(described.tensors))
    # One or two values of 8 bits per element, with their scales; not of 32.
    per_element = described.tensors[0].state_bytes / reference[0].weight.numel()
    assert 1 < per_element < 2.1


@pytest.mark.ranks(3, backend="gloo")
@classes(("heavyball.AdamW", {}), *QUANTIZED, *WRAPPED)
def test_state_that_does_not_follow_the_elements_is_not_cut(name: str, arguments: dict[str, Any]) -> None:
    model = language_model()
    sharded = ZeroRedundancyOptimizer(model.parameters(), found(name), partition="split", elementwise=True, **arguments)
    assert sharded.plan.is_cut(0)
    set_gradients(model.parameters(), 0)
    with pytest.raises(ValueError, match=r"of 'param\.0' .* so it is not elementwise and cannot be joined"):
        sharded.step()


@pytest.mark.ranks(2, backend="gloo")
@classes(*QUANTIZED)
def test_quantized_state_is_saved_and_loaded(name: str, arguments: dict[str, Any], rank: int) -> None:
    model, reference = twins(language_model)
    sharded, plain = twin_optimizers((model, reference), found(name), **arguments)
    train_equally(model, sharded, reference, [plain])
    sharded.consolidate_state_dict(to=0)
    resumed = ZeroRedundancyOptimizer(model.parameters(), found(name), **arguments)
    resumed.load_state_dict(sharded.state_dict() if rank == 0 else {}, from_rank=0)
    train_equally(model, resumed, reference, [plain])


@pytest.mark.ranks(2, backend="gloo")
@classes(*WRAPPED)
def test_state_in_wrapped_tensors_is_not_saved(name: str, arguments: dict[str, Any], rank: int) -> None:
    model = language_model()
    sharded = ZeroRedundancyOptimizer(model.parameters(), found(name), **arguments)
    set_gradients(model.parameters(), 0)
    sharded.step()
    with pytest.raises(ValueError, match=r"'exp_avg' of 'param\.0' is a \w+, which cannot be sent without"):
        sharded.consolidate_state_dict(to=0)
    set_gradients(model.parameters(), 1)
    sharded.step()


@pytest.mark.ranks(3, backend="gloo")
@classes(
    ("heavyball.Muon", {}),
    ("heavyball.PSGDKron", {}),
    ("pytorch_optimizer.Kron", {}),
    ("pytorch_optimizer.SPAM", {}),
)
def test_one_that_draws_random_numbers_leaves_replicas_equal(name: str, arguments: dict[str, Any], rank: int) -> None:
    model = nn.ParameterList(parted(language_model())[0])
    sharded = ZeroRedundancyOptimizer(model.parameters(), found(name), partition="level", **arguments)
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


@pytest.mark.ranks(2, backend="gloo")
@classes(("muon.Muon", {}), ("muon.MuonWithAuxAdam", {}), ("pytorch_optimizer.DistributedMuon", {}))
def test_one_that_shards_by_itself_is_refused(name: str, arguments: dict[str, Any]) -> None:
    groups = [{"params": parted(language_model())[0], "use_muon": True}]
    with pytest.raises(ValueError, match=f"{name} couples tensors: it partitions its tensors over the ranks by itself"):
        ZeroRedundancyOptimizer(groups, found(name), **arguments)


@pytest.mark.ranks(3, backend="gloo")
@classes(("prodigyopt.Prodigy", {}), ("pytorch_optimizer.Prodigy", {}))
def test_one_that_may_couple_tensors_leaves_replicas_equal(name: str, arguments: dict[str, Any]) -> None:
    model, _ = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), found(name), coupled="allow", **arguments)
    for step in range(STEPS):
        set_gradients(model.parameters(), step)
        sharded.step()
        assert_replicas_equal(model.parameters())

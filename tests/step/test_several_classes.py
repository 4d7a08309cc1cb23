"""A class per param group: one sharded optimizer does what a plain optimizer for each class does in one process."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.combinations import VIEWS, each_of
from support.ddp_training import HOOKS, register, steps_in_backward
from support.example_scripts import script
from support.training import EVERYWHERE, assert_bitwise_equal, assert_same_state, set_gradients, twins
from support.two_classes import language_model, parted, separate, sharded, step_all
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zeroshard import AveragedParameters, ZeroRedundancyOptimizer, join_state_dicts, split_state_dict
from zeroshard_core import adam, newton_schulz, numel
from zeroshard_testing import assert_replicas_equal

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


def large_language_model() -> nn.Sequential:
    """One whose embedding may be cut."""
    return nn.Sequential(nn.Embedding(3000, 24), *list(language_model())[1:])


@pytest.mark.by_default("2-params | 3-views")
@pytest.mark.ranks(1, 2, 3, 4, backend=EVERYWHERE)
@VIEWS
def test_muon_and_adamw_equal_two_plain_optimizers(rank: int, as_bucket_view: bool) -> None:
    model, reference = twins(language_model)
    optimizer, plain = sharded(model, parameters_as_bucket_view=as_bucket_view), separate(reference)
    assert optimizer.group_assignment == [0, 1, 1]
    assert [type(each) for each in optimizer.local_optimizers] == [optim.Muon, optim.AdamW]
    for step in range(4):
        step_all(model, [optimizer], step)
        step_all(reference, plain, step)
        assert_bitwise_equal(model, reference, f"after step {step}")
    assert_replicas_equal(model.parameters())
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        parts = split_state_dict(optimizer.state_dict(), optimizer.group_assignment)
        for part, each in zip(parts, plain, strict=True):
            assert_same_state(part, each.state_dict())
        assert join_state_dicts(parts, [0, 1, 1])["param_groups"] == optimizer.state_dict()["param_groups"]


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_groups_of_one_class_with_other_arguments_of_the_constructor_have_local_optimizers_of_their_own() -> None:
    model = language_model()
    hidden, outer, rest = parted(model)
    groups = [
        {"params": hidden, "optimizer_defaults": {"amsgrad": True}},
        {"params": outer},
        {"params": rest, "optimizer_class": optim.AdamW},
    ]
    optimizer = ZeroRedundancyOptimizer(groups, optim.AdamW, lr=0.5)
    assert optimizer.group_assignment == [0, 1, 1]
    assert [group["amsgrad"] for group in optimizer.param_groups] == [True, False, False]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5, 0.5]


@pytest.mark.exhaustive_at(1, 3)
@pytest.mark.ranks(1, 2, 3, backend=EVERYWHERE)
@each_of("hook", HOOKS, partition=["whole", "level"])
def test_hooks_step_both_classes(hook: str, partition: str, rank: int) -> None:
    # Muon orthogonalises in bfloat16: equal only where gradients are equal to the bit, as at 2 ranks.
    model, reference = twins(large_language_model)
    ddp, plain_ddp = (DistributedDataParallel(each, bucket_cap_mb=0.01) for each in (model, reference))
    optimizer, plain = (
        sharded(model, overlap_with_ddp=steps_in_backward(hook), partition=partition),
        separate(reference),
    )
    register(hook, ddp, optimizer)
    rates: list[Callable[[int], float]] = [lambda step: 0.9**step, lambda step: 1.0, lambda step: 0.5**step]
    schedulers = [optim.lr_scheduler.LambdaLR(optimizer, rates)]
    schedulers += [optim.lr_scheduler.LambdaLR(plain[0], rates[:1]), optim.lr_scheduler.LambdaLR(plain[1], rates[1:])]
    device = next(model.parameters()).device
    for step in range(5):
        torch.manual_seed(10 * step + rank)
        tokens = torch.randint(40, (8,), device=device)
        for each in (ddp, plain_ddp):
            nn.functional.cross_entropy(each(tokens), tokens.roll(1)).backward()
        if hook == "reduce_to_owner_hook":
            # Norms differ in their last bits, so no gradient is scaled here.
            norm, expected = optimizer.clip_grad_norm_(1e9), nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
            assert dist.get_world_size() > 2 or torch.isclose(norm, expected, rtol=1e-5, atol=0)
        for each in (optimizer, *plain):
            each.step()
            each.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        assert_replicas_equal(model.parameters())
        if dist.get_world_size() <= 2:
            assert_bitwise_equal(model, reference, f"after step {step}")


@pytest.mark.ranks(3, backend=EVERYWHERE)
def test_both_classes_have_master_weights_and_averages(rank: int) -> None:
    model = language_model().bfloat16()
    optimizer = sharded(model, master_weights=True)
    AveragedParameters(optimizer)
    copied = copy.deepcopy(model).float()
    plain = separate(copied)
    for step in range(3):
        set_gradients(model.parameters(), step)
        for param, master in zip(model.parameters(), copied.parameters(), strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        for each in (optimizer, *plain):
            each.step()
        assert_replicas_equal(model.parameters())
        for param, master in zip(model.parameters(), copied.parameters(), strict=True):
            assert torch.equal(param, master.bfloat16())
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        state = optimizer.state_dict()["state"]
        assert all({"master_param", "average_param"} <= entries.keys() for entries in state.values())


@pytest.mark.exhaustive_at(4)
@pytest.mark.ranks(2, 3, 4, backend=EVERYWHERE)
def test_level_cuts_the_embedding_alone(rank: int) -> None:
    model, reference = twins(large_language_model)
    optimizer, plain = sharded(model, partition="level"), separate(reference)
    plan = optimizer.plan
    assert plan.is_cut(3)
    assert not any(map(plan.is_cut, (0, 1, 2)))
    for step in range(3):
        step_all(model, [optimizer], step)
        step_all(reference, plain, step)
        assert_bitwise_equal(model, reference, f"after step {step}")
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        for part, each in zip(split_state_dict(optimizer.state_dict(), [0, 1, 1]), plain, strict=True):
            assert_same_state(part, each.state_dict())


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_the_example_selects_the_matrices_of_blocks() -> None:
    model = script("small_gpt").SmallGPT()
    groups = script("muon").param_groups(model, model.head)
    names, rest = ([name for name, _ in group["params"]] for group in groups)
    assert len(names) == 8
    assert all(name.startswith("blocks.layers") and name.endswith("weight") for name in names)
    assert {"bytes.weight", "positions.weight", "head.weight"} <= set(rest)
    assert len(names) + len(rest) == len(list(model.parameters()))
    optimizer = ZeroRedundancyOptimizer(groups, optim.AdamW, partition="level")
    assert [group["name"] for group in optimizer.param_groups] == ["matrices", "rest"]
    assert optimizer.param_groups[0]["param_names"] == names


class StandInMuonWithAuxAdam(optim.Optimizer):
    """As classes that treat groups differently by a flag: exact keys, another order of the parameters, no defaults."""

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        for group in param_groups:
            if group["use_muon"]:
                group["params"] = sorted(group["params"], key=lambda param: tuple(param.shape), reverse=True)
            group["lr"] = group.get("lr", 0.02)
            assert set(group) == {"params", "lr", "use_muon"}
        super().__init__(param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (each for each in group["params"] if each.grad is not None):
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                momentum.lerp_(param.grad, 0.1)
                scale = momentum.norm() if group["use_muon"] else momentum.abs() + 1e-8
                param.sub_(group["lr"] * momentum / scale)


@pytest.mark.ranks(3, backend=EVERYWHERE)
def test_a_class_that_treats_groups_differently_by_a_flag(rank: int) -> None:
    model, reference = twins(large_language_model)

    def groups(of: nn.Module, **options: Any) -> list[dict[str, Any]]:
        hidden, outer, rest = parted(of)
        costs = {"cost": newton_schulz()} if options else {}
        return [
            {"params": hidden, "use_muon": True, **costs},
            {"params": [*outer, *rest], "use_muon": False, "lr": 0.01, **options},
        ]

    optimizer = ZeroRedundancyOptimizer(
        groups(model, elementwise=True, cost=adam()), StandInMuonWithAuxAdam, partition="level"
    )
    plain = StandInMuonWithAuxAdam(groups(reference))
    assert optimizer.group_assignment == [0, 0]
    assert optimizer.plan.is_cut(3)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 0.8**step])
    expected = optim.lr_scheduler.LambdaLR(plain, [lambda step: 0.9**step, lambda step: 0.8**step])
    for step in range(3):
        step_all(model, [optimizer], step)
        step_all(reference, [plain], step)
        for each in (scheduler, expected):
            each.step()
        assert_bitwise_equal(model, reference, f"after step {step}")
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == len(plain.state_dict()["state"])


class StandInLookingAtItsState(optim.Optimizer):
    """Makes buffers while it has no state, halves all that it has, and may keep a count that is no parameter's."""

    def __init__(self, params: Any, lr: float = 0.1, counts: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.counts = counts

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.state:
            for param in [param for group in self.param_groups for param in group["params"]]:
                self.state[param]["buffer"] = torch.ones_like(param)
        for param, entries in self.state.items():
            if param.grad is not None:
                param.sub_(self.param_groups[0]["lr"] * entries["buffer"] * param.grad)
            entries["buffer"].mul_(0.5)
        if self.counts:
            self.state["count"] = 1  # type: ignore[index] # that is what is tried


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_each_class_sees_its_own_state_alone() -> None:
    model, reference = twins(language_model)
    (hidden, outer, rest), (first, *others) = parted(model), parted(reference)
    groups = [{"params": hidden, "optimizer_class": optim.Muon}, {"params": [*outer, *rest]}]
    optimizer = ZeroRedundancyOptimizer(groups, StandInLookingAtItsState)
    plain = [optim.Muon(first), StandInLookingAtItsState([param for params in others for param in params])]
    for step in range(3):
        step_all(model, [optimizer], step)
        step_all(reference, plain, step)
        assert_bitwise_equal(model, reference, f"after step {step}")
    for each in optimizer.local_optimizers:
        assert set(each.state_dict()) == {"state", "param_groups"}
    counting = ZeroRedundancyOptimizer(groups, StandInLookingAtItsState, counts=True)
    set_gradients(model.parameters(), 0)
    with pytest.raises(RuntimeError, match="state under the key 'count', which belongs to no parameter"):
        counting.step()


@pytest.mark.ranks(1)
def test_what_a_group_says_itself_goes_before_the_constructors_arguments() -> None:
    hidden, outer, rest = parted(language_model())
    groups = [
        {"params": hidden, "optimizer_class": partial(optim.AdamW, lr=0.1)},
        {"params": outer, "optimizer_defaults": {"lr": 0.2}},
        {"params": rest, "lr": 0.3, "optimizer_defaults": {"lr": 0.2}},
    ]
    optimizer = ZeroRedundancyOptimizer(groups, optim.AdamW, lr=0.5, weight_decay=0.7)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2, 0.3]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.7] * 3


@pytest.mark.ranks(1)
def test_a_constructor_sees_the_names_of_its_parameters() -> None:
    class ByName(optim.SGD):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, lr=lr)
            for group in self.param_groups:
                group["weight_decay"] = 0.0 if "norm" in group["param_names"][0] else 0.5

    groups = [{"params": [(name, nn.Parameter(torch.ones(2)))]} for name in ("norm", "weight")]
    optimizer = ZeroRedundancyOptimizer(groups, ByName)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.5]


@pytest.mark.ranks(2)
def test_level_counts_the_state_of_master_weights_and_takes_classes_that_cannot_be_tried(rank: int) -> None:
    model = large_language_model().bfloat16()
    optimizer = sharded(model, partition="level", master_weights=True)
    step_all(model, [optimizer], 0)
    here = optimizer.describe().state_bytes_here
    assert here == pytest.approx(optimizer.plan.state_loads[rank], rel=0.01)

    class Untried(optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise RuntimeError("call train() first")

    assert ZeroRedundancyOptimizer([*model.parameters()], Untried, partition="level").plan.imbalances["state"] >= 1


@pytest.mark.ranks(1)
def test_a_cost_of_the_user_is_taken_for_all_classes_also_if_it_is_the_usual_one_of_one() -> None:
    model = language_model()
    elements = sum(param.numel() for param in model.parameters())
    assert sharded(model, cost=numel).plan.loads == (elements,)
    assert sharded(model).plan.loads[0] > 100 * elements


class LiveBytes(TorchDispatchMode):
    """Notes how many bytes of new tensors live at once at most."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {each.untyped_storage().data_ptr() for each in tree_leaves(args) if isinstance(each, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and not each.is_meta and each.untyped_storage().data_ptr() not in before:
                self.live += each.nbytes
                self.peak = max(self.peak, self.live)
                weakref.finalize(each.untyped_storage(), self._freed, each.nbytes)
        return result

    def _freed(self, nbytes: int) -> None:
        self.live -= nbytes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("partition", ["whole", "level"])
def test_a_class_that_makes_state_in_its_constructor_makes_it_for_this_ranks_shards_alone(partition: Any) -> None:
    matrices, others = ([nn.Parameter(torch.ones(256, 256)) for _ in range(4)] for _ in range(2))
    groups = [{"params": matrices, "optimizer_class": optim.Muon}, {"params": others}]
    with LiveBytes() as here:
        optimizer = ZeroRedundancyOptimizer(groups, optim.Adagrad, partition=partition)
    share = 2 * others[0].nbytes
    assert optimizer.describe().state_bytes_here == pytest.approx(share, rel=0.01)
    assert share <= here.peak <= 1.1 * share


class StandInWithPower(optim.SGD):
    """Has an argument that is no hyperparameter."""

    def __init__(self, params: Any, lr: float = 0.1, power: float = 1.0) -> None:
        super().__init__(params, lr=lr)
        self.power = power


@pytest.mark.ranks(2)
def test_arguments_of_constructors_that_are_no_hyperparameters_are_in_no_group() -> None:
    hidden, *others = parted(language_model())
    groups = [{"params": hidden, "optimizer_class": optim.Muon}, *[{"params": params} for params in others]]
    optimizer = ZeroRedundancyOptimizer(groups, StandInWithPower, power=2.0)
    assert vars(optimizer.local_optimizers[1])["power"] == 2.0
    assert all("power" not in group for group in optimizer.param_groups)

"""A class per param group: one sharded optimizer does what a plain optimizer for each class does in one process."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ddp_training import HOOKS, register, steps_in_backward
from support.example_scripts import script
from support.training import EVERYWHERE, assert_bitwise_equal, assert_same_state, set_gradients, twins
from support.two_classes import groups_of, language_model, parted, separate, sharded, step_all
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zeroshard import AveragedParameters, ZeroRedundancyOptimizer, join_state_dicts, split_state_dict
from zeroshard_comm import DisagreementError
from zeroshard_core import adam, newton_schulz, numel
from zeroshard_testing import assert_replicas_equal

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


def large_language_model() -> nn.Sequential:
    """One whose embedding may be cut."""
    return nn.Sequential(nn.Embedding(3000, 24), *list(language_model())[1:])


@pytest.mark.by_default("2-params | 3-views")
@pytest.mark.ranks(1, 2, 3, 4, backend=EVERYWHERE)
@pytest.mark.parametrize("as_bucket_view", [False, True], ids=["params", "views"])
def test_muon_and_adamw(rank: int, as_bucket_view: bool) -> None:
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
def test_a_checkpoint_goes_to_and_from_separate_optimizers(rank: int) -> None:
    model, reference = twins(language_model)
    optimizer, plain = sharded(model), separate(reference)
    step_all(model, [optimizer], 0)
    step_all(reference, plain, 0)
    optimizer.consolidate_state_dict(to=0)
    buffer = io.BytesIO()
    torch.save(join_state_dicts([each.state_dict() for each in plain], optimizer.group_assignment), buffer)
    buffer.seek(0)
    other = sharded(copied := copy.deepcopy(reference))
    other.load_state_dict(torch.load(buffer, weights_only=True))
    if rank == 0:
        for each, part in zip(plain, split_state_dict(optimizer.state_dict(), [0, 1, 1]), strict=True):
            each.load_state_dict(part)
    for step in range(1, 3):
        step_all(model, [optimizer], step)
        step_all(copied, [other], step)
        step_all(reference, plain, step)
        assert_bitwise_equal(model, reference, f"after step {step}")
        assert_bitwise_equal(copied, reference, f"after step {step}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_group_of_a_third_class_is_added() -> None:
    model, reference = twins(language_model)
    optimizer, plain = sharded(model), separate(reference)
    step_all(model, [optimizer], 0)
    step_all(reference, plain, 0)
    one, other = (nn.Parameter(torch.ones(8, device=next(model.parameters()).device)) for _ in range(2))
    optimizer.add_param_group({"params": [one], "optimizer_class": partial(optim.SGD, momentum=0.9), "lr": 0.1})
    plain.append(optim.SGD([other], lr=0.1, momentum=0.9))
    assert optimizer.group_assignment == [0, 1, 1, 2]
    assert set(optimizer.defaults) == {"lr", "weight_decay"}
    for step in range(1, 4):
        one.grad, other.grad = (torch.full_like(each, step) for each in (one, other))
        step_all(model, [optimizer], step)
        step_all(reference, plain, step)
    assert_bitwise_equal(model, reference, "in the end")
    assert torch.equal(one, other)


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


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_what_is_refused(rank: int) -> None:
    model = language_model()
    hidden, outer, rest = parted(model)
    optimizer = sharded(model)
    with pytest.raises(AttributeError, match=r"2 local optimizers, for Muon \+ AdamW: they are in local_optimizers"):
        _ = optimizer.optim
    with pytest.raises(TypeError, match="takes no keyword arguments with several optimizer classes, but got grads"):
        optimizer.step(grads=None)
    with pytest.raises(ValueError, match="param group 0 has 'betas', which Muon does not take, but AdamW does"):
        ZeroRedundancyOptimizer(
            [{"params": hidden, "optimizer_class": optim.Muon, "betas": (0, 0)}, {"params": rest}], optim.AdamW
        )
    with pytest.raises(ValueError, match=r"Muon, the class of param group 0, is not known .* Use partition='level'"):
        sharded(model, partition="split")
    with pytest.raises(ValueError, match="only supports 2D"):
        ZeroRedundancyOptimizer([{"params": rest, "optimizer_class": optim.Muon}, {"params": outer}], optim.AdamW)
    with pytest.raises(TypeError, match="must be an optimizer class, but got SGD"):
        ZeroRedundancyOptimizer([{"params": rest, "optimizer_class": optim.SGD(rest)}, {"params": outer}], optim.AdamW)
    with pytest.raises(ValueError, match="cannot be sharded"):
        ZeroRedundancyOptimizer([{"params": rest, "optimizer_class": optim.LBFGS}, {"params": outer}], optim.AdamW)
    other = [optim.Muon, optim.SGD][rank]
    with pytest.raises(RuntimeError, match="optimizer is 'Muon, AdamW, AdamW' on rank 0 and 'SGD, AdamW, AdamW' on"):
        ZeroRedundancyOptimizer([{**groups_of(model)[0], "optimizer_class": other}, *groups_of(model)[1:]], optim.AdamW)
    muon, adamw = separate(model)
    for state_dict in (muon.state_dict(), adamw.state_dict()):
        with pytest.raises(ValueError, match="the assignment names"):
            join_state_dicts([state_dict, state_dict], [0, 1, 1])
    swapped = optimizer.state_dict()
    swapped["param_groups"] = [{**group, "amsgrad": False} for group in swapped["param_groups"]]
    with pytest.raises(ValueError, match="loaded state dict: group 0 has 'amsgrad', which Muon does not take"):
        optimizer.load_state_dict(swapped)
    groups = len(optimizer.param_groups)
    with pytest.raises(ValueError, match="param group 3 has 'ns_steps', which AdamW does not take, but Muon does"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "ns_steps": 5})
    assert len(optimizer.param_groups) == groups
    step_all(model, [optimizer], 0)


@pytest.mark.by_default(
    "2-reduce_to_owner_hook-whole | 2-hook_with_zero_step-level | 2-hook_with_zero_step_interleaved-whole"
)
@pytest.mark.ranks(1, 2, 3, backend=EVERYWHERE)
@pytest.mark.parametrize("partition", ["whole", "level"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks(hook: str, partition: str, rank: int) -> None:
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


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_distributed_checkpoint(flat: bool, ranks_tmp_path: Path) -> None:
    model, reference = twins(language_model)
    optimizer, plain = sharded(model), separate(reference)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    step_all(model, [optimizer], 0)
    step_all(reference, plain, 0)
    dcp.save(get_optimizer_state_dict(model, optimizer, options=options), checkpoint_id=ranks_tmp_path / "checkpoint")
    other = sharded(copied := copy.deepcopy(reference))
    found = get_optimizer_state_dict(copied, other, options=options)
    dcp.load(found, checkpoint_id=ranks_tmp_path / "checkpoint")
    set_optimizer_state_dict(copied, other, found, options=options)
    for step in range(1, 3):
        step_all(copied, [other], step)
        step_all(reference, plain, step)
        assert_bitwise_equal(copied, reference, f"after step {step}")


@pytest.mark.ranks(3, backend=EVERYWHERE)
def test_master_weights_and_averages(rank: int) -> None:
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


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_plain_checkpoint_is_loaded_into_the_groups_of_one_class() -> None:
    model, reference = twins(language_model)
    optimizer, plain = sharded(model), separate(reference)
    step_all(model, [optimizer], 0)
    step_all(reference, plain, 0)
    # The others keep their state.
    other = separate(copy.deepcopy(reference))[1]
    other.load_state_dict(plain[1].state_dict())
    for entries in other.state.values():
        entries["exp_avg"].mul_(0.5)
    optimizer.load_state_dict(other.state_dict(), group=1)
    plain[1].load_state_dict(other.state_dict())
    for step in range(1, 3):
        step_all(model, [optimizer], step)
        step_all(reference, plain, step)
        assert_bitwise_equal(model, reference, f"after step {step}")


@pytest.mark.exhaustive_at(4)
@pytest.mark.ranks(2, 3, 4, backend=EVERYWHERE)
def test_level(rank: int) -> None:
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


@pytest.mark.ranks(2)
def test_what_differs_between_ranks_is_told_on_both(rank: int) -> None:
    model = language_model()
    hidden, outer, rest = parted(model)
    groups = [{"params": hidden, "optimizer_class": optim.Muon}, {"params": [*outer, *rest]}]
    optimizer = ZeroRedundancyOptimizer(groups, optim.AdamW)
    set_gradients(model.parameters(), 0)
    with pytest.raises(TypeError, match=r"rank 1: step\(\) takes no keyword arguments with several optimizer classes"):
        optimizer.step(**({"grads": None} if rank else {}))
    optimizer.step()
    groups[0]["optimizer_class"], groups[0]["optimizer_defaults"] = StandInLookingAtItsState, {"counts": bool(rank)}
    with pytest.raises(DisagreementError, match=r"optimizer_defaults is .*False.* on rank 0 and .*True"):
        ZeroRedundancyOptimizer(groups, optim.AdamW)


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


class StandInThatCounts(optim.SGD):
    """Counts steps in its groups, as schedule-free classes do, but only in those of which it steps a tensor.

    As a number, in a tensor, and beside a tensor and an object, which cannot be sent; ``n`` keeps its first value.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.update({"k": group.get("k", 0), "t": group.get("t", torch.zeros(())), "n": 1, "odd": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(group["lr"] * group["n"] / (1 + group["k"] + group["t"].to(param.device)) * param.grad)
            group["k"] += bool(group["params"])
            group["t"] = group["t"] + bool(group["params"])
            group["n"] = int(bool(group["params"]))
            group["odd"] = {"tensor": torch.ones(3), "object": object}


@pytest.mark.ranks(3, backend=EVERYWHERE)
def test_what_a_class_writes_into_a_group_is_taken_from_the_lowest_rank_that_steps_it(rank: int) -> None:
    model, reference = twins(language_model)

    def groups(of: nn.Module) -> list[dict[str, Any]]:
        hidden, outer, rest = parted(of)
        return [{"params": rest}, {"params": hidden[:1], "lr": 0.01}, {"params": outer, "optimizer_class": optim.AdamW}]

    def last_rank_first(tensors: Any, loads: Any, cost: Any) -> list[tuple[int, ...]]:
        return [(2 - spec.group,) for spec in tensors]

    def plain() -> list[optim.Optimizer]:
        *counted, outer = groups(reference)
        return [StandInThatCounts(counted), optim.AdamW(outer["params"])]

    def steps(optimizer: optim.Optimizer, expected: list[optim.Optimizer], seeds: range) -> None:
        for step in seeds:
            step_all(model, [optimizer], step)
            step_all(reference, expected, step)
        assert_bitwise_equal(model, reference, f"after step {seeds[-1]}")

    optimizer, expected = ZeroRedundancyOptimizer(groups(model), StandInThatCounts, partition=last_rank_first), plain()
    steps(optimizer, expected, range(3))
    assert [group["k"] for group in optimizer.param_groups[:2]] == [3, 3]
    assert [group["n"] for group in optimizer.param_groups[:2]] == [1, 1]
    assert [group["t"].item() for group in optimizer.param_groups[:2]] == [3, 3]
    optimizer.consolidate_state_dict(to=0)
    saved = optimizer.state_dict() if rank == 0 else {}
    if rank == 0:
        assert [group.get("k") for group in saved["param_groups"]] == [3, 3, None]
        assert [group.get("n") for group in saved["param_groups"]] == [1, 1, None]
        assert [group["t"].item() for group in saved["param_groups"][:2]] == [3, 3]
        for group in saved["param_groups"]:
            group.pop("odd", None)
    resumed = ZeroRedundancyOptimizer(groups(model), StandInThatCounts)
    resumed.load_state_dict(saved, from_rank=0)
    steps(resumed, expected, range(3, 5))


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_checkpoint_is_loaded_after_a_class_with_a_name_of_an_older_group_was_added() -> None:
    model = language_model()
    hidden, outer, rest = parted(model)
    optimizer = ZeroRedundancyOptimizer(
        [{"params": hidden, "optimizer_class": optim.Muon, "momentum_decay": 0.5}, {"params": outer}], optim.AdamW
    )
    optimizer.add_param_group({"params": rest, "optimizer_class": optim.NAdam})
    step_all(model, [optimizer], 0)
    assert optimizer.param_groups[0]["momentum_decay"] == 0.5
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.ranks(2)
def test_the_group_of_a_load_is_the_same_on_all_ranks(rank: int) -> None:
    model = language_model()
    optimizer = sharded(model)
    with pytest.raises(DisagreementError, match=r"group of load_state_dict\(\) is 0 on rank 0 and 1 on rank 1"):
        optimizer.load_state_dict(separate(language_model())[rank].state_dict(), group=rank)
    step_all(model, [optimizer], 0)


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


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("first", "added"),
    [
        ({"optimizer_class": optim.AdamW}, {}),
        ({"optimizer_class": partial(optim.Adam, lr=0.5, amsgrad=True)}, {"lr": 0.1}),
        ({"optimizer_class": optim.Muon}, {"lr": 0.2}),
    ],
    ids=["another class", "other arguments", "Muon"],
)
def test_a_group_that_is_added_without_a_class_has_the_defaults_of_the_constructors(first: Any, added: Any) -> None:
    one, two, three = (nn.Parameter(torch.ones(4, 4)) for _ in range(3))
    optimizer = ZeroRedundancyOptimizer([{"params": [one], **first}], optim.Adam, weight_decay=0.3)
    optimizer.add_param_group({"params": [two], **added})
    expected = optim.Adam([{"params": [three], **added}], weight_decay=0.3)
    assert {**optimizer.param_groups[1], "params": ()} == {**expected.param_groups[0], "params": ()}
    for step in range(1, 3):
        for param in (one, two, three):
            param.grad = torch.full_like(param, step)
        optimizer.step()
        expected.step()
    assert torch.equal(two, three)


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


@pytest.mark.ranks(2)
def test_loads_that_do_not_fit_the_classes_are_refused() -> None:
    model = language_model()
    optimizer, plain = sharded(model), separate(model)
    step_all(model, [optimizer], 0)
    whole: Any = optimizer.state_dict()
    for group in (5, -1, True, "a"):
        with pytest.raises(ValueError, match=r"load_state_dict\(group=.*\): there are groups 0 to 2"):
            optimizer.load_state_dict(plain[0].state_dict(), group=group)  # type: ignore[arg-type] # that is tried
    with pytest.raises(TypeError, match="has 'state' and 'param_groups'"):
        optimizer.load_state_dict({"state": {}}, group=0)
    with pytest.raises(ValueError, match="state under 'count', which belongs to no parameter"):
        optimizer.load_state_dict({**whole, "state": {**whole["state"], "count": 3}})
    whole["param_groups"][0]["optimizer_class"] = optim.Muon
    with pytest.raises(ValueError, match="group 0 has 'optimizer_class', which no state dict holds"):
        optimizer.load_state_dict(whole)
    # A hook may return something else than the state.
    optimizer.register_state_dict_post_hook(lambda _, found: {"optimizer": found})
    optimizer.load_state_dict(plain[0].state_dict(), group=0)

"""Ranks whose parameters, settings or hyperparameters differ: an error on every rank that names the difference."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ddp_training import Twins
from support.pairs import Optimizers, Pair, go_on, trained
from support.training import set_gradients, small_model, twins
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError
from zeroshard_testing import assert_replicas_equal


@pytest.mark.ranks(2, backend="gloo")
def test_settings_that_differ_are_named(rank: int) -> None:
    with pytest.raises(DisagreementError, match="optimizer is 'Adam' on rank 0 and 'AdamW' on rank 1"):
        ZeroRedundancyOptimizer(small_model().parameters(), optim.AdamW if rank else optim.Adam)
    with pytest.raises(DisagreementError, match="parameters_as_bucket_view is False on rank 0"):
        ZeroRedundancyOptimizer(small_model().parameters(), optim.Adam, parameters_as_bucket_view=rank == 1)


np = pytest.importorskip("numpy", reason="hyperparameters are NumPy's numbers too")

HYPERPARAMETERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a number": ({"lr": 0.1}, {"lr": 0.5}, "lr of group 0 is '0.1' on rank 0 and '0.5' on rank 1"),
    "the default": ({}, {"weight_decay": 0.5}, "weight_decay of group 0 is '0' on rank 0 and '0.5' on rank 1"),
    "a tensor": ({"lr": torch.tensor(0.5)}, {"lr": torch.tensor(0.25)}, "lr of group 0 is '0.5' .* '0.25' on rank 1"),
    "a pair": ({"betas": (0.5, 0.5)}, {"betas": (0.5, 0.25)}, r"betas of group 0 is '\(0.5, 0.5\)' .* '\(0.5, 0.25\)'"),
    "a flag": ({"amsgrad": True}, {}, "amsgrad of group 0 is 'True' on rank 0 and 'False' on rank 1"),
    "NumPy's number": ({"lr": np.float32(0.5)}, {"lr": np.float32(0.25)}, "lr of group 0 is '0.5' .* '0.25' on rank 1"),
}


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_hyperparameters_that_differ_are_named(rank: int, name: str) -> None:
    *settings, words = HYPERPARAMETERS[name]
    with pytest.raises(DisagreementError, match=rf"ZeroRedundancyOptimizer\(\): .*{words}"):
        ZeroRedundancyOptimizer(small_model().parameters(), optim.Adam, **settings[rank])
    with pytest.raises(DisagreementError, match=words):
        ZeroRedundancyOptimizer(small_model().parameters(), functools.partial(optim.Adam, **settings[rank]))
    with pytest.raises(DisagreementError, match=words):
        ZeroRedundancyOptimizer([{"params": small_model().parameters(), **settings[rank]}], optim.Adam)
    pair, optimizers = trained()
    added = [{"params": [nn.Parameter(torch.ones(3))], **settings[rank]} for _ in pair]
    with pytest.raises(DisagreementError, match=rf"add_param_group\(\): .*{words.replace('group 0', 'group 1')}"):
        optimizers[0].add_param_group(added[0])
    assert len(optimizers[0].param_groups) == len(optimizers[0].optim.param_groups) == 1
    go_on(pair, optimizers, range(2, 4))


@pytest.mark.ranks(2, backend="gloo")
def test_hyperparameters_that_cannot_be_compared_are_not(rank: int) -> None:
    class Scheduled(optim.SGD):
        def __init__(self, params: Any, lr: float, schedule: Callable[[int], float]) -> None:
            super().__init__(params, lr)
            for group in self.param_groups:
                group["schedule"] = schedule

    pair = twins()
    # Another function on every rank.
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), Scheduled, lr=0.1, schedule=lambda step: 0.5**step)
    plain = Scheduled(pair[1].parameters(), lr=0.1, schedule=lambda step: 0.5**step)
    go_on(pair, (sharded, plain), range(2))
    assert sharded.param_groups[0]["schedule"](2) == 0.25


AS_BUCKET_VIEWS = pytest.mark.parametrize("as_bucket_view", [False, True], ids=["params", "views"])


@pytest.mark.ranks(3, backend="gloo")
@AS_BUCKET_VIEWS
def test_a_learning_rate_that_one_rank_alone_has_changed_is_named(rank: int, as_bucket_view: bool) -> None:
    pair, optimizers = trained(as_bucket_view=as_bucket_view)
    if rank == 1:
        optimizers[0].param_groups[0]["lr"] = 5.0
    set_gradients(pair[0].parameters(), 2)
    with pytest.raises(DisagreementError, match=r"lr of group 0 is '0.001' on rank 0 and '5' on rank 1"):
        optimizers[0].step()
    assert_replicas_equal(pair[0].parameters())
    optimizers[0].param_groups[0]["lr"] = 0.001
    optimizers[0].load_state_dict(optimizers[1].state_dict())
    pair[0].load_state_dict(pair[1].state_dict())
    go_on(pair, optimizers, range(2, 4))


EDITED: dict[str, tuple[Any, Any, str]] = {
    "a number of 32 bits": (np.float32(0.5), np.float32(0.25), "'0.5' on rank 0 and '0.25' on rank 1"),
    "a number of 64 bits": (np.float64(0.1), np.float64(0.2), "'0.1' on rank 0 and '0.2' on rank 1"),
    "an integer": (np.int64(3), np.int64(4), "'3' on rank 0 and '4' on rank 1"),
    "a flag": (np.bool_(True), np.bool_(False), "'True' on rank 0 and 'False' on rank 1"),
    "an array": (np.array([0.5, 1.0]), np.array([0.5, 2.0]), r"'\(0.5, 1\)' on rank 0 and '\(0.5, 2\)' on rank 1"),
    "a list": ([0.5, [1, None]], [0.5, [2, None]], r"'\(0.5, \(1, None\)\)' on rank 0 .* '\(0.5, \(2, None\)\)'"),
    "a tuple of NumPy's": ((np.float32(0.5),), (np.float32(0.25),), r"'\(0.5\)' on rank 0 and '\(0.25\)' on rank 1"),
    "a dict": ({"b": 2, "a": [1.5]}, {"a": [2.5], "b": 2}, r"\{'a': \(1.5\), 'b': 2\}\\?.* on rank 0 and .*2.5"),
    "another kind": (np.float32(0.5), [0.5], r"'0.5' on rank 0 and '\(0.5\)' on rank 1"),
    "complex": (1 + 2j, 1 + 3j, r"\(1\+2j\).* on rank 0 and .*\(1\+3j\)"),
}


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("name", EDITED)
def test_numbers_of_numpy_lists_and_dicts_that_one_rank_alone_has_changed_are_named(rank: int, name: str) -> None:
    *values, words = EDITED[name]
    pair, optimizers = trained()
    optimizers[0].param_groups[0]["schedule"] = values[rank]
    set_gradients(pair[0].parameters(), 2)
    with pytest.raises(DisagreementError, match=f"schedule of group 0 is .*{words}"):
        optimizers[0].step()
    assert_replicas_equal(pair[0].parameters())


@pytest.mark.ranks(2, backend="gloo")
def test_a_list_that_one_rank_alone_has_changed_in_place_is_named(rank: int) -> None:
    pair, optimizers = trained()
    for optimizer in optimizers:
        optimizer.param_groups[0]["schedule"] = {"milestones": [10, 20]}
    go_on(pair, optimizers, range(2, 4))
    if rank == 1:
        optimizers[0].param_groups[0]["schedule"]["milestones"].append(30)
    set_gradients(pair[0].parameters(), 4)
    with pytest.raises(DisagreementError, match=r"schedule of group 0 .*\(10, 20\).* on rank 0 and .*\(10, 20, 30\)"):
        optimizers[0].step()


@pytest.mark.ranks(2, backend="gloo")
def test_hyperparameters_of_other_classes_that_mean_the_same_are_equal(rank: int) -> None:
    pair, optimizers = trained()
    same = [{"eps": 1e-8, "betas": (0.9, 0.999)}, {"eps": np.float64(1e-8), "betas": [np.float64(0.9), 0.999]}]
    optimizers[0].param_groups[0].update(same[rank])
    go_on(pair, optimizers, range(2, 4))


@pytest.mark.ranks(2, backend="gloo")
def test_what_ranks_need_not_have_alike_may_differ(rank: int) -> None:
    pair, optimizers = trained()
    optimizers[0].param_groups[0]["note"] = object()
    optimizers[0].param_groups[0]["counts"] = torch.tensor(float(rank))
    optimizers[0].param_groups[0]["notes"] = [rank, object()]
    set_gradients(pair[0].parameters(), 2)
    optimizers[0].step()
    assert_replicas_equal(pair[0].parameters())


class Counting(optim.SGD):
    """Keeps counters in its groups: of steps, and of tensors that it has seen, which differs between ranks."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.setdefault("count", 0)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] += bool(group["params"])
            group["latest"] = group.get("latest", 0) + len(group["params"])
        return super().step(closure)


@pytest.mark.ranks(3, backend="gloo")
def test_what_the_optimizer_itself_counts_may_differ_between_ranks(rank: int) -> None:
    pair = twins(lambda: nn.Linear(3, 2))
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), Counting)
    plain = Counting(pair[1].parameters())
    go_on(pair, (sharded, plain), range(3))
    assert sharded.param_groups[0]["count"] == 3
    for optimizer in (sharded, plain):
        optimizer.param_groups[0]["lr"] = 0.01
    go_on(pair, (sharded, plain), range(3, 5))
    if rank == 1:
        sharded.param_groups[0]["lr"] = 0.5
    set_gradients(pair[0].parameters(), 5)
    with pytest.raises(DisagreementError, match=r"lr of group 0 is '0.01' on rank 0 and '0.5' on rank 1"):
        sharded.step()


# ---------------------------------------------------------------------- calls


@pytest.mark.ranks(3, backend="gloo")
def test_different_calls_are_named(rank: int) -> None:
    pair, optimizers = trained()
    sharded = optimizers[0]
    group = {"params": [nn.Parameter(torch.zeros(3))]}
    with pytest.raises(DisagreementError, match=r"ranks 0, 2 called consolidate.*rank 1 called add_param_group"):
        sharded.add_param_group(group) if rank == 1 else sharded.consolidate_state_dict()
    with pytest.raises(DisagreementError, match=r"rank 1 called consolidate_state_dict\(to=1\)"):
        sharded.consolidate_state_dict(to=int(rank == 1))
    with pytest.raises(ValueError, match="group rank from 0 to 2"):
        sharded.consolidate_state_dict(to=7)
    go_on(pair, optimizers, range(2, 4))


def two_alike() -> list[tuple[Pair, Optimizers]]:
    """Return two trainings that nothing tells apart but the order in which their optimizers were built."""
    pairs = twins(), twins()
    return [
        (pair, (ZeroRedundancyOptimizer(pair[0].parameters(), optim.Adam), optim.Adam(pair[1].parameters())))
        for pair in pairs
    ]


MIXED_UP: dict[str, Callable[[ZeroRedundancyOptimizer], Any]] = {
    "step()": lambda optimizer: optimizer.step(),
    "consolidate_state_dict(to=0)": lambda optimizer: optimizer.consolidate_state_dict(),
    "add_param_group()": lambda optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "load_state_dict()": lambda optimizer: optimizer.load_state_dict(
        optim.Adam(small_model().parameters()).state_dict()
    ),
}


@pytest.mark.exhaustive_at(2)
@pytest.mark.ranks(2, 3, backend="gloo")
@pytest.mark.parametrize("call", MIXED_UP)
def test_two_optimizers_that_look_alike_do_not_pass_for_each_other(rank: int, world_size: int, call: str) -> None:
    made = two_alike()
    for number, (pair, optimizers) in enumerate(made):
        go_on(pair, optimizers, range(number, number + 2))
    for pair, _ in made:
        set_gradients(pair[0].parameters(), 5)
    before = [[param.detach().clone() for param in pair[0].parameters()] for pair, _ in made]
    others = "rank 0" if world_size == 2 else "ranks 0, 2"
    told = (
        rf"{others} called {re.escape(call)} after 2 steps of optimizer 1 \(Adam\); "
        rf"rank 1 called {re.escape(call)} after 2 steps of optimizer 2 \(Adam\)"
    )
    with pytest.raises(DisagreementError, match=told):
        MIXED_UP[call](made[rank == 1][1][0])
    for (pair, _), params in zip(made, before, strict=True):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(pair[0].parameters(), params, strict=True))
    # Used rightly, both go on.
    for number, (pair, optimizers) in enumerate(made):
        go_on(pair, optimizers, range(number + 2, number + 4))


@pytest.mark.ranks(3, backend="gloo")
def test_an_optimizer_that_one_rank_steps_twice_is_told(rank: int) -> None:
    (pair, optimizers), (_, others) = two_alike()
    set_gradients(pair[0].parameters(), 0)
    for step in range(2):
        told = r"ranks 0, 2 called step\(\) after 0 steps of optimizer 2 .* rank 1 called .* 1 steps of optimizer 1"
        if step == 0:
            optimizers[0].step()
        else:
            with pytest.raises(DisagreementError, match=told):
                (optimizers if rank == 1 else others)[0].step()
    optimizers[0].step()
    others[0].step()
    assert_replicas_equal(pair[0].parameters())


@pytest.mark.ranks(2, backend="gloo")
def test_optimizers_of_other_shapes_that_change_places_are_an_error_on_every_rank(rank: int) -> None:
    models = [small_model(), nn.Linear(33, 100)]
    optimizers = [ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1) for model in models]
    for model in models:
        set_gradients(model.parameters(), 0)
    with pytest.raises(DisagreementError, match=r"of optimizer 1 .* of optimizer 2"):
        optimizers[rank].step()
    for optimizer in optimizers:
        optimizer.step()
    for model in models:
        assert_replicas_equal(model.parameters())


@pytest.mark.ranks(2, backend="gloo")
def test_clipping_another_optimizer_on_one_rank_is_told(rank: int) -> None:
    trainings = [Twins(), Twins()]
    for number in (1, 2):
        for training in trainings:
            training.backward(training.ddp, number)
        with pytest.raises(
            DisagreementError, match=r"clip_grad_norm_\(\) .* optimizer 1 .* clip_grad_norm_\(\) .* optimizer 2"
        ):
            trainings[rank].optimizer.clip_grad_norm_(1.0)
        for training in trainings:
            training.optimizer.clip_grad_norm_(1.0)
            training.optimizer.step()
            training.optimizer.zero_grad()
    for training in trainings:
        assert_replicas_equal(training.ddp.parameters())

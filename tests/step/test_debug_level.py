"""TORCH_DISTRIBUTED_DEBUG: DETAIL finds faults in the step where they happen, OFF costs nothing, INFO logs once."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.combinations import FLAG, each_of
from support.ddp_training import HOOKS
from support.debugged_training import Training
from support.training import set_gradients, small_model
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from zeroshard import ZeroRedundancyOptimizer
from zeroshard.debug import checks, describe
from zeroshard_comm import DisagreementError, ParameterBroadcaster
from zeroshard_testing import assert_replicas_equal

BOTH = pytest.mark.parametrize("hook", ["none", "reduce_to_owner_hook"])


@pytest.fixture(autouse=True)
def _restores_the_level() -> Iterator[None]:
    level = dist.get_debug_level()
    yield
    dist.set_debug_level(level)


def found(training: Training, *words: str, kind: type[Exception] = RuntimeError) -> None:
    """The next step raises on this rank, and says these words."""
    with pytest.raises(kind) as error:
        training.iterate()
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_a_parameter_that_ddp_ignores_and_that_differs_from_the_start_is_found(rank: int, frozen: bool) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    model = small_model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.bias"])
    model[1].bias.requires_grad_(not frozen)
    with torch.no_grad():
        # Only the bias is not broadcast by DDP, which may be built later.
        model[0].weight.add_(rank)
        if rank == 2:
            model[1].bias.fill_(float("nan"))
    words = r"parameter, ignored by DistributedDataParallel, tensor 3 '1.bias' differs between ranks: on rank"
    with pytest.raises(DisagreementError, match=words):
        ZeroRedundancyOptimizer(model.named_parameters(), optim.Adam)


@pytest.mark.ranks(2, backend="gloo")
@each_of("how", ["in place", "replaced", "dropped"], hook=HOOKS[1:])
def test_state_that_was_edited_after_the_backward_that_stepped_is_found(rank: int, hook: str, how: str) -> None:
    training = Training(hook)
    training.iterate(3)
    index = training.owned_by(1)
    training.backward()
    if rank == 1:
        entries = training.state_of(index)
        if how == "in place":
            entries["exp_avg"].mul_(0.5)
        elif how == "replaced":
            training.optimizer.state[training.params[index]] = {**entries, "step": entries["step"] + 1}
        else:
            del training.optimizer.state[training.params[index]]
        with pytest.raises(RuntimeError, match=rf"the state of tensor {index} .* was changed after the backward"):
            training.optimizer.step()
    else:
        training.optimizer.step()
    with pytest.raises(RuntimeError, match=rf"the state of tensor {index} .* was changed after the backward"):
        training.iterate()


@pytest.mark.by_default("2-other values | 3-none")
@pytest.mark.ranks(2, 3, backend="gloo")
@pytest.mark.parametrize("how", ["other values", "none"])
def test_a_gradient_that_differs_is_found(rank: int, world_size: int, how: str) -> None:
    training = Training("none")
    training.iterate(2)
    training.backward()
    if rank == 1:
        training.params[4].grad = None if how == "none" else training.params[4].grad * 2
    owner = training.optimizer.plan.owners[4][0]
    odd = "rank 1" if owner != 1 else "rank 0" if world_size == 2 else "ranks 0, 2"
    words = f"gradient of tensor 4 '2.weight' differs between ranks: on {odd} it is not .* its owner, rank {owner}"
    with pytest.raises(DisagreementError, match=words):
        training.optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
@BOTH
def test_a_parameter_that_one_rank_has_frozen_is_found(rank: int, hook: str) -> None:
    training = Training(hook)
    training.iterate(3)
    training.backward()
    if rank == 1:
        training.params[4].requires_grad_(False).grad = None
    with pytest.raises(DisagreementError, match=r"tensor 4 '2.weight' .*on rank 0, but is frozen on rank 1"):
        training.optimizer.step()


class Inside:
    """Changes what the broadcasters of a rank do, in a simulation: no user's code can."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: Callable[[ParameterBroadcaster], None]) -> None:
        from zeroshard_comm.message_exchange import MessageBroadcaster

        arrive = MessageBroadcaster.arrive

        def arriving(broadcaster: Any) -> None:
            is_first = bool(broadcaster._arriving)
            arrive(broadcaster)
            if is_first:
                after(broadcaster)

        monkeypatch.setattr(MessageBroadcaster, "arrive", arriving)


@pytest.mark.ranks(2, backend="gloo")
@BOTH
def test_simulated_values_that_arrive_damaged_are_found(rank: int, hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(hook)
    training.iterate(3)
    index = training.owned_by(0)

    def damage(_: ParameterBroadcaster) -> None:
        with torch.no_grad():
            training.params[index].view(-1)[0] = 7

    if rank == 1:
        Inside(monkeypatch, damage)
    name = training.optimizer.plan.tensors[index].name
    words = "after parameters were broadcast", f"tensor {index} '{name}'", "the copy on its owner, rank 0"
    found(training, *words, kind=DisagreementError)


@pytest.mark.ranks(2, backend="gloo")
def test_a_gradient_of_a_closure_that_differs_is_found(rank: int) -> None:
    training = Training("none")
    seeds = iter([1, 1, 2 + rank])

    def closure() -> None:
        set_gradients(training.params, next(seeds))

    training.optimizer.step(closure)
    training.optimizer.step(closure)
    with pytest.raises(DisagreementError, match=r"gradient of tensor 0 '0.weight' differs"):
        training.optimizer.step(closure)


@pytest.mark.ranks(2, backend="gloo")
def test_levels_that_differ_are_named(rank: int) -> None:
    with pytest.raises(DisagreementError, match="TORCH_DISTRIBUTED_DEBUG=DETAIL is"):
        Training("none", "DETAIL" if rank else "INFO")


@pytest.mark.ranks(2, backend="gloo")
@each_of("hook", ["none", *HOOKS], partition=["whole", "split"], views=FLAG)
def test_what_all_ranks_change_alike_is_no_fault(hook: str, partition: str, views: bool) -> None:
    training = Training(hook, partition=partition, parameters_as_bucket_view=views)
    training.iterate(3)
    with torch.no_grad():
        for param in training.params:
            param.mul_(0.5)
    training.optimizer.param_groups[0]["lr"] = 0.5
    training.iterate()
    training.optimizer.consolidate_state_dict()
    held = [training.optimizer.state_dict() if dist.get_rank() == 0 else {}]
    training.optimizer.load_state_dict(held[0], from_rank=0)
    training.iterate()
    training.optimizer.optim.state.clear()
    training.iterate(2)
    assert_replicas_equal(training.params)


@pytest.mark.ranks(64, backend="fake", fake_rank=5)
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_one_rank_of_a_large_world_is_no_fault(partition: str) -> None:
    Training("none", partition=partition).iterate(3)


@pytest.mark.ranks(2, backend="gloo")
def test_a_group_made_at_the_level_of_detail_can_be_used() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    # torch compares the calls of the ranks on such a group.
    group = dist.new_group(list(range(dist.get_world_size())))
    training = Training("none", process_group=group, partition="split")
    training.iterate(3)
    training.optimizer.consolidate_state_dict()
    assert_replicas_equal(training.params)


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.ranks(2, backend="gloo")
@BOTH
def test_only_detail_adds_calls_and_operations_to_a_step(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = Counter[str]()
    digest_of = checks.digest_of

    def counted(tensor: torch.Tensor | None) -> int:
        digests[level] += 1
        return digest_of(tensor)

    monkeypatch.setattr(checks, "digest_of", counted)
    words, operations = {}, {}
    for level in ("OFF", "INFO", "DETAIL"):
        training = Training(hook, level)
        training.iterate(4)
        digests.clear()
        training.backward()
        before = training.optimizer.traffic.of("control")
        with Operations() as counting:
            training.optimizer.step()
        words[level] = (training.optimizer.traffic.of("control") - before).calls
        operations[level] = counting.count
        tensors = len(training.params)
        assert digests[level] == {"DETAIL": (2 if hook == "none" else 1) * tensors}.get(level, 0)
    # What ranks compare before a step and at its end; DETAIL adds gradients before it, and parameters after it.
    assert words["OFF"] == words["INFO"]
    assert words["DETAIL"] - words["OFF"] == (2 if hook == "none" else 1)
    assert operations["OFF"] == operations["INFO"] < operations["DETAIL"]


@pytest.mark.ranks(2, backend="gloo")
@BOTH
def test_off_calls_no_function_of_these_modules(hook: str) -> None:
    files = {module.__file__ for module in (checks, describe)}
    called: set[str] = set()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename in files:
            called.add(frame.f_code.co_name)

    for level, has_checks in (("OFF", False), ("INFO", True)):
        training = Training(hook, level)
        training.iterate(4)
        called.clear()
        sys.setprofile(note)
        try:
            training.iterate()
        finally:
            sys.setprofile(None)
        assert ("log" in called) == has_checks
        assert "digest_of" not in called
        assert has_checks or not called


@pytest.mark.by_default("1-none | 2-reduce_to_owner_hook")
@pytest.mark.ranks(1, 2, backend="gloo")
@BOTH
def test_info_logs_after_the_first_step_and_after_changes(
    rank: int, world_size: int, hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="zeroshard.debugging")

    def logged() -> list[str]:
        texts = [record.getMessage() for record in caplog.records if record.name == "zeroshard.debugging"]
        caplog.clear()
        return texts

    training = Training(hook, "INFO")
    assert logged() == []
    training.iterate(4)
    texts = logged()
    # DDP rebuilds its buckets once.
    assert 1 <= len(texts) <= (1 if hook == "none" else 2)
    assert f"rank {rank} of {world_size}" in texts[0]
    assert f"Plan for {world_size} rank" in texts[0]
    assert ("buckets: " in texts[-1]) == (hook == "reduce_to_owner_hook")
    training.iterate(2)
    assert logged() == []
    if hook == "none":
        training.optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(3, dtype=torch.float64)))]})
        training.optimizer.step()
        assert len(logged()) == 1
    Training(hook, "OFF").iterate(2)
    assert logged() == []

"""Input that cannot be used, on all ranks or on one: the same error on every rank, and the optimizer is as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ddp_training import WHERE
from support.pairs import go_on, trained
from support.training import assert_bitwise_equal, cutting, set_gradients, small_model, twins
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError
from zeroshard_testing import assert_replicas_equal

BAD_PARAMS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "tensor": (lambda: torch.zeros(2), TypeError, "single"),
    "not iterable": (lambda: 3, TypeError, "int"),
    "mixed": (lambda: [nn.Parameter(torch.zeros(1)), {"params": []}], TypeError, "one kind"),
    "empty": (list, ValueError, "empty parameter list"),
    "no params": (lambda: [{"lr": 0.1}], ValueError, "'params'"),
}


@pytest.mark.ranks(2, backend="gloo")
@WHERE
@pytest.mark.parametrize("name", BAD_PARAMS)
def test_params_that_cannot_be_used_are_refused(rank: int, where: str, name: str) -> None:
    make, error, words = BAD_PARAMS[name]
    bad = where == "on all ranks" or rank == 1
    with pytest.raises(error, match=words) as caught:
        ZeroRedundancyOptimizer(make() if bad else small_model().parameters(), optim.Adam)
    assert ("rank 1: " in str(caught.value)) == (where == "on rank 1")


@pytest.mark.ranks(3, backend="gloo")
def test_an_optimizer_class_that_cannot_be_built_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=r"rank 1: Adam: Invalid learning rate: -1"):
        ZeroRedundancyOptimizer(small_model().parameters(), optim.Adam, lr=-1.0 if rank == 1 else 1.0)
    with pytest.raises(TypeError, match="no_such_argument"):
        ZeroRedundancyOptimizer(small_model().parameters(), optim.Adam, no_such_argument=1)
    with pytest.raises(ValueError, match="LBFGS cannot be sharded"):
        ZeroRedundancyOptimizer(small_model().parameters(), optim.LBFGS)
    with pytest.raises(ValueError, match="nonsense"):
        ZeroRedundancyOptimizer(small_model().parameters(), optim.Adam, partition="nonsense")
    with pytest.raises(ValueError, match="Muon is not known to be elementwise"):
        ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(64, 64))], optim.Muon, partition=cutting("split"))


@pytest.mark.ranks(2, backend="gloo")
def test_members_that_are_exchanged_without_the_optimizer_are_refused() -> None:
    pair, optimizers = trained()
    members = optimizers[0].param_groups[0]["params"]
    first, members[0] = members[0], nn.Parameter(torch.zeros(64, 40))
    set_gradients(pair[0].parameters(), 5)
    with pytest.raises(RuntimeError, match="members of param_groups"):
        optimizers[0].step()
    members[0] = first
    go_on(pair, optimizers, range(2, 4))


@pytest.mark.ranks(2, backend="gloo")
def test_the_object_can_be_neither_copied_nor_pickled() -> None:
    _, (sharded, _) = trained()
    with pytest.raises(TypeError, match="cannot be pickled or deep-copied"):
        copy.deepcopy(sharded)


# ---------------------------------------------------------------------- steps


AS_BUCKET_VIEWS = pytest.mark.parametrize("as_bucket_view", [False, True], ids=["params", "views"])


@pytest.mark.ranks(2, backend="gloo")
@AS_BUCKET_VIEWS
def test_freezing_on_one_rank_alone_is_told(rank: int, as_bucket_view: bool) -> None:
    (model, _), (sharded, _) = trained(as_bucket_view=as_bucket_view)
    weight = list(model.parameters())[2]
    weight.requires_grad_(rank == 0)
    set_gradients(model.parameters(), 5)
    with pytest.raises(DisagreementError, match=r"tensor 2 'param.2' is trainable .*frozen on rank 1"):
        sharded.step()
    assert_replicas_equal(model.parameters())
    weight.requires_grad_(True)
    set_gradients(model.parameters(), 6)
    sharded.step()
    assert_replicas_equal(model.parameters())


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(
    ("what", "as_bucket_view"),
    [("a sparse gradient", False), ("a frozen tensor", True)],
    ids=["a sparse gradient", "a frozen tensor"],
)
def test_a_rank_that_refuses_a_step_receives_the_others_shards_where_its_data_was_rebound(
    rank: int, as_bucket_view: bool, what: str
) -> None:
    model, _ = twins()
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), optim.Adam, partition=cutting("split"), parameters_as_bucket_view=as_bucket_view
    )
    for step in range(2):
        set_gradients(model.parameters(), step)
        if step == 1 and rank == 0:
            for param in model.parameters():
                param.data = param.data.clone()
            if what == "a sparse gradient":
                model[2].weight.grad = model[2].weight.grad.to_sparse()
            else:
                model[2].weight.requires_grad_(False).grad = None
        if step == 1:
            with pytest.raises((RuntimeError, DisagreementError), match=r"sparse gradient|frozen on rank 0"):
                sharded.step()
        else:
            sharded.step()
        assert_replicas_equal(model.parameters())


@pytest.mark.ranks(2, backend="gloo")
@AS_BUCKET_VIEWS
def test_converting_the_model_on_one_rank_alone_is_told(rank: int, as_bucket_view: bool) -> None:
    (model, _), (sharded, _) = trained(as_bucket_view=as_bucket_view)
    if rank == 1:
        model.double()
    set_gradients(model.parameters(), 5)
    words = "is a view of a flat buffer" if as_bucket_view else "has optimizer state, and has changed its dtype"
    with pytest.raises(RuntimeError if as_bucket_view else ValueError, match=rf"rank 1: tensor .* {words}"):
        sharded.step()


@pytest.mark.ranks(2, backend="gloo")
@AS_BUCKET_VIEWS
def test_a_local_step_that_fails_on_one_rank_is_an_error_on_all(rank: int, as_bucket_view: bool) -> None:
    (model, _), (sharded, _) = trained(as_bucket_view=as_bucket_view)
    set_gradients(model.parameters(), 5)
    if rank == 1:
        for param in model.parameters():
            param.grad = param.grad.to_sparse()
    with pytest.raises(RuntimeError, match="rank 1: Adam does not support sparse gradients"):
        sharded.step()
    assert_replicas_equal(model.parameters())
    set_gradients(model.parameters(), 6)
    sharded.step()
    assert_replicas_equal(model.parameters())


@pytest.mark.ranks(2, backend="gloo")
def test_sparse_gradients_of_cut_tensors_are_refused_before_anything_is_stepped() -> None:
    model, reference = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, partition=cutting("split"))
    for param in model.parameters():
        param.grad = torch.ones_like(param).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradient, but is cut"):
        sharded.step()
    assert_bitwise_equal(model, reference, "after the refused step")


@pytest.mark.ranks(2, backend="gloo")
def test_a_closure_that_raises_on_one_rank_is_an_error_on_all(rank: int) -> None:
    pair, optimizers = trained()

    def closure() -> float:
        if rank == 0:
            raise ZeroDivisionError("no loss today")
        return 0.0

    set_gradients(pair[0].parameters(), 5)
    with pytest.raises(ZeroDivisionError, match="no loss today"):
        optimizers[0].step(closure)
    assert_replicas_equal(pair[0].parameters())


# ---------------------------------------------------------------------- memory


def share_one_memory(module: nn.Module) -> None:
    module[2].bias.data = module[0].weight.data.view(-1)[:300]


@pytest.mark.ranks(2, backend="gloo")
@WHERE
def test_parameters_that_share_memory_are_refused(rank: int, where: str) -> None:
    model = small_model()
    if where == "on all ranks" or rank == 1:
        share_one_memory(model)
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 .* and parameter 5 of group 0 .* share memory"):
        ZeroRedundancyOptimizer(model.named_parameters(), optim.Adam)


@pytest.mark.ranks(2, backend="gloo")
def test_parameters_that_come_to_share_memory_are_refused_until_they_are_mended(rank: int) -> None:
    pair, optimizers = trained()
    before = pair[0][2].bias.data
    if rank == 1:
        share_one_memory(pair[0])
    set_gradients(pair[0].parameters(), 2)
    with pytest.raises(ValueError, match="share memory"):
        optimizers[0].step()
    pair[0][2].bias.data = before
    pair[0].load_state_dict(pair[1].state_dict())
    optimizers[0].load_state_dict(optimizers[1].state_dict())
    go_on(pair, optimizers, range(2, 4))


@pytest.mark.ranks(2, backend="gloo")
def test_views_of_one_tensor_that_do_not_overlap_are_fine() -> None:
    flat = torch.ones(64)
    params = [nn.Parameter(part) for part in (flat[:20], flat[20:40], flat[10:10], flat[40:40], flat[40:])]
    frozen = nn.Parameter(flat[:30], requires_grad=False)
    sharded = ZeroRedundancyOptimizer([*params, frozen], optim.SGD, lr=1.0)
    for param in params:
        param.grad = torch.ones_like(param)
    sharded.step()
    assert torch.equal(flat, torch.zeros(64))

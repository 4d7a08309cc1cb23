"""What a user may hand to the optimizer, and what is made of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zeroshard.plan.groups import read_group, read_groups, specs_of


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def test_tensors_become_one_group() -> None:
    first, second = parameter(2), parameter(3)
    (group,) = read_groups(iter([first, second]))
    assert group["params"][0] is first
    assert group["params"][1] is second


def test_a_generator_in_a_group_is_read_once_and_the_callers_dict_stays_as_it_was() -> None:
    members = [parameter(2), parameter(3)]
    given = {"params": (p for p in members), "lr": 0.1}
    (group,) = read_groups([given])
    assert len(group["params"]) == 2
    assert group["lr"] == 0.1
    assert not isinstance(given["params"], list)


def test_names_are_kept_beside_the_tensors() -> None:
    module = nn.Linear(2, 3)
    (group,) = read_groups(module.named_parameters())
    assert group["param_names"] == ["weight", "bias"]
    assert [spec.name for spec in specs_of([group], [True, True])] == ["weight", "bias"]


@pytest.mark.parametrize("given", [torch.zeros(2), 3, None, [parameter(2), {"params": [parameter(2)]}], [1, 2]])
def test_what_is_no_iterable_of_parameters_is_a_type_error(given: object) -> None:
    with pytest.raises(TypeError, match="params"):
        read_groups(given)


def test_an_empty_list_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        read_groups([])


def test_a_group_without_params_is_a_value_error_that_shows_its_keys() -> None:
    with pytest.raises(ValueError, match=r"'params'.*'lr'"):
        read_groups([{"lr": 0.1}])


def test_a_set_has_no_order() -> None:
    with pytest.raises(TypeError, match="use a list"):
        read_groups({parameter(1), parameter(2)})
    with pytest.raises(TypeError, match="use a list"):
        read_group({"params": {parameter(1)}})


def test_a_parameter_that_stands_twice_is_named() -> None:
    shared = parameter(2)
    with pytest.raises(ValueError, match="twice: as a and as b"):
        read_group({"params": [("a", shared), ("b", shared)]})


def test_names_for_some_only_are_refused() -> None:
    with pytest.raises(TypeError, match="all of one kind"):
        read_group({"params": [("a", parameter(2)), parameter(3)]})


def test_specs_tell_memory_format_dtype_group_and_activity() -> None:
    image = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    half = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    groups = [{"params": [image]}, {"params": [half]}]
    first, second = specs_of(groups, [True, False])
    assert first.stride == image.stride()
    assert (second.dtype, second.group, second.trainable, second.stride) == (torch.float16, 1, False, None)
    assert (first.name, second.name) == ("param.0", "param.1")


def test_a_parameter_in_a_layout_that_cannot_be_shared_is_refused_by_its_place() -> None:
    compressed = nn.Parameter(torch.eye(3).to_sparse_csr())
    with pytest.raises(ValueError, match=r"parameter 0 of group 0.*sparse_csr"):
        specs_of([{"params": [compressed]}], [True])

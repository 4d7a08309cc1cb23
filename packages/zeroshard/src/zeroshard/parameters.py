"""Reading what a user hands to an optimizer: parameters, groups and names in, tensor specs out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Number
from operator import is_
from typing import Any

import torch
from zeroshard_core import TensorSpec, is_dense

ParamGroup = dict[str, Any]


def read_groups(params: Any) -> list[ParamGroup]:  # noqa: ANN401 - anything may be handed in; this is where it is checked
    """Check ``params`` and return it as a list of fresh group dicts with list-valued ``"params"``.

    Args:
        params: an iterable of tensors, of ``(name, tensor)`` pairs, or of dicts whose ``"params"`` is a tensor or such
            an iterable (a generator too). Nothing in it is modified.

    Returns:
        New dicts; ``"params"`` holds tensors, ``"param_names"`` their names where names were given.

    Raises:
        TypeError: for a tensor, something that cannot be iterated, or a mixture of kinds.
        ValueError: for an empty list, or a dict without ``"params"``.
    """
    if isinstance(params, torch.Tensor):
        raise TypeError(f"`params` must be an iterable of tensors or dicts, but got a single {torch.typename(params)}")
    try:
        items = list(params)
    except TypeError as error:
        raise TypeError(
            f"`params` must be an iterable of tensors or dicts, but got {torch.typename(params)}"
        ) from error
    if not items:
        raise ValueError("ZeroRedundancyOptimizer got an empty parameter list")
    if all(isinstance(item, Mapping) for item in items):
        return [read_group(item) for item in items]
    if isinstance(params, (set, frozenset)):
        raise TypeError("`params` must have an order that is the same on every rank; a set has none, use a list")
    return [read_group({"params": items})]


def read_group(group: Mapping[str, Any]) -> ParamGroup:
    """Check one group and return a fresh dict with a list of tensors, and their names where given.

    Raises:
        TypeError: if ``group`` is not a dict, or holds something that is no tensor.
        ValueError: if ``"params"`` is missing, only some parameters are named, or a parameter stands in it twice.
    """
    if not isinstance(group, Mapping):
        raise TypeError(f"a parameter group must be a dict, but got {torch.typename(group)}")
    if "params" not in group:
        raise ValueError(
            f"a parameter group must have the key 'params' with its parameters; this one has {sorted(map(str, group))}"
        )
    given = group["params"]
    if isinstance(given, (set, frozenset)):
        raise TypeError("the parameters of a group must be in an ordered collection; a set has no order, use a list")
    items = [given] if isinstance(given, torch.Tensor) else _listed(given)
    named = [item for item in items if _is_named(item)]
    if named and len(named) != len(items):
        raise _mixed(items)
    tensors = [item[1] if named else item for item in items]
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise _mixed(items)
    fresh = {**group, "params": tensors}
    if named:
        fresh["param_names"] = [item[0] for item in items]
    names = fresh.get("param_names", [f"#{position}" for position in range(len(tensors))])
    seen: dict[int, str] = {}
    for name, tensor in zip(names, tensors, strict=True):
        if id(tensor) in seen:
            raise ValueError(f"a parameter group holds the same parameter twice: as {seen[id(tensor)]} and as {name}")
        seen[id(tensor)] = name
    return fresh


def parameters_of(groups: Iterable[Mapping[str, Any]]) -> list[torch.Tensor]:
    """Return all parameters in the order of the groups; their positions are the tensor indices of the plan."""
    return [param for group in groups for param in group["params"]]


def check_members(groups: Sequence[ParamGroup], params: Sequence[torch.Tensor]) -> None:
    """Raise if somebody has exchanged parameters or groups without the optimizer.

    Args:
        groups: the public param groups.
        params: the members that they should have.

    Raises:
        RuntimeError: if they do not.
    """
    members = parameters_of(groups)
    if len(members) != len(params) or not all(map(is_, members, params)):
        raise RuntimeError(
            "the members of param_groups are not those that the optimizer was built with; "
            "add parameters with add_param_group(), and build a new optimizer to exchange or remove them"
        )


def activity(params: Iterable[torch.Tensor]) -> tuple[bool, ...]:
    """Tell per parameter whether an optimizer may change it: it is trainable, or still has a gradient."""
    return tuple([param.requires_grad or param.grad is not None for param in params])


def specs_of(groups: Sequence[Mapping[str, Any]], active: Sequence[bool]) -> tuple[TensorSpec, ...]:
    """Describe all parameters of the groups.

    Args:
        groups: param groups with list-valued ``"params"``.
        active: per parameter, whether it counts as trainable.

    Raises:
        TypeError: for an active parameter that is a DTensor.
        ValueError: for a parameter in another layout than strided and COO.

    Returns:
        One spec per parameter. A parameter without a name is called ``param.<index>``. Devices are numbered in order of
        appearance, so that ranks on different GPUs describe the same thing.
    """
    specs: list[TensorSpec] = []
    logical: dict[torch.device, str] = {}
    for number, group in enumerate(groups):
        names = group.get("param_names")
        for position, param in enumerate(group["params"]):
            if param.layout not in (torch.strided, torch.sparse_coo):
                raise ValueError(
                    f"parameter {position} of group {number}, of shape {tuple(param.shape)}, is a {param.layout} "
                    f"tensor; only strided and sparse_coo parameters can be sharded"
                )
            if active[len(specs)] and hasattr(param, "device_mesh"):
                raise TypeError(
                    f"parameter {position} of group {number}, of shape {tuple(param.shape)}, is a DTensor: who holds "
                    f"which of its elements is settled already; give it to an optimizer that does not shard"
                )
            device = param.device
            if device not in logical:
                alike = sum(1 for known in logical if known.type == device.type)
                logical[device] = "cpu" if device.type == "cpu" else f"{device.type}:{alike}"
            specs.append(
                TensorSpec(
                    name=str(names[position]) if names is not None else f"param.{len(specs)}",
                    shape=tuple(param.shape),
                    dtype=param.dtype,
                    device=logical[device],
                    trainable=active[len(specs)],
                    group=number,
                    stride=_stride(param),
                )
            )
    return tuple(specs)


def hyperparameters_of(
    groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any], *, first: int = 0
) -> dict[str, str]:
    """Write down the hyperparameters of groups so that ranks can compare them.

    Args:
        groups: param groups.
        defaults: what holds where a group says nothing.
        first: the number of the first group.

    Returns:
        Values by name and group, as :func:`in_words` writes them.
    """
    return {
        f"{key} of group {number}": in_words(value)
        for number, group in enumerate(groups, first)
        for key, value in {**defaults, **group}.items()
        if key not in ("params", "param_names")
    }


def in_words(value: object) -> str:
    """Write a value so that ranks can compare it: alike where it means the same, whatever its class.

    Of what is neither a number, a string, a tensor nor a list, tuple or dict of these, only the type is written: two
    ranks' objects need not look alike.
    """
    value = without_numpy(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(in_words, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{in_words(key)}: {in_words(part)}' for key, part in value.items()))}}}"
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and value.device.type != "meta":
            return in_words(value.item())
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, float):
        # As an integer if it is one: 0 and 0.0 mean the same.
        return repr(int(value)) if value.is_integer() else float.__repr__(value)
    return repr(value) if isinstance(value, (Number, str, torch.dtype, type(None))) else type(value).__name__


def without_numpy(value: Any) -> Any:  # noqa: ANN401 - a hyperparameter
    """Return NumPy's scalars and arrays as Python's numbers and lists, and everything else as it is."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, (torch.Tensor, type)) else value


def _stride(param: torch.Tensor) -> tuple[int, ...] | None:
    if param.layout is not torch.strided or param.is_contiguous() or not is_dense(param):
        return None
    return tuple(param.stride())


def _listed(given: Any) -> list[Any]:  # noqa: ANN401 - checked by trying
    try:
        return list(given)
    except TypeError as error:
        raise TypeError(
            f"the 'params' of a group must be a tensor or an iterable of tensors, but got {torch.typename(given)}"
        ) from error


def _is_named(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)


def _mixed(items: Sequence[object]) -> TypeError:
    kinds = sorted({torch.typename(item) for item in items})
    return TypeError(f"`params` must hold tensors, or (name, tensor) pairs, or dicts, all of one kind; got {kinds}")

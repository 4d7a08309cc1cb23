"""Lists the private names of torch that this package uses, with reasons, and checks that this torch has them.

Each package lists its private names of torch in a module of this name, or uses the module of a package below. If a new
torch renames one, importing the package raises an error that says which.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

TESTED_WITH = "2.15"
"""The newest torch with which these names were tested."""

USED: Mapping[str, str] = {
    "torch._foreach_add_": "updates many tensors in one call; a loop needs a call for each",
    "torch._foreach_copy_": "the same",
    "torch._foreach_div_": "the same",
    "torch.distributed.ProcessGroup._device_types": "a group does not expose its timeout, but its backends do",
    "torch.distributed.ProcessGroup._get_backend": "the same; the public name exists only since torch 2.14",
    "torch.distributed._coalescing_manager": "issues several collectives as one group, and has no public name",
    "torch._C._distributed_c10d.Backend.Options._timeout": "how long the operations of a group may take",
    "torch.distributed.ProcessGroup._register_backend": "isend and irecv take a group, not a backend such as gloo",
    "torch.distributed.ProcessGroup._set_group_name": "sets the name by which zeroshard_testing matches messages",
}


def check_names(package: str, used: Mapping[str, str], tested_with: str) -> None:
    """Raise an ImportError that lists which private names of a package this torch does not have.

    ``used`` maps each dotted name to the reason for its use. The last part of a name is an attribute of a module or a
    class, or of an instance of the class, if a method of the class uses it.
    """
    missing = [name for name in used if not _is_there(name)]
    if missing:
        raise ImportError(
            f"{package} uses {', '.join(missing)}, which torch {torch.__version__} does not have: install a newer "
            f"{package}, or torch {tested_with}, the newest that it was tested with"
        )


def _is_there(dotted: str) -> bool:
    place, _, name = dotted.rpartition(".")
    try:
        owner = pkgutil.resolve_name(place)
    except (AttributeError, ImportError):
        return False
    if hasattr(owner, name):
        return True
    methods = [member for member in vars(owner).values() if isinstance(member, FunctionType)]
    return any(name in method.__code__.co_names for method in methods)


check_names("zeroshard_comm", USED, TESTED_WITH)

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
coalescing_manager = dist._coalescing_manager  # type: ignore[attr-defined]  # not an explicit export
# Public names: the first of each line is new in torch 2.13, which deprecates the second.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of a group's operations; None if no backend reports one."""
    for backend in backends_of(group):
        with suppress(AttributeError, RuntimeError):
            timeout = backend.options._timeout
            if isinstance(timeout, timedelta):
                return timeout
    return None


def backends_of(group: dist.ProcessGroup) -> list[Any]:
    """Return the backends of a group, once for each device type."""
    found = []
    for device in group._device_types:
        # torch makes some backends at their first use; until then, this raises.
        with suppress(RuntimeError):
            found.append(group._get_backend(device))
    return found


def supports_coalescing(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if the backend of a group for a device can issue several collectives as one."""
    return bool(group._get_backend(device).supports_coalescing)


def group_of(gloo: dist.ProcessGroupGloo, store: Any, name: Any) -> dist.ProcessGroup:  # noqa: ANN401 - torch's stubs lack both
    """Return a group whose only backend is ``gloo``, for CPU tensors. torch does not list it among its groups."""
    group = dist.ProcessGroup(store, gloo.rank(), gloo.size())
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_group_name(name)
    return group

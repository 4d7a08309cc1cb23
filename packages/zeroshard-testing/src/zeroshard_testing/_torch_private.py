"""Lists the private names of torch that this package uses, with reasons, and tests which of them work.

If a later torch renames one, the checks that need it are off, and the header of the run names them with the reason. No
check is off silently, and no correct test fails. Importing this module never raises for a missing name.
"""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not an explicit export

from zeroshard_testing.rank_state import Operation

TESTED_WITH = "2.15"
"""The newest torch with which these names were tested."""

GROUP_METHODS: Mapping[str, tuple[str, int]] = {
    "allreduce": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allreduce_coalesced": ("all_reduce_coalesced", 0),
    "allgather": ("all_gather", 0),
    "_allgather_base": ("all_gather_into_tensor", 1),
    "all_gather_single": ("all_gather_into_tensor", 1),
    "allgather_coalesced": ("all_gather_coalesced", 1),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor_coalesced", 1),
    "all_gather_single_coalesced": ("all_gather_into_tensor_coalesced", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 0),
    "reduce_scatter_single": ("reduce_scatter_tensor", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced", 0),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced", 0),
    "alltoall": ("all_to_all", 0),
    "alltoall_base": ("all_to_all_single", 0),
    "all_to_all_single": ("all_to_all_single", 0),
    "barrier": ("barrier", -1),
    "monitored_barrier": ("monitored_barrier", -1),
}
"""Methods of `ProcessGroup` that `torch.distributed` calls to issue a collective: the public name, and which argument
holds this rank's tensors, or the tensors of all ranks where their sizes may differ (-1 for none). The public functions
cannot be wrapped: modules import them by name."""

_TORCH = str(Path(torch.__file__).parent)
_LOGGER = str(Path(_TORCH, "distributed", "c10d_logger.py"))
_WAITING = ("distributed", "nn/parallel/distributed.py", "autograd/graph.py", "_ops.py")
WAITING_CODE = tuple(str(Path(_TORCH, name)) for name in _WAITING)
"""Functions whose Python frame belongs to a thread that waits for other ranks inside C++."""

_NEVER_WAITING = ("elastic", "rpc", "launcher", "rendezvous.py")
NEVER_WAITING_CODE = tuple(str(Path(_TORCH, "distributed", name)) for name in _NEVER_WAITING)
LOADED_LATE = re.compile(r"(torch|sympy|mpmath)\.(?!_inductor|testing\._internal)")
"""Modules that torch loads on demand, which takes a second, except modules that may start processes or use CUDA."""

FUTURE = torch._C.Future
"""The class of the futures of works; ``torch.futures.Future`` is a subclass. Waits for both are recorded."""

RUN_CASE = "_run"
"""The method of PyTorch's MultiProcessTestCase that runs in the process of a rank; test classes override it."""
START_PROCESSES = ("_spawn_processes", "_start_processes")
"""The methods of MultiProcessTestCase that start these processes."""

GROUP_CONSTRUCTOR = "_new_process_group_helper"
"""The function in which ranks connect to make a process group."""
_GROUP_ARGUMENTS = {"group_name", "group_size", "group_rank", "global_ranks_in_group"}

_DTYPES = {"Char": "int8", "Byte": "uint8", "ComplexFloat": "complex64", "ComplexDouble": "complex128"}


@dataclass(frozen=True)
class Recorded:
    """A collective in torch's flight recorder, which also sees what C++ issues.

    Its name is the operation that gloo runs, such as ``"all_gather"`` for an all_gather_into_tensor; its number counts
    from 1 in its group. ``created`` is in seconds since the epoch; it times out ``timeout`` seconds later.
    """

    group: str
    number: int
    operation: Operation
    created: float
    timeout: float


def process_groups() -> list[dist.ProcessGroup]:
    """Return the process groups of this process, of which there is no public list."""
    return list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []


def count_groups_anew() -> None:
    """Make torch name groups from 0 again, because a group that failed has used a name on one rank."""
    dist.distributed_c10d._world.group_count = 0


def module_hooks() -> list[dict[int, Any]]:
    """Return the registries of the hooks of all modules; there is no public way to clear them."""
    found = vars(torch.nn.modules.module).items()
    return [value for name, value in found if name.startswith("_global_") and isinstance(value, dict)]


def group_constructor() -> Callable[..., Any]:
    """Return the function in which ranks connect to make a group; LookupError if torch has none with its arguments."""
    found = getattr(dist.distributed_c10d, GROUP_CONSTRUCTOR, None)
    if found is None or not inspect.signature(found).parameters.keys() >= _GROUP_ARGUMENTS:
        raise LookupError(f"torch makes process groups with a function other than {GROUP_CONSTRUCTOR}")
    return found  # type: ignore[no-any-return]


def sequence_number(group: dist.ProcessGroup) -> int:
    """Return the number of operations of a group, from C++ too; RuntimeError if the backend does not count."""
    if any(device.type == "emu" for device in group._device_types):
        # Since torch 2.14 this is the number of the group's gloo, which counts nothing on the emulated accelerator.
        raise RuntimeError("a group with the emulated accelerator has no sequence number common to its backends")
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]  # missing in torch's stubs


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the timeout of a group's operations in seconds; infinity if the backend does not report it."""
    try:
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    except (RuntimeError, AttributeError):
        return float("inf")


def recorded(since: float = 0.0) -> list[Recorded]:
    """Return the collectives in the flight recorder since a time after the epoch. The recorder has no public reader.

    Any error means that torch has changed the recorder, which `probe` detects first.
    """
    # This process has just pickled it: nothing comes from a file or a peer.
    dump = torch._C._distributed_c10d._dump_fr_trace(True, False, False)  # type: ignore[attr-defined]
    entries = pickle.loads(dump)["entries"]  # noqa: S301 - see above
    return [_recorded(entry) for entry in entries if not entry["is_p2p"] and entry["time_created_ns"] >= since * 1e9]


def _recorded(entry: Mapping[str, Any]) -> Recorded:
    side = "input" if entry["input_sizes"] else "output"
    pairs = zip(entry[f"{side}_dtypes"], entry[f"{side}_sizes"], strict=False)
    return Recorded(
        entry["process_group"][0],
        int(entry["collective_seq_id"]),
        Operation(
            entry["profiling_name"].rpartition(":")[2],
            ", ".join(f"{_dtype_name(dtype)}{sizes}" for dtype, sizes in pairs),
            pending=not entry["retired"] and entry["state"] != "completed",
            from_python=False,
        ),
        entry["time_created_ns"] / 1e9,
        entry["timeout_ms"] / 1e3,
    )


def _dtype_name(name: str) -> str:
    """Return the public name of a dtype, given its name in C++, such as ``"Double"``, which is often an alias."""
    return _DTYPES.get(name) or str(getattr(torch, name.lower(), name)).removeprefix("torch.")


def complex_arguments(frame: FrameType) -> dict[tuple[int, ...], torch.Tensor]:
    """Return the complex arguments of the public function of a frame, which passes views of them to C++.

    The keys are address and shape of such a view as real numbers. The frame of the function's wrapper has the tensors.
    """
    caller = frame.f_back
    if caller is None or caller.f_code.co_filename != _LOGGER:
        return {}
    known = caller.f_locals
    values = [*known.get("args", ()), *known.get("kwargs", {}).values()]
    tensors = (one for value in values for one in (value if isinstance(value, (list, tuple)) else [value]))
    return {
        (one.data_ptr(), *one.shape, 2): one for one in tensors if isinstance(one, torch.Tensor) and one.is_complex()
    }


def reduce_op_name(options: object) -> str:
    """Return text such as ``"SUM"`` for a collective's options; empty without an operation. It has no public name."""
    return str(getattr(getattr(getattr(options, "reduceOp", None), "op", None), "name", ""))


def completed_work() -> object:
    """Return a completed work, for an operation that a fault drops."""
    from torch._C._distributed_c10d import FakeWork

    return FakeWork()


def fake_store() -> Any:  # noqa: ANN401 - torch's testing modules have no stubs
    """Return the store that the fake backend needs."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def case_modules() -> tuple[Any, Any]:
    """Return PyTorch's modules of test cases on ranks, and of all test cases.

    Call it only if they are needed: they load torch._dynamo, and need the package expecttest.
    """
    from torch.testing._internal import common_distributed, common_utils

    return common_distributed, common_utils


def probe() -> dict[str, str]:
    """Return the checks that cannot work with this torch, with reasons, after trying them in a group of one rank."""
    if not dist.is_gloo_available():
        return dict.fromkeys(("deadlock", "collectives", "messages"), "torch has no gloo to try them with")
    missing: dict[str, str] = {}
    versions = f"torch is {torch.__version__}; the newest tested is {TESTED_WITH}"
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    for try_it, checks in (
        (_probe_sequence, ("collectives", "deadlock")),
        (_probe_recorder, ("deadlock",)),
        (group_constructor, ("deadlock",)),
        (_probe_methods, ("messages", "deadlock", "collectives")),
    ):
        try:
            try_it()
        except Exception as error:  # noqa: BLE001 - a later torch may raise anything
            missing |= dict.fromkeys(checks, f"{type(error).__name__}: {error}; {versions}")
    dist.destroy_process_group()
    return missing


def _probe_sequence() -> None:
    group = process_groups()[0]
    before = sequence_number(group)
    dist.all_reduce(torch.ones(1))
    if sequence_number(group) != before + 1:
        raise LookupError("torch no longer counts collectives")


def _probe_recorder() -> None:
    dist.all_reduce(torch.ones(3))
    group = process_groups()[-1]
    latest = recorded()[-1]
    operation = latest.operation
    # With the debug level DETAIL, a group has no name there.
    if latest.group not in (group.group_name, "") or (operation.name, operation.tensors) != (
        "all_reduce",
        "float32[3]",
    ):
        raise LookupError(f"torch's flight recorder shows {operation} for an all_reduce of float32[3]")


def _probe_methods() -> None:
    for name in ("send", "recv", "recv_anysource", "allreduce", "barrier"):
        if not hasattr(dist.ProcessGroup, name):
            raise LookupError(f"torch's ProcessGroup no longer has a method {name!r}")


def register_device_module(name: str, module: ModuleType) -> None:
    """Register a module such as ``torch.emu`` for a device, for which there is no public function."""
    torch._register_device_module(name, module)

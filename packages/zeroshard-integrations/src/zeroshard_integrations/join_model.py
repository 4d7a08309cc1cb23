"""A model in DistributedDataParallel inside a Join block: following its iterations, and shadowing those of the others.

The backward of a rank without data is DDP's own: buckets of zeros, reduced as the others reduce theirs. Here they hold
what the rank had accumulated, if that has not been stepped, and what has been reduced in them becomes ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from zeroshard_core import is_dense

from zeroshard_integrations.announcements import Announcement, Status


class Phase(Enum):
    """Where this rank is with a model."""

    IDLE = "no backward is due"
    FORWARD = "a forward has begun, its backward has not"
    BACKWARD = "in backward"


class ModelInJoin:
    """One model of a block, on one rank; only the block uses it.

    Args:
        ddp: the model.
        divide_by_running: average gradients over the ranks that still have data, where DDP reduces them itself.
        answered: waits for the ranks' announcements, and returns how many still have data.

    Attributes:
        phase: where this rank is.
        reduces: whether the last forward's backward reduces gradients.
        is_open: whether ``.grad`` holds what has not been stepped.
        is_stepped: whether the block hears of steps; else a reduction is taken for the end of a step.
        behind: called when all of a backward has been shadowed.
        takes_buckets: whether a communication hook keeps the gradients, and adds what was accumulated itself.
        has_unstepped: tells whether ``.grad`` holds what has not been stepped, when the block is entered.
    """

    def __init__(self, ddp: DistributedDataParallel, *, divide_by_running: bool, answered: Callable[[], int]) -> None:
        self.ddp, self._divide_by_running, self._answered = ddp, divide_by_running, answered
        self.phase = Phase.IDLE
        self.reduces = self.is_open = self.is_stepped = False
        self.takes_buckets = False
        self.behind: Sequence[Callable[[], None]] = ()
        self.has_unstepped: Callable[[], bool] = bool
        # Also those of DDP in C++, which it does not keep in a list.
        self._has_hook = bool(ddp._comm_hooks or ddp._get_ddp_logging_data().get("comm_hook"))
        self._handle: RemovableHandle | None = None
        self._on_params: list[RemovableHandle] = []
        self._has_shadowed = self._has_reduced = self._has_local = self._has_run = False
        self._reduced: dict[torch.Tensor, torch.Tensor] = {}
        """What had been reduced of gradients to which backwards under ``no_sync()`` have added since."""

    # ------------------------------------------------------------------ a rank that still has data

    def enter(self) -> None:
        """Follow the model's forwards from now on."""
        self._handle = self.ddp.register_forward_hook(self._after_forward)
        self.is_open = self._has_local = self.is_stepped and not self.takes_buckets and self.has_unstepped()

    def leave(self) -> None:
        """Leave the model as it was; safe to call repeatedly."""
        if self._handle is None:
            return
        self._handle.remove()
        self._handle = None
        for handle in self._on_params:
            handle.remove()
        self._on_params = []
        if self._has_shadowed and not self.is_open:
            # The others have stepped with these gradients, and may have set theirs to zero.
            for param in self.ddp.parameters():
                param.grad = None
        self._reduced = {}
        if self._divide_by_running:
            # True: divide by the number of ranks, whatever the last iteration's number was.
            self.ddp.reducer._set_forward_pass_work_handle(_known(self.ddp.process_group.size()), True)
        self.ddp.__dict__["_divide_by_initial_world_size"] = True

    def synchronizes_buffers(self) -> bool:
        """Whether DDP sends module buffers around, for which it must know who still has data."""
        return len(self.ddp.modules_buffers) > 0

    def waits_in_front(self) -> bool:
        """Whether DDP waits for the other ranks before the model computes: for buffers, or to rebuild its buckets."""
        rebuilds = not self.ddp.find_unused_parameters and not getattr(self.ddp, "_has_rebuilt_buckets", True)
        return rebuilds or self.synchronizes_buffers()

    def begin(self, joinable: int) -> Announcement:
        """Begin a forward, and return what to announce.

        Args:
            joinable: the model's place in the block.
        """
        with_grad = torch.is_grad_enabled()
        self.reduces = with_grad and self.ddp.require_backward_grad_sync
        self.phase = Phase.FORWARD if with_grad else Phase.IDLE
        if with_grad and not self.reduces and self._has_reduced and not self._reduced and self._adds_local_only:
            self._reduced = {param: param.grad.clone() for param in self.ddp.parameters() if param.grad is not None}
        return Announcement(Status.RUNNING, joinable, self.reduces, with_grad)

    def _after_forward(self, module: nn.Module, inputs: object, output: object) -> None:  # noqa: ARG002 - torch's signature
        running = self._answered()
        if self.phase is not Phase.FORWARD:
            return
        if self._divide_by_running:
            self.ddp.reducer._set_forward_pass_work_handle(_known(running), False)
        found = list(_tensors(output))
        watched = [tensor for tensor in found if tensor.grad_fn is not None]
        for tensor in watched:
            tensor.register_hook(self._backward_begins)
        if not found and output is not None and not self._on_params:
            # An object that is not known: its backward is noticed where it ends.
            trained = [param for param in self.ddp.parameters() if param.requires_grad]
            self._on_params = [param.register_hook(self._backward_begins) for param in trained]
        if not watched and not self._on_params:
            self.phase = Phase.IDLE

    def _backward_begins(self, gradient: torch.Tensor) -> None:  # noqa: ARG002 - torch's signature
        if self.phase is Phase.FORWARD:
            self.phase = Phase.BACKWARD
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self.phase = Phase.IDLE
        self._has_run = True
        self.is_open = self.is_stepped or not self.reduces
        self._accumulated(local=not self.reduces)

    def close(self) -> None:
        """Take what is in ``.grad`` for stepped."""
        self.is_open = self._has_reduced = self._has_local = False
        self._reduced = {}

    @property
    def _adds_local_only(self) -> bool:
        """Whether a rank without data adds only what was never reduced.

        What has been reduced is the same on all ranks, and DDP divides it by their number again. If that is the number
        of those that still have data, they keep all of it between them.
        """
        return self._divide_by_running and not self._has_hook

    def _accumulated(self, *, local: bool) -> None:
        if local:
            self._has_local = True
            return
        self._has_local, self._has_reduced = False, self.is_open
        self._reduced = {}

    # ------------------------------------------------------------------ a rank that has run out

    def problem(self) -> Exception | None:
        """Return why this rank cannot shadow the others, if it cannot: DDP has not seen enough of the model yet."""
        has_rebuilt = bool(getattr(self.ddp, "_has_rebuilt_buckets", True))
        if self.ddp.static_graph and not has_rebuilt and not self._has_run:
            return ValueError(
                "this rank has run out of data without a single batch, and static_graph lets DistributedDataParallel "
                "learn the graph in the first: give every rank a batch, or leave static_graph out"
            )
        sparse = [
            f"{name}.weight".removeprefix(".")
            for name, module in self.ddp.module.named_modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad
        ]
        if not sparse or (has_rebuilt and self._knows_sparse()):
            return None
        if self.ddp.find_unused_parameters and self._knows_sparse():
            # Buckets are not rebuilt.
            return None
        return ValueError(
            f"this rank has run out of data with fewer than two batches, and {sparse[0]!r} has sparse gradients, whose "
            f"shape DistributedDataParallel does not know before: give every rank two batches, or use sparse=False"
        )

    def _knows_sparse(self) -> bool:
        try:
            self.ddp.reducer._get_zeros_like_grad_buckets()
        except RuntimeError:
            return False
        return True

    def shadow(self, announcement: Announcement, running: int) -> None:
        """Do what DDP does in a forward and a backward, without data. Collective.

        Args:
            announcement: of a rank that still has data.
            running: how many do.
        """
        ddp = self.ddp
        if announcement.with_grad:
            ddp.reducer._rebuild_buckets()
        ddp._check_and_sync_module_buffers()
        if self.synchronizes_buffers():
            ddp._check_global_requires_backward_grad_sync(is_joined_rank=True)
        ddp.require_forward_param_sync = announcement.reduces
        if announcement.reduces:
            self.shadow_backward(running)

    def shadow_backward(self, running: int) -> None:
        """Take part in the reduction of gradients, without a backward. Collective.

        Args:
            running: how many ranks still have data.
        """
        ddp, reducer = self.ddp, self.ddp.reducer
        self.phase = Phase.IDLE
        self._has_shadowed = True
        own = not self.takes_buckets
        # Now, before a communication hook takes them.
        used = [self.is_open and param.grad is not None for param in ddp._build_params_for_reducer()[0]]
        # With a communication hook, it is the hook that divides.
        share = 1 if self._has_hook else running if self._divide_by_running else ddp.process_group.size()
        buckets = reducer._get_zeros_like_grad_buckets()
        if own and self.is_open and (self._has_local or not self._adds_local_only):
            for bucket in buckets:
                _fill(bucket, share, self._reduced)
        works = [reducer._run_comm_hook(bucket) for bucket in buckets]
        for bucket, work in zip(buckets, works, strict=True):
            reduced = work.wait()
            if own and self.is_stepped:
                _keep(bucket, reduced if isinstance(reduced, torch.Tensor) else reduced[0])
        self.is_open = self.is_stepped
        self._accumulated(local=False)
        if ddp.find_unused_parameters:
            # What is there is what all ranks have used in the last backward of this one.
            reducer._get_local_used_map().copy_(torch.tensor(used, device="cpu"))
            dist.all_reduce(reducer._get_local_used_map(), group=ddp.process_group)
        reducer._push_all_rebuilt_params()
        for call in self.behind:
            call()


def _known(number: int) -> Any:  # noqa: ANN401 - torch's Work, of a type without a stub
    """Make a finished operation with this result, as DDP expects the number of ranks that still have data."""
    found: Future[list[torch.Tensor]] = Future()
    found.set_result([torch.tensor([number], device="cpu")])
    # torch's stubs leave it out.
    return vars(_distributed_c10d)["_create_work_from_future"](found)


def _fill(bucket: GradBucket, share: int, reduced: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Put ``.grad``, without what has been reduced of it, divided by ``share``, into a bucket of zeros."""
    if bucket.buffer().layout is not torch.strided:
        param = bucket.parameters()[0]
        if param.grad is not None:
            before = reduced.get(param)
            bucket.set_buffer((param.grad if before is None else param.grad - before) / share)
        return
    for param, place in _places(bucket):
        if param.grad is not None:
            before = reduced.get(param)
            torch.div(param.grad if before is None else param.grad - before, share, out=place)


def _keep(bucket: GradBucket, reduced: torch.Tensor) -> None:
    """Make what has been reduced this rank's gradients."""
    if reduced.layout is not torch.strided:
        bucket.parameters()[0].grad = reduced.clone()
        return
    if reduced.data_ptr() != bucket.buffer().data_ptr():
        bucket.buffer().copy_(reduced.view(-1))
    for param, place in _places(bucket):
        param.grad = place


def _places(bucket: GradBucket) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The parameters of a bucket and their gradients' places in it, laid out by the strides of their parameters."""
    buffer = bucket.buffer()
    for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
        stride = param.stride() if is_dense(param) else view.stride()
        yield param, buffer.as_strided(param.shape, stride, int(view.storage_offset()))


def _tensors(output: object) -> Iterator[torch.Tensor]:
    """The tensors in what a model returned."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from _tensors(item)
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors(item)
    elif hasattr(output, "__dataclass_fields__"):
        for name in output.__dataclass_fields__:
            yield from _tensors(getattr(output, name))

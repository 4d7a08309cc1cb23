"""A model in DistributedDataParallel inside a Join block: following its iterations, and shadowing those of the others.

The backward of a rank without data is DDP's own: buckets of zeros, reduced as the others reduce theirs. Here they hold
what the rank has in ``.grad``, if the others have it in theirs, and what has been reduced in them becomes ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zeroshard import OptimizerJoinHook
from zeroshard._torch_private import local_used_map
from zeroshard.joining.fingerprint import fingerprint
from zeroshard.joining.handover import give_gradients, take_gradients
from zeroshard_comm import Control

from zeroshard_integrations._torch_private import (
    buckets_of_zeros,
    divide_by,
    forget_join,
    has_comm_hook,
    has_rebuilt_buckets,
    params_for_reducer,
    prepare_forward,
    push_rebuilt_params,
    run_comm_hook,
)
from zeroshard_integrations.join.announcements import Announcement, Held, Kind, Status
from zeroshard_integrations.join.backward_watch import BackwardWatch, Phase
from zeroshard_integrations.join.held_gradients import HeldGradients
from zeroshard_integrations.join.zero_buckets import fill, keep

_MIXED = (
    "gradients were changed, or some of them set to zero, between backwards under no_sync(), and a rank has run out of "
    "data, whose own part of them nobody knows: change them behind the backward that reduces"
)


class ModelInJoin:
    """One model of a block, on one rank; only the block uses it.

    Args:
        ddp: the model.
        owners: of the sharded optimizers of its parameters that are in the block.
        takes_buckets: whether a communication hook keeps the gradients, and adds what was accumulated itself.
        divide_by_running: average gradients over the ranks that still have data, where DDP reduces them itself.
        answered: waits for the ranks' announcements, and returns how many still have data.
        begins: called at the beginning of every backward of a forward, with the model.

    Attributes:
        params: those whose gradients DDP reduces, in its order.
        watch: tells where this rank is.
        reduces: whether the backward that is due, or was the last, reduces gradients.
        held: follows the gradients.
        awaits_step: whether gradients have been reduced that no step has used.
        has_windows: whether several backwards that reduce have come before a step.
        knows_joined: whether a rank has run out of data, as far as is known; set by :meth:`expect_shadows`.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        owners: Sequence[OptimizerJoinHook],
        *,
        takes_buckets: bool,
        divide_by_running: bool,
        answered: Callable[[], int],
        begins: Callable[[ModelInJoin], None],
    ) -> None:
        self.ddp, self.owners, self.takes_buckets = ddp, owners, takes_buckets
        self._divide_by_running, self._answered = divide_by_running, answered
        self.params = reduced_params(ddp)
        self.reduces = self.awaits_step = self.has_windows = self.knows_joined = False
        self.held = HeldGradients(self.params, at_owners=takes_buckets)
        # Also those of DDP in C++, which it does not keep in a list.
        self._has_hook = has_comm_hook(ddp)
        self.watch = BackwardWatch(
            ddp.module,
            self.params,
            behind_forward=self._after_forward,
            begins=lambda: begins(self),
            ends=self._backward_ends,
            settled=self._settled,
        )
        self._is_prepared = self._has_run = self._has_left = False
        self._has_reduced = self._has_local = self._is_mixed = False
        self._may_rebuild = self._rebuilds()
        self._reduced: dict[torch.Tensor, torch.Tensor] = {}
        """What had been reduced of gradients to which backwards under ``no_sync()`` have added since."""

    # ------------------------------------------------------------------ a rank that still has data

    def leave(self) -> None:
        """Leave the model as it was; safe to call repeatedly."""
        if self._has_left:
            return
        self._has_left = True
        self.watch.leave()
        self._reduced = {}
        if self._divide_by_running:
            # True: divide by the number of ranks, whatever the last iteration's number was.
            divide_by(self.ddp, self.ddp.process_group.size(), initial=True)
        forget_join(self.ddp)

    @property
    def steps_in_backward(self) -> bool:
        """Whether a communication hook steps the optimizer of its parameters."""
        return any(hook.steps_in_backward for hook in self.owners)

    def enter(self, control: Control) -> None:
        """Find out whether the gradients that there are have been reduced: they are the same on all ranks then.

        Collective.

        Raises:
            PeerLostError: if a rank is gone.
        """
        if not self._adds_local_only:
            # What was reduced, and what was not, are added alike.
            return
        grads = [param.grad for param in self.params]
        prints = control.all_gather_ints([fingerprint(grads)], "entering Join")
        has_grads = any(grad is not None for grad in grads)
        self._has_reduced = has_grads and all(each == prints[0] for each in prints)
        self._has_local = has_grads and not self._has_reduced

    def expect_shadows(self) -> None:
        """Take note that a rank has run out of data: from now on backwards begin with their first gradients."""
        if not self.knows_joined:
            self.knows_joined = True
            self.watch.watch_params()

    def synchronizes_buffers(self) -> bool:
        """Whether DDP sends module buffers around, for which it must know who still has data."""
        return len(self.ddp.modules_buffers) > 0

    def waits_in_front(self) -> bool:
        """Whether DDP waits for the other ranks before the model computes: for buffers, or to rebuild its buckets."""
        return self._rebuilds() or self.synchronizes_buffers()

    def _rebuilds(self) -> bool:
        """Whether DDP will rebuild its buckets in the forward behind the first backward that reduces."""
        may = not self.ddp.find_unused_parameters or self.ddp.static_graph
        return may and not has_rebuilt_buckets(self.ddp)

    def begin(self, joinable: int) -> Announcement:
        """Begin a forward, and return what to announce.

        Args:
            joinable: the model's place in the block.
        """
        with_grad = torch.is_grad_enabled()
        reduces = with_grad and self.ddp.require_backward_grad_sync
        self.watch.expect(with_grad=with_grad)
        if with_grad and self._may_rebuild:
            self.held.expect_rebuild()
        if with_grad:
            # What a forward has prepared stays so until a backward has reduced.
            self.reduces = self._is_prepared = reduces or self._is_prepared
        return Announcement(Status.RUNNING, Kind.FORWARD, joinable, reduces, with_grad)

    def _after_forward(self) -> None:
        if self._may_rebuild and not (may_rebuild := self._rebuilds()):
            self._may_rebuild = may_rebuild
            self.held.rebuilt()
        running = self._answered()
        if torch.is_grad_enabled() and self._divide_by_running:
            divide_by(self.ddp, running, initial=False)

    def _backward_ends(self, of_forward: bool) -> None:
        self._has_run = True
        if not of_forward:
            # A second one of the same forward, which DDP does not follow, or one of the module without DDP.
            return
        if self.reduces:
            self._is_prepared, self.awaits_step = False, True
        self._accumulated(local=not self.reduces)

    def _settled(self) -> None:
        if self.knows_joined or not self.reduces:
            self.held.record()
        else:
            # Most loops set gradients to None, which needs no memory of what they were.
            self.held.forget()

    def seen(self) -> Held:
        """Tell what has become of the gradients as far as it must be known while all ranks have data, for little."""
        if self.held.are_none():
            return Held.NONE
        # What was reduced of them is only remembered until they are dropped, also in place.
        return self.held.now() if self._reduced else Held.KEPT

    def add_to(self, held: Held) -> None:
        """Take note of the gradients to which a backward is about to add.

        Args:
            held: what has become of them.
        """
        are_gone = held in (Held.NONE, Held.ZERO)
        if are_gone:
            self._has_reduced = self._has_local = self._is_mixed = False
            self._reduced = {}
        elif self.awaits_step and self.reduces:
            self.has_windows = True
        # What was reduced of these gradients is no longer what was remembered of it.
        self._is_mixed = self._is_mixed or (held is Held.CHANGED and bool(self._reduced))
        if not self.reduces and self._has_reduced and not self._reduced and self._adds_local_only:
            self._reduced = {param: param.grad.clone() for param in self.params if param.grad is not None}
        for hook in self.owners:
            hook.begin_backward(adds=not are_gone)

    def refuse_untold(self, held: Held) -> None:
        """Raise if ranks without data cannot be told what they are to hold. Before anything is announced.

        Args:
            held: what has become of the gradients.

        Raises:
            RuntimeError: saying so.
        """
        if held in (Held.ZERO, Held.CHANGED):
            self.held.gone()
        if held is Held.CHANGED and self._has_local and not self.takes_buckets:
            raise RuntimeError(_MIXED)

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
        self._has_local, self._has_reduced, self._is_mixed = False, True, False
        self._reduced = {}

    # ------------------------------------------------------------------ a rank that has run out

    def problem(self) -> Exception | None:
        """Return why this rank cannot shadow the others, if it cannot.

        DDP has not seen enough of the model yet, or it is not known what this rank has accumulated.
        """
        if self._is_mixed or (self._reduced and self.held.now() is Held.CHANGED):
            return RuntimeError(_MIXED)
        has_rebuilt = has_rebuilt_buckets(self.ddp)
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
            buckets_of_zeros(self.ddp)
        except RuntimeError:
            return False
        return True

    def hold(self, held: Held) -> None:
        """Do with this rank's gradients what the others have done with theirs, where no values are needed.

        Args:
            held: what has become of theirs.
        """
        if held is Held.NONE:
            for param in self.params:
                param.grad = None
        self.add_to(held)

    def give(self, control: Control, joined: Sequence[int]) -> None:
        """Send this rank's gradients to ranks that have run out.

        Raises:
            RuntimeError: if it cannot be told which of them are None or zero.
            PeerLostError: if a rank is gone.
        """
        give_gradients(control, joined, self.params, *self.held.gone(), values=not self.takes_buckets)

    def take(self, control: Control, giver: int) -> None:
        """Receive what :meth:`give` sends.

        Raises:
            PeerLostError: if the rank that gives is gone.
        """
        take_gradients(control, giver, self.params, values=not self.takes_buckets)

    def shadow_forward(self, announcement: Announcement) -> None:
        """Do what DDP does in a forward, without data. Collective.

        Args:
            announcement: of a rank that still has data.
        """
        prepare_forward(self.ddp, with_grad=announcement.with_grad)
        self.ddp.require_forward_param_sync = announcement.reduces

    def shadow_backward(self, running: int) -> None:
        """Take part in the reduction of gradients, without a backward. Collective.

        Args:
            running: how many ranks still have data.
        """
        ddp = self.ddp
        self.watch.phase = Phase.IDLE
        own = not self.takes_buckets
        # Now, before a communication hook takes them. What was reduced is not used again, only kept.
        used = [param.grad is not None and (self._has_local or self.takes_buckets) for param in self.params]
        before = [param.grad for param in self.params]
        # With a communication hook, it is the hook that divides.
        share = 1 if self._has_hook else running if self._divide_by_running else ddp.process_group.size()
        buckets = buckets_of_zeros(ddp)
        if own and (self._has_local or not self._adds_local_only):
            for bucket in buckets:
                fill(bucket, share, self._reduced)
        works = [run_comm_hook(ddp, bucket) for bucket in buckets]
        for bucket, work in zip(buckets, works, strict=True):
            reduced = work.wait()
            if own:
                keep(bucket, reduced if isinstance(reduced, torch.Tensor) else reduced[0])
        self._accumulated(local=False)
        counts = local_used_map(ddp)
        if ddp.find_unused_parameters and counts is not None:
            # What is there is what all ranks have used in the last backward of this one.
            counts.copy_(torch.tensor(used, device="cpu"))
            dist.all_reduce(counts, group=ddp.process_group)
            if own:
                # As DDP does where all ranks have data: what nobody has used is left as it was.
                for param, grad, users in zip(self.params, before, counts.tolist(), strict=True):
                    if not users:
                        param.grad = grad
        push_rebuilt_params(ddp)

    def end_backward(self) -> None:
        """Do what communication hooks do at the end of a backward that was shadowed. Collective."""
        for hook in self.owners:
            hook.finish_backward()


def reduced_params(ddp: DistributedDataParallel) -> Sequence[torch.Tensor]:
    """Return the parameters whose gradients DDP reduces, in its order: those that were trained when it was built.

    Args:
        ddp: the model.
    """
    trained = params_for_reducer(ddp)
    # None where all must be used in every backward, so that none can have been frozen since.
    used = local_used_map(ddp)
    if used is None or len(trained) == (count := int(used.numel())):
        return trained
    inside = {param for bucket in buckets_of_zeros(ddp) for param in bucket.parameters()}
    found = [param for param in ddp.module.parameters() if param in inside]
    assert len(found) == count
    return found

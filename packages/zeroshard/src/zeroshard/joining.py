"""Uneven inputs: what ranks with data announce, and what a rank without data does for its optimizer.

Inside a Join context every rank announces every call before it communicates, or that it has run out of data. The
first rank that has data sends such ranks the values that the call needs, and they do their part.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from zeroshard_comm import Control, DisagreementError, PeerLostError, agreed

from zeroshard._torch_private import JoinConfig, foreach_norm, join_config, local_used_map, set_join_config
from zeroshard.local_optimizer import NOT_SYNCED
from zeroshard.overlap.backward import BackwardFollower
from zeroshard.overlap.placeholder import GradPlaceholder
from zeroshard.sharding import Sharding
from zeroshard.state.serialization import receive_value, send_value, write_value

_USE_OURS = "use zeroshard_integrations.join.Join in place of torch's"


class Call(IntEnum):
    """What a rank is about to do."""

    JOINED = 0
    """It has run out of data, and takes part in what the others do."""
    STEP = 1
    CLIP = 2
    CONSOLIDATE = 3
    BACKWARD = 4
    """The begin of a backward that reduces; announced for its model, and by an optimizer that steps during it."""
    END = 5
    """The end of a backward that has stepped."""
    FORWARD = 6
    """A forward whose backward reduces."""
    FORWARD_UNDER_NO_SYNC = 7
    FORWARD_WITHOUT_GRADIENTS = 8
    NOTIFY = 9
    """A call of another joinable."""
    REFUSED = 10
    """A call that a rank without data cannot take part in, such as loading a state."""
    FAILED = 11
    """It leaves the context with an error."""
    UNABLE = 12
    """It has run out of data, and cannot take part if others have not."""


@dataclass(frozen=True)
class Announcement:
    """What a rank says before a call.

    Attributes:
        call: what it is about to do.
        place: 1-based index of the caller: joinable or optimizer; 0 for any.
    """

    call: Call
    place: int = 0

    def __str__(self) -> str:
        """Return text such as ``"forward under no_sync of joinable 1"``."""
        words = self.call.name.lower().replace("_", " ").replace("no sync", "no_sync")
        return f"{words} of joinable {self.place}"


@dataclass(frozen=True)
class Attendance:
    """What all ranks have announced.

    Attributes:
        made: the call of the ranks that still have data; JOINED if there are none.
        running, joined: those ranks, and the others, ascending.
    """

    made: Announcement
    running: tuple[int, ...]
    joined: tuple[int, ...] = ()


def exchange(control: Control, mine: Announcement, error: Exception | None = None) -> Attendance:
    """Tell all ranks what this one is about to do, and hear it from them. Collective.

    Raises:
        DisagreementError: if ranks that still have data are about to do different things.
        PeerLostError: if a rank is gone.
        Exception: the error of a rank that has failed, or is unable, on every rank.
    """
    answers, word = [mine] * control.ranks.world_size, mine.call | mine.place << 4
    if not control.is_unanimous("a call inside Join", word):
        words = control.all_gather_ints([word], "a call inside Join")
        answers = [Announcement(Call(word & 15), word >> 4) for [word] in words]
    if mine.call is Call.FAILED:
        # Not raised: its frames would keep the context.
        control.inconsistency("leaving Join", error=error)
        return Attendance(mine, ())
    joined = tuple([rank for rank, answer in enumerate(answers) if answer.call in (Call.JOINED, Call.UNABLE)])
    running = tuple([rank for rank in range(len(answers)) if rank not in joined])
    calls = [answer.call for answer in answers]
    if Call.FAILED in calls or (Call.UNABLE in calls and running):
        control.check_consistent("leaving Join", error=error)
    made = answers[running[0]] if running else Announcement(Call.JOINED)
    for rank, answer in enumerate(answers):
        if running and answer != made and (rank in running or answer.place not in (0, made.place)):
            raise DisagreementError(
                f"inside Join, rank {running[0]} is about to make a {made}, and rank {rank} a {answer}: ranks that "
                f"still have data must make the same calls in the same order, and decide about no_sync() and step() "
                f"by the number of the batch"
            )
    return Attendance(made, running, joined)


def fail(control: Control, error: Exception) -> None:
    """Tell all ranks of an error at their next announcement. Collective."""
    with suppress(PeerLostError):
        exchange(control, Announcement(Call.FAILED), error)


class Participant:
    """Announces the calls of one optimizer, and sends ranks without data the values that they need.

    Attributes:
        exchange: announces a call in the context that the optimizer is in; None outside. Contexts change these.
        divides_by_running: whether a hook of zeroshard averages gradients over the ranks that still have data.
        problem: returns why ranks without data cannot take part in a step, if they cannot.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self.leave()

    def leave(self) -> None:
        """Leave a context."""
        self.exchange: Callable[[Call], Attendance | None] | None = None
        self.problem: Callable[[], Exception | None] = lambda: None
        self.divides_by_running = False

    def announce(self, call: Call, **arguments: Any) -> None:  # noqa: ANN401 - of any call
        """Announce a call, and send its values to ranks that have run out of data. Collective; a no-op outside."""
        if self.exchange is None or self._sharding.control.alone:
            return
        attendance = self.exchange(call)
        if attendance is not None and attendance.joined and attendance.running and call is not Call.END:
            self.hand_over(attendance, arguments)

    def announce_backward(self, *, is_own: bool = True, ends: bool = False) -> None:
        """Announce a backward during which shards are stepped, or its end; or take part in one of the others."""
        self.announce(Call.END if ends else Call.BACKWARD if is_own else Call.JOINED)

    def hand_over(self, attendance: Attendance, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send ranks without data what a call needs, and return its arguments; or raise on all ranks. Collective."""
        control, source, call = self._sharding.control, attendance.running[0], attendance.made.call
        rank, written = control.ranks.rank, dict[int, Any]()
        with agreed(control, "a call inside Join"):
            if call is Call.REFUSED:
                what = "add_param_group(), load_state_dict(), train(), eval() and step(closure)"
                raise RuntimeError(f"{what} need all ranks, and one has run out of data: call them outside of Join")
            problem = self.problem() if call is Call.STEP and rank in attendance.running else None
            if problem is not None:
                raise problem
            if rank == source:
                common = self._describe(call, arguments)
                written = {peer: {**common, **self._tensors_for(peer, call)} for peer in attendance.joined}
        with agreed(control, "a call inside Join"):
            for peer, values in written.items():
                send_value(control, peer, values)
            if rank in attendance.joined:
                given = receive_value(control, source)
                arguments = given["arguments"]
                self._take(call, given)
        return arguments

    def _describe(self, call: Call, arguments: Mapping[str, Any]) -> dict[str, Any]:
        groups = [{k: v for k, v in group.items() if k not in NOT_SYNCED} for group in self._sharding.groups]
        self._sharding.hyperparameters.follow(self._sharding.groups)
        named = [(f"the hyperparameter {key!r}", value) for group in groups for key, value in group.items()]
        named += [(f"the argument {key!r} of {call.name.lower()}()", value) for key, value in arguments.items()]
        for name, value in named:
            # Raises.
            write_value(value, [], f"a rank has run out of data in Join, and cannot be told {name}: it")
        return {"groups": groups, "agreed": dict(self._sharding.hyperparameters.agreed), "arguments": dict(arguments)}

    def _tensors_for(self, peer: int, call: Call) -> dict[str, Any]:
        """The parameters that another rank updates, since the loop may have changed them; and their gradients."""
        params = self._sharding.params
        grads = [param.grad for param in params]
        takes_buckets, updates = self._sharding.buckets is not None, call in (Call.STEP, Call.BACKWARD)
        return {
            "parameters": self._of_rank(peer, params) if updates else {},
            "gradients": self._of_rank(peer, grads) if updates and not takes_buckets else {},
            "held": [None if g is None else not (isinstance(g, GradPlaceholder) and g.is_zero()) for g in grads],
        }

    def _of_rank(self, peer: int, values: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """A rank's parts of parameters, or of their gradients, by tensor."""
        plan, found = self._sharding.layout.plan, dict[str, torch.Tensor]()
        for shard in plan.of_rank(peer):
            value = values[shard.tensor]
            if value is not None:
                found[str(shard.tensor)] = shard.box(value.detach()) if plan.is_cut(shard.tensor) else value.detach()
        return found

    def _take(self, call: Call, given: Mapping[str, Any]) -> None:
        groups, params, rank = self._sharding.groups, self._sharding.params, self._sharding.control.ranks.rank
        for from_group, to_group in zip(given["groups"], groups, strict=True):
            for key, value in from_group.items():
                present = to_group.get(key)
                if isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor):
                    value = present.copy_(value)
                to_group[key] = value
        self._sharding.hyperparameters.adopt(given["agreed"], groups)
        places = self._of_rank(rank, params)
        for tensor, values in given["parameters"].items():
            places[tensor].copy_(values)
        if call is Call.BACKWARD:
            return
        for param, held in zip(params, given["held"], strict=True):
            param.grad = None if held is None else param.grad
            if held is False and param.grad is not None:
                param.grad.zero_()
        for tensor, values in given["gradients"].items():
            param = params[int(tensor)]
            is_whole = values.shape == param.shape
            param.grad = values.to(param.device) if is_whole else torch.zeros_like(param)
            if not is_whole:
                # This rank's part of it; the rest is not looked at.
                self._of_rank(rank, [each.grad for each in params])[tensor].copy_(values)

    def drop_gradients(self) -> None:
        """Set all gradients to None."""
        for param in self._sharding.params:
            param.grad = None


class _Sharded(Protocol):
    """All of an optimizer; it is a :class:`zeroshard.sharded_optimizer.ShardedOptimizer`."""

    joining: Participant
    sharding: Sharding
    follower: BackwardFollower | None

    @property
    def steps_early(self) -> bool: ...
    def apply_step(self, arguments: Mapping[str, Any]) -> object: ...
    def apply_clipping(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> object: ...
    def apply_consolidation(self, target: int) -> None: ...


def follow(sharded: _Sharded, attendance: Attendance) -> None:
    """Do what the ranks that still have data do with an optimizer; raise what they raise. Collective."""
    call, follower = attendance.made.call, sharded.follower
    if call is Call.END:
        assert follower is not None
        follower.on_backward_end()
        return
    end_backward(sharded)
    arguments = sharded.joining.hand_over(attendance, {})
    if call is Call.CLIP:
        sharded.apply_clipping(**arguments)
    elif call is Call.CONSOLIDATE:
        sharded.apply_consolidation(**arguments)
    else:
        sharded.apply_step(arguments)
        if follower is None:
            sharded.joining.drop_gradients()


def end_backward(sharded: _Sharded) -> None:
    """End a backward in which this rank got the others' gradients; a no-op if their hook steps during backward."""
    follower = sharded.follower
    if follower is not None and follower.in_backward and not sharded.steps_early:
        follower.on_backward_end()


class OptimizerJoinHook(JoinHook):
    """The hook of an optimizer for torch's Join, which does not say who has run out, nor which joinables there are.

    So each iteration is one forward and one reducing backward of each model, and one ``step()`` of each optimizer.
    """

    def __init__(self, public: Callable[[], Any], *, divide_by_running: bool) -> None:
        if type(join_config(public())) is not JoinConfig:
            raise RuntimeError("this optimizer is in a Join block already, and blocks cannot be nested: leave it first")
        self._public = public
        self._control, params = self._sharded.sharding.control, set(self._sharded.sharding.params)
        self._number = 1 + getattr(self._control.position, "optimizer", 0)
        self._has_forward, self._kept = False, list[torch.Tensor]()
        # torch does not tell a joinable which others there are.
        found = [item for item in gc.get_objects() if issubclass(type(item), DistributedDataParallel) and vars(item)]
        self._models = weakref.WeakSet([model for model in found if not params.isdisjoint(model.parameters())])
        self._handles: list[RemovableHandle] = []
        for model in self._models:
            self._handles.append(model.register_forward_pre_hook(_weakly(self._forward_begins)))
            self._handles.append(model.register_forward_hook(_weakly(self._forward_ends)))
        trained = [param for param in params if param.requires_grad]
        if trained and self._sharded.follower is None:
            begins = _weakly(self._backward_begins)
            self._handles.append(torch.autograd.graph.register_multi_grad_hook(trained, begins, mode="any"))
        joining = self._sharded.joining
        # torch does not report that a block ended with an error: weakly, so that a dropped hook is not called.
        joining.exchange, joining.problem = _weakly(self._exchange), _weakly(self._problem)
        joining.divides_by_running = divide_by_running
        self._clear_used_maps()
        super().__init__()

    def main_hook(self) -> None:
        """Take part in the others' calls of the optimizer, up to their step. Collective."""
        self._check_order()
        call = Call.JOINED
        while call not in (Call.STEP, Call.END):
            attendance = self._exchange(Call.JOINED)
            follow(self._sharded, attendance)
            call = attendance.made.call
        self._sharded.joining.drop_gradients()
        self._clear_used_maps()

    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: ARG002 - torch's signature
        """Leave the context."""
        for handle in self._handles:
            handle.remove()
        self._sharded.joining.leave()
        set_join_config(self._public(), None)

    @property
    def _sharded(self) -> _Sharded:
        found: _Sharded = self._public()._sharded
        return found

    def _exchange(self, call: Call) -> Attendance:
        public: Joinable = self._public()
        if not join_config(public).enable:
            return Attendance(Announcement(call), (self._control.ranks.rank,))
        if call in (Call.STEP, Call.END):
            self._has_forward = False
            self._clear_used_maps()
        if call is Call.STEP:
            Join.notify_join_context(public)
        return exchange(self._control, Announcement(call, self._number))

    def _check_order(self) -> None:
        if join_config(self._public()).is_first_joinable and self._models:
            raise ValueError(
                "the optimizer comes before its model in Join, so a rank without data would step before it has "
                "gradients: write Join([ddp, optimizer])"
            )

    def _forward_begins(self, *_: object) -> None:
        if not join_config(self._public()).enable or self._control.alone:
            return
        self._check_order()
        if self._has_forward:
            error = RuntimeError(
                f"a second forward without step() inside torch's Join, whose ranks without data would wait for that: "
                f"to accumulate gradients, to leave out steps or to evaluate, {_USE_OURS}"
            )
            fail(self._control, error)
            raise error

    def _forward_ends(self, *_: object) -> None:
        # Not after a forward in which torch has raised.
        self._has_forward = True

    def _backward_begins(self, _: torch.Tensor) -> None:
        """Keep the norms of gradients to which a backward adds, without waiting for a device."""
        if self._sharded.follower is not None or not join_config(self._public()).enable:
            return
        grads = [param.grad for param in self._sharded.sharding.params if param.grad is not None]
        values = [grad if grad.layout is torch.strided else grad.coalesce().values() for grad in grads]
        self._kept = list(foreach_norm(values, 1.0)) if values else []

    def _problem(self) -> Exception | None:
        if not any(map(bool, self._kept)):
            return None
        return RuntimeError(
            f"a backward has added to gradients that were not set to zero, and a rank has run out of data in torch's "
            f"Join, which does not count them: call zero_grad() in every iteration, or {_USE_OURS}"
        )

    def _clear_used_maps(self) -> None:
        """Clear this rank's used parameters for DDP's next reduction: torch leaves the others' in the map."""
        for used in [local_used_map(model) for model in self._models if model.find_unused_parameters]:
            if used is not None:
                used.zero_()


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method while its object lives, and does not keep the object."""
    reference = weakref.WeakMethod(method)
    return lambda *arguments: found(*arguments) if (found := reference()) is not None else None

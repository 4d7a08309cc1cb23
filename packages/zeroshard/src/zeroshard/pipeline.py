"""Bucket by bucket: gradients to their owners while backward computes, then local steps and parameters back.

A pipeline decides what is to be done with the buckets of a backward and behind it, and keeps the books; a carrier moves
them, in the way that the backend is good at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from operator import attrgetter, is_
from typing import Any

import torch
from torch.futures import Future
from zeroshard_comm import (
    WORTH_READING,
    BucketHeader,
    BucketReduceWork,
    Control,
    PeerLostError,
    Segment,
    ShardingConfig,
    Traffic,
    all_read,
    check_config,
    choose_broadcaster,
)
from zeroshard_core import Plan, storage_view

from zeroshard._torch_private import in_autograd
from zeroshard.by_collectives import CollectiveCarrier, SameHostCarrier
from zeroshard.by_messages import MessageCarrier
from zeroshard.carrier import Backward, Carrier
from zeroshard.layout import Layout
from zeroshard.local import LocalOptimizer
from zeroshard.memory import lies_flat
from zeroshard.narrowed import Portion, may_step_in_pieces
from zeroshard.reduced_gradient import ReducedGradient
from zeroshard.route import Bucket, Route, gradient_view

_grad_of = attrgetter("grad")

_SETTLED = 3
"""After so many equal backwards, the next one is expected to have the same buckets: DDP rebuilds them once, before."""


class Stepping(Enum):
    """When shards are stepped."""

    IN_STEP = "in step()"
    BEHIND_BACKWARD = "behind the last bucket"
    IN_BACKWARD = "as soon as a bucket is reduced"


class Pipeline:
    """Holds the routes of one sharded optimizer's buckets, and what is under way on them.

    Args:
        control: the channel of the ranks' meetings, and the group.
        traffic: where bytes are counted.
        local: the local optimizer; its pieces are set apart from the parameters.
        params: all parameters, by tensor index.
        layout: who owns what.
        stepping: when shards are stepped.

    Raises:
        RuntimeError: if the group has no backend for the device that parameters are on.
        ValueError: if parameters cannot be exchanged in this way.
    """

    def __init__(
        self,
        control: Control,
        traffic: Traffic,
        local: LocalOptimizer,
        params: Sequence[torch.Tensor],
        layout: Layout,
        stepping: Stepping,
    ) -> None:
        self.stepping = stepping
        self._control, self._ranks = control, control.ranks
        self._device = common_device(params, layout)
        reads = self._device.type == "cpu" and all_read(control.ranks)
        reads = reads and sum(spec.nbytes for spec in layout.plan.tensors) >= WORTH_READING
        self._carrier = _carrier_for(control, traffic, self._device, self, reads=reads)
        self._routes: dict[int, Route] = {}
        self._order: list[int] = []
        self._carried: dict[int, torch.Tensor] = {}
        self._delivered: set[int] = set()
        """Of the carried ones, those whose later values are on their way: their window was not given up."""
        self._rebuilt: dict[int, int] = {}
        self._backwards = 0
        self.in_backward = False
        """Whether a backward hands over buckets, from its first one on."""
        self._touched: set[int] = set()
        self._known: frozenset[int] = frozenset()
        self._is_new = self._is_changed = False
        self._alike = 0
        self._before: list[int] = []
        self._may_step = False
        self.divides_by_running: Callable[[], bool] = bool
        """Whether gradients are averaged over the ranks that still have data; False unless changed."""
        self._failure: Exception | None = None
        self._broken: BaseException | None = None
        local.set_apart()
        self.follow(params, layout, local)

    # ------------------------------------------------------------------ following the model

    def follow(self, params: Sequence[torch.Tensor], layout: Layout, local: LocalOptimizer) -> None:
        """Take over another plan, or parameters that have moved in memory.

        Raises:
            ValueError: if parameters cannot be exchanged in this way; nothing has changed then.
        """
        self.check(params, layout)
        self._params, self._layout, self._local = list(params), layout, local
        self._index_of = {param: index for index, param in enumerate(params)}
        names = [spec.name for spec in layout.plan.tensors]
        self._stand_ins = [ReducedGradient(p, i, names[i], self) for i, p in enumerate(params)]
        for route in self._routes.values():
            for tensor, param in zip(route.tensors, route.params, strict=True):
                if type(param.grad) is ReducedGradient:
                    param.grad = self._stand_ins[tensor]
            route.follow(layout.plan, local)
            self._is_changed = True
            route.stand_ins = [self._stand_ins[tensor] for tensor in route.tensors]
        self._carrier.follow(list(self._routes.values()), list(self._routes.values()))
        self._lay_out_rest()

    def check(self, params: Sequence[torch.Tensor], layout: Layout) -> None:
        """Raise what :meth:`follow` would, for what this rank alone may find: before the ranks agree on a layout.

        Raises:
            ValueError: if parameters cannot be exchanged in this way.
        """
        if common_device(params, layout) != self._device:
            raise ValueError(
                f"parameters were on {self._device} when the communication hook began to work, and have been moved: "
                f"move the model before DistributedDataParallel and the optimizer are built"
            )

    def move_gradients(self, before: Plan, now: Plan) -> None:
        """Bring gradients to their new owners, where a plan gives tensors others than they were reduced to. Collective.

        Args:
            before: the plan by which they were reduced.
            now: the plan by which they are going to be stepped.

        Raises:
            PeerLostError: if a rank is gone.
        """
        segments = [
            Segment(shard.rank, route.bucket.buffer[offset + shard.flat.start : offset + shard.flat.stop])
            for route in self._in_order()
            for tensor, offset in zip(route.tensors, route.offsets, strict=True)
            if before.of_tensor(tensor) != now.of_tensor(tensor)
            for shard in before.of_tensor(tensor)
        ]
        if self._ranks.world_size > 1:
            choose_broadcaster(self._control, segments, self._device, by_reading=False).broadcast()

    def _lay_out_rest(self) -> None:
        """What is stepped and shared after the buckets: parameters that are in none."""
        self._place = {
            tensor: (route, place) for route in self._routes.values() for place, tensor in enumerate(route.tensors)
        }
        active = [i for i, is_active in enumerate(self._layout.active) if is_active]
        rest = [i for i in active if i not in self._place]
        self._rest = [self._local.pieces[i] for i in rest if i in self._local.pieces]
        self._rest_params = [self._params[i] for i in rest]
        self._rest_portion = Portion(self._local, self._rest)
        segments = [
            Segment(shard.rank, storage_view(self._params[i].data)[shard.flat])
            for i in (rest if self._carrier.shares_buckets else active)
            for shard in self._layout.plan.of_tensor(i)
        ]
        self._tail = self._carrier.broadcaster(segments)

    @property
    def routed(self) -> bool:
        """Whether buckets are known: from the first backward on, on all ranks alike."""
        return bool(self._routes)

    # ------------------------------------------------------------------ backward

    def receive(
        self, bucket: Bucket, *, reduce: Callable[[], Future[torch.Tensor]] | None, may_step: bool
    ) -> Future[torch.Tensor]:
        """Send a bucket of gradients to their owners. The first bucket of a backward has the index 0.

        Args:
            bucket: of this backward.
            reduce: if somebody else reduces it on all ranks, begins that, and returns the result to come, as long as
                the bucket.
            may_step: whether this rank's shards may be stepped during this backward.

        Returns:
            The bucket's buffer to come, when this rank's parts of it are reduced.

        Raises:
            DisagreementError: if ranks have other buckets.
            PeerLostError: if a rank is gone.
            RuntimeError: if an earlier backward or step could not be finished.
            ValueError: if the optimizer does not have a parameter of the bucket.
        """
        self.refuse_broken()
        try:
            if bucket.index == 0:
                self._begin(may_step=may_step)
            route = self._route(bucket)
            if bucket.index == 0 and self._alike >= _SETTLED and not self._is_changed:
                self._carrier.expect([self._routes[index] for index in self._before], gradients=reduce is None)
            self._order.append(bucket.index)
            note = BucketHeader(self._backwards, bucket.index, bucket.present, self.steps_early, bucket.is_shadow)
            # Now that nobody looks at the gradients in it any more: it may begin to write at once, in a thread.
            return self._carrier.receive(route, note, reduce() if reduce is not None else None)
        except BaseException as error:
            self.break_off(error)
            raise

    @property
    def arrived(self) -> Sequence[Bucket]:
        """The buckets of this backward that have arrived, or of the last one."""
        return [route.bucket for route in self._in_order()]

    def _begin(self, *, may_step: bool) -> None:
        self._alike = self._alike + 1 if self._order and self._order == self._before and not self._is_changed else 0
        self._is_changed = False
        self.in_backward, self._may_step, self._before, self._order = True, may_step, self._order, []
        self._failure = None
        self._backwards += 1
        self._rebuilt.clear()

    def finish_backward(self) -> None:
        """Wait until every gradient lies at its owner, and put what refuses to be read in its place.

        Raises:
            PeerLostError: if a rank is gone.
            RuntimeError: if ranks are in different backwards.
        """
        try:
            self._carrier.finish()
        except BaseException as error:
            self.break_off(error)
            raise
        finally:
            self.in_backward = False
        if self._is_new:
            # After a rebuild there may be fewer.
            self._is_new = False
            self._routes = {index: self._routes[index] for index in self._order}
            self._known = frozenset([tensor for route in self._routes.values() for tensor in route.tensors])
            self._lay_out_rest()
        for route in self._in_order():
            for param, stand_in in zip(route.params, route.stand_ins, strict=True):
                if param.grad is not None:
                    param.grad = stand_in
        for tensor in self._touched:
            self._stand_ins[tensor]._local = None
        self._touched.clear()

    def _route(self, bucket: Bucket) -> Route:
        known = self._routes.get(bucket.index)
        same = (
            known is not None
            and len(known.params) == len(bucket.params)
            and all(mine is theirs for mine, theirs in zip(known.params, bucket.params, strict=True))
        )
        if known is not None and same:
            known.takes(bucket)
            return known
        failure: Exception | None = None
        route: Route | None = None
        tensors: list[int] = []
        try:
            tensors = self._checked(bucket)
            shares = self._carrier.shares_buckets and self._ranks.world_size > 1
            make = self._carrier.broadcaster if shares else None
            route = Route(make, self._layout.plan, self._local, bucket, tensors)
            route.stand_ins = [self._stand_ins[tensor] for tensor in tensors]
        except Exception as error:  # noqa: BLE001 - every rank must hear of it, whatever it is
            failure = error
        offsets = route.offsets if route is not None else []
        declaration = _with_bucket(self._layout, bucket, tensors, offsets, self._carrier.tags)
        try:
            check_config(self._control, "backward()", declaration, error=failure)
        finally:
            del failure
        assert route is not None
        self._routes[bucket.index] = route
        # Others keep the routes that they had before a rebuild until their own new bucket comes.
        self._place.update({tensor: (route, place) for place, tensor in enumerate(tensors)})
        self._is_new = self._is_changed = True
        self._carrier.follow([route], list(self._routes.values()))
        return route

    def _checked(self, bucket: Bucket) -> list[int]:
        """Return the indices of the bucket's parameters.

        Raises:
            ValueError: if the optimizer does not have one, or their gradients cannot be sent.
        """
        tensors: list[int] = []
        for place, param in enumerate(bucket.params):
            index = self._index_of.get(param)
            if index is None:
                raise ValueError(
                    f"DistributedDataParallel reduces a parameter of shape {tuple(param.shape)} that the optimizer "
                    f"does not have: with a communication hook of zeroshard, one optimizer must have all of them. "
                    f"Give it all parameters, or freeze those that are not to be trained before "
                    f"DistributedDataParallel is built"
                )
            name = self._layout.plan.tensors[index].name
            if bucket.buffer.layout is not torch.strided:
                raise ValueError(
                    f"tensor {index} {name!r} has sparse gradients, which cannot be sent to their owners in a bucket; "
                    f"use sparse=False, or train without a communication hook"
                )
            if param.is_complex():
                raise ValueError(
                    f"tensor {index} {name!r} is complex, and DistributedDataParallel reduces its gradients as real "
                    f"numbers: train without a communication hook"
                )
            if bucket.gradients[place].dtype != param.dtype:
                raise ValueError(
                    f"tensor {index} {name!r} is {param.dtype}, but its gradients are reduced as "
                    f"{bucket.gradients[place].dtype}; mixed precision of DistributedDataParallel cannot be combined "
                    f"with the hooks of zeroshard"
                )
            _check_order(bucket, place, f"tensor {index} {name!r}")
            tensors.append(index)
        if self._known and self._known.isdisjoint(tensors):
            raise ValueError(
                f"bucket {bucket.index} has none of the parameters that were reduced before: two models in "
                f"DistributedDataParallel cannot have one optimizer with a communication hook of zeroshard; give each "
                f"of them its own"
            )
        return tensors

    # ------------------------------------------------------------------ what a carrier is told, and does

    @property
    def steps_each_bucket(self) -> bool:
        """See :class:`~zeroshard.carrier.Backward`."""
        return self.stepping is Stepping.IN_BACKWARD

    @property
    def steps_behind_last(self) -> bool:
        """See :class:`~zeroshard.carrier.Backward`."""
        return self.stepping is Stepping.BEHIND_BACKWARD

    @property
    def steps_early(self) -> bool:
        """See :class:`~zeroshard.carrier.Backward`."""
        return self._may_step and self._failure is None and may_step_in_pieces(self._local.optim)

    @property
    def is_broken(self) -> bool:
        """See :class:`~zeroshard.carrier.Backward`."""
        return self._broken is not None

    def reduced(
        self, route: Route, arrival: BucketReduceWork, result: Future[torch.Tensor] | None
    ) -> list[BucketHeader]:
        """Take in a bucket; see :class:`~zeroshard.carrier.Backward`."""
        buffer = route.bucket.buffer
        notes = arrival.finish()
        self._check(notes, route.bucket.index)
        if result is not None:
            value = result.wait()
            if value.numel() != buffer.numel():
                raise ValueError(
                    f"the communication hook that reduces gradients has returned {value.numel()} elements for a bucket "
                    f"of {buffer.numel()}"
                )
            if value.data_ptr() != buffer.data_ptr():
                self._carrier.keep(value)
                buffer.copy_(value.view(-1))
        running = sum(not note.is_shadow for note in notes)
        if self.divides_by_running() and 0 < running < len(notes):
            route.scale(len(notes) / running)
        route.present = tuple([any(bits) for bits in zip(*[note.present for note in notes], strict=True)])
        self._add_carried(route)
        return notes

    def step_early(self, route: Route) -> bool:
        """Step a bucket during backward; see :class:`~zeroshard.carrier.Backward`."""
        if not self.steps_early or self.is_broken:
            return False
        try:
            route.step(route.present, {})
        except Exception as error:  # noqa: BLE001 - reported when all have sent what they owe
            self._failure = error
            return False
        return True

    def _add_carried(self, route: Route) -> None:
        """Add what earlier backwards have brought to the gradients that have just been reduced."""
        if self._carried:
            for place, tensor in enumerate(route.tensors):
                carried = self._carried.pop(tensor, None)
                gradient = route.owned_gradient(place)
                if carried is not None and gradient is not None and tensor in self._delivered:
                    self._carrier.keep(carried)
                    gradient.add_(carried)
            self._delivered.difference_update(route.tensors)

    def _check(self, notes: Sequence[BucketHeader], bucket: int) -> None:
        for other, note in enumerate(notes):
            if (note.backward, note.bucket) != (self._backwards, bucket):
                raise RuntimeError(
                    f"rank {other} is in bucket {note.bucket} of its backward number {note.backward}, rank "
                    f"{self._ranks.rank} in bucket {bucket} of number {self._backwards}: a backward has failed or was "
                    f"left out on one of them. Every rank must make the same calls in the same order"
                )

    # ------------------------------------------------------------------ stepping

    def step(self, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as the inner step
        """Step what has not been stepped yet, bucket by bucket, and send each as soon as it is.

        A parameter is stepped if any rank had a gradient for it in the last backward, and it was not set to None since.

        Args:
            arguments: keyword arguments of the inner step.

        Raises:
            RuntimeError: if gradients were accumulated on this rank that were never reduced.
            Exception: what the local optimizer raises; :meth:`share` is to be called all the same.
        """
        self.refuse_broken()
        failure, self._failure = self._failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure
        present = [self._there(route) for route in self._in_order()]
        if not may_step_in_pieces(self._local.optim):
            return self._step_whole(present, arguments)
        keywords = dict(arguments)
        for route in self._in_order():
            route.expect()
        for route, there in zip(self._in_order(), present, strict=True):
            if not (self._may_step and route.stepped):
                route.step(there, keywords)
                route.send()
        if self._rest:
            self._local.bind_gradients(self._rest)
            try:
                self._rest_portion.step(keywords)
            finally:
                for piece in self._rest:
                    piece.tensor.grad = None
        self._may_step = False
        return None

    def _step_whole(self, present: Sequence[tuple[bool, ...]], arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as the inner step
        """Step everything in one call of the inner optimizer."""
        for route, there in zip(self._in_order(), present, strict=True):
            route.bind(there)
            route.stepped = True
        try:
            self._local.bind_gradients(self._rest)
            return self._local.step_bound(arguments)
        finally:
            self._may_step = False
            for piece in self._rest:
                piece.tensor.grad = None

    def _there(self, route: Route) -> tuple[bool, ...]:
        """Tell per tensor of a bucket whether it has a gradient to be stepped with.

        Raises:
            RuntimeError: if a gradient was accumulated on this rank and never reduced.
        """
        grads = list(map(_grad_of, route.params))
        if not self._touched and all(map(is_, grads, route.stand_ins)):
            return route.present
        for grad, tensor in zip(grads, route.tensors, strict=True):
            if grad is None or (type(grad) is ReducedGradient and grad._local is None):
                continue
            # DDP may have replaced it in a forward; the route still has the reduced one then.
            if self._rebuilt.get(tensor) != grad.data_ptr():
                raise self._unreduced(tensor)
        return tuple([is_present and grad is not None for is_present, grad in zip(route.present, grads, strict=True)])

    def _unreduced(self, tensor: int) -> RuntimeError:
        return RuntimeError(
            f"the gradient of tensor {tensor} {self._layout.plan.tensors[tensor].name!r} has not been reduced: the "
            f"last backward() before step() must not be inside no_sync()"
        )

    @property
    def has_fresh(self) -> bool:
        """Whether gradients have been reduced that were not stepped yet."""
        return any(not route.stepped for route in self._in_order())

    def stand_in(self, param: torch.Tensor) -> ReducedGradient:
        """Return what stands for the reduced gradient of a parameter."""
        return self._stand_ins[self._index_of[param]]

    def is_spent(self, tensor: int) -> bool:
        """Whether the reduced gradient of a tensor was stepped or set to zero, so that nothing adds to it."""
        place = self._place.get(tensor)
        return place is None or place[0].stepped or tensor in place[0].zeroed

    def _in_order(self) -> list[Route]:
        return [self._routes[index] for index in self._order if index in self._routes]

    def _unended(self) -> RuntimeError:
        return RuntimeError(
            f"the last backward did not come to its end on rank {self._ranks.rank}: an exception has left it, and its "
            f"gradients are not complete. Start again from a checkpoint"
        )

    def end_abandoned(self) -> RuntimeError | None:
        """End a backward that an exception has left behind its last bucket, and return an error for all ranks to raise.

        Returns:
            None if there is no such backward.

        Raises:
            RuntimeError: if it was left before its last bucket, which the others wait for.
            PeerLostError: if a rank is gone.
        """
        if not self.in_backward:
            return None
        error = self._unended()
        if not self.arrived or not self.arrived[-1].is_last:
            raise self.broken_by(error)
        self.finish_backward()
        return error

    def refuse_unreduced(self) -> None:
        """Raise if gradients were accumulated on this rank that were never reduced.

        Raises:
            RuntimeError: naming a tensor.
        """
        if self.in_backward:
            raise self._unended()
        for route in self._in_order():
            self._there(route)
        if not self._routes:
            for tensor, param in enumerate(self._params):
                if param.grad is not None:
                    raise self._unreduced(tensor)

    def bind(self) -> None:
        """Hand the local optimizer all gradients, for somebody else to step it, and regard them as used."""
        for route in self._in_order():
            route.bind(self._there(route))
            route.stepped = True

    # ------------------------------------------------------------------ sharing

    def share(self) -> None:
        """Send what has not been sent yet, and wait for all parameters. Collective.

        Until all ranks have agreed upon something after that, others may still be reading what this rank owns.

        Raises:
            PeerLostError: if a rank is gone.
        """
        try:
            for route in self._in_order():
                route.send()
            torch.autograd.graph.increment_version(self._rest_params)
            tail = self._tail.begin()
            tail.send()
            # All that others wait for before anything that waits for others.
            for route in self._in_order():
                route.arrive()
            tail.arrive()
            for route in self._in_order():
                route.wait()
            tail.wait()
        except BaseException as error:
            self.break_off(error)
            raise

    def indices_of(self, params: Sequence[torch.Tensor]) -> list[int]:
        """Return the indices of those of these parameters that the optimizer has."""
        return [self._index_of[param] for param in params if param in self._index_of]

    # ------------------------------------------------------------------ gradients

    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's parts of all gradients that the next step will use.

        Raises:
            RuntimeError: if gradients were accumulated on this rank that were never reduced.
        """
        self.refuse_unreduced()
        found: list[torch.Tensor] = []
        for route in self._in_order():
            for place, is_there in enumerate(self._there(route)):
                gradient = route.owned_gradient(place) if is_there else None
                if gradient is not None:
                    found.append(gradient)
        for piece in self._rest:
            self._local.bind_gradients([piece])
            if piece.tensor.grad is not None:
                found.append(piece.tensor.grad)
                piece.tensor.grad = None
        return found

    def carry(self, tensor: int) -> None:
        """Keep what was reduced of a gradient; see :class:`~zeroshard.reduced_gradient.Keeper`."""
        route, place = self._place[tensor]
        self._touched.add(tensor)
        if tensor in route.zeroed:
            return
        if route.stepped:
            raise RuntimeError(
                f"tensor {tensor} {self._layout.plan.tensors[tensor].name!r} still has the gradient of the last step: "
                f"call optimizer.zero_grad() before backward()"
            )
        gradient = route.owned_gradient(place)
        if gradient is not None:
            self._carried[tensor] = gradient.clone()

    def deliver(self, tensor: int) -> None:
        """Take note that values to which something was carried go into a bucket; see the same class."""
        if tensor in self._carried:
            self._delivered.add(tensor)

    def zero(self, tensor: int) -> None:
        """Set a reduced gradient to zero; see :class:`~zeroshard.reduced_gradient.Keeper`."""
        route, place = self._place[tensor]
        route.zeroed.add(tensor)
        self._carried.pop(tensor, None)
        self._delivered.discard(tensor)
        gradient = route.owned_gradient(place)
        if gradient is not None:
            gradient.zero_()

    def is_zeroed(self, tensor: int) -> bool:
        """Whether a reduced gradient was set to zero; see :class:`~zeroshard.reduced_gradient.Keeper`."""
        place = self._place.get(tensor)
        return place is not None and tensor in place[0].zeroed

    def replaced(self, tensor: int, place: torch.Tensor) -> None:
        """Carry a gradient over into a bucket; see :class:`~zeroshard.reduced_gradient.Keeper`.

        DDP copies gradients into its buckets when it rebuilds them in a forward, and those of parameters that a
        backward did not use. The owner puts in what was reduced before, times the number of ranks, by which the
        reduction divides; so it is added to if a further backward comes before the step, and discarded by whatever
        discards gradients. Nobody else puts in anything.
        """
        route, position = self._place[tensor]
        gradient = None if route.stepped or tensor in route.zeroed else route.owned_gradient(position)
        # The place may be where it lies.
        gradient = gradient.clone() if gradient is not None else None
        place.zero_()
        if gradient is not None and self.divides_by_running() and in_autograd():
            # Not of this backward, and not to be scaled with what is.
            self._carried[tensor] = gradient
            self.deliver(tensor)
        elif gradient is not None:
            self._own(tensor, place).copy_(gradient).mul_(self._ranks.world_size)
        if not route.stepped and tensor not in route.zeroed:
            self._rebuilt[tensor] = place.data_ptr()

    def carry_replaced(self) -> None:
        """Carry what :meth:`replaced` has put into buckets in a forward, at the beginning of a backward.

        It must not be in the buckets where the number of ranks, by which it was multiplied, is not what the reduction
        divides by.
        """
        for tensor, address in self._rebuilt.items():
            grad = self._params[tensor].grad
            if grad is None or type(grad) is ReducedGradient or grad.data_ptr() != address:
                continue
            if tensor in self._local.pieces:
                self._carried[tensor] = self._own(tensor, grad) / self._ranks.world_size
                self.deliver(tensor)
            grad.zero_()
        self._rebuilt.clear()

    def give_up_carried(self) -> None:
        """Forget what was carried: all gradients were dropped since."""
        self._carried.clear()
        self._delivered.clear()

    def _own(self, tensor: int, whole: torch.Tensor) -> torch.Tensor:
        """What this rank owns of a gradient."""
        piece = self._local.pieces[tensor]
        return piece.shard.box(whole) if piece.is_cut else whole

    def advice(self, operation: str) -> str:
        """Say what to call instead; see :class:`~zeroshard.reduced_gradient.Keeper`."""
        early = self.stepping is not Stepping.IN_STEP
        if "_amp_" in operation:
            return (
                "a GradScaler cannot be combined with gradients that are sent to their owners. Use bfloat16, which "
                "needs none, or train without a communication hook"
                + (
                    ". This one has stepped during backward, with the scaled gradients: load a checkpoint"
                    if early
                    else ""
                )
            )
        if early:
            return (
                "this hook steps during backward, so gradients can be neither clipped nor changed. Use "
                "reduce_to_owner_hook for that, and optimizer.clip_grad_norm_()"
            )
        return (
            "to clip, call optimizer.clip_grad_norm_(max_norm), which also returns the norm over all ranks; to change "
            "gradients, do it in a hook of the tensor, or train without a communication hook"
        )

    # ------------------------------------------------------------------ failing

    def broken_by(self, error: RuntimeError) -> RuntimeError:
        """Take note that nothing can be finished any more, and return the error to be raised."""
        self.break_off(error)
        return error

    def break_off(self, error: BaseException) -> None:
        """Take note that nothing can be finished any more; see :class:`~zeroshard.carrier.Backward`."""
        if isinstance(error, PeerLostError):
            self._control.cut_off()
        if self._broken is None:
            self._broken = error if isinstance(error, Exception) else RuntimeError(type(error).__name__)

    def refuse_broken(self) -> None:
        """Raise if an earlier backward or step could not be finished: ranks may be in different places.

        Raises:
            PeerLostError: if a rank was lost.
            RuntimeError: if it was something else.
        """
        if self._broken is not None:
            kind = PeerLostError if isinstance(self._broken, PeerLostError) else RuntimeError
            raise kind(
                f"rank {self._ranks.rank}: an earlier backward or step could not be finished, and messages of it may "
                f"still be on their way; start again from a checkpoint. It was: {self._broken}"
            )


def _carrier_for(
    control: Control, traffic: Traffic, device: torch.device, backward: Backward, *, reads: bool
) -> Carrier:
    """Choose by what the group can do with tensors on a device."""
    if reads:
        return SameHostCarrier(control, backward)
    if control.ranks.sends_tagged(device):
        return MessageCarrier(control, traffic, backward)
    return CollectiveCarrier(control, traffic, device, backward)


def common_device(params: Sequence[torch.Tensor], layout: Layout) -> torch.device:
    """Return the device of all parameters that take part.

    Raises:
        ValueError: if they are on several, or one of them cannot be exchanged.
    """
    first: tuple[str, torch.device] | None = None
    for index, (param, is_active) in enumerate(zip(params, layout.active, strict=True)):
        title = f"tensor {index} {layout.plan.tensors[index].name!r}"
        if is_active and not lies_flat(param):
            raise ValueError(
                f"{title} is sparse, has gaps in memory, or is a conjugate or negative view: it cannot be exchanged by "
                f"a communication hook; make it contiguous, or train without a hook"
            )
        if is_active and first is None:
            first = title, param.device
        if is_active and first is not None and param.device != first[1]:
            raise ValueError(
                f"{title} is on {param.device}, and {first[0]} on {first[1]}: a communication hook exchanges "
                f"parameters of one device; bring them together, or train without a hook"
            )
    return first[1] if first is not None else torch.device("cpu")


def _check_order(bucket: Bucket, place: int, title: str) -> None:
    """Raise if a gradient does not lie in its bucket in the order of its parameter's elements.

    DDP lays out its buckets when it is built, and once more later. Looked at once per bucket, since it reads all of it.
    """
    param, grad = bucket.params[place], bucket.params[place].grad
    if param.dim() < 2 or grad is None or type(grad) is ReducedGradient or not bucket.present[place]:
        return
    offset = int(bucket.gradients[place].storage_offset()) - int(bucket.buffer.storage_offset())
    view = gradient_view(bucket.buffer, offset, param.shape, param.stride())
    if not bool(((view == grad) | (grad != grad)).all()):
        raise ValueError(
            f"{title} has changed its memory format since DistributedDataParallel was built, which still lays out its "
            f"gradients in the old one: convert the model before"
        )


def _with_bucket(
    layout: Layout, bucket: Bucket, tensors: Sequence[int], offsets: Sequence[int], tags: int
) -> ShardingConfig:
    return replace(
        layout.declaration,
        settings={
            **layout.declaration.settings,
            "tags of hooks, in the order of their first backward": f"{tags:#x}",
            f"bucket {bucket.index}": f"{bucket.buffer.numel()} elements of {bucket.buffer.dtype}: tensors "
            f"{list(tensors)} at {list(offsets)}",
        },
    )

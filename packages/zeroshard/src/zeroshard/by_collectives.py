"""The carriers of one thread, which work in one order: by collectives, for every backend, and by reads of memory.

All is issued by the thread that runs backward or the step, in one order that does not depend on timing: the reduction
of a bucket; then, if each bucket is stepped as soon as it is reduced, the shares of the bucket before. Whether shards
are stepped during a backward is a matter of all ranks, for it decides about that order: a rank says with each bucket
whether it may, and a bucket is shared early only if all ranks said so.

On an accelerator nothing here waits for the device. Reduced buckets are taken in, stepped and shared on a side stream,
behind their reductions, while backward computes on its own.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.futures import Future
from zeroshard_comm import (
    BucketHeader,
    BucketReduceWork,
    CollectiveBroadcaster,
    CollectiveReducer,
    Control,
    GradientReducer,
    ParameterBroadcaster,
    SameHostBroadcaster,
    SameHostReducer,
    Segment,
    Traffic,
    choose_private_group,
)

from zeroshard.carrier import Backward, Carrier
from zeroshard.route import Route
from zeroshard.side_stream import SideStream


@dataclass(frozen=True, eq=False)
class _Open:
    """A bucket whose reduction has been issued."""

    route: Route
    underway: BucketReduceWork
    result: Future[torch.Tensor] | None
    done: Future[torch.Tensor]


class _OrderedCarrier(Carrier):
    """Takes buckets in when the last one has come, or one by one, if each is stepped as soon as it is reduced."""

    def __init__(self, control: Control, device: torch.device, backward: Backward) -> None:
        self._control, self._backward = control, backward
        self._side = SideStream(device)
        # Of a device with streams, a future orders those who wait for it behind the stream on which it was set.
        self._devices: list[int | str | torch.device] = [] if device.type == "cpu" else [device]
        self._reducers: weakref.WeakKeyDictionary[Route, GradientReducer] = weakref.WeakKeyDictionary()
        self._received: list[Route] = []
        self._open: list[_Open] = []
        self._all_may_step = False

    @abstractmethod
    def _reducer(self, route: Route) -> GradientReducer:
        """Make what brings the gradients of a bucket to their owners."""

    def follow(self, changed: Sequence[Route], routes: Sequence[Route]) -> None:  # noqa: ARG002 - as Carrier
        """Lay out reductions."""
        for route in changed:
            self._reducers[route] = self._reducer(route)

    def expect(self, routes: Sequence[Route], *, gradients: bool) -> None:
        """Do nothing: a collective is issued when there is something to be reduced."""

    def receive(self, route: Route, note: BucketHeader, result: Future[torch.Tensor] | None) -> Future[torch.Tensor]:
        """Issue the reduction of a bucket, and take in those of the buckets before as far as that is of use now."""
        backward, bucket = self._backward, route.bucket
        if bucket.index == 0:
            self._received.clear()
            self._all_may_step = True
        self._received.append(route)
        done: Future[torch.Tensor] = Future(devices=self._devices)
        underway = self._reducers[route].begin(bucket.buffer, note, gradients=result is None)
        self._open.append(_Open(route, underway, result, done))
        # What is not announced may be the last, behind which DDP waits for all.
        if bucket.is_last or bucket.announced != bucket.index:
            self._take_in(leave=0)
        elif backward.steps_each_bucket:
            self._take_in(leave=1)
        if bucket.is_last and backward.steps_behind_last and self._all_may_step:
            with self._side.behind_current():
                for other in self._received:
                    self._step(other)
        return done

    def finish(self) -> None:
        """Take in what has not been, and order the current stream behind it."""
        self._take_in(leave=0)
        self._side.join()

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep what the side stream uses."""
        self._side.keep(tensor)

    def _take_in(self, *, leave: int) -> None:
        """Finish reductions in the order in which they were issued, all but the last few."""
        taken: list[BucketReduceWork] = []
        with self._side.behind_current():
            while len(self._open) > leave:
                item = self._open.pop(0)
                taken.append(item.underway)
                buffer = item.route.bucket.buffer
                self.keep(buffer)
                notes = self._backward.reduced(item.route, item.underway, item.result)
                item.done.set_result(buffer)
                may_step = all(note.may_step for note in notes)
                self._all_may_step = self._all_may_step and may_step
                if self._backward.steps_each_bucket and may_step:
                    self._step(item.route)
            for underway in taken:
                underway.close()

    def _step(self, route: Route) -> None:
        """Step a bucket during backward, and share it, also if the step has failed: all ranks have agreed to."""
        self._backward.step_early(route)
        route.send()


class CollectiveCarrier(_OrderedCarrier):
    """Reduces every owner's part to it, by collectives on a group of its own. Made by all ranks together.

    Args:
        control: has the group, and the channel of the headers.
        traffic: where bytes are counted.
        device: where parameters and buckets are.
        backward: what is done with the buckets.

    Raises:
        RuntimeError: if the group has no backend for the device.
        ValueError: if a group of our own cannot be made.
    """

    def __init__(self, control: Control, traffic: Traffic, device: torch.device, backward: Backward) -> None:
        super().__init__(control, device, backward)
        self._ranks, self._traffic = choose_private_group(control.ranks, device), traffic

    def broadcaster(self, segments: Sequence[Segment]) -> ParameterBroadcaster:
        """Make one that issues its collectives on the group of our own."""
        return CollectiveBroadcaster(self._ranks, segments, self._traffic)

    def _reducer(self, route: Route) -> GradientReducer:
        buffer, tensors = route.bucket.buffer, len(route.tensors)
        return CollectiveReducer(self._ranks, self._control, self._traffic, route.runs, buffer, tensors)


class SameHostCarrier(_OrderedCarrier):
    """Has every owner read its part where the others have it. Parameters travel together, in one read from each peer.

    Args:
        control: has the group, all of whose ranks read each other's memory, and its channel.
        backward: what is done with the buckets.
    """

    shares_buckets = False

    def __init__(self, control: Control, backward: Backward) -> None:
        super().__init__(control, torch.device("cpu"), backward)

    def broadcaster(self, segments: Sequence[Segment]) -> ParameterBroadcaster:
        """Make one for the thread that calls a step."""
        return SameHostBroadcaster(self._control, segments)

    def _reducer(self, route: Route) -> GradientReducer:
        return SameHostReducer(self._control, route.runs, route.bucket.buffer.dtype, len(route.tensors))

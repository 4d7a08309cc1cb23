"""The carrier of tagged point-to-point messages (gloo, CPU tensors).

Main thread and worker share the work of one backward. The main thread hands over buckets in order; it sends this rank's
values and posts receives. The worker waits for what arrives, adds it up and, if steps are made during backward, steps
and shares. Messages are matched by tag, so they never meet the collectives that DistributedDataParallel issues on the
same group.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.futures import Future
from zeroshard_comm import (
    BucketHeader,
    Control,
    MessageBroadcaster,
    MessageReducer,
    MessageReduceWork,
    ParameterBroadcaster,
    ReceiveWindow,
    Segment,
    Traffic,
    window_bytes,
)

from zeroshard.carrier import Backward, Carrier
from zeroshard.route import Route
from zeroshard.worker import Worker

TAG_BUCKETS = 0x5A530032


class MessageCarrier(Carrier):
    """Sends every owner its part, and adds up what arrives in a thread that lives during a backward.

    Args:
        control: has the group.
        traffic: where bytes are counted.
        backward: what is done with the buckets.
    """

    def __init__(self, control: Control, traffic: Traffic, backward: Backward) -> None:
        self._ranks, self._traffic, self._backward = control.ranks, traffic, backward
        self.tags = control.ranks.context.allocate_tags()
        self._window = ReceiveWindow(control.ranks)
        self._worker = Worker(f"zeroshard rank {control.ranks.rank}")
        self._reducers: weakref.WeakKeyDictionary[Route, MessageReducer] = weakref.WeakKeyDictionary()
        self._received: list[Route] = []
        self._underway: list[MessageReduceWork] = []
        self._expected: dict[Route, MessageReduceWork] = {}

    def broadcaster(self, segments: Sequence[Segment]) -> ParameterBroadcaster:
        """Make one whose messages may be sent by the worker."""
        return MessageBroadcaster(self._ranks, segments, self._traffic, tag=TAG_BUCKETS + self.tags)

    def follow(self, changed: Sequence[Route], routes: Sequence[Route]) -> None:
        """Lay out messages, and set the limit of the memory for receives."""
        if self._expected:
            raise RuntimeError(
                "buckets have changed after many equal backwards, as if the model had been wrapped in another "
                "DistributedDataParallel: build a new optimizer for that"
            )
        for route in changed:
            dtype = route.bucket.buffer.dtype
            self._reducers[route] = MessageReducer(
                self._ranks, route.runs, dtype, len(route.tensors), self._window, self._traffic, tags=self.tags
            )
        self._window.limit(window_bytes([route.bucket.buffer.nbytes for route in routes]))

    def expect(self, routes: Sequence[Route], *, gradients: bool) -> None:
        """Post receives before anything is sent: what posts a receive would wait behind it."""
        for route in routes:
            self._expected[route] = self._reducers[route].expect(gradients=gradients)

    def receive(self, route: Route, note: BucketHeader, result: Future[torch.Tensor] | None) -> Future[torch.Tensor]:
        """Send this rank's values, and let the worker wait for the others'."""
        backward, bucket = self._backward, route.bucket
        if bucket.index == 0:
            self._received.clear()
        self._received.append(route)
        if route not in self._expected:
            self.expect([route], gradients=result is None)
        underway = self._expected.pop(route)
        underway.send(bucket.buffer, note)
        if backward.steps_early:
            if backward.steps_each_bucket:
                route.expect()
            elif bucket.is_last:
                for other in self._received:
                    other.expect()
        self._underway.append(underway)
        done: Future[torch.Tensor] = Future()
        behind = self._underway[-3] if len(self._underway) > 2 else None
        self._worker.submit(lambda: self._finish(route, underway, behind, result, done))
        if bucket.is_last and backward.steps_early and backward.steps_behind_last:
            for other in self._received:
                self._worker.submit(lambda other=other: self._step(other))  # type: ignore[misc]
        return done

    def finish(self) -> None:
        """Wait for the worker, and until everything has been sent."""
        try:
            self._worker.drain()
            for underway in self._underway:
                underway.close()
        finally:
            self._underway.clear()

    def keep(self, tensor: torch.Tensor) -> None:
        """Do nothing: what is used on the CPU has been used when the call returns."""

    def _finish(
        self,
        route: Route,
        underway: MessageReduceWork,
        behind: MessageReduceWork | None,
        result: Future[torch.Tensor] | None,
        done: Future[torch.Tensor],
    ) -> None:
        """Worker: one bucket, from its arrival to its owners' sums; and the end of one that came some buckets before.

        What that one has packed is memory that the next one needs.
        """
        backward = self._backward
        try:
            if not backward.is_broken:
                backward.reduced(route, underway, result)
                if behind is not None:
                    behind.close()
        except BaseException as error:
            # Others may still be waiting for the next bucket; this rank has nothing to send any more.
            backward.break_off(error)
            raise
        finally:
            # Also after an error: backward would wait for ever. It is raised at its end.
            done.set_result(route.bucket.buffer)
        if backward.steps_each_bucket:
            self._step(route)

    def _step(self, route: Route) -> None:
        """Worker: step a bucket during backward, and send it."""
        if self._backward.step_early(route):
            route.send()

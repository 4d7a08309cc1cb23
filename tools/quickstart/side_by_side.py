"""What the ranks do: train both ways side by side, save, and go on from what was saved."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from corpus import Batches
from job import Contender, Continuation, Job, Predicted, Training
from runs import Iteration, Run, global_mean, largest_difference

UNINTERRUPTED = "uninterrupted.pt"
CORPUS = "corpus.bin"


def train(job: Job) -> Training:
    """Train sharded and unsharded on the same batches, save the sharded run midway, and resume it. Collective."""
    batches = batches_of(job)
    plain, sharded = Run(job, sharded=False), Run(job, sharded=True)
    seen: dict[Run, list[Iteration]] = {plain: [], sharded: []}
    losses: dict[Run, list[float]] = {plain: [], sharded: []}
    difference, checkpoint_seconds, sent_by_steps = 0.0, 0.0, 0
    first = plain.flat()
    for step in range(job.steps + job.more_steps):
        if step == job.steps:
            started = time.perf_counter()
            sharded.save(job.checkpoint)
            checkpoint_seconds = time.perf_counter() - started
        batch = batches.of(step, dist.get_rank(), dist.get_world_size())
        sent_before = sharded.bytes_sent()
        # They take turns at going first, so that neither always finds the caches warm.
        for run in (plain, sharded) if step % 2 else (sharded, plain):
            iteration = run.iterate(*batch)
            seen[run].append(iteration)
            losses[run].append(global_mean(iteration.loss))
        sent_by_steps += sharded.bytes_sent() - sent_before
        found = largest_difference(sharded.flat(), plain.flat())
        difference = found if found != found else max(difference, found)
        if found != found:
            break
        _tell_step(step + 1, losses[sharded][-1])
    if dist.get_rank() == 0:
        torch.save(sharded.flat(), Path(job.folder) / UNINTERRUPTED)
    contenders = [
        Contender(
            losses=losses[run],
            state_bytes=run.state_bytes(),
            bytes_per_step=sent_by_steps // len(losses[run]) if run is sharded else plain.predicted_bytes(),
            step_seconds=statistics.median(iteration.seconds for iteration in seen[run]),
            update_seconds=statistics.median(iteration.update_seconds for iteration in seen[run]),
        )
        for run in (plain, sharded)
    ]
    predicted = Predicted(sharded.predicted_state_bytes(), sharded.predicted_bytes())
    relative = _relative(sharded.flat(), plain.flat(), first)
    dist.barrier()
    again = resume(job, sharded=True, told_before=job.steps + job.more_steps)
    return Training(
        first.numel(), contenders[0], contenders[1], difference, relative, predicted, checkpoint_seconds, again
    )


def resume(job: Job, *, sharded: bool, told_before: int = 0) -> Continuation:
    """Build everything again, load the checkpoint and train on as the uninterrupted run did. Collective.

    Args:
        job: what to do.
        sharded: whether the optimizer's state is sharded.
        told_before: steps that this launch has reported already.

    Returns:
        How it went, against the uninterrupted run.
    """
    batches = batches_of(job)
    run = Run(job, sharded=sharded)
    run.load(job.checkpoint)
    loaded = run.flat()
    losses = []
    for step in range(job.more_steps):
        batch = batches.of(job.steps + step, dist.get_rank(), dist.get_world_size())
        losses.append(global_mean(run.iterate(*batch).loss))
        _tell_step(told_before + step + 1, losses[-1])
    expected = torch.load(Path(job.folder) / UNINTERRUPTED, weights_only=True)
    ours = run.flat()
    return Continuation(losses, largest_difference(ours, expected), _relative(ours, expected, loaded))


def batches_of(job: Job) -> Batches:
    """Return the batches of a job's text."""
    return Batches((Path(job.folder) / CORPUS).read_bytes(), job.sequences, job.context, job.seed)


def _relative(ours: torch.Tensor, expected: torch.Tensor, start: torch.Tensor) -> float:
    """The difference as L2 norm, relative to how far the expected run moved from the start; NaN if it did not."""
    moved = float((expected - start).norm())
    return float((ours - expected).norm()) / moved if moved else float("nan")


def _tell_step(step: int, loss: float) -> None:
    if dist.get_rank() == 0:
        print(json.dumps({"step": step, "loss": loss}), flush=True)

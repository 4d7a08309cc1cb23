"""What the ranks are told and what they answer, as JSON files in one folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Task = Literal["train", "resume-sharded", "resume-plain"]


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank of one launch is to do.

    Attributes:
        task: train sharded and unsharded side by side, or resume from the checkpoint in one of the two ways.
        folder: where text, checkpoint of the comparison and answers lie.
        checkpoint: file of the consolidated state.
        steps: before the checkpoint.
        more_steps: after it.
        sequences: of the global batch.
        context: bytes per sequence.
        seed: of weights and batches.
        optimizer: classes and their parameters, see :mod:`zeroshard.plan.choices`.
        lr: learning rate of the only class; None for the default.
        partition: "whole", "split" or "level".
        bucket_views: whether parameters are packed into flat buffers.
    """

    task: Task
    folder: str
    checkpoint: str
    steps: int
    more_steps: int
    sequences: int
    context: int
    seed: int
    optimizer: str
    lr: float | None
    partition: str
    bucket_views: bool

    def write(self, file: Path) -> None:
        """Write the job to a file."""
        file.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(file: Path) -> Job:
        """Read a job from a file."""
        return Job(**json.loads(file.read_text()))


@dataclass(frozen=True, slots=True)
class Continuation:
    """How training went on after the checkpoint.

    Attributes:
        losses: global mean per step, in nats per byte.
        difference: largest parameter difference to the uninterrupted run, over all elements.
        relative: that difference as L2 norm, relative to how far the uninterrupted run moved since the checkpoint.
    """

    losses: list[float]
    difference: float
    relative: float


@dataclass(frozen=True, slots=True)
class Contender:
    """One optimizer on one rank.

    Attributes:
        losses: global mean per step, in nats per byte, before and after the checkpoint.
        state_bytes: optimizer state that this rank holds, in bytes.
        bytes_per_step: gradients and parameters that this rank sends, in bytes: counted if sharded, else what a
            ring all-reduce sends.
        step_seconds: median time of forward, backward and update, in seconds.
        update_seconds: median time of ``optimizer.step()``, in seconds.
    """

    losses: list[float]
    state_bytes: int
    bytes_per_step: int
    step_seconds: float
    update_seconds: float


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a rank was predicted to hold of optimizer state, and to send per step, from shapes alone; in bytes."""

    state_bytes: int
    bytes_per_step: int


@dataclass(frozen=True, slots=True)
class Training:
    """What one rank saw while it trained both ways.

    Attributes:
        parameters: number of elements of the model.
        plain: the unsharded optimizers.
        sharded: the sharded one.
        difference: largest difference of any parameter between the two, over all steps.
        relative: the difference in the end as L2 norm, relative to how far the unsharded run moved.
        predicted: what this rank was predicted to hold and send.
        checkpoint_seconds: time to consolidate and save, in seconds.
        again: resumed from the checkpoint in the same processes.
    """

    parameters: int
    plain: Contender
    sharded: Contender
    difference: float
    relative: float
    predicted: Predicted
    checkpoint_seconds: float
    again: Continuation


def write_answer(job: Job, rank: int, answer: Training | Continuation) -> None:
    """Write what a rank found to the job's folder."""
    _answer_file(Path(job.folder), job.task, rank).write_text(json.dumps(asdict(answer)))


def read_training(folder: Path, ranks: int) -> list[Training]:
    """Read the answers of all ranks that trained."""
    answers = []
    for rank in range(ranks):
        found = json.loads(_answer_file(folder, "train", rank).read_text())
        found["plain"], found["sharded"] = Contender(**found["plain"]), Contender(**found["sharded"])
        found["predicted"] = Predicted(**found["predicted"])
        answers.append(Training(**{**found, "again": Continuation(**found["again"])}))
    return answers


def read_continuation(folder: Path, task: Task, ranks: int) -> Continuation:
    """Read the answers of all ranks that resumed: rank 0's losses, and the largest differences of any rank."""
    answers = [Continuation(**json.loads(_answer_file(folder, task, rank).read_text())) for rank in range(ranks)]
    return worst(answers)


def worst(answers: list[Continuation]) -> Continuation:
    """Return rank 0's losses with the largest differences of any rank; a NaN counts as the largest."""
    return Continuation(
        answers[0].losses, largest([a.difference for a in answers]), largest([a.relative for a in answers])
    )


def largest(values: list[float]) -> float:
    """Return the largest value, or NaN if there is one: Python's own ``max`` may pass over it."""
    return next((value for value in values if value != value), max(values))


def _answer_file(folder: Path, task: Task, rank: int) -> Path:
    return folder / f"{task}.rank{rank}.json"

"""What ranks of the quickstart find for several optimizer classes, in few steps of few bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from job import Job
from side_by_side import CORPUS, resume, train
from verdict import TOLERANCE

JOB = Job(
    task="train",
    folder="",
    checkpoint="",
    steps=1,
    more_steps=1,
    sequences=6,
    context=8,
    seed=0,
    optimizer="Muon:matrices+AdamW(lr=0.01):bytes.*+AdamW:rest",
    lr=None,
    partition="level",
    bucket_views=True,
)


@pytest.mark.ranks(2)
def test_several_classes_train_and_resume_as_a_plain_optimizer_for_each(rank, ranks_tmp_path):
    job = replace(JOB, folder=str(ranks_tmp_path), checkpoint=str(ranks_tmp_path / "checkpoint.pt"))
    if rank == 0:
        (ranks_tmp_path / CORPUS).write_bytes(bytes(range(256)))
    dist.barrier()
    torch.set_num_threads(1)

    found = train(job)
    plain = resume(job, sharded=False)

    assert found.difference == 0.0
    assert found.again.difference == 0.0
    assert plain.relative <= TOLERANCE
    assert found.sharded.bytes_per_step == found.predicted.bytes_per_step
    assert found.sharded.state_bytes == found.predicted.state_bytes
    # Each class keeps a count of steps for each tensor, and level cuts tensors: a few bytes more in all.
    held = torch.tensor(found.sharded.state_bytes)
    dist.all_reduce(held)
    assert 0 <= held.item() - found.plain.state_bytes <= 100
    assert found.sharded.state_bytes <= 1.02 * found.plain.state_bytes / 2

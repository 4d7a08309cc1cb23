"""The way of a bucket: what holds it, and that its modules are found."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections import deque
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace

import pytest
import torch
import typer
from bucket_trace import PACKAGES, Passed, holds, main, traced

ROOT = Path(__file__).parents[2]
BUFFER = torch.arange(100.0)
SPANS = [(BUFFER.data_ptr() + 40, BUFFER.data_ptr() + 80)]
"""Of elements 10 to 19."""


def closes_over(value):
    return lambda: value


@pytest.mark.parametrize(
    "value",
    [
        BUFFER,
        BUFFER[19:30],
        torch.nn.Parameter(BUFFER[10:12]),
        BUFFER.view(10, 10)[:, 9],
        [{"shards": deque([BUFFER[12:]])}],
        SimpleNamespace(state=SimpleNamespace(buckets=[BUFFER])),
        closes_over(BUFFER),
        partial(print, BUFFER),
        MethodType(print, BUFFER),
        SPANS[0][0],
        (ctypes.c_size_t * 2)(0, SPANS[0][1] - 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_leads_to_the_memory_holds_it(value):
    assert holds([None, value], SPANS)


@pytest.mark.parametrize(
    "value",
    [
        BUFFER.clone(),
        BUFFER[:10],
        BUFFER[20:],
        BUFFER[10:10],
        torch.empty(100, device="meta"),
        SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=BUFFER))),
        BUFFER.shape,
        SPANS[0][1],
        torch,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_does_not_lead_there_in_two_attributes_does_not_hold_it(value):
    assert not holds([value], SPANS)


def test_a_circle_ends():
    one = SimpleNamespace(items=[])
    one.items.append(one)

    assert not holds([one], SPANS)


def test_the_way_begins_at_the_hook_and_what_only_counts_is_not_on_it():
    passed = traced("reduce_to_owner_hook", "messages")

    names = [one.module for one in passed]
    assert names[0] == "zeroshard_integrations.ddp"
    assert "reduce_to_owner_hook" in passed[0].functions
    assert {name.partition(".")[0] for name in names} == {"zeroshard_integrations", "zeroshard", "zeroshard_comm"}
    assert not {"zeroshard_comm.traffic", "zeroshard_comm.process_group", "zeroshard_comm.errors"} & set(names)
    assert all(isinstance(one, Passed) and min(one.functions.values()) > 0 for one in passed)


# The other transport is drawn above; this one repeats it in a process of its own.
@pytest.mark.exhaustive
def test_the_way_by_memory_is_written_to_a_file(tmp_path):
    command = [sys.executable, "tools/bucket_trace.py", "--hook", "hook_with_zero_step", "--transport", "memory"]

    done = subprocess.run(
        [*command, "--most", "1", "--json", str(tmp_path / "way.json")], cwd=ROOT, capture_output=True, check=False
    )

    assert done.returncode == 1, done.stderr
    (found,) = json.loads((tmp_path / "way.json").read_text())["traces"]
    assert {name.partition(".")[0] for name in found["modules"]} <= PACKAGES
    assert f"{len(found['modules'])} modules, at most 1" in done.stdout.decode()


@pytest.mark.parametrize(("most", "status"), [(1, 1), (2, 0)])
def test_too_many_modules_are_a_failure(monkeypatch, most, status):
    monkeypatch.setattr("bucket_trace.traced", lambda *_: [Passed("a", {"f": 1}), Passed("b", {"g": 1})])

    with pytest.raises(typer.Exit) as ended:
        main(most, transport=["memory"])

    assert ended.value.exit_code == status


def test_an_unknown_hook_is_refused():
    done = subprocess.run(
        [sys.executable, "tools/bucket_trace.py", "--hook", "none"], cwd=ROOT, capture_output=True, check=False
    )

    assert done.returncode == 2
    assert b"reduce_to_owner_hook" in done.stderr

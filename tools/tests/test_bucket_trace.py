"""Which modules a step and a bucket enter: what is counted, and what the command prints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import typer
from bucket_trace import PACKAGES, Entered, main, traced

ROOT = Path(__file__).parents[2]
# Two tests look at the way of a bucket.
traced_once = cache(traced)


def test_a_bucket_enters_modules_of_three_packages():
    entered = traced_once("bucket", "messages")

    assert entered[0].module == "zeroshard_integrations.ddp"
    assert "reduce_to_owner_hook" in entered[0].functions
    packages = {each.module.partition(".")[0] for each in entered}
    assert packages >= {"zeroshard_integrations", "zeroshard", "zeroshard_comm"}
    assert {each.thread for each in entered} == {"main"}
    assert all(min(each.functions.values()) > 0 for each in entered)


@pytest.mark.parametrize(("what", "heading"), [("step", "one step"), ("bucket", "one bucket")])
def test_the_ways_on_the_page_for_contributors_are_those_that_are_entered(what, heading):
    page = (ROOT / "docs" / "contributing.md").read_text("utf-8")
    way = re.search(rf"## The way of {heading}\n(.*?)(?=\nWhat differs|\n## )", page, re.DOTALL)[1]
    modules = {each.module for each in traced_once(what, "messages")}
    # Interfaces, which others implement, and objects that were made before.
    elsewhere = {"zeroshard_comm.interfaces", "zeroshard.grads.placeholder"}

    numbered = [line for line in re.split(r"\n(?=\d+\. )", way) if line[0].isdigit()]
    names = [name for line in numbered for name in re.findall(r"`(zeroshard\w*(?:\.\w+)+)`", line)]

    assert len(names) >= 8
    for name in names:
        inside = [module for module in modules if name == module or name.startswith(f"{module}.")]
        assert inside or any(name.startswith(each) for each in elsewhere), name


# The other transport and way are traced above; this one repeats them in a process of its own.
@pytest.mark.exhaustive
def test_a_step_by_memory_is_written_to_a_file(tmp_path):
    command = [sys.executable, "tools/bucket_trace.py", "--what", "step", "--transport", "memory"]

    done = subprocess.run(
        [*command, "--most", "1", "--json", str(tmp_path / "way.json")], cwd=ROOT, capture_output=True, check=False
    )

    assert done.returncode == 1, done.stderr
    (found,) = json.loads((tmp_path / "way.json").read_text())["traces"]
    assert {each["module"].partition(".")[0] for each in found["entered"]} <= PACKAGES
    assert f"{found['modules']} modules, at most 1" in done.stdout.decode()


@pytest.mark.parametrize(("most", "status"), [(1, 1), (2, 0)])
def test_too_many_modules_are_a_failure(monkeypatch, most, status):
    entered = [Entered("a", "main", {"f": 1}), Entered("b", "main", {"g": 2}), Entered("b", "worker", {"g": 1})]
    monkeypatch.setattr("bucket_trace.traced", lambda *_: entered)

    with pytest.raises(typer.Exit) as ended:
        main(most, transport=["memory"])

    assert ended.value.exit_code == status


def test_an_unknown_name_is_refused():
    done = subprocess.run(
        [sys.executable, "tools/bucket_trace.py", "--what", "none"], cwd=ROOT, capture_output=True, check=False
    )

    assert done.returncode == 2
    assert b"bucket" in done.stderr

"""The parts of the training benchmark that need no ranks: its table, its page, and what a link takes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from links import missing
from training_report import markdown, remarks, rows
from training_result import Entry, Result

BENCH = Path(__file__).parents[1] / "bench"
MB = 1e6


def result(*entries, **changes):
    fields = {
        "command": "python tools/bench/training.py",
        "machine": {"cpus": 2},
        "model": "mlp",
        "batch": "32 rows",
        "parameter_bytes": 10_000_000,
        "ranks": 2,
        "rounds": 6,
        "link": None,
    }
    return Result(**(fields | changes), entries=list(entries))


def entry(name, seconds, **fields):
    return Entry(name, f"what {name} is", seconds=[seconds] * 6, **fields)


DDP = entry("ddp", 0.4, difference=0.0)
TORCH = [entry("torch-zero", 0.2, difference=0.0), entry("torch-zero-views", 0.3, difference=0.0)]


def test_ratios_are_to_the_better_of_torchs_modes_and_to_ddp():
    headings, *cells = rows(result(DDP, *TORCH, entry("step-whole", 0.1, difference=0.0)))

    row = dict(zip(headings, cells[-1], strict=True))

    assert row["ms"] == "100.0"
    assert row["/ torch"].startswith("0.50 ")
    assert row["/ DDP"].startswith("0.25 ")


def test_empty_columns_are_left_out():
    headings, *_ = rows(result(DDP))

    assert headings == ["contender", "ms", "/ DDP", "apart"]


def test_bytes_on_the_link_are_compared_with_a_ring_all_reduce():
    headings, cells = rows(result(entry("step-whole", 0.1, wire=[20 * MB, 10 * MB], counted=[5 * MB, 5 * MB])))

    row = dict(zip(headings, cells, strict=True))

    assert (row["sent"], row["link"], row["/ ring"]) == ("5.0", "15.0", "1.50")


def test_memory_is_compared_with_the_parameters():
    peaks = [{"overall": 40_000_000, "settled": 30_000_000}] * 2

    headings, cells = rows(result(entry("ddp", 0.1, peaks=peaks)))

    row = dict(zip(headings, cells, strict=True))
    assert (row["peak"], row["/ P"], row["later"]) == ("40.0", "4.00", "30.0")


def test_what_did_not_run_has_a_remark_and_no_row():
    found = result(DDP, Entry("fsdp2", "sharded", failure="does not run: ValueError: no"))

    assert [row[0] for row in rows(found)[1:]] == ["ddp"]
    assert remarks(found) == ["fsdp2: does not run: ValueError: no"]


@pytest.mark.parametrize("difference", [1e-4, float("inf"), float("nan")])
def test_other_parameters_are_told(difference):
    found = result(DDP, entry("fsdp2", 0.1, difference=difference))

    assert found.disagreeing == ["fsdp2"]
    assert remarks(found)


def test_a_result_survives_json():
    found = result(DDP, *TORCH, Entry("deepspeed-1", "DeepSpeed", failure="not installed"), link="1gbit")

    again = Result.of_json(json.loads(json.dumps(found.as_json())))

    assert json.dumps(again.as_json()) == json.dumps(found.as_json())
    assert markdown(again) == markdown(found)


def test_rounds_need_not_be_kept():
    whole = result(DDP, *TORCH, entry("owner-whole", 0.1, difference=0.0), link="1gbit")
    kept = json.loads(json.dumps(whole.as_json()))
    for one in kept["entries"]:
        del one["seconds"]

    again = Result.of_json(kept)

    assert markdown(again) == markdown(whole)
    assert again.as_json()["figures"] == kept["figures"]


def page(*arguments):
    command = [sys.executable, str(BENCH / "benchmarks_page.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_page_has_a_section_for_each_run_and_the_pictures_that_it_shows(tmp_path):
    peaks = [{"overall": 40_000_000, "settled": 30_000_000}] * 2
    runs = [result(DDP, *TORCH), result(DDP, *TORCH, link="1gbit"), result(entry("ddp", 0.1, peaks=peaks))]
    files = [tmp_path / f"{number}.json" for number in range(len(runs))]
    for file, run in zip(files, runs, strict=True):
        file.write_text(json.dumps(run.as_json()))

    done = page(*files, "--page", tmp_path / "page.md")

    assert done.returncode == 0, done.stderr
    text = (tmp_path / "page.md").read_text()
    assert text.count("\n### ") == text.count("Command: `python tools/bench/training.py`") == 3
    assert text.index("\n### mlp, 2 ranks, loopback") < text.index("\n### mlp, 2 ranks, links of 1gbit")
    pictures = re.findall(r"\((pictures/.*?)\)", text)
    assert pictures == ["pictures/memory.svg", "pictures/time-mlp-loopback.svg", "pictures/time-mlp-1gbit.svg"]
    assert all((tmp_path / picture).read_text().startswith("<?xml") for picture in pictures)


def test_the_page_of_the_documentation_is_what_the_committed_results_give(tmp_path):
    done = page("--page", tmp_path / "page.md")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.md").read_text() == (BENCH.parents[1] / "docs" / "benchmarks.md").read_text()


def test_the_page_refuses_another_file(tmp_path):
    (tmp_path / "other.json").write_text('{"met": true}')

    done = page(tmp_path / "other.json", "--page", tmp_path / "page.md")

    assert done.returncode == 2
    assert "other.json is no result of training.py" in done.stderr
    assert not (tmp_path / "page.md").exists()


def test_a_link_needs_root_and_iproute2():
    assert missing(which=lambda name: f"/sbin/{name}", user=lambda: 0) is None
    assert missing(which=lambda name: f"/sbin/{name}", user=lambda: 1000) == "--link needs root"
    assert missing(which=lambda name: None, user=lambda: 0).count("iproute2") == 2

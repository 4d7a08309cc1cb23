"""The benchmarks: what follows from times, what a page shows, and that each subcommand runs."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from pathlib import Path

import pytest
from bench import __main__ as program
from bench import iteration, links, page
from bench.collectives import GPT2, count, fake_group
from bench.results import Result
from bench.turns import ratio
from typer.main import get_command
from typer.testing import CliRunner
from zeroshard_comm.collectives import STAGING_BYTES

ROOT = Path(__file__).parents[2]
MB = 10**6


def found(seconds, apart=0.0, counted=None, wire=None):
    return {"seconds": seconds, "apart": apart, "counted": counted, "wire": wire}


def bench(*arguments):
    return CliRunner().invoke(program.app, [*map(str, arguments)])


def test_a_ratio_is_the_median_of_rounds_with_an_interval_that_leaves_out_rare_values():
    drifting = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    others = [2.0 * seconds for seconds in drifting]
    others[0], others[4] = 1.0, 1000.0

    assert ratio(drifting, others) == [0.5, 0.5, 0.5]
    with pytest.raises(ValueError, match="5 values has no 95 % interval"):
        ratio([1.0] * 5, [1.0] * 5)


def test_a_row_has_ratios_to_the_base_and_bytes_beside_a_ring_all_reduce():
    rows = iteration.rows(
        {"ddp": found([0.4] * 6), "hook-split": found([0.2] * 6, 0.0, 5 * MB, 15 * MB)}, "ddp", 10 * MB
    )

    bytes_sent = {"sent MB": 5.0, "link MB": 15.0, "/ ring": 1.5}
    assert rows[1] == {"contender": "hook-split", "ms": 200.0, "/ ddp": [0.5] * 3, **bytes_sent, "apart": 0.0}


def test_a_base_without_a_partition_is_the_contender_of_the_same_partition():
    times = {"hook-whole": 1.0, "hook-split": 2.0, "sharded-whole": 3.0, "sharded-split": 3.0}

    rows = iteration.rows({name: found([seconds] * 6) for name, seconds in times.items()}, "hook", 1)

    assert [row["/ hook"][0] for row in rows] == [1.0, 1.0, 3.0, 1.5]


def test_a_table_has_no_empty_columns_and_a_line_for_what_does_not_run():
    rows = iteration.rows({"ddp": found([0.4] * 6), "fsdp2": {"error": "ValueError: no"}}, "torch-zero", 1)

    assert Result("", "", {}, rows).table().splitlines() == [
        "| contender | ms    | apart |",
        "| --------- | ----: | ----: |",
        "| ddp       | 400.0 | 0e+00 |",
        "",
        "fsdp2, ValueError: no",
    ]


@pytest.mark.parametrize(("apart", "status"), [(1e-5, 0), (1e-3, 1), (math.inf, 1), (math.nan, 1)])
def test_the_exit_status_says_whether_contenders_agree(monkeypatch, apart, status):
    rows = iteration.rows({"ddp": found([0.4] * 6), "fsdp2": found([0.4] * 6, apart)}, "ddp", 1)
    monkeypatch.setattr(program, "measure", lambda *_: rows)

    done = bench("iteration")

    assert done.exit_code == status
    assert ("FAILED: fsdp2" in done.stderr) == (status == 1)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--link", "1gbit"], "--link needs root"),
        (["--contender", "fsdp3"], "there is no 'fsdp3'"),
        (["--base", "hooks"], "no contender is 'hooks'"),
        (["--ranks", "1"], "'--ranks'"),
    ],
)
def test_what_cannot_be_measured_is_refused(monkeypatch, arguments, why):
    monkeypatch.setattr(links.os, "geteuid", lambda: 1000)
    monkeypatch.setenv(program.SWITCH, "")

    done = bench("iteration", *arguments)

    assert done.exit_code == 2
    assert why in done.stderr


@pytest.mark.parametrize(
    ("command", "contenders"),
    [
        (["step", "--model", "tiny", "--rounds", "6"], {*program.STEPPED}),
        (["iteration", "--model", "tiny", "--rounds", "6"], {*program.TRAINED}),
        (["memory", "--model", "tiny", "--ranks", "2", "--contender", "sharded-split"], {"sharded-split"}),
        (["norms", "--model", "tiny", "--ranks", "2", "--rounds", "6"], {*program.NORMS}),
        (["two-checkouts", "--before", str(ROOT), "--rounds", "6"], {*program.checkouts.NAMES}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_subcommand_writes_a_row_for_each_contender_and_says_how_it_was_made(tmp_path, command, contenders):
    done = bench(*command, "--json", tmp_path / "found.json")

    assert done.exit_code == 0, done.output
    result = Result.read(tmp_path / "found.json")
    assert {row["contender"] for row in result.rows} == contenders
    assert not [row for row in result.rows if "error" in row]
    assert result.table() in done.stdout
    assert result.machine["torch"]


def test_collectives_are_counted_for_each_model_and_the_host_is_timed(tmp_path):
    done = bench("collectives", "--ranks", "8", "--rounds", "6", "--json", tmp_path / "found.json")

    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["partition"] for row in rows] == ["whole", "split"] * 2
    assert ["/ torch" in row for row in rows] == [True, True, False, False]


@pytest.mark.parametrize(("ranks", "padding"), [(8, 1.01), (512, 1.15)])
def test_cut_tensors_take_a_collective_for_each_bucket_and_each_full_buffer(ranks, padding):
    with fake_group(ranks):
        counts = count(GPT2, "split")

    most = counts["buckets"] + math.ceil(4 * sum(map(math.prod, GPT2)) / STAGING_BYTES)
    assert 0 < counts["reduce-scatters"] <= most
    assert 0 < counts["all-gathers"] <= most
    assert counts["staging MB"] * MB <= 2 * STAGING_BYTES
    assert counts["padding"] <= padding


@pytest.mark.parametrize("file", sorted((page.PAGE.parent / "measured").glob("*.json")), ids=lambda file: file.stem)
def test_the_command_of_committed_figures_is_one_that_the_benchmarks_take(file):
    python, tool, subcommand, *options = shlex.split(Result.read(file).command)

    assert (python, tool) == ("python", "tools/bench")
    # It is a subcommand, which takes these options.
    get_command(program.app).commands[subcommand].make_context(subcommand, options)


def test_the_page_and_its_pictures_are_what_the_committed_figures_give(tmp_path):
    # Given the page, and the figures beside it,
    copy = shutil.copy(page.PAGE, tmp_path)
    shutil.copytree(page.PAGE.parent / "measured", tmp_path / "measured")
    # when it is written again,
    assert bench("page", copy).exit_code == 0
    # then nothing changes, it shows every file, and its pictures are drawn.
    text = Path(copy).read_text("utf-8")
    assert text == page.PAGE.read_text("utf-8"), "run python tools/bench page"
    assert all(f"<!-- measured/{file.name} -->" in text for file in tmp_path.glob("measured/*.json"))
    assert all((tmp_path / "pictures" / name).stat().st_size for name in ("memory.svg", "time-mlp-1gbit.svg"))

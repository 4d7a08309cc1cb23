"""The comparison of harnesses: what is read from a run, what stands in the table, and what its trials are."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from harness_table.cli import app
from harness_table.harnesses import harnesses
from harness_table.running import Bounds, Verdict, last_word, verdict_of
from harness_table.table import Column, Found, cell, markdown, notes, replaced, rows
from harness_table.trials import KINDS, TRIALS, right_for
from typer.testing import CliRunner

BOUNDS = Bounds(limit=15, bound=30)
WRONG = [trial for trial in TRIALS.values() if trial.wrong]


def column(*verdicts, kind="raises", **fields):
    found = tuple(
        Found(f"trial-{number}", kind, verdict, seconds) for number, (verdict, seconds) in enumerate(verdicts)
    )
    return Column("X", 60, found=found, **fields)


@pytest.mark.parametrize(
    ("status", "reported", "seconds", "verdict"),
    [
        (0, False, 3.0, Verdict.PASSED),
        (0, True, 20.0, Verdict.PASSED),
        (1, True, 3.0, Verdict.FAILED),
        (3, False, 3.0, Verdict.FAILED),
        (-9, False, 3.0, Verdict.FAILED),
        (1, True, 16.0, Verdict.FAILED_AT_LIMIT),
        (None, True, 30.0, Verdict.FAILED_WITHOUT_END),
        (None, False, 30.0, Verdict.HANGS),
    ],
)
def test_a_verdict_is_read_from_the_exit_status_and_the_time(status, reported, seconds, verdict):
    assert verdict_of(status, reported, seconds, BOUNDS) is verdict


def test_a_run_that_hangs_or_passes_is_not_caught():
    assert [verdict for verdict in Verdict if not verdict.caught] == [Verdict.PASSED, Verdict.HANGS]


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("==\nFAILED test_it.py::test_it - boom\n1 failed in 2 s\n", "FAILED test_it.py::test_it - boom"),
        ("\x1b[31m!!!!! Exit: Test hanged\x1b[0m\n", "!!!!! Exit: Test hanged"),
        ("Fatal Python error\n\n", "Fatal Python error"),
        ("", ""),
        ("FAILED " + "x" * 300, "FAILED " + "x" * 193),
    ],
)
def test_what_pytest_said_is_its_summary_of_the_failure(output, said):
    assert last_word(output) == said


@pytest.mark.parametrize(
    ("verdicts", "text"),
    [
        ([("failed", 2.0), ("failed", 4.0)], "**2 of 2**, 3.0 s"),
        ([("failed", 2.0), ("passed", 4.0)], "1 of 2, 2.0 s"),
        ([("failed at its time limit", 16.0), ("hangs", 30.0)], "1 of 2, 16.0 s (1 at its limit, 1 hanging)"),
        ([("hangs", 30.0), ("hangs", 30.0)], "0 of 2 (2 hanging)"),
        ([("reported as failed, but did not end", 30.0)], "**1 of 1**, 30.0 s (1 without end)"),
        ([("failed", 2.0), (None, 0.0)], "**1 of 1**, 2.0 s"),
        ([(None, 0.0)], "n/a"),
    ],
)
def test_a_cell_counts_what_the_harness_can_express(verdicts, text):
    assert cell(column(*verdicts), "raises") == text


def test_a_harness_that_was_not_run_says_so_in_every_row():
    _, *body = rows([column(("failed", 2.0), nothing_seconds=0.004), Column("Y", blocked="it is missing")])
    assert [row[1] for row in body] == ["**1 of 1**, 2.0 s", "**1 of 1**", "4 ms"]
    assert {row[2] for row in body} == {"not run"}


def test_the_notes_tell_reasons_of_what_is_missing():
    expressed = column((None, 0.0), kind="messages", cannot={"messages": "it has none", "killed": "unused"})
    text = "\n".join(notes([expressed, Column("Y", blocked="it is missing")], 15, 30, "2 cores"))
    assert f"X, {KINDS['messages']}: it has none." in text
    assert "Y was not run: it is missing." in text
    assert "unused" not in text
    assert "2 cores" in text


def test_rows_come_in_the_order_of_the_kinds():
    both = Column("X", found=(Found("a", "killed", "failed"), Found("b", "raises", "failed")))
    assert [row[0] for row in rows([both])[1:3]] == [KINDS["raises"], KINDS["killed"]]


def test_a_table_goes_between_the_markers_of_a_page():
    text = markdown([["a", "b"], ["1", "2"]], ["Said."])
    assert text == "| a | b |\n|---|---|\n| 1 | 2 |\n\n- Said."
    page = replaced("before\n<!-- table -->\nold\n<!-- /table -->\nafter\n", text)
    assert page == f"before\n<!-- table -->\n{text}\n<!-- /table -->\nafter\n"
    assert replaced(page, text) == page


@pytest.mark.parametrize(
    "page", ["", "<!-- table -->", "<!-- /table --><!-- table -->", "<!-- table --><!-- table --><!-- /table -->"]
)
def test_a_page_without_its_markers_is_refused(page):
    with pytest.raises(ValueError, match="there must be one line"):
        replaced(page, "text")


def test_a_column_can_be_kept_as_json():
    kept = column(("failed", 2.0), (None, 0.0), nothing_seconds=0.5, cannot={"raises": "why"})
    assert Column.read(json.loads(json.dumps(vars(kept), default=vars))) == kept


def test_every_kind_has_wrong_tests_and_every_wrong_test_a_right_one_of_its_form():
    assert {trial.kind for trial in WRONG} == set(KINDS)
    assert all(not right_for(trial).wrong for trial in WRONG)


@pytest.mark.parametrize("harness", harnesses(Path("tests/unit/common.py")), ids=lambda harness: harness.key)
def test_every_trial_is_a_test_file_unless_the_harness_has_no_means(harness):
    for trial in TRIALS.values():
        text = harness.write(trial, ["it", "again"], 15.0)
        if text is None:
            assert trial.kind in harness.cannot
        else:
            names = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
            assert {"test_it", "test_again"} <= set(names)


@pytest.mark.parametrize("option", ["--harness=x", "--kind=x", "--again=x", f"--write={__file__}"])
def test_bad_input_is_refused_before_anything_runs(option):
    done = CliRunner().invoke(app, [option], env={"TERM": "dumb"})
    assert done.exit_code == 2
    assert option.partition("=")[0] in done.output


def test_a_file_of_other_results_is_refused(tmp_path):
    (tmp_path / "results.json").write_text("[]")
    done = CliRunner().invoke(app, [f"--results={tmp_path / 'results.json'}"], env={"TERM": "dumb"})
    assert done.exit_code == 2

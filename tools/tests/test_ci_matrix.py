"""The matrix of the workflows: a cell for each session, never an empty one."""

from __future__ import annotations

import io
import json

import pytest
from ci_matrix import cells, main


def entry(session, name=None):
    return {"session": session, "name": name or session, "description": "", "python": None, "tags": []}


def test_each_session_on_each_python_is_a_cell():
    matrix = cells([entry("lint"), entry("tests")], ["3.10", "3.13"])
    assert [(cell["session"], cell["python"]) for cell in matrix] == [
        ("lint", "3.10"),
        ("lint", "3.13"),
        ("tests", "3.10"),
        ("tests", "3.13"),
    ]


def test_a_backend_that_has_a_cell_must_be_there():
    (cell,) = cells([entry("ranks(backend='fake')", "ranks")])
    assert cell["session"] == "ranks(backend='fake')"
    assert cell["arguments"] == "-- --require"


@pytest.mark.parametrize("listing", [{}, "lint", ["lint"], [{"name": "lint"}], [{"session": 1, "name": "lint"}]])
def test_another_form_of_list_is_refused(listing):
    with pytest.raises(ValueError, match="nox -l --json"):
        cells(listing)


def test_a_tag_that_selects_nothing_is_an_error_and_no_empty_matrix(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("[]"))
    assert main([]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert "no session is selected" in err


def test_the_matrix_is_one_line_of_json(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps([entry("lint")])))
    assert main(["--python", "3.11"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"include": [{"session": "lint", "python": "3.11", "arguments": ""}]}


def test_what_is_no_json_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("nox: error"))
    assert main([]) == 1
    assert "ci_matrix: " in capsys.readouterr().err

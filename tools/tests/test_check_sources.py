"""A folder that has more lines than its ceiling, or none, is told."""

from __future__ import annotations

import check_sources
import pytest


@pytest.mark.parametrize(("lines", "status"), [(9, 0), (10, 0), (11, 1), (0, 1)])
def test_a_folder_above_its_ceiling_or_without_sources_is_told(tmp_path, monkeypatch, capsys, lines, status):
    # Given a folder with a ceiling of ten lines,
    monkeypatch.setattr(check_sources, "CEILINGS", {"one": 10})
    (tmp_path / "one" / "deep").mkdir(parents=True)
    (tmp_path / "one" / "deep" / "a.py").write_text("number = 1\n" * lines)
    # when its lines are counted,
    found = check_sources.main(tmp_path)
    # then the status and the table say whether it has too many.
    assert found == status
    assert ("remove lines from it" in capsys.readouterr().out) == bool(status)

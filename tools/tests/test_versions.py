"""One version for all packages, set by one command; one license, and the same addresses."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import zeroshard
from version import ROOT, set_version, versions

PACKAGES = sorted((ROOT / "packages").iterdir())


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_package_has_the_version_the_license_and_the_addresses_of_its_siblings(package: Path) -> None:
    written = (package / "pyproject.toml").read_text(encoding="utf-8")
    [path] = re.findall(r'\[tool.hatch.version\]\npath = "(.*)"', written)
    assert f'__version__ = "{zeroshard.__version__}"\n' in (package / path).read_text(encoding="utf-8")
    assert set(re.findall(r'"zeroshard[a-z-]*==([^"]*)"', written)) <= {zeroshard.__version__}
    # Its wheel takes the license from its own folder; `nox -s wheels` looks into the wheel.
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert 'license-files = ["LICENSE"]' in written
    [urls] = re.findall(r"\[project.urls\]\n(.*?)\n\n", written, re.DOTALL)
    assert urls in (PACKAGES[0] / "pyproject.toml").read_text(encoding="utf-8")


def test_the_version_is_set_everywhere_by_one_command(tmp_path: Path) -> None:
    # Given a copy of the files that name it,
    for file in (*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("packages/*/src/*/__init__.py")):
        target = tmp_path / file.relative_to(ROOT)
        target.parent.mkdir(parents=True)
        shutil.copy(file, target)
    # when it is set,
    set_version("7.8.9rc1", tmp_path)
    # then every place names it: five in the sources, and the siblings in three files.
    assert versions(tmp_path) == {"7.8.9rc1"}
    texts = [file.read_text(encoding="utf-8") for file in tmp_path.rglob("*.*")]
    assert sum(text.count("7.8.9rc1") for text in texts) == 5 + 1 + 2 + 3
    assert not any(f"=={zeroshard.__version__}" in text for text in texts)


@pytest.mark.parametrize("wrong", ["v1.0.0", "1.0", "new"])
def test_a_version_of_another_form_is_refused(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"looks like 0\.2\.0"):
        set_version(wrong, tmp_path)

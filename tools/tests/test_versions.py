"""One version for all packages: each says it in its sources, where its build reads it, and names its siblings by it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import zeroshard

PACKAGES = sorted((Path(__file__).parents[2] / "packages").iterdir())


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_package_and_its_siblings_are_of_one_version(package: Path) -> None:
    written = (package / "pyproject.toml").read_text(encoding="utf-8")
    [path] = re.findall(r'\[tool.hatch.version\]\npath = "(.*)"', written)
    assert f'__version__ = "{zeroshard.__version__}"\n' in (package / path).read_text(encoding="utf-8")
    assert set(re.findall(r'"zeroshard[a-z-]*==([^"]*)"', written)) <= {zeroshard.__version__}
    assert "\nversion" not in written.partition("[tool")[0]

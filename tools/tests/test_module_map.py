"""The pictures of modules and imports are those of today's sources."""

from __future__ import annotations

import re

import pytest
from module_imports import read_packages
from module_map import PACKAGES, PICTURES, ROOT, imports_within


@pytest.mark.parametrize("package", PACKAGES)
def test_the_picture_has_the_modules_of_the_package(package):
    shown = re.findall(r">([\w.]+)</text>", (PICTURES / f"modules-{package}.svg").read_text(encoding="utf-8"))

    assert set(shown) == set(imports_within(read_packages(ROOT, PACKAGES), package)), "run tools/module_map.py"

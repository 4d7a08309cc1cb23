"""The package asks for no framework: what a user does not have installed must not matter."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires, version

import pytest

FRAMEWORKS = ["accelerate", "lightning", "pytorch_lightning", "transformers"]


def test_importing_it_imports_no_framework():
    program = f"import sys, zeroshard_integrations; print([name for name in {FRAMEWORKS} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("sibling", ["zeroshard-core", "zeroshard-comm", "zeroshard"])
def test_its_siblings_are_of_its_own_version(sibling):
    assert f"{sibling}=={version('zeroshard-integrations')}" in (requires("zeroshard-integrations") or [])

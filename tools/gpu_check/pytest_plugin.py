"""pytest plugin (``-p gpu_check.pytest_plugin``): more rank tests run on one GPU than in the repository's sessions."""

from __future__ import annotations

import importlib
import os

import pytest
from gpu_check.sharing import ALSO_ON, SHARED, claim_host
from zeroshard_testing import backends

if os.environ.get(ALSO_ON):
    # The marks of tests take this list.
    importlib.import_module("support.training").EVERYWHERE.extend(os.environ[ALSO_ON].split(","))

if os.environ.get(SHARED):
    # Also before NCCL 2.30, by sharing.claim_host.
    backends._NCCL_THAT_SHARES = (2, 0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Claim a host before the first collective, on ranks."""
    claim_host()

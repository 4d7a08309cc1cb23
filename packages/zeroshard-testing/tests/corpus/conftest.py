"""What the case files share: fixtures that a package has in its conftest."""

import os

import pytest

pytest.register_assert_rewrite("helpers_beside")


@pytest.fixture
def from_conftest(rank):
    """Made on each rank, of its rank."""
    return {"rank": rank}


@pytest.fixture(scope="session")
def of_the_session(tmp_path_factory):
    """Made once in each process."""
    folder = tmp_path_factory.mktemp("session")
    return {"folder": folder, "process": os.getpid()}


@pytest.fixture
def variable_from_conftest(monkeypatch):
    """Sets an environment variable for one test."""
    monkeypatch.setenv("FROM_CONFTEST", "yes")


@pytest.fixture
def to_override():
    """Replaced by modules and classes."""
    return "conftest"


def pytest_make_parametrize_id(val):
    """Name parameters of one class, as conftest hooks do."""
    return f"named-{val.name}" if hasattr(val, "is_named_by_conftest") else None

"""What tests on ranks have in common: which combinations are tested by default, and that little counts as much."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from zeroshard_comm import ring, transport
from zeroshard_testing import rank_fixture
from zeroshard_testing.marker import spec_of


@pytest.fixture(autouse=True)
def _is_worth_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add up gradients in a thread, however few they are, as those of large models are."""
    monkeypatch.setattr(transport, "WORTH_OVERLAPPING", 0)


@pytest.fixture(params=["ring", "rounds"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How ranks agree from the second time on."""
    way: str = request.param
    monkeypatch.setattr(ring, "MOST_RANKS", 16 if way == "ring" else 1)
    return way


@rank_fixture
def tensors_on_the_device(device: torch.device) -> Iterator[None]:
    """Make models and inputs on the device that the backend is for, where a test does not say another one."""
    if device.type == "cpu":
        yield
        return
    torch.set_default_device(device)
    yield
    # None is the CPU without a mode that looks at every call.
    torch.set_default_device(None)


EMULATED_BY_DEFAULT = "test_emulated_smoke.py"
"""The one file whose tests on the emulated device are not exhaustive."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as exhaustive what ``by_default`` and ``exhaustive_at`` leave out, and what repeats on the emulated device.

    On NCCL all cases run that ``by_default`` leaves out elsewhere: the tests on CPUs are those that must be quick. What
    ``each_of`` and ``exhaustive_at`` leave out is exhaustive on a GPU too.
    """
    unknown = {(item.path, item.originalname): listed(item) for item in items if isinstance(item, pytest.Function)}
    for item in items:
        spec, sizes, cases = spec_of(item), item.get_closest_marker("exhaustive_at"), listed(item)
        is_repeat = spec is not None and spec.backend == "emulated" and item.path.name != EMULATED_BY_DEFAULT
        is_large = spec is not None and sizes is not None and spec.world_size in sizes.args
        is_left_out = bool(cases) and case_of(item) not in cases and (spec is None or spec.backend != "nccl")
        if is_repeat or is_large or is_left_out:
            item.add_marker(pytest.mark.exhaustive)
        if cases:
            unknown[item.path, item.originalname] -= {case_of(item)}
    # Ids on the command line collect some of the cases alone.
    if not any("::" in argument for argument in config.args) and any(unknown.values()):
        found = "; ".join(f"{path.name} {name}: {sorted(cases)}" for (path, name), cases in unknown.items() if cases)
        raise pytest.UsageError(f"by_default names cases that do not exist: {found}")


def listed(item: pytest.Item) -> set[str]:
    """Return the cases of a test that run by default, empty if all do."""
    marker = item.get_closest_marker("by_default")
    return set() if marker is None else set(marker.args[0].split(" | "))


def case_of(item: pytest.Item) -> str:
    """Return the id of a parametrized test, without its backend: ``2-whole`` of ``test_it[2-gloo-whole]``."""
    spec = spec_of(item)
    return item.callspec.id if spec is None else item.callspec.id.replace(spec.test_id, str(spec.world_size), 1)

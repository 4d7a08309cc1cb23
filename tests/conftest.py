"""What tests on ranks have in common: which combinations are tested by default, and that little counts as much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations, groupby
from pathlib import Path

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
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave as many combinations of parameters as show each value, world sizes among them, and if marked each pair."""
    for item in items:
        spec, sizes = spec_of(item), item.get_closest_marker("exhaustive_at")
        if spec is None:
            continue
        is_repeat = spec.backend == "emulated" and item.path.name != EMULATED_BY_DEFAULT
        if is_repeat or (sizes is not None and spec.world_size in sizes.args):
            item.add_marker(pytest.mark.exhaustive)
    here = Path(__file__).parent
    usual = [item for item in items if here in item.path.parents and hasattr(item, "callspec") and not on_a_gpu(item)]
    for _, same in groupby(usual, key=lambda item: (item.parent, item.originalname)):
        tests = list(same)
        leave_as_many_as_needed(tests, 2 if tests[0].get_closest_marker("pairwise") else 1)


def on_a_gpu(item: pytest.Item) -> bool:
    """Whether a test needs a GPU, where nothing is left out: the tests on CPUs are those that must be quick."""
    spec = spec_of(item)
    return spec is not None and spec.backend == "nccl"


def leave_as_many_as_needed(items: list[pytest.Item], together: int) -> None:
    """Mark as exhaustive what shows no values of so many parameters together that others do not show."""
    unseen = {
        item: set(combinations(values_of(item), together))
        for item in items
        if not item.get_closest_marker("exhaustive") and len(item.callspec.params) > 1
    }
    used = Counter[tuple[str, int]]()
    while any(unseen.values()):
        # Among equals one whose values were chosen least often, so that late values do not meet in one test.
        chosen = max(unseen, key=lambda item: (len(unseen[item]), -sum(used[each] for each in values_of(item))))
        seen = unseen.pop(chosen)
        used.update(values_of(chosen))
        for others in unseen.values():
            others -= seen
    for item in unseen:
        item.add_marker(pytest.mark.exhaustive)


def values_of(item: pytest.Item) -> list[tuple[str, int]]:
    """Return the parameters of a test, with the identities of their values."""
    return [(name, id(value)) for name, value in item.callspec.params.items()]

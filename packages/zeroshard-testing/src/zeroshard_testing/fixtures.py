"""The fixtures that a rank test may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroshard_testing.rank_values import RankValue
from zeroshard_testing.spec import RanksSpec

SPEC_FIXTURE = "_ranks_spec"


@pytest.fixture(name=SPEC_FIXTURE)
def _ranks_spec(request: pytest.FixtureRequest) -> RanksSpec:
    spec = getattr(request, "param", None)
    if spec is None:
        pytest.fail(f"{request.node.nodeid} asks for a rank's fixture: mark it with @pytest.mark.ranks(2)", False)
    return spec  # type: ignore[no-any-return]


@pytest.fixture
def world_size(_ranks_spec: RanksSpec) -> int:
    """Number of ranks."""
    return _ranks_spec.world_size


@pytest.fixture
def rank(_ranks_spec: RanksSpec) -> RankValue:
    """This process's rank in the default process group, an int."""
    return RankValue("rank")


@pytest.fixture
def process_group(_ranks_spec: RanksSpec) -> RankValue:
    """The default process group, initialised for this test."""
    return RankValue("process_group")


@pytest.fixture
def device(_ranks_spec: RanksSpec) -> RankValue:
    """The `torch.device` that the backend communicates on: the CPU, or this rank's CUDA device."""
    return RankValue("device")


@pytest.fixture
def faults(_ranks_spec: RanksSpec) -> RankValue:
    """The faults that this test asks for, a `zeroshard_testing.Faults`."""
    return RankValue("faults")


@pytest.fixture
def ranks_tmp_path(_ranks_spec: RanksSpec, tmp_path: Path) -> Path:
    """A temporary folder, the same one on all ranks."""
    return tmp_path

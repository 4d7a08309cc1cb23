"""Classes that derive from DeepSpeed's ``DistributedTest`` run on ranks with no more than another import."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Suite

HEAD = """
    import multiprocessing, os
    import pytest
    import torch
    import torch.distributed as dist
    from zeroshard_testing.distributed_test import DistributedFixture, DistributedTest
"""
OPTIONS = ("-v", "--strict-markers", "-o", "markers=world_size", "-p", "no:randomly")

CLASSES = (
    HEAD
    + """
    class TestSizes(DistributedTest):
        world_size = [1, 2]

        def test_of_the_class(self):
            assert dist.get_world_size() == int(os.environ["WORLD_SIZE"]) == int(os.environ["LOCAL_SIZE"])
            assert dist.get_rank() == int(os.environ["LOCAL_RANK"])

        @pytest.mark.world_size(3)
        def test_of_its_own(self, greeting="hello"):
            assert dist.get_world_size() == 3

    class TestInherited(TestSizes):
        world_size = 2

        def test_more(self):
            assert dist.get_world_size() == self.world_size

    class TestMarked(DistributedTest):
        @pytest.mark.ranks(3)
        def test_ranks(self):
            assert dist.get_world_size() == 3

    @pytest.mark.parametrize("number", [1, 2])
    class TestFixtures(DistributedTest):
        @pytest.fixture(params=["a", "b"])
        def letter(self, request):
            return request.param, dist.get_rank()

        @pytest.mark.parametrize("color", ["red"])
        def test_fixtures(self, letter, number, color):
            assert letter[1] == dist.get_rank() and number in (1, 2) and color == "red"

    class TestFolders(DistributedTest):
        def test_1_writes(self, class_tmpdir, tmpdir):
            class_tmpdir.join(f"rank-{dist.get_rank()}").write("written")
            tmpdir.join(f"rank-{dist.get_rank()}").ensure()
            dist.barrier()
            assert len(tmpdir.listdir()) == 2

        @pytest.mark.world_size(1)
        def test_2_reads(self, class_tmpdir):
            assert sorted(os.listdir(class_tmpdir)) == ["rank-0", "rank-1"]

    class TestWithoutGroup(DistributedTest):
        init_distributed = False

        def test_not_initialized(self):
            assert not dist.is_initialized()
            dist.init_process_group("gloo")
            assert dist.get_world_size() == 2

    class TestWithoutEnvironment(DistributedTest):
        set_dist_env = False

        def test_unset(self):
            assert "RANK" not in os.environ and dist.get_world_size() == 2

    class TestReused(DistributedTest):
        reuse_dist_env = True
        non_daemonic_procs = True

        def test_starts_a_process(self):
            process = multiprocessing.get_context("fork").Process(target=int)
            process.start()
            process.join()
            assert process.exitcode == 0

    class TestSkipped(DistributedTest):
        def test_skips(self):
            pytest.skip("not today")

        @pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
        def test_needs_cuda(self):
            pass

    class TestCuda(DistributedTest):
        backend = "gloo"
        requires_cuda_env = True

        @pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
        def test_is_skipped(self):
            raise AssertionError

    class TestWrong(DistributedTest):
        def test_fails(self):
            assert dist.get_rank() == 0

        @pytest.mark.parametrize("world_size", [4])
        def test_parameter(self, world_size):
            pass
"""
)

DEEPSPEED = {
    "comm/__init__.py": "from deepspeed.comm.comm import init_distributed",
    "comm/comm.py": """
        cdb = None
        def init_distributed(backend):
            global cdb
            assert cdb is None, "it is the last test's"
            cdb = "initialized"
    """,
    "utils/groups.py": "_WORLD_GROUP, _GROUPS = None, {}",
}
KEEPS_STATE = (
    HEAD
    + """
    import deepspeed.comm
    from deepspeed.utils import groups

    @pytest.mark.parametrize("turn", [1, 2])
    class TestDeepSpeed(DistributedTest):
        def test_state(self, turn):
            assert deepspeed.comm.comm.cdb == "initialized"
            assert groups._WORLD_GROUP is None and not groups._GROUPS
            groups._WORLD_GROUP = groups._GROUPS["all"] = dist.group.WORLD
    """
)


@pytest.fixture(scope="module")
def done(run_suite: Callable[..., Suite], tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return run_suite(tmp_path_factory.mktemp("classes"), *OPTIONS, test_classes=CLASSES)


@pytest.mark.parametrize(
    "name",
    [
        "test_of_the_class[1-gloo]",
        "test_of_the_class[2-gloo]",
        "test_of_its_own[3-gloo]",
        "test_more[2-gloo]",
        "test_ranks[3-gloo]",
        "test_1_writes[2-gloo]",
        "test_2_reads[1-gloo]",
        "test_not_initialized[2-gloo]",
        "test_unset[2-gloo]",
        "test_starts_a_process[2-gloo]",
    ],
)
def test_a_class_runs_with_its_world_sizes(done: Suite, name: str) -> None:
    assert done.cases[name].kind == "passed", done.cases[name].text


def test_a_class_derived_from_another_has_its_own_world_size(done: Suite) -> None:
    inherited = re.findall(r"TestInherited::(\S+) PASSED", done.text)
    assert set(inherited) == {"test_of_the_class[2-gloo]", "test_of_its_own[3-gloo]", "test_more[2-gloo]"}


def test_fixtures_and_parameters_work_in_the_class(done: Suite) -> None:
    assert len([name for name in done.cases if name.startswith("test_fixtures")]) == 4
    assert {case.kind for name, case in done.cases.items() if name.startswith("test_fixtures")} == {"passed"}


def test_skipping_on_all_ranks_skips(done: Suite) -> None:
    assert done.cases["test_skips[2-gloo]"].kind == "skipped"
    assert done.cases["test_is_skipped[2-gloo]"].kind == "skipped"


def test_a_failure_names_its_rank(done: Suite) -> None:
    assert "rank 1 failed: assert 1 == 0" in done.cases["test_fails[2-gloo]"].text


def test_a_parameter_for_the_world_size_is_refused(done: Suite) -> None:
    [text] = [case.text for name, case in done.cases.items() if name.startswith("test_parameter")]
    assert "@pytest.mark.world_size([2, 4])" in text


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("class Prepared(DistributedFixture): pass", "run_on_ranks"),
        pytest.param(
            "class TestLaunch(DistributedTest):\n        def run(self): pass",
            "TestLaunch.run",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(suite: Callable[..., Suite], source: str, complaint: str) -> None:
    refused = suite(test_refused=f"{HEAD}\n    {source}")
    assert refused.status == pytest.ExitCode.INTERRUPTED
    assert complaint in refused.text


def test_what_deepspeed_knows_of_a_group_ends_with_the_test(suite: Callable[..., Suite], tmp_path: Path) -> None:
    for name, text in DEEPSPEED.items():
        path = tmp_path / "deepspeed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    done = suite(test_state=KEEPS_STATE)
    assert {case.kind for case in done.cases.values()} == {"passed"}, done.text
    assert len(done.cases) == 2

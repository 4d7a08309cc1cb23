"""Bodies of PyTorch's MultiProcessTestCase on our ranks: one suite of them, run once."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("expecttest", reason="PyTorch's test classes import it")

CASES = """
    import os, sys, tempfile, time, unittest
    import torch
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import MultiProcessTestCase, TEST_SKIPS
    from torch.testing._internal.common_utils import skip_but_pass_in_sandcastle_if

    class GroupsOfMethods(MultiProcessTestCase):
        def setUp(self):
            super().setUp()
            self.folder = tempfile.TemporaryDirectory()
            os.environ["FOLDER"] = self.folder.name
            self._spawn_processes()

        def tearDown(self):
            super().tearDown()
            self.folder.cleanup()

        def sum_of_ranks(self):
            store = dist.FileStore(self.file_name, self.world_size)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
            total = torch.tensor(self.rank)
            dist.all_reduce(total)
            return total.item()

    class Right(GroupsOfMethods):
        def test_sums(self):
            self.assertEqual(self.sum_of_ranks(), sum(range(self.world_size)))

        def test_sums_again(self):
            self.assertEqual(self.sum_of_ranks(), sum(range(self.world_size)))

        def test_is_as_in_a_spawned_process(self):
            self.assertEqual(self._testMethodName, "test_is_as_in_a_spawned_process")
            self.assertEqual(self.id(), "cases.Right.test_is_as_in_a_spawned_process")
            self.assertFalse(dist.is_initialized())
            self.assertFalse(hasattr(self, "folder"))
            self.assertEqual(torch.initial_seed(), 1234)

        def test_shares_what_set_up_made(self):
            self.sum_of_ranks()
            open(os.path.join(os.environ["FOLDER"], str(self.rank)), "x").close()
            dist.barrier()
            self.assertEqual(sorted(os.listdir(os.environ["FOLDER"])), ["0", "1"])
            time.sleep(0.2 if self.rank == 0 else 0)
            self.assertTrue(os.path.exists(os.environ["FOLDER"]))

        def test_cleans_up(self):
            self.done = []
            self.addCleanup(self.assertEqual, self.done, ["added late", "last"])
            self.addCleanup(self.done.append, "last")
            self.addCleanup(lambda: self.addCleanup(self.done.append, "added late"))

        def test_skips(self):
            self.skipTest("skipped by the body")

        def test_skips_by_exit_code(self):
            sys.exit(TEST_SKIPS["importerror"].exit_code)

        @unittest.skip("skipped by unittest")
        def test_skips_by_decorator(self):
            raise AssertionError

        @skip_but_pass_in_sandcastle_if(True, "skipped by a note")
        def test_skips_by_note(self):
            raise AssertionError

    class GroupOfRun(MultiProcessTestCase):
        @classmethod
        def _run(cls, rank, test_name, file_name, pipe, **kwargs):
            self = cls(test_name)
            self.rank, self.file_name = rank, file_name
            store = dist.FileStore(file_name, self.world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=self.world_size)
            dist.distributed_c10d.made_by = "_run"
            self.run_test(test_name, pipe)
            dist.barrier()
            dist.destroy_process_group()
            sys.exit(0)

        def setUp(self):
            dist.distributed_c10d.made_by = "the plugin"
            super().setUp()
            self._spawn_processes()

        def test_by_run(self):
            self.assertEqual(dist.distributed_c10d.made_by, "_run")
            self.assertEqual(dist.get_world_size(), self.world_size)

        def test_by_the_plugin(self):
            self.assertEqual(dist.distributed_c10d.made_by, "the plugin")
            self.assertEqual(dist.get_world_size(), self.world_size)

    @unittest.skip("all of them")
    class Skipped(MultiProcessTestCase):
        def setUp(self):
            raise AssertionError

        def test_skipped(self):
            pass

    class SkippedInSetUp(MultiProcessTestCase):
        def setUp(self):
            raise unittest.SkipTest("not today")

        def test_skipped_in_set_up(self):
            raise AssertionError

    class Wrong(GroupsOfMethods):
        def test_1_fails_on_rank_1(self):
            self.assertEqual(self.rank, 0, "not rank 0")

        def test_2_leaves_a_collective_out(self):
            self.sum_of_ranks()
            if self.rank == 0:
                dist.all_reduce(torch.ones(1))

        def test_3_exits(self):
            sys.exit(0)

        def test_5_fails_in_a_cleanup(self):
            self.addCleanup(print, "another one")
            self.addCleanup(self.assertEqual, self.rank, 0, "not cleaned up")

        @unittest.expectedFailure
        def test_4_fails_as_expected(self):
            raise ValueError
"""
TESTS = """
    import cases
    from zeroshard_testing.torch_cases import as_rank_tests

    TestRight = as_rank_tests(cases.Right, 2)
    TestByRun = as_rank_tests(cases.GroupOfRun, 2, methods=["test_by_run"])
    TestByPlugin = as_rank_tests(cases.GroupOfRun, 2, methods=["test_by_the_plugin"], init=True, timeout=30)
    TestSkipped = as_rank_tests(cases.Skipped, 2)
    TestSkippedInSetUp = as_rank_tests(cases.SkippedInSetUp, 2)
    TestWrong = as_rank_tests(cases.Wrong, 2)
"""


@pytest.fixture(scope="module")
def verdicts(run_suite, tmp_path_factory):
    return run_suite(tmp_path_factory.mktemp("torch_cases"), "-p", "no:randomly", cases=CASES, test_torch_cases=TESTS)


@pytest.mark.parametrize(
    "name",
    [
        "test_sums[2-gloo]",
        pytest.param("test_sums_again[2-gloo]", marks=pytest.mark.exhaustive),
        "test_is_as_in_a_spawned_process[2-gloo]",
        "test_shares_what_set_up_made[2-gloo]",
        "test_cleans_up[2-gloo]",
        "test_by_run[2-gloo]",
        "test_by_the_plugin[2-gloo]",
    ],
)
def test_a_right_body_passes(verdicts, name):
    assert verdicts.cases[name].kind == "passed", verdicts.cases[name].text


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("test_1_fails_on_rank_1", "rank 1 failed: AssertionError"),
        ("test_2_leaves_a_collective_out", "rank 0 stuck in all_reduce"),
        ("test_3_exits", "called sys.exit(0)"),
        ("test_5_fails_in_a_cleanup", "rank 1 failed: AssertionError: Scalars are not equal!"),
    ],
)
def test_a_wrong_body_fails_with_its_cause(verdicts, name, cause):
    case = verdicts.cases[f"{name}[2-gloo]"]
    assert case.kind == "failure"
    assert cause in case.text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("test_skips", "skipped by the body"),
        ("test_skips_by_exit_code", "Test skipped due to missing import"),
        ("test_skips_by_decorator", "skipped by unittest"),
        ("test_skips_by_note", "skipped by a note"),
        ("test_skipped", "all of them"),
        ("test_skipped_in_set_up", "not today"),
        ("test_4_fails_as_expected", ""),
    ],
)
def test_a_skip_is_one_however_it_is_asked_for(verdicts, name, reason):
    case = verdicts.cases[f"{name}[2-gloo]"]
    assert case.kind == "skipped", case.text
    assert reason in case.text


def test_a_class_of_another_kind_is_refused():
    code = """
import unittest
from zeroshard_testing.torch_cases import as_rank_tests

as_rank_tests(unittest.TestCase, 2)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "TypeError: as_rank_tests expects a subclass of MultiProcessTestCase" in done.stderr

"""How the emulated accelerator is compiled and cached, what is said where it cannot be, and what fails a test."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from zeroshard_testing.emulated import build
from zeroshard_testing.emulated.build import BuildError
from zeroshard_testing.spec import SpecError, parse_marker

if TYPE_CHECKING:
    from conftest import Suite

RunSuite = Callable[..., "Suite"]

pytest_plugins = ["pytester"]

COMPILER = """#!/bin/sh
[ -e "$ZEROSHARD_CACHE/broken" ] && { echo "error: no such header" >&2; exit 1; }
echo "$@" >> "$ZEROSHARD_CACHE/compiled"
while [ $# -gt 0 ]; do
  [ "$1" = -o ] && echo library > "$2"
  shift
done
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder. What compiles writes a line for each time into a file, and fails if there is another."""
    folder = tmp_path / "cache"
    folder.mkdir()
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("ZEROSHARD_CACHE", str(folder))
    monkeypatch.setenv("CXX", str(compiler))
    return folder


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROSHARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)


def times_compiled(cache: Path) -> int:
    return len((cache / "compiled").read_text().splitlines())


# ------------------------------------------------------------------------------------------------ what is compiled


def test_it_is_compiled_once_into_a_folder_named_by_torch_s_version(cache: Path) -> None:
    assert not build.library().exists()
    made = build.build()
    assert made == build.library()
    assert made.name == "zeroshard_emulated.so"
    assert made.parent.parent == cache
    assert made.parent.name.startswith(f"emulated-{torch.__version__}-")
    assert build.build() == made
    assert times_compiled(cache) == 1
    assert sorted(path.name for path in made.parent.iterdir()) == ["zeroshard_emulated.sha256", "zeroshard_emulated.so"]


def test_another_torch_another_python_and_other_sources_have_folders_of_their_own(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {build.build()}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.0")
        found.add(build.build())
    with monkeypatch.context() as patch:
        patch.setattr(sys.implementation, "cache_tag", "cpython-399")
        found.add(build.build())
    sources = tmp_path / "csrc"
    shutil.copytree(build._SOURCES, sources)
    with monkeypatch.context() as patch:
        patch.setattr(build, "_SOURCES", sources)
        assert build.library() in found
        (sources / "checker.h").write_text("// nothing")
        found.add(build.build())
    assert len(found) == times_compiled(cache) == 4


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ZEROSHARD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build.library().is_relative_to(tmp_path / ".cache" / "zeroshard-testing")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.library().is_relative_to(tmp_path / "xdg" / "zeroshard-testing")
    monkeypatch.setenv("ZEROSHARD_CACHE", str(tmp_path / "chosen"))
    assert build.library().parent.parent == tmp_path / "chosen"


def test_processes_that_come_at_the_same_time_compile_once(cache: Path) -> None:
    program = """
import torch
from zeroshard_testing.emulated import build
print("ready", flush=True)
print(build.build())
"""
    with Path(f"{build.library().parent}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        processes = [
            subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)
        ]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
    made = {process.communicate()[0].strip() for process in processes}
    assert made == {str(build.library())}
    assert [process.returncode for process in processes] == [0, 0]
    assert times_compiled(cache) == 1


def test_what_does_not_compile_is_an_error_with_the_compiler_s_words(cache: Path) -> None:
    (cache / "broken").touch()
    with pytest.raises(BuildError, match=r"does not compile with torch .*:\nerror: no such header"):
        build.build()
    assert list(build.library().parent.iterdir()) == []
    (cache / "broken").unlink()
    build.build()
    assert times_compiled(cache) == 1


@pytest.mark.parametrize("damage", ["written over", "cut off", "without its checksum"])
def test_a_damaged_library_is_named_and_compiled_again_once_it_is_deleted(cache: Path, damage: str) -> None:
    made = build.build()
    if damage == "without its checksum":
        made.with_suffix(".sha256").unlink()
    else:
        made.write_text("another" if damage == "written over" else "")
    for _ in range(2):
        with pytest.raises(BuildError) as error:
            build.build()
        assert str(error.value) == f"{made} is damaged: delete the folder {made.parent} to compile it again"
    shutil.rmtree(made.parent)
    assert build.build() == made
    assert times_compiled(cache) == 2


def test_a_build_that_was_cut_off_is_made_again(cache: Path) -> None:
    made = build.build()
    # The checksum is written first.
    made.unlink()
    assert build.build() == made
    assert times_compiled(cache) == 2


def _read_only(tmp_path: Path) -> Path:
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("root may write everywhere")
    return folder


def _a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    return tmp_path / "file" / "below"


def _of_the_kernel(tmp_path: Path) -> Path:
    if not Path("/proc/self").exists():
        pytest.skip("there is no /proc")
    # Not even root may.
    return Path("/proc/zeroshard")


@pytest.mark.parametrize("place", [_read_only, _a_file, _of_the_kernel])
def test_a_cache_that_cannot_be_written_is_named(cache, tmp_path, monkeypatch, place) -> None:
    folder = place(tmp_path)
    monkeypatch.setenv("ZEROSHARD_CACHE", str(folder))
    with pytest.raises(BuildError) as error:
        build.build()
    assert str(error.value).startswith("the cache of the emulated accelerator cannot be written: ")
    assert str(folder) in str(error.value)
    assert str(error.value).endswith("Make it writable, or set ZEROSHARD_CACHE to another folder")


# -------------------------------------------------------------------------------------- what a machine has not got


def test_a_machine_that_can_compile_is_available(cache: Path) -> None:
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("Python's header files are not installed")
    assert build.why_unavailable() is None


def test_a_missing_compiler_is_the_reason(no_compiler: None) -> None:
    assert build.why_unavailable() == (
        "backend emulated needs a C++ compiler: $CXX, c++, g++ or clang++, but none was found"
    )
    # Only to compile it.
    build.library().parent.mkdir(parents=True)
    build.library().touch()
    assert build.why_unavailable() is None


def test_missing_header_files_are_the_reason(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert "needs Python's header files (python3-dev)" in (build.why_unavailable() or "")


def test_other_systems_are_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert build.why_unavailable() == "backend emulated runs on Linux and macOS, not on win32"


ON_BOTH = """
    import sys
    import pytest
    import torch

    @pytest.mark.ranks(2, backend=["gloo", "emulated"])
    def test_it(device):
        assert [name for name in sys.modules if "zeroshard_testing.emulated" in name] == []
        assert device.type == "cpu"
        assert not hasattr(torch, "emu")
"""


def test_without_a_compiler_tests_are_skipped_by_name(suite: RunSuite, no_compiler: None) -> None:
    done = suite("-rs", test_on_both=ON_BOTH)
    assert {name: case.kind for name, case in done.cases.items()} == {
        "test_it[2-gloo]": "passed",
        "test_it[2-emulated]": "skipped",
    }, done.text
    assert "backend emulated needs a C++ compiler: $CXX, c++, g++ or clang++" in done.text


@pytest.mark.exhaustive
def test_without_a_compiler_tests_fail_where_they_are_required(suite: RunSuite, no_compiler: None) -> None:
    done = suite("--ranks-require=emulated", "--ranks-backend=emulated", test_on_both=ON_BOTH)
    assert done.cases["test_it[2-emulated]"].kind == "error"
    assert "(--ranks-require=emulated)" in done.cases["test_it[2-emulated]"].text


@pytest.mark.exhaustive
def test_a_build_that_fails_fails_the_test_with_the_compiler_s_words(suite: RunSuite, cache: Path) -> None:
    (cache / "broken").touch()
    done = suite(test_on_both=ON_BOTH)
    assert "ranks: compiling the emulated accelerator (once, takes about a minute)" in done.text
    assert done.cases["test_it[2-emulated]"].kind == "error"
    assert "error: no such header" in done.cases["test_it[2-emulated]"].text
    assert done.cases["test_it[2-gloo]"].kind == "passed"


@pytest.mark.exhaustive
def test_a_library_that_cannot_be_loaded_is_named(suite: RunSuite, cache: Path) -> None:
    done = suite("--ranks-backend=emulated", test_on_both=ON_BOTH)
    assert done.cases["test_it[2-emulated]"].kind == "failure"
    text = done.cases["test_it[2-emulated]"].text
    assert f"{build.library()} cannot be loaded" in text
    assert f"delete the folder {build.library().parent} to compile it again" in text
    assert times_compiled(cache) == 1


# -------------------------------------------------------------------------------------------- markers and imports


@pytest.mark.parametrize(
    ("arguments", "off"),
    [
        ({"checks": "no:races"}, None),
        ({"checks": "no:races", "reason": ""}, None),
        ({"reason": "it is slow"}, None),
        ({"checks": "no:messages", "reason": "it is slow"}, None),
        ({"checks": "no:races", "reason": "its races are benign"}, ("races",)),
        ({"checks": "no:races no:messages", "reason": "its races are benign"}, ("messages", "races")),
        ({"checks": "no:messages"}, ("messages",)),
    ],
)
def test_races_are_allowed_with_a_reason(arguments: dict[str, str], off: tuple[str, ...] | None) -> None:
    if off is None:
        with pytest.raises(SpecError, match=r'checks="no:races" needs reason="\.\.\."'):
            parse_marker((2,), {"backend": "emulated", **arguments})
    else:
        (spec,) = parse_marker((2,), {"backend": "emulated", **arguments})
        assert spec.checks_off == off


def test_a_marker_that_allows_races_without_a_reason_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.ranks(2, checks='no:races')\ndef test_it(): pass")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*test_it: @pytest.mark.ranks: *needs reason=*"])


def test_races_are_allowed_to_no_whole_project(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest_inprocess("-o", "ranks_checks=no:races")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*ranks_checks in the ini file: no:races cannot be set here: set it in a test's*"])


def test_neither_the_plugin_nor_its_errors_import_torch_or_the_accelerator() -> None:
    program = """
import sys
import zeroshard_testing.plugin
assert not any("emulated" in name for name in sys.modules), "the plugin imports the emulated accelerator"
from zeroshard_testing import DifferentCollectivesError, RaceError
from zeroshard_testing.emulated import build
assert issubclass(RaceError, RuntimeError) and issubclass(DifferentCollectivesError, RuntimeError)
assert "torch" not in sys.modules, "torch is imported"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# ---------------------------------------------------------------------------------------- what fails a test, and how

WRONG = """
    import pytest
    import torch
    import torch.distributed as dist

    def allocated(device):
        return torch.ones(1000, device=device)  # allocation

    @pytest.mark.ranks(2, backend="emulated")
    def test_race_in_backward(device):
        weight = torch.nn.Parameter(allocated(device))
        hidden = (weight * weight).sum()
        side = torch.Stream(device)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            weight.data.zero_()  # first
        hidden.backward()  # then

    @pytest.mark.ranks(1, backend="emulated")
    def test_freed_in_use(device):
        side, x = torch.Stream(device), torch.ones(1000, device=device)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            x.add_(1)  # used
        del x  # freed
        torch.zeros(1000, device=device)

    @pytest.mark.ranks(2, backend="emulated")
    def test_left_out(rank, device):
        if rank == 0:
            dist.all_reduce(torch.ones(3, device=device))  # left out

    @pytest.mark.ranks(1, backend="emulated")
    def test_that_fails_by_itself(device):
        side, x = torch.Stream(device), torch.ones(1000, device=device)
        with side:
            x.add_(1)
        assert x.device.type == "cpu"

    @pytest.mark.ranks(1, backend="emulated", checks="no:races", reason="a test of what turns it off")
    def test_race_that_is_allowed(device):
        side, x = torch.Stream(device), torch.ones(1000, device=device)
        with side:
            x.add_(1)

    @pytest.mark.ranks(2, backend="emulated")
    def test_skipped_alone(rank, device):
        if rank == 0:
            pytest.skip("not today")
        dist.all_reduce(torch.ones(3, device=device))

    @pytest.fixture
    def skips(rank):
        if rank == 0:
            pytest.skip("not today")

    @pytest.mark.ranks(2, backend="emulated")
    def test_skipped_alone_in_a_fixture(skips, device):
        pass

    @pytest.mark.ranks(2, backend="emulated")
    def test_that_is_right(device):
        x = torch.ones(3, device=device)
        dist.all_reduce(x, async_op=True).wait()
        assert x.tolist() == [2] * 3
"""


@pytest.mark.exhaustive
def test_what_is_found_fails_a_test_with_both_places_the_allocation_and_the_autograd_node(suite: RunSuite) -> None:
    done = suite("--ranks-require=emulated", test_wrong=WRONG)
    kinds = {name.partition("[")[0]: case.kind for name, case in done.cases.items()}
    assert kinds == {
        "test_race_in_backward": "failure",
        "test_freed_in_use": "failure",
        "test_left_out": "failure",
        "test_that_fails_by_itself": "failure",
        "test_race_that_is_allowed": "passed",
        "test_skipped_alone": "failure",
        "test_skipped_alone_in_a_fixture": "failure",
        "test_that_is_right": "passed",
    }, done.text
    lines = {text.partition("  # ")[2]: number for number, text in enumerate(WRONG.splitlines(), 1)}

    text = done.cases["test_race_in_backward[2-emulated]"].text
    assert "RaceError" in text
    assert "race: a read on the default stream is not ordered after a write on side stream 1 of the same memory" in text
    for where, title in (("then", "aten::mul in autograd node MulBackward0"), ("first", "aten::zero_")):
        assert title in text
        assert f"test_wrong.py:{lines[where]} in test_race_in_backward" in text
    assert "allocation of 4000 bytes" in text
    assert f"test_wrong.py:{lines['allocation']} in allocated" in text
    # Of torch's frames and pytest's, none.
    assert "/_pytest/" not in text
    assert "torch/autograd" not in text

    text = done.cases["test_freed_in_use[1-emulated]"].text
    assert "freed in use: memory was freed while side stream 1 may still use it" in text
    for where in ("used", "freed"):
        assert f"test_wrong.py:{lines[where]} in test_freed_in_use" in text

    text = done.cases["test_left_out[2-emulated]"].text
    assert "DifferentCollectivesError" in text
    assert f"rank 0 issues all_reduce of float32[3] by SUM (test_wrong.py:{lines['left out']}" in text
    assert "rank 1 is at the end of the test" in text

    # None waits for the rank that has skipped, until the time limit.
    text = done.cases["test_skipped_alone[2-emulated]"].text
    assert "rank 0 is at the end of the test" in text
    text = done.cases["test_skipped_alone_in_a_fixture[2-emulated]"].text
    assert "rank 0 skipped alone: not today" in text
    assert "DifferentCollectivesError" not in text

    text = done.cases["test_that_fails_by_itself[1-emulated]"].text
    assert "AssertionError" in text
    assert "RaceError" not in text

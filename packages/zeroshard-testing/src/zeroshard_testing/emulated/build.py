"""Compiles the emulated accelerator, once for each version of torch, of Python and of its sources, into a cache.

The cache is ``$ZEROSHARD_CACHE``, or ``zeroshard-testing`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. Processes that need
the extension at the same time wait for the first of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from zeroshard_testing.ipc import Message
from zeroshard_testing.launcher import LaunchError

MODULE = "zeroshard_emulated"
"""The name under which Python imports the extension."""

_SOURCES = Path(__file__).parent / "csrc"
# A higher level doubles the time of compilation, and the kernels are torch's.
_FLAGS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-w", "-DUSE_DISTRIBUTED", f"-DTORCH_EXTENSION_NAME={MODULE}")
# Seconds for a compilation, and for a compilation of another process before it.
_BUILD_PATIENCE = 600.0
_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


class BuildError(RuntimeError):
    """Raised if the extension cannot be compiled, or the cache is unusable. The message names the file."""


def why_unavailable() -> str | None:
    """Return what this machine lacks to compile the extension; None if nothing."""
    if sys.platform not in ("linux", "darwin"):
        return f"backend emulated runs on Linux and macOS, not on {sys.platform}"
    if library().exists():
        return None
    if _compiler() is None:
        return "backend emulated needs a C++ compiler: $CXX, c++, g++ or clang++, but none was found"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "backend emulated needs Python's header files (python3-dev), which were not found"
    return None


def library() -> Path:
    """Return the path of the compiled extension, which may not exist yet."""
    import torch

    key = hashlib.sha256(" ".join((torch.__version__, sys.implementation.cache_tag or "", *_FLAGS)).encode())
    for source in sorted(_SOURCES.iterdir()):
        key.update(source.read_bytes())
    return _cache() / f"emulated-{torch.__version__}-{key.hexdigest()[:16]}" / f"{MODULE}.so"


def build() -> Path:
    """Compile the extension if it is not compiled yet, and return its path. Raises BuildError, which names the file."""
    target = library()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{target.parent}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(target)
    except OSError as error:
        raise BuildError(
            f"the cache of the emulated accelerator cannot be written: {error}. Make it writable, or set "
            f"ZEROSHARD_CACHE to another folder"
        ) from error
    if _digest(target) != _read(_checksum(target)):
        raise BuildError(f"{target} is damaged: delete the folder {target.parent} to compile it again")
    return target


def _compile(target: Path) -> None:
    import torch

    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    compiler = _compiler()
    if compiler is None:
        raise BuildError("no C++ compiler was found")
    made = target.with_suffix(f".{os.getpid()}")
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    command = [
        *(compiler, *_FLAGS, *undefined),
        *(text for folder in includes for text in ("-isystem", str(folder))),
        *(str(_SOURCES / "extension.cpp"), "-o", str(made)),
        *(f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", *(f"-l{name}" for name in _LIBRARIES)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        made.unlink(missing_ok=True)
        raise BuildError(
            f"the emulated accelerator does not compile with torch {torch.__version__}:\n{done.stderr[-4000:]}"
        )
    _checksum(target).write_text(_digest(made))
    made.replace(target)


def _compiler() -> str | None:
    names = [name for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name]
    return next((found for name in names if (found := shutil.which(name))), None)


def _cache() -> Path:
    chosen = os.environ.get("ZEROSHARD_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen) if chosen else Path(base, "zeroshard-testing")


def _checksum(target: Path) -> Path:
    return target.with_suffix(".sha256")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def why_not_built(ask: Callable[[Message, float], Message], say: Callable[[str], object]) -> str | None:
    """Have another process compile the extension. Return why this machine cannot have it; None if it can.

    ``ask`` sends the request, given the timeout of the answer in seconds. Raises LaunchError with the error of the
    compiler or the cache.
    """
    for builds in (False, True):
        answer = ask({"op": "emulated", "builds": builds}, _BUILD_PATIENCE)
        if answer["error"]:
            raise LaunchError(answer["error"])
        if answer["reason"] is not None:
            return str(answer["reason"])
        if not answer["is_built"]:
            say("ranks: compiling the emulated accelerator (once, takes about a minute)")
    return None


def availability(*, builds: bool) -> dict[str, str | bool | None]:
    """Return the ``reason`` why the machine cannot have it, whether it ``is_built``, and the ``error`` of the build."""
    error, reason = "", why_unavailable()
    if builds:
        try:
            build()
        except BuildError as failure:
            error = str(failure)
    return {"error": error, "reason": reason, "is_built": library().exists()}

"""Ranks on an emulated network: each in a network namespace of its own, behind an interface of a given rate.

Two ranks are joined by a pair of interfaces, more by a bridge in one more namespace; both ends of each pair are shaped,
so that the rate holds for either direction. The interface carries one rank's traffic and nothing else, so its counter
tells what that rank sends.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from spawned import as_rank

INTERFACE = "link0"
SHAPING = ("burst", "256kb", "latency", "50ms")
_CONGESTION_CONTROL = "reno"
"""Which every Linux has. BBR, the default of some, takes the shaper's small buffer for a slow link, and stalls."""
_BRIDGE = "bridge0"
_FOLDER = Path(__file__).parent


class LinkError(Exception):
    """A link cannot be made, or a rank on it failed."""


def missing(
    *, which: Callable[[str], str | None] = shutil.which, user: Callable[[], int] = lambda: os.geteuid()
) -> str | None:
    """Return what keeps this machine from emulating a link, in one line; None if nothing does.

    Args:
        which: finds a program.
        user: tells the effective user's number.
    """
    lacking = [f"the program {name!r} (of iproute2)" for name in ("ip", "tc") if which(name) is None]
    if user() != 0:
        lacking.append("root")
    return f"--link needs {' and '.join(lacking)}" if lacking else None


class Links:
    """As many ranks as asked for, joined by links; made by :func:`linked`.

    Args:
        namespaces: of the ranks, in order.
    """

    def __init__(self, namespaces: Sequence[str]) -> None:
        self._namespaces = namespaces

    def on_ranks(self, function: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - whatever the function reports
        """Run a function of a module on fresh ranks, one for each namespace, and return what rank 0 reports.

        Args:
            function: called on every rank; what it returns on rank 0, and its arguments, must fit into JSON.
            *arguments: passed to the function.

        Raises:
            LinkError: if a rank fails; it has written why to standard error.
        """
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            call = [function.__module__, function.__qualname__, arguments]
            processes = []
            for rank, namespace in enumerate(self._namespaces):
                task = json.dumps([rank, len(self._namespaces), folder, *call])
                # Away from the terminal's signals, which are for this process: it ends them.
                process = subprocess.Popen(
                    _inside(namespace, sys.executable, "-c", "import links; links.rank_main()", task),
                    env=_environment(),
                    start_new_session=True,
                )
                stack.callback(_end, process)
                processes.append(process)
            _await_all(processes)
            return json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))


@contextmanager
def linked(ranks: int, rate: str) -> Iterator[Links]:
    """Make namespaces and links, and remove them in the end, also when the program is interrupted or told to end.

    Args:
        ranks: number of namespaces.
        rate: of every interface, as tc takes it, such as ``1gbit``.

    Raises:
        LinkError: if something of it cannot be made; what was made before is removed.
    """
    # A pid is unique among what runs; a namespace of that name can only be left over.
    prefix = f"zeroshard-{os.getpid()}"
    namespaces = [f"{prefix}-{rank}" for rank in range(ranks)]
    with _ending_by_exception(), ExitStack() as stack:
        for namespace in namespaces:
            _make_namespace(namespace, stack)
        if ranks == 2:
            _ip(
                namespaces[0],
                "link",
                "add",
                INTERFACE,
                "type",
                "veth",
                "peer",
                "name",
                INTERFACE,
                "netns",
                namespaces[1],
            )
        else:
            _join_by_bridge(f"{prefix}-bridge", namespaces, rate, stack)
        for rank, namespace in enumerate(namespaces):
            _ip(namespace, "address", "add", f"10.0.{rank // 250}.{rank % 250 + 1}/16", "dev", INTERFACE)
            _start(namespace, INTERFACE, rate)
            _ip(namespace, "link", "set", "lo", "up")
        yield Links(namespaces)


def rank_main() -> None:
    """Be one rank, as the command line says."""
    rank, ranks, folder, module, function, arguments = json.loads(sys.argv[1])
    chosen = getattr(__import__(module), function)
    # Of this process's namespace alone.
    Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(_CONGESTION_CONTROL, encoding="ascii")
    as_rank(rank, ranks, folder, chosen, tuple(arguments))


def _join_by_bridge(bridge: str, namespaces: Sequence[str], rate: str, stack: ExitStack) -> None:
    _make_namespace(bridge, stack)
    _ip(bridge, "link", "add", _BRIDGE, "type", "bridge")
    _ip(bridge, "link", "set", _BRIDGE, "up")
    for rank, namespace in enumerate(namespaces):
        port = f"port{rank}"
        _ip(bridge, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", namespace)
        _ip(bridge, "link", "set", port, "master", _BRIDGE)
        _start(bridge, port, rate)


def _make_namespace(name: str, stack: ExitStack) -> None:
    # Registered first: an interrupt may come at once.
    stack.callback(
        lambda: subprocess.run([_program("ip"), "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)
    )
    _run(_program("ip"), "netns", "add", name)


def _start(namespace: str, interface: str, rate: str) -> None:
    # No address of its own making: the counter is for what ranks send.
    _ip(namespace, "link", "set", interface, "addrgenmode", "none")
    _run(
        *(_program("tc"), "-netns", namespace, "qdisc", "add", "dev", interface, "root", "tbf", "rate", rate, *SHAPING),
    )
    _ip(namespace, "link", "set", interface, "up")


def _ip(namespace: str, *arguments: str) -> None:
    _run(_program("ip"), "-netns", namespace, *arguments)


def _inside(namespace: str, *command: str) -> list[str]:
    return [_program("ip"), "netns", "exec", namespace, *command]


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise LinkError(f"there is no program {name!r}")
    return found


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise LinkError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": INTERFACE}


def _await_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    running = dict(enumerate(processes))
    while running:
        for rank, process in list(running.items()):
            status = process.poll()
            if status:
                raise LinkError(f"rank {rank} ended with exit status {status}")
            if status == 0:
                del running[rank]
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


@contextmanager
def _ending_by_exception() -> Iterator[None]:
    """Turn the signals that end a program into exceptions, so that everything is cleaned up."""

    def leave(number: int, _: FrameType | None) -> None:
        # Once is enough; a second one would interrupt the cleaning up.
        for one in numbers:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

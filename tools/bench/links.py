"""An emulated network: each rank in a network namespace of its own, and all joined by a bridge in one more namespace.

Both ends of the cable between a rank and the bridge are shaped, so that the rate holds for either direction. A rank's
interface carries its traffic and nothing else, so its counter tells what the rank sends.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

INTERFACE = "link0"
_BRIDGE = "bridge0"
_SHAPING = ("burst", "256kb", "latency", "50ms")
_CONGESTION_CONTROL = "reno"
"""Which every Linux has. BBR, the default of some, takes the shaper's small buffer for a slow link, and stalls."""


class LinkError(Exception):
    """A link cannot be made."""


@contextmanager
def linked(ranks: int, rate: str) -> Iterator[list[str]]:
    """Make a namespace for each rank, with an interface of a rate as tc takes it, such as ``1gbit``; yield their names.

    All of it is removed in the end, also when something cannot be made, or the program is interrupted or told to end.
    """
    if shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
        raise LinkError("--link needs root and the programs ip and tc (of iproute2)")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    # A pid is unique among what runs; a namespace of that name can only be left over.
    bridge, *namespaces = (f"zeroshard-{os.getpid()}-{place}" for place in ("bridge", *range(ranks)))
    with ExitStack() as stack:
        for name in (bridge, *namespaces):
            # Registered first: an interrupt may come at once.
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)
            _run("ip", "netns", "add", name)
        _run("ip", "-netns", bridge, "link", "add", _BRIDGE, "type", "bridge")
        _run("ip", "-netns", bridge, "link", "set", _BRIDGE, "up")
        for rank, name in enumerate(namespaces):
            port = f"port{rank}"
            cable = ("type", "veth", "peer", "name", INTERFACE, "netns", name)
            _run("ip", "-netns", bridge, "link", "add", port, *cable)
            _run("ip", "-netns", bridge, "link", "set", port, "master", _BRIDGE)
            address = f"10.0.{rank // 250}.{rank % 250 + 1}/16"
            _run("ip", "-netns", name, "address", "add", address, "dev", INTERFACE)
            _run("ip", "-netns", name, "link", "set", "lo", "up")
            for where, interface in ((bridge, port), (name, INTERFACE)):
                # No address of its own making: the counter is for what ranks send.
                _run("ip", "-netns", where, "link", "set", interface, "addrgenmode", "none")
                shaping = ("root", "tbf", "rate", rate, *_SHAPING)
                _run("tc", "-netns", where, "qdisc", "add", "dev", interface, *shaping)
                _run("ip", "-netns", where, "link", "set", interface, "up")
        yield namespaces


def enter(namespace: str) -> None:
    """Move the calling thread, and threads that it starts from now on, into a namespace, and gloo to its interface."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open("rb") as file:
        if libc.setns(file.fileno(), 0):
            raise LinkError(f"cannot enter {namespace}: {os.strerror(ctypes.get_errno())}")
    # Of this namespace alone.
    Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(_CONGESTION_CONTROL, encoding="ascii")
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def sent_bytes() -> float:
    """Return how many bytes have left the interface of this thread's namespace; NaN where it has no such interface."""
    devices = Path("/proc/thread-self/net/dev")
    for line in devices.read_text(encoding="ascii").splitlines() if devices.exists() else []:
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    return math.nan


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise LinkError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")

"""Reading memory of processes: this one, others, and what cannot be read."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys

import pytest
import torch
from zeroshard_comm import process_memory
from zeroshard_comm.process_memory import SWITCH, ProcessMemory, machine

HAS_IT = sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "process_vm_readv")
pytestmark = pytest.mark.skipif(not HAS_IT, reason="this system has no process_vm_readv")


def read_into(buffer: torch.Tensor, process: int, address: int) -> None:
    ProcessMemory(process, [(buffer.data_ptr(), address, buffer.nbytes)]).read()


def test_memory_is_read_as_it_is() -> None:
    values = torch.arange(1000, dtype=torch.float64)
    found = torch.zeros(500, dtype=torch.float64)
    read_into(found, os.getpid(), values.data_ptr() + 8 * 250)
    assert torch.equal(found, values[250:750])


def test_memory_that_is_not_there() -> None:
    with pytest.raises(OSError, match=f"reading memory of process {os.getpid()}: Bad address"):
        read_into(torch.zeros(10), os.getpid(), 16)


def test_memory_that_ends_too_early() -> None:
    page = mmap.PAGESIZE
    region = torch.frombuffer(mmap.mmap(-1, 2 * page), dtype=torch.uint8)
    region.fill_(7)
    found = torch.zeros(2 * page, dtype=torch.uint8)
    libc, second = ctypes.CDLL(None), ctypes.c_void_p(region.data_ptr() + page)
    assert libc.mprotect(second, page, 0) == 0
    try:
        # What can be read is, and what cannot is not taken for the end.
        with pytest.raises(OSError, match="Bad address"):
            read_into(found, os.getpid(), region.data_ptr())
    finally:
        assert libc.mprotect(second, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    assert found.tolist() == [7] * page + [0] * page


def test_a_process_that_has_ended() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(OSError, match="No such process"):
        read_into(torch.zeros(10), ended.pid, torch.zeros(10).data_ptr())


def test_the_switch_and_systems_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    program = "from zeroshard_comm.process_memory import machine; print(machine())"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert machine() == int(other.stdout) != 0
    monkeypatch.setenv(SWITCH, "0")
    assert machine() == 0
    monkeypatch.delenv(SWITCH)
    monkeypatch.setattr(process_memory, "_libc", lambda: None)
    assert machine() == 0
    with pytest.raises(OSError, match="no process_vm_readv"):
        read_into(torch.zeros(10), os.getpid(), 16)

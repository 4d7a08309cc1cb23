"""What ranks print and log, and fixtures that capture it."""

import ctypes
import faulthandler
import logging
import os
import subprocess
import sys

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)


def test_printed(rank):
    print("hello from", rank)
    print("error from", rank, file=sys.stderr)


def test_captured(capsys, rank):
    print("hello from", rank)
    sys.stderr.write("error")
    assert capsys.readouterr() == (f"hello from {rank}\n", "error")


@pytest.mark.parametrize("turn", [1, 2])
def test_captured_anew(capsys, turn):
    print("once")
    assert capsys.readouterr().out == "once\n"


def test_captured_from_descriptors(capfd, rank):
    os.write(1, b"to the descriptor\n")
    subprocess.run(["echo", "from a child"], check=True)
    assert capfd.readouterr().out == "to the descriptor\nfrom a child\n"


def test_captured_bytes(capfdbinary):
    os.write(1, b"\xff\x00")
    assert capfdbinary.readouterr().out == b"\xff\x00"


def test_captured_bytes_of_python(capsysbinary):
    sys.stdout.buffer.write(b"\xff")
    assert capsysbinary.readouterr().out == b"\xff"


def test_captured_from_c(capfd):
    library = ctypes.CDLL(None)
    library.puts(b"from C")
    library.fflush(None)
    assert "from C" in capfd.readouterr().out


def test_capturing_that_is_turned_off(capsys, rank):
    with capsys.disabled():
        print("seen at once")
    print("captured")
    assert capsys.readouterr().out == "captured\n"


@pytest.fixture
def captured(capsys):
    print("from a fixture")
    return capsys


def test_captured_in_a_fixture(captured):
    print("from a test")
    assert captured.readouterr().out == "from a fixture\nfrom a test\n"


def test_a_lone_surrogate(rank):
    print("\ud800", file=sys.stderr)
    sys.stdout.write("\udcff\n")


def test_a_lone_surrogate_in_a_message_that_is_expected(rank):
    with pytest.raises(AssertionError) as caught:
        assert rank is None, "\ud800"
    assert "\ud800" in str(caught.value)


def test_bytes_that_are_no_text(rank):
    os.write(1, b"\xff\xfe\x00 no text\n")
    sys.stdout.buffer.write(b"\xc3\x28\n")


def test_much(rank):
    for number in range(2000):
        print(number, "x" * 200)


def test_much_on_a_descriptor(rank):
    os.write(2, b"x" * 300_000)


def test_without_an_end_of_line(rank):
    print("no end", end="")


def test_after_sys_stdout_was_replaced(rank):
    sys.stdout = sys.stderr
    print("elsewhere")


def test_sys_stdout_as_it_was(rank, capsys):
    assert sys.stdout is not sys.stderr
    print("here")
    assert capsys.readouterr().out == "here\n"


def test_beneath_pytest(rank):
    print("beneath", file=sys.__stdout__)
    faulthandler.dump_traceback()


def test_logged(rank):
    logging.getLogger("of.the.test").warning("from rank %d", rank)


def test_input_that_is_not_there(rank):
    with pytest.raises((OSError, EOFError)):
        input()


def test_a_child_that_prints(rank):
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    dist.barrier()


def test_what_looks_like_a_failure(rank):
    print("=== FAILURES ===\nrank 1 failed: ValueError: no\n]]> </testcase>")


def test_what_is_printed_through_torch(rank):
    print(__import__("torch").ones(3))


def test_a_name_with_a_percent_sign(record_property):
    record_property("%s", "100 %")

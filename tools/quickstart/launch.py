"""Ranks: started by torchrun, watched while they run, and their errors made readable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from errors import RankFailedError
from job import Job

OnStep = Callable[[int, float], None]
"""Told of every step: its number from 1, and the loss in nats per byte."""


def launch(job: Job, ranks: int, on_step: OnStep) -> None:
    """Run a job on ranks of this machine and wait for its end.

    Args:
        job: what every rank does; answers lie in its folder afterwards.
        ranks: number of processes.
        on_step: told of every step of rank 0.

    Raises:
        RankFailedError: if a rank failed, naming the first one and what it raised.
    """
    folder = Path(job.folder)
    job_file, log_file = folder / f"{job.task}.job.json", folder / f"{job.task}.log"
    job.write(job_file)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
        f"--nproc-per-node={ranks}", str(Path(__file__).with_name("rank_main.py")), str(job_file),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if sys.platform == "linux":
        # All ranks are here, and some machines cannot resolve their own name.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with (
        log_file.open("w") as log,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                _hear(line, on_step)
            code = process.wait()
        except BaseException:
            _end(process)
            raise
    if code:
        raise RankFailedError(_reason(job, log_file, code))


def _hear(line: str, on_step: OnStep) -> None:
    if line.startswith('{"step"'):
        told = json.loads(line)
        on_step(told["step"], told["loss"])
    elif line.strip():
        print(line, end="", file=sys.stderr)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()


def _reason(job: Job, log_file: Path, code: int) -> str:
    """What the first rank to fail raised; the others often only lost their connection to it."""
    found = [json.loads(file.read_text()) for file in Path(job.folder).glob(f"{job.task}.rank*.error.json")]
    if not found:
        tail = "\n".join(log_file.read_text().splitlines()[-20:])
        return f"torchrun ended with code {code} in task {job.task!r}, and no rank said why; its last lines:\n{tail}"
    first = min(found, key=lambda told: told["time"])
    return f"rank {first['rank']} failed in task {job.task!r}: {first['error']}\n{first['trace']}"

"""Measures the processor time of one agreement of all ranks, by number of ranks.

With ``--before FOLDER`` it compares another checkout, with ``--rounds`` the two ways in which ranks agree. Each turn
forks ranks on this machine, which agree 20 times, and then as often as asked: its time is the processor time of all
threads of a rank for one agreement, on the mean over the ranks. Turns alternate, so that drift of the machine cancels
out.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
import zeroshard_comm
from contest import Times, compared
from rich.console import Console
from rich.progress import track
from rich.table import Table
from spawned import machine
from zeroshard_comm import Coordinator, RankGroup, ring

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 20


def main(
    ranks: Annotated[list[int] | None, typer.Option(min=2, help="numbers of ranks (2, 4, 8, 16 and 32)")] = None,
    pairs: Annotated[int, typer.Option(min=6, help="turns of each; fewer than 6 have no interval")] = 15,
    agreements: Annotated[int, typer.Option(min=1, help="agreements of a turn")] = 200,
    before: Annotated[Path | None, typer.Option(help="another checkout of the repository")] = None,
    rounds: Annotated[bool, typer.Option("--rounds", help="compare agreement in rounds with the ring")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
    serve: Annotated[bool, typer.Option("--serve", hidden=True)] = False,
) -> None:
    """Time agreements at each number of ranks."""
    if serve:
        _serve()
        return
    folders = {"now": ROOT, **({"before": before.resolve()} if before is not None else {})}
    most: dict[str, int | None] = dict.fromkeys(folders)
    if rounds:
        folders, most = {"rounds": ROOT, "ring": ROOT}, {"rounds": 1, "ring": 1 << 20}
    counts, found = ranks or [2, 4, 8, 16, 32], dict[int, Times]()
    with ExitStack() as stack:
        servers = {name: stack.enter_context(_server(folder)) for name, folder in folders.items()}
        for count in counts:
            times = found[count] = {name: [] for name in servers}
            for turn in track(range(pairs), f"{count} ranks", console=Console(stderr=True)):
                for name in list(servers)[:: 1 if turn % 2 == 0 else -1]:
                    times[name].append(_ask(servers[name], [count, agreements, most[name]]))
    Console().print(_table(found))
    Console().print(machine())
    if json_file is not None:
        figures = {"machine": machine(), "agreements": agreements, "seconds": found}
        json_file.write_text(json.dumps(figures), encoding="utf-8")


def _table(found: dict[int, Times]) -> Table:
    table = Table(title="processor time of an agreement, of a rank")
    first, *others = next(iter(found.values()))
    for heading in ("ranks", f"{first}, us", *[text for name in others for text in (f"{name}, us", "ratio", "95 %")]):
        table.add_column(heading, justify="right")
    for count, times in found.items():
        row = [str(count), f"{1e6 * statistics.median(times[first]):.0f}"]
        for name in others:
            timing = compared(times, first, name)
            row += [f"{1e6 * timing.median_b:.0f}", f"{timing.ratio:.2f}", f"{timing.low:.2f} - {timing.high:.2f}"]
        table.add_row(*row)
    return table


def _server(folder: Path) -> subprocess.Popen[str]:
    """Start this program with the packages of a checkout; it has torch loaded, and forks the ranks of each turn."""
    packages = os.pathsep.join(str(path) for path in sorted(folder.glob("packages/*/src")))
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve"],
        env={**os.environ, "PYTHONPATH": packages},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    module = Path(_ask(server, "which"))
    if folder not in module.parents:
        raise SystemExit(f"zeroshard_comm was imported from {module}, and not from {folder}")
    return server


def _ask(server: subprocess.Popen[str], question: object) -> Any:  # noqa: ANN401 - JSON
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps(question), file=server.stdin, flush=True)
    return json.loads(server.stdout.readline())


def _serve() -> None:
    # Else a rank looks through all that was imported when it collects garbage.
    gc.freeze()
    for line in sys.stdin:
        question = json.loads(line)
        answer = zeroshard_comm.__file__ if question == "which" else _turn(*question)
        print(json.dumps(answer), flush=True)


def _turn(ranks: int, agreements: int, most: int | None) -> float:
    """Fork ranks, and return the seconds of processor time that one of them takes for an agreement, on the mean."""
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            processes.append(os.fork())
            if processes[-1] == 0:
                seconds = _be_rank(rank, ranks, folder, agreements, most)
                os.write(writing, f"{seconds}\n".encode())
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as told:
            times = [float(line) for line in told]
        for process in processes:
            os.waitpid(process, 0)
    if len(times) != ranks:
        raise SystemExit("a rank has failed")
    return statistics.mean(times)


def _be_rank(rank: int, ranks: int, folder: str, agreements: int, most: int | None) -> float:
    torch.set_num_threads(1)
    if most is not None:
        ring.MOST_RANKS = most
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    coordinator = Coordinator(RankGroup.of())
    for _ in range(WARM_UP):
        coordinator.agree("warming up")
    dist.barrier()
    started = time.process_time()
    for _ in range(agreements):
        coordinator.agree("a step")
    seconds = (time.process_time() - started) / agreements
    # No rank ends while others still agree.
    dist.barrier()
    return seconds


if __name__ == "__main__":
    typer.run(main)

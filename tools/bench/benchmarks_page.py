"""Write docs/benchmarks.md and its pictures from docs/measured: what programs beside it have found."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from collective_counts import table as table_of_counts
from host_time import table as table_of_times
from many_ranks import growth, table_of_growth
from pictures import draw_memory, draw_ranks, draw_time, place_of
from training_report import markdown
from training_result import DDP, Result

DOCS = Path(__file__).parents[2] / "docs"
MEASURED, PAGE = DOCS / "measured", DOCS / "benchmarks.md"
_PICTURES = "pictures"

_HEAD = """# Benchmarks

The same model is trained on the same batches, with Adam: by plain DistributedDataParallel (DDP), with torch's
`ZeroRedundancyOptimizer` (ZeRO), and with zeroshard.
"""

_MEMORY = """
## Memory

![Bars: peak memory of a rank falls with the number of ranks towards what parameters and gradients take]({file})

Adam's state is twice the parameters, and each of N ranks holds 1/N of it; parameters and gradients are on every rank.
"""

_TIME = """
## Time

{pictures}

A hook sends each gradient only to its owner, so a sharded iteration sends as much as DDP; torch's ZeRO sends 1.5
times as much. Lines are 95 % intervals. mlp is large linear layers, gpt a small language model. On one machine ranks
read each other's memory.
"""

_RANKS = """
## Thousands of ranks

![Lines: time and memory of a step by the number of ranks]({file})

What one rank computes and holds falls with the number of ranks; what remains is to pack and unpack what all of them
own. This is measured on a backend that moves no data: the time of the network is not in it.
"""

_GPUS = """
## On GPUs

{found}To make one, run `bash tools/gpu_check/gpu_check.sh` in a clone. It checks hooks, training, memory, time and CUDA
graphs on one GPU, in at most 8 minutes. Please paste `gpu-check-out/report.md` into an issue.
"""

_NO_GPU = "There is no report of a GPU yet.\n"

_METHOD = """
## How it is measured

All contenders live in the same processes, one for each rank, and take turns in every round, in an order that is
reversed from round to round. A time is the slowest rank's. A ratio is the median over the rounds, with an
interval that covers the true median with a probability of 95 %. In the end the parameters of all contenders are
compared with DDP's.

| column | meaning |
| --- | --- |
| ms | time of an iteration: forward, backward, step |
| / torch | the same, relative to the better of torch's two modes, with and without bucket views |
| / DDP | the same, relative to DDP |
| sent | MB that zeroshard counts as sent by a rank in an iteration |
| link | MB that left the rank's network interface, by the kernel's counter |
| / ring | the same, relative to a ring all-reduce of all gradients: 2P(N - 1)/N bytes for P bytes of parameters |
| peak | MB of resident memory of a rank at the highest, above what was resident before the model was built |
| / P | the same, relative to the parameters |
| later | as peak, after the first iterations |
| apart | L2 norm of the difference of the parameters from DDP's, relative to theirs |

Memory is measured for one contender at a time, in fresh processes. Bytes and memory are means over ranks. On a link,
each rank has a network namespace of its own, whose interface is shaped to the given rate.

Contenders are:

"""

_WORDS = """## Messages without tensor data

What a rank sends in one `step()` without a hook beside the parameters, however many: words of 64 bits, each by one
collective up to 16 ranks, and above by one message in each of log2 N rounds. `tests/step/test_costs.py` counts them.

| ranks | words between hosts | words on one host, where memory is read | each is |
| ---: | ---: | ---: | --- |
| 2 | 2 | 3 | one collective |
| 4 | 2 | 3 | one collective |
| 8 | 2 | 3 | one collective |
| 16 | 2 | 3 | one collective |
| 17 to 32 | 2 | 3 | 5 messages |

With a hook that reduces gradients to their owners what ranks tell each other of a bucket travels with its gradients, at
no further message; where memory is read, there is one further word for each bucket, and one for all of them. With norms
there is a word at the end of backward, unless memory is read, and one exchange of a number for each tensor and order:
one collective up to 16 ranks, and above, or for more than 1,024 numbers, messages in log2 N rounds.
"""


_NORMS = """
## Norms

With `reduce_to_owner_hook` every rank learns the 2-norms of all gradients at the end of backward, for torch's
`clip_grad_norm_`; `norms=False` leaves that out. Processor time of all threads of a rank, in an iteration with SGD
on 64 rows, all ranks on two cores. Ratios are medians of 15 rounds, with quartiles.

| model | ranks | partition | | iteration | without norms | ratio |
| --- | ---: | --- | --- | ---: | ---: | ---: |
{rows}

Command: `python tools/bench/norms.py --model MODEL --ranks N --json docs/measured/norms-MODEL-N.json`
"""


_COLLECTIVES = """
## Collectives

On accelerators, an iteration with `reduce_to_owner_hook` issues these collectives, beside the agreements of hosts. DDP
issues one all-reduce per bucket. A group of reduces or broadcasts is one launch; its members are counted beside it.
*Staging* is the memory of the two buffers that matrices of cut tensors lie in, and *padding* their size relative to
what they hold.

{counts}

Command: `{command}`
"""

_HOST = """
Time of the host for such an iteration, on a backend that moves no data, against torch's class with bucket views. The
tensors are GPT-2's with a twelfth of the columns, cut into as many parts; processor time, median of alternating pairs
with its 95 % interval. Bounds: at most 1.25 up to 64 ranks, and 1.6 above.

{times}

Command: `{command}`
"""


def collectives_of(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the section about collectives, from what collective_counts.py and host_time.py have written."""
    text = ""
    if "collective_counts" in found:
        counts = found["collective_counts"]
        text += _COLLECTIVES.format(counts=table_of_counts(counts), command=counts["command"])
    if "host_time" in found:
        times = found["host_time"]
        text += _HOST.format(times=table_of_times(times), command=times["command"])
    return text


def norms_of(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the section about norms, from what norms.py has written."""
    rows = [
        f"| {run['title']} | {run['ranks']} | {row['partition']} | {row['contender']} | {row['ms']:.1f} ms | "
        f"{row['without']:.1f} ms | {row['ratio']:.3f} ({row['low']:.3f} - {row['high']:.3f}) |"
        for run in found
        for row in run["rows"]
    ]
    return _NORMS.format(rows="\n".join(rows))


def gpus_of(reports: Sequence[Path]) -> str:
    """Return the section about GPUs, from the reports that tools/gpu_check has written."""
    if not reports:
        return _GPUS.format(found=_NO_GPU)
    rows = []
    for report in reports:
        text = report.read_text(encoding="utf-8")
        facts = dict(re.findall(r"^\| ([\w ]+) \| (.*) \|$", text, re.MULTILINE))
        [(device, verdicts)] = re.findall(r"^# gpu-check: (.*)\n\n\d+ steps: (.*?)\.", text)
        name, *cells = device, facts["torch"], facts["CUDA"], facts["NCCL"], facts["commit"], verdicts
        rows.append(f"| [{name}](measured/{report.name}) | {' | '.join(cells)} |")
    tree = "".join(f"measured/{report.stem}\n" for report in reports)
    table = "\n".join(
        ["| GPU | torch | CUDA | NCCL | commit | steps |", "| --- | --- | --- | --- | --- | --- |", *rows]
    )
    return _GPUS.format(found=f"{table}\n\n```{{toctree}}\n:hidden:\n\n{tree}```\n\n")


def main(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="written by training.py, many_ranks.py or norms.py with --json, or a report of tools/gpu_check; by "
            "default all in docs/measured"
        ),
    ] = None,
    page: Annotated[Path, typer.Option(help="file to write; pictures go to a folder beside it")] = PAGE,
) -> None:
    """Write the page of benchmarks, and draw its pictures."""
    runs: list[Result] = []
    many: dict[str, Any] | None = None
    norms: list[dict[str, Any]] = []
    collectives: dict[str, dict[str, Any]] = {}
    reports: list[Path] = []
    for file in files or sorted([*MEASURED.glob("*.json"), *MEASURED.glob("*.md")]):
        if file.suffix == ".md":
            reports += [file] if file.read_text(encoding="utf-8").startswith("# gpu-check:") else []
            continue
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            if found.get("program") == "many_ranks":
                many = found
            elif found.get("program") == "norms":
                norms.append(found)
            elif found.get("program") in ("collective_counts", "host_time"):
                collectives[found["program"]] = found
            else:
                runs.append(Result.of_json(found))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            typer.echo(f"{file} is no result of training.py, many_ranks.py or norms.py: {error}", err=True)
            raise typer.Exit(2) from None
    page.write_text(page_of(runs, many, norms, collectives, reports, page.parent / _PICTURES), encoding="utf-8")
    count = len(runs) + len(norms) + len(collectives) + len(reports) + (many is not None)
    typer.echo(f"{count} runs written to {page}")


def page_of(
    runs: list[Result],
    many: dict[str, Any] | None,
    norms: Sequence[Mapping[str, Any]],
    collectives: Mapping[str, Mapping[str, Any]],
    reports: Sequence[Path],
    pictures: Path,
) -> str:
    """Draw the pictures, and return the page.

    Args:
        runs: of training.py; those with memory are of one model on different numbers of ranks.
        many: of many_ranks.py.
        norms: of norms.py.
        collectives: of collective_counts.py and host_time.py, by their names.
        reports: of tools/gpu_check.
        pictures: folder to draw to.
    """
    remembered = [run for run in runs if any(entry.peaks for entry in run.entries)]
    timed = [run for run in runs if run not in remembered and any(run.ratio(entry, DDP) for entry in run.entries)]
    parts = [_HEAD]
    if remembered:
        draw_memory(remembered, pictures / "memory.svg")
        parts.append(_MEMORY.format(file=f"{_PICTURES}/memory.svg"))
    shown = []
    for run in timed:
        name = f"time-{run.model.partition(',')[0]}-{run.link or 'loopback'}.svg"
        draw_time(run, pictures / name)
        shown.append(f"![Bars: the time of an iteration of {place_of(run)}, relative to DDP's]({_PICTURES}/{name})")
    parts += [_TIME.format(pictures="\n".join(shown))] if shown else []
    if many is not None:
        draw_ranks(growth(many), pictures / "ranks.svg")
        parts.append(_RANKS.format(file=f"{_PICTURES}/ranks.svg"))
    parts += [gpus_of(reports), collectives_of(collectives), norms_of(norms) if norms else ""]
    whats = {entry.name: entry.what for run in runs for entry in run.entries if entry.failure is None}
    parts += [_METHOD, *(f"- `{name}`: {what}\n" for name, what in whats.items()), "\n## Figures\n\n"]
    parts += [
        markdown(run, level=3, names_contenders=False) + "\n" for run in (*timed, *map(_without_times, remembered))
    ]
    parts += [table_of_growth(many) + "\n"] if many is not None else []
    return "".join([*parts, _WORDS])


def _without_times(run: Result) -> Result:
    """A run whose few rounds are for its memory."""
    return replace(run, entries=[replace(entry, seconds=(), counted=None) for entry in run.entries], kept={})


if __name__ == "__main__":
    typer.run(main)

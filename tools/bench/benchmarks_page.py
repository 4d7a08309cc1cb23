"""Write docs/benchmarks.md from what runs of training.py left with --json; without files, say how to use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from training_report import markdown
from training_result import Result

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
_HEAD = """# Benchmarks

Training the same model on the same batches, with everything that shards Adam's state and was installed.

How it is measured: all contenders live in the same processes, one for each rank, and take turns in every round, in an
order that is reversed from round to round. A time is that of the slowest rank. Ratios are medians over the rounds, each
with an interval that covers the true median with a probability of 95 %. "To torch ZeRO" is to the better of
`torch.distributed.optim.ZeroRedundancyOptimizer`'s two modes, with and without bucket views. In the end the parameters
of all contenders are compared with DDP's: "difference" is the L2 norm of what they differ by, relative to theirs.

"Counted MB" is what zeroshard's optimizer counted as sent by each rank in an iteration. "Wire MB" is what left the
rank's network interface, by the kernel's counter, also as a multiple of what a ring all-reduce of all gradients sends,
2P(N-1)/N bytes for P bytes of parameters on N ranks. On a link, each rank has a network namespace of its own, whose
interface is shaped to the given rate. "Peak MB" is the highest resident memory of a rank above what was resident before
the model was built, measured for each contender alone in fresh processes; "settled MB" is that of later iterations.
Bytes and memory are means over the ranks.
"""


_WORDS = """## Messages without tensor data

What a rank sends in one `step()` without a hook beside the parameters, however many: words of 64 bits, each by one
collective up to 16 ranks, and above by one message in each of log2 N rounds. `tests/test_costs.py` counts them.

| ranks | words between hosts | words on one host, where memory is read | each is |
| ---: | ---: | ---: | --- |
| 2 | 2 | 3 | one collective |
| 4 | 2 | 3 | one collective |
| 8 | 2 | 3 | one collective |
| 16 | 2 | 3 | one collective |
| 17 to 32 | 2 | 3 | 5 messages |

With a hook that reduces gradients to their owners what ranks tell each other of a bucket travels with its gradients, at
no further message; where memory is read, there is one further word for each bucket, and one for all of them.
"""


def main(
    files: Annotated[
        list[Path] | None, typer.Argument(help="written by training.py --json, in the order of the page")
    ] = None,
    page: Annotated[Path, typer.Option(help="file to write")] = PAGE,
) -> None:
    """Write the page of benchmarks."""
    if not files:
        typer.echo("usage: python tools/bench/benchmarks_page.py FILE.json ... [--page docs/benchmarks.md]")
        return
    results = []
    for file in files:
        try:
            results.append(Result.of_json(json.loads(file.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            typer.echo(f"{file} is no result of training.py: {error}", err=True)
            raise typer.Exit(2) from None
    page.write_text(page_of(results), encoding="utf-8")
    typer.echo(f"{len(results)} runs written to {page}")


def page_of(results: list[Result]) -> str:
    """Return the page."""
    return "\n".join([_HEAD, *(markdown(result) for result in results), _WORDS])


if __name__ == "__main__":
    typer.run(main)

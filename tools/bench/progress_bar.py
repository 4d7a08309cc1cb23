"""Progress of a benchmark on standard error, drawn only between timed calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def calls(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar of ``total`` calls on rank 0; yields the function that counts one.

    Nothing refreshes it by itself: a thread that draws would disturb what is timed.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, disable=dist.get_rank() != 0) as progress:
        task = progress.add_task(title, total=total)

        def advance() -> None:
            progress.advance(task)
            progress.refresh()

        yield advance

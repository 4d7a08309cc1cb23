"""Progress on the terminal's error stream: live bars, or plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from launch import OnStep
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Stages:
    """The stages of a run; :meth:`stage` shows one of them while it lasts.

    Args:
        console: where to show them.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def stage(self, title: str, steps: int) -> Iterator[OnStep]:
        """Show one stage, until the block ends, and hand out what is to be told of its steps."""
        if not self._console.is_terminal:
            self._console.print(f"{title} ...", highlight=False)
            yield self._lines(steps)
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(f"{title:<34}", total=steps, loss="starting ranks")

            def show(step: int, loss: float) -> None:
                progress.update(task, completed=step, loss=f"loss {loss:.3f}")

            yield show
            progress.update(task, completed=steps)

    def _lines(self, steps: int) -> OnStep:
        def show(step: int, loss: float) -> None:
            if step in (1, steps) or step % 5 == 0:
                self._console.print(f"  step {step:>3} of {steps}, loss {loss:.3f}", highlight=False)

        return show

"""Progress on the terminal's error stream: a live bar with the time left, or plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from launch import OnStep
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn


class Stages:
    """The stages of a run; :meth:`stage` shows one of them while it lasts.

    Args:
        console: where to show them.
        work: of all stages, in model steps: a step that trains two models counts twice.
    """

    def __init__(self, console: Console, work: int) -> None:
        self._console, self._work, self._done = console, work, 0
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._progress = Progress(*columns, console=console)

    @contextmanager
    def stage(self, title: str, steps: int, models: int = 1, resumed: int = 0) -> Iterator[OnStep]:
        """Show one stage, until the block ends, and return what is to be told of its steps.

        Args:
            title: what is done.
            steps: how many.
            models: how many of them each step trains.
            resumed: further steps, which one model takes from the checkpoint on.
        """
        if not self._console.is_terminal:
            self._console.print(f"{title} ...", highlight=False)
            yield self._lines(steps, resumed)
            return
        if not self._progress.tasks:
            self._progress.add_task(title, total=self._work, loss="")
        [task] = self._progress.task_ids
        self._progress.update(task, description=f"{title:<34}", loss="starting ranks")

        def show(step: int, loss: float) -> None:
            completed = self._done + models * min(step, steps) + max(step - steps, 0)
            self._progress.update(task, completed=completed, loss=f"loss {loss:.3f}")

        with self._progress:
            yield show
        self._done += models * steps + resumed

    def _lines(self, steps: int, resumed: int) -> OnStep:
        def show(step: int, loss: float) -> None:
            here, of, what = (step, steps, "step") if step <= steps else (step - steps, resumed, "resumed, step")
            if here in (1, of) or here % 5 == 0:
                self._console.print(f"  {what} {here:>3} of {of}, loss {loss:.3f}", highlight=False)

        return show

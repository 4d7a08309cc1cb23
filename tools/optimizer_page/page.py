"""The page of what was seen of each optimizer, in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from optimizer_page.trials import Seen

_VERDICTS = ("equal", "coupled", "draws random numbers", "cannot tell")
_HEAD = """<!-- Written by tools/optimizer_page; a change belongs there. -->

# Optimizers

Each rank steps only the tensors that it owns. That gives what one process gives if the optimizer updates each tensor by
itself, as most do. An optimizer that **couples** tensors, such as Prodigy, which estimates one step size from all of
them, would train differently, without an error. So `ZeroRedundancyOptimizer` refuses those that it knows, by name, with
an error on every rank. With `coupled="allow"` it accepts them: all ranks still hold the same parameters, but on each of
them the optimizer sees only the tensors that the rank owns.

{func}`zeroshard.check_optimizer` tries out a class that is not on this page:

```python
from zeroshard import check_optimizer

check_optimizer(MyOptimizer, lr=1e-3).verdict  # "equal", "coupled", "draws random numbers" or "cannot tell"
```

It steps toy tensors together and separately, and compares them: evidence, not proof. The tables show the results for
these packages on a CPU, with the classes' own arguments unless others are named. Some classes are refused for what
their source does, though toy tensors do not show it.

| seen | what it means |
| --- | --- |
| equal | no tensor depended on the others in 50 steps with any of four kinds of gradients |
| coupled | one did, from the step named on |
| draws random numbers | equal if tensors get the same random numbers; sharded, they get other ones |
| cannot tell | it could not be tried this way; the remark says why |
"""


def page_of(seen: Sequence[Seen], versions: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        seen: by package.
        versions: of each package.
    """
    lines = [
        _HEAD,
        "| package | version | " + " | ".join(_VERDICTS) + " |",
        "| --- | --- |" + " ---: |" * len(_VERDICTS),
    ]
    for package, version in versions.items():
        counts = Counter(one.verdict for one in seen if one.trial.package == package)
        lines.append(f"| {package} | {version} | {' | '.join(str(counts[verdict]) for verdict in _VERDICTS)} |")
    for package, version in versions.items():
        lines += ["", f"## {package} {version}", "", "| class | seen | step | sharded | remark |"]
        lines += ["| --- | --- | ---: | --- | --- |"]
        lines += [_row(one) for one in seen if one.trial.package == package]
    return "\n".join(lines) + "\n"


def _row(seen: Seen) -> str:
    remark = seen.reason.replace("|", "\\|").replace("<", "\\<")
    cells = [f"`{seen.trial.title}`", seen.verdict, seen.first_step or "", seen.sharded, remark]
    return f"| {' | '.join(map(str, cells))} |"

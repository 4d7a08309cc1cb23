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
an error on every rank. It tries others for a few milliseconds, on a matrix and a vector, with large and small
gradients, and refuses one that steps them together otherwise than apart; one that cannot be tried is accepted, and
named in the log at level `INFO`. With `coupled="allow"` it accepts all: all ranks still hold the same parameters,
but on each of them the optimizer sees only the tensors that the rank owns.

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

The column *partition* names the one that fits. Each class was stepped with a tensor, and with two parts of it: it is
elementwise if both gave the same bits and its state can be cut too. Then pass `elementwise=True`, unless the class is
of `torch.optim`.

| partition | what it means |
| --- | --- |
| `"split"` | it is elementwise: `"split"` and `"level"` may cut its tensors |
| `"level"` | it needs whole tensors: `"level"` and `"whole"` do not cut them; `"level"` balances several classes |
| `"whole"` | it has state that belongs to no tensor, so it is not cut, and cannot be one of several classes |
| refused | it couples tensors |

Matrices are often given to one class and the rest to AdamW: a param group may [name its own class](muon.md), and
`cost` says what its updates take. `"level"` balances these, and cuts AdamW's tensors where state is missing:

```python
def soap(spec):
    return 4.0 * spec.numel * sum(spec.shape)  # products with a preconditioner for each dimension

optimizer = ZeroRedundancyOptimizer(
    [{"params": matrices, "optimizer_class": pytorch_optimizer.SOAP, "lr": 3e-3, "cost": soap},
     {"params": rest, "lr": 3e-4}],
    torch.optim.AdamW, partition="level")
```

Some classes step matrices by Muon, and by AdamW the groups that a flag names. Declare these elementwise, and `"level"`
cuts their tensors:

```python
optimizer = ZeroRedundancyOptimizer(
    [{"params": matrices, "use_muon": True, "cost": newton_schulz()},
     {"params": rest, "use_muon": False, "lr": 3e-4, "cost": adam(), "elementwise": True}],
    muon.SingleDeviceMuonWithAuxAdam, partition="level")
```

8-bit classes scale blocks of elements together, so their tensors stay whole. torchao keeps state in tensors of its own
kind: `consolidate_state_dict()` refuses to send these. heavyball keeps counts outside of the state of its tensors,
which checkpoints do not hold: a warning says so, and a run that resumes may differ. `AdaShift`, `AggMo`, `Conda` and
`ScalableShampoo` of pytorch_optimizer keep objects in their state that cannot be moved without pickle: the first step
raises.
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
        lines += ["", f"## {package} {version}", "", "| class | seen | step | partition | remark |"]
        lines += ["| --- | --- | ---: | --- | --- |"]
        lines += [_row(one) for one in seen if one.trial.package == package]
    return "\n".join(lines) + "\n"


def _row(seen: Seen) -> str:
    remark = seen.reason.replace("|", "\\|").replace("<", "\\<")
    partition = f'`"{seen.partition}"`' if seen.partition not in ("", "refused") else seen.partition
    cells = [f"`{seen.trial.title}`", seen.verdict, seen.first_step or "", partition, remark]
    return f"| {' | '.join(map(str, cells))} |"

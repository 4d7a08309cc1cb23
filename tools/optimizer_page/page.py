"""The page of what was seen of each optimizer, in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from optimizer_page.trials import Seen

_VERDICTS = ("equal", "coupled", "draws random numbers", "cannot tell")
_HEAD = """<!-- Written by tools/optimizer_page; a change belongs there. -->

# Optimizers

See whether your optimizer works with zeroshard, and with which partition.

Each rank steps only the tensors that it owns. That matches one process if the optimizer updates each tensor
independently, as most do. An optimizer that **couples** tensors, such as Prodigy, which estimates one step size from
all of them, would train differently without an error. So `ZeroRedundancyOptimizer` refuses it:

- A class that is known to couple tensors raises on every rank.
- A class that zeroshard does not know is stepped on two small tensors for a few milliseconds, and raises if it
  couples them. A class that cannot be tried is accepted, and logged at level `INFO`.
- With `coupled="allow"` every class but LBFGS is accepted. All ranks still hold the same parameters, but the
  optimizer sees only the tensors of its rank.

To try a class that is not on this page:

```python
from zeroshard import check_optimizer

check_optimizer(MyOptimizer, lr=1e-3).verdict  # "equal", "coupled", "draws random numbers" or "cannot tell"
```

The check steps small tensors together and separately, and compares them. This is evidence, not proof.

## How to read the tables

Classes were tried on a CPU, with their own arguments unless others are named. Some classes are refused because of
their source, though small tensors show no coupling.

| seen | what it means |
| --- | --- |
| equal | no tensor depended on another in 50 steps, with four kinds of gradients |
| coupled | a tensor depended on another, from the step named on |
| draws random numbers | equal if tensors get the same random numbers; sharded, they get other numbers |
| cannot tell | the class could not be tried; the remark says why |

| partition | what it means |
| --- | --- |
| `"split"` | the class is elementwise: `"split"` and `"level"` may cut its tensors |
| `"level"` | the class needs whole tensors, which `"level"` and `"whole"` keep |
| `"whole"` | the class has state that belongs to no tensor: it is not cut, and cannot be one of several classes |
| refused | the class couples tensors |

With `"split"` and `"level"`, pass `elementwise=True` for an elementwise class that is not of `torch.optim`.

## Several classes

A param group may [name its own class](muon.md), and `cost` gives the work of its updates. `"level"` balances that
work, and cuts AdamW's tensors to even out state:

```python
def soap(spec):
    return 4.0 * spec.numel * sum(spec.shape)  # products with a preconditioner for each dimension

optimizer = ZeroRedundancyOptimizer(
    [{"params": matrices, "optimizer_class": pytorch_optimizer.SOAP, "lr": 3e-3, "cost": soap},
     {"params": rest, "lr": 3e-4}],
    torch.optim.AdamW, partition="level")
```

Some classes step some groups by Muon and others by AdamW, as a flag says. Declare the AdamW groups elementwise:

```python
optimizer = ZeroRedundancyOptimizer(
    [{"params": matrices, "use_muon": True, "cost": newton_schulz()},
     {"params": rest, "use_muon": False, "lr": 3e-4, "cost": adam(), "elementwise": True}],
    muon.SingleDeviceMuonWithAuxAdam, partition="level")
```

## Limits of some packages

- 8-bit classes scale blocks of elements together, so their tensors stay whole.
- torchao keeps state in tensors of its own kind: `consolidate_state_dict()` refuses to send them.
- heavyball keeps counts outside of the state of tensors, which checkpoints do not hold. A warning says so, and a
  resumed run may differ.
- `AdaShift`, `AggMo`, `Conda` and `ScalableShampoo` of pytorch_optimizer keep objects in their state that cannot be
  moved without pickle: the first step raises.

## Packages
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

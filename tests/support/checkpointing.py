"""Training that torch.distributed.checkpoint saves and loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict


def matrices() -> nn.Sequential:
    """Only matrices, as Muon takes nothing else."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(*shape, bias=False) for shape in ((40, 64), (64, 300), (300, 7), (7, 1))])


def saved(
    model: nn.Module, optimizer: optim.Optimizer, path: Path, group: dist.ProcessGroup | None, *, flat: bool
) -> None:
    states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=path, process_group=group)


def loaded(
    model: nn.Module, optimizer: optim.Optimizer, path: Path, group: dist.ProcessGroup | None, *, flat: bool
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True))
    dcp.load(states, checkpoint_id=path, process_group=group)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
        options=options,
    )


def save_by(way: str, model: nn.Module, optimizer: Any, path: Path, group: dist.ProcessGroup | None) -> None:
    """Save by torch.distributed.checkpoint, "dcp", or in one file, "consolidated"."""
    if way == "dcp":
        saved(model, optimizer, path, group, flat=False)
        return
    optimizer.consolidate_state_dict()
    if dist.get_rank(group) == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    dist.barrier(group)


def load_by(way: str, model: nn.Module, optimizer: Any, path: Path, group: dist.ProcessGroup | None) -> None:
    """Load what `save_by` has saved."""
    if way == "dcp":
        loaded(model, optimizer, path, group, flat=False)
        return
    found = torch.load(path, weights_only=True)
    optimizer.load_state_dict(found["optimizer"])
    model.load_state_dict(found["model"])

"""Trains drawn loops on two ranks, each beside plain DDP with the plain optimizer, and compares them bit by bit.

At two ranks results are equal: a sum of two gradients has no order, and half of a sum is exact. With master weights the
plain optimizer steps float32 copies by hand.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from drawn_loops.classes import CLASSES, Special
from drawn_loops.expected import Outcome
from drawn_loops.loop import HEADS, LAYERS, SHARDED, STEM, STEPPING, Loop
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from zeroshard import ZeroRedundancyOptimizer, shard_gradients
from zeroshard.plan import layout
from zeroshard_comm import transport
from zeroshard_integrations import ddp as hooks
from zeroshard_testing import RanksFailure, run_on_ranks

_SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"lr": 0.1} for name in CLASSES},
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "weight_decay": 0.01},
    "ExponentialLR": {"gamma": 0.7},
    "StepLR": {"step_size": 2},
    "LambdaLR": {"lr_lambda": lambda epoch: 1 / (1 + epoch)},
    "CosineAnnealingLR": {"T_max": 4},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 40},
    "ReduceLROnPlateau": {"patience": 0},
}


def run(loop: Loop) -> Outcome:
    """Train a loop on two ranks, and return the outcome."""
    # A loop that is refused leaves messages behind.
    checks = "no:deadlock no:collectives no:messages"
    try:
        found = [Outcome(*each) for each in run_on_ranks(train, 2, loop, timeout=120, checks=checks)]
    except RanksFailure as failure:
        return Outcome("other", text=f"hung or ended: {failure.verdict.summary}")
    if len({each.act for each in found}) > 1:
        return Outcome("other", text="; ".join(map(str, found)))
    return next((each for each in found if each.kind == "differs"), found[0])


def train(loop: Loop) -> tuple[str, str, str]:
    """Train a loop on this rank; return kind, act and text of the outcome."""
    group, found = dist.new_group(timeout=timedelta(seconds=30)), ""
    # So that small tensors are cut, and a thread adds up small gradients, as in large models.
    cut, add_up = patch.multiple(layout, SMALLEST_PART=32), patch.multiple(transport, WORTH_OVERLAPPING=0)
    with warnings.catch_warnings(), cut, add_up:
        warnings.simplefilter("ignore")
        plain, ours = (_Training(loop, group, is_sharded=is_sharded) for is_sharded in (False, True))
        for index, act in enumerate(["build", *sum(loop.iterations, ()), "end"], -1):
            error = ""
            try:
                ours.do(act)
            except Exception as raised:  # noqa: BLE001 - whatever it is, ranks compare it
                error = re.sub(r"^rank \d+: ", "", str(raised).partition("\n")[0]) or repr(raised)
            if act.startswith(("delete", "pop", "assign")):
                # Other acts communicate, so no rank continues alone.
                errors = [""] * 2
                dist.all_gather_object(errors, error)
                error = max(errors)
            if error:
                return "refused", f"{index} {act}", error
            plain.do(act)
            if not found and act in ("step", "closure", "end"):
                one, other = (training.values(with_state=act == "end") for training in (ours, plain))
                differing = [name for name in {**one, **other} if one.get(name) != other.get(name)]
                found = "".join(f"{name} after {index} {act}" for name in differing[:1])
    return "differs" if found else "equal", "", found


class _Model(nn.ModuleDict):
    """Layers by name; the forward does not use parameters that are added later."""

    def forward(self, inputs: torch.Tensor, heads: list[str]) -> torch.Tensor:
        layers: Any = self
        for name in STEM:
            inputs = layers[name](inputs.to(layers[name].weight.dtype)).tanh()
        return torch.stack([layers[head](inputs.to(layers[head].weight.dtype)) for head in heads]).sum(0)


class _Training:
    """One of two trainings of a loop: sharded, or plain."""

    def __init__(self, loop: Loop, group: dist.ProcessGroup, *, is_sharded: bool) -> None:
        self.loop, self.group, self.is_sharded, self.number = loop, group, is_sharded, 0
        # The tensor that the optimizer steps for each parameter: itself, or a copy in float32.
        self.stepped: dict[torch.Tensor, torch.Tensor] = {}
        self.optimizer: Any = None
        self.has_copies = "master_weights" in loop.flags and not is_sharded

    def build(self) -> None:
        loop, group, is_sharded, flags = self.loop, self.group, self.is_sharded, self.loop.flags
        self.output: Any = None
        # Gradients that backward has reduced, and the reduced gradients to which the next mean is added.
        self.reduced: dict[torch.Tensor, torch.Tensor] = {}
        self.apart: dict[torch.Tensor, torch.Tensor] = {}
        torch.manual_seed(loop.seed)
        sizes = (12, 24), (24, 20), (20, 6), (20, 6)
        # Muon accepts only matrices.
        layers = [nn.Linear(*size, bias=loop.optimizer != "Muon", dtype=torch.float64) for size in sizes]
        self.model: Any = _Model({**dict(zip(LAYERS, layers, strict=True)), "added": nn.ParameterList()})
        if "master_weights" in flags:
            # One layer has no masters.
            self.model.bfloat16()[STEM[1]].float()
        if not {"equal", "experts"}.isdisjoint(flags):
            self.append(1.0 + dist.get_rank() * ("experts" in flags))
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, ["added.0"])
        param: Any
        for number, param in enumerate(self.model.parameters() if loop.family == "attributes" else ()):
            param.lr_mul = 0.5 * (1 + number % 3)
            if loop.optimizer == "ByType":
                param.__class__ = Special
        given: dict[str, Any] = {flag: flag in flags for flag in ("gradient_as_bucket_view", "find_unused_parameters")}
        self.ddp: Any = self.model
        if not is_sharded or loop.mode != SHARDED:
            self.ddp = DistributedDataParallel(self.model, process_group=group, bucket_cap_mb=0.002, **given)
        for layer in loop.frozen:
            self.model[layer].requires_grad_(False)
        make: Any = CLASSES.get(loop.optimizer) or getattr(torch.optim, loop.optimizer)
        params = self.new_params()
        # The script keeps these.
        self.groups: list[dict[str, Any]] = [{"params": params}]
        if "a group each" in flags:
            self.groups = [{"params": [param]} for param in params]
        elif "two groups" in flags:
            self.groups = [{"params": params[:3], "lr": 0.02}, {"params": params[3:], "weight_decay": 0.1}]
        if is_sharded:
            given = {flag: flag in flags for flag in ("parameters_as_bucket_view", "master_weights")}
            given |= {"overlap_with_ddp": loop.mode in STEPPING, "partition": loop.partition}
            make = partial(ZeroRedundancyOptimizer, optimizer_class=make, process_group=group, **given)
        # Ids are arguments of the class: each training has its own.
        ids = {"ids": frozenset(map(id, params[::2]))} if loop.optimizer == "ById" else {}
        self.optimizer = make(self.groups, **_SETTINGS.get(loop.optimizer, {"lr": 0.01}), **ids)
        self.no_sync: Any = getattr(self.ddp, "no_sync", None)
        if is_sharded and loop.mode == SHARDED:
            self.no_sync = shard_gradients(self.model, self.optimizer, bucket_mb=0.002).no_sync
        elif is_sharded and loop.mode == "reduce_to_owner":
            hooks.register_reduce_to_owner(self.ddp, self.optimizer)
        elif is_sharded and loop.mode in STEPPING:
            self.ddp.register_comm_hook(None, getattr(hooks, loop.mode)(allreduce_hook, self.ddp, self.optimizer))
        name = loop.scheduler
        self.scheduler: Any = getattr(lr_scheduler, name)(self.optimizer, **_SETTINGS[name]) if name else None

    def new_params(self) -> list[torch.Tensor]:
        """Return the tensors that the optimizer steps for new parameters of the model."""
        new = [param for param in self.model.parameters() if param not in self.stepped]
        for param in new:
            is_copied = self.has_copies and param.dtype == torch.bfloat16
            self.stepped[param] = type(param)(param.detach().float()) if is_copied else param
            vars(self.stepped[param]).update(vars(param))
        return [self.stepped[param] for param in new]

    def append(self, value: float) -> nn.Parameter:
        """Add a parameter that DDP ignores to the model."""
        added = nn.Parameter(torch.full_like(self.model[HEADS[0]].weight, value))
        self.model["added"].append(added)
        return added

    def resume(self) -> None:
        """Build everything again, with the values of parameters and of the consolidated state."""
        self.do("end")
        saved = [self.optimizer.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(saved)
        old, scheduler, self.stepped = self.stepped, self.scheduler, {}
        self.build()
        with torch.no_grad():
            for new, value in zip(sum(self.stepped.items(), ()), sum(old.items(), ()), strict=True):
                new.copy_(value)
        self.optimizer.load_state_dict(saved[0])
        if scheduler is not None:
            self.scheduler.load_state_dict(scheduler.state_dict())

    def do(self, act: str) -> None:
        word, _, argument = act.partition(" ")
        optimizer, params = self.optimizer, list(self.stepped)
        param: Any = params[int(argument) % len(params)] if argument.isdigit() else None
        match word:
            case "build" | "resume" | "forward" | "backward" | "step":
                getattr(self, word)()
            case "local":
                with self.no_sync():
                    self.backward(reduces=False)
            case "zero":
                self.zero(argument)
            case "schedule":
                self.scheduler.step(*[1.0] * (self.loop.scheduler == "ReduceLROnPlateau"))
            case "freeze" | "unfreeze":
                self.model[argument].requires_grad_(word == "unfreeze")
            case "lr":
                optimizer.param_groups[0]["lr"] *= 0.5
            case "decay":
                optimizer.param_groups[-1]["weight_decay"] += 0.01
            case "add":
                vars(self.append(1.0))["_ddp_ignored"] = True
                optimizer.add_param_group({"params": self.new_params(), "weight_decay": 0.02})
            case "delete" if self.stepped[param] in optimizer.state:
                del optimizer.state[self.stepped[param]]
            case "pop":
                optimizer.state.pop(self.stepped[param], None)
            case "assign":
                optimizer.state[self.stepped[param]] = {}
            case "clear":
                optimizer.state.clear()
            case "scale":
                # Of a sharded optimizer, what this rank owns.
                for entries in getattr(optimizer, "optim", optimizer).state.values():
                    for value in filter(torch.is_tensor, entries.values()):
                        value.mul_(0.5 if value.dim() else 1)
            case "rebind":
                param.data = param.detach() * 0.5
            case "write":
                with torch.no_grad():
                    param.mul_(0.5)
            case "mul":
                param.lr_mul *= 2
                vars(self.stepped[param]).update(vars(param))
            case "grad" if param.grad is not None:
                param.grad.data = torch.full_like(param, 0.01)
            case "closure":
                self.step(self.closure)
            case "data":
                param.data.mul_(0.5)
            case "clamp":
                param.data.clamp_(-0.05, 0.05)
            case "rate":
                self.groups[int(argument) % len(self.groups)]["lr"] = 0.1 / (2 + self.number)
            case "end" if isinstance(optimizer, ZeroRedundancyOptimizer):
                optimizer.consolidate_state_dict()

    def zero(self, way: str) -> None:
        self.add_reduced()
        self.reduced.clear()
        if way in ("none", "zeros", "model"):
            # Copies have no gradients between steps.
            zeroing = self.ddp if self.has_copies or way == "model" else self.optimizer
            zeroing.zero_grad(set_to_none=way != "zeros")
            return
        for layer in (*STEM, *self.loop.heads_of(self.number, 0, 1)) if way == "used" else self.model:
            for param in self.model[layer].parameters():
                if way != "trainable" or param.requires_grad:
                    param.grad = None

    def forward(self) -> None:
        # A forward may make DDP replace the views of its buckets, and with them the gradients.
        self.keep_apart()
        rank = dist.get_rank()
        inputs = torch.randn(4, 12, generator=torch.Generator().manual_seed(100 * self.number + rank))
        self.output = self.ddp(inputs, self.loop.heads_of(self.number, rank))

    def backward(self, *, reduces: bool = True) -> torch.Tensor:
        for added in self.model["added"]:
            # DDP does not reduce its gradient, which is equal on all ranks.
            added.grad = torch.full_like(added, 0.1 * self.number)
        if self.output is None:
            self.forward()
        loss: torch.Tensor = self.output.square().mean()
        self.output, self.number = None, self.number + 1
        loss.backward()
        if reduces:
            self.add_reduced()
        return loss.detach()

    def keep_apart(self) -> None:
        """Set reduced gradients aside: sharding adds the next mean to them, but DDP would average the sum again."""
        for param, grad in self.reduced.items():
            if param.grad is grad:
                self.apart[param], param.grad = grad.clone(), None
        self.reduced.clear()

    def add_reduced(self) -> None:
        """Add the gradients that were set aside."""
        if self.is_sharded or self.loop.mode != SHARDED:
            return
        for param, grad in self.apart.items():
            param.grad = grad if param.grad is None else grad.add_(param.grad)
        self.apart.clear()
        self.reduced = {param: param.grad for param in self.model.parameters() if param.grad is not None}

    def step(self, *closure: Callable[[], Any]) -> None:
        self.exchange(to_copies=True)
        with torch.no_grad():
            self.optimizer.step(*closure)
        self.exchange(to_copies=False)

    def closure(self) -> torch.Tensor:
        self.exchange(to_copies=False)
        self.zero("none")
        loss = self.backward()
        self.exchange(to_copies=True)
        return loss

    @torch.no_grad()
    def exchange(self, *, to_copies: bool) -> None:
        """Copy the parameters to the copies that are stepped, or the copies to the parameters."""
        for param, copied in self.stepped.items():
            if to_copies and copied is not param:
                # Where a parameter is not the rounded copy, it was written, and replaces the copy.
                copied.copy_(torch.where(copied.to(param.dtype) == param, copied, param))
                copied.grad = None if param.grad is None else param.grad.float()
            elif copied is not param:
                param.copy_(copied)

    def values(self, *, with_state: bool) -> dict[str, Any]:
        """Return all parameters by name, and, where the state is gathered, its entries but for master weights."""
        found: dict[str, Any] = {f"parameter {number}": param for number, param in enumerate(self.stepped)}
        if with_state and dist.get_rank() == 0:
            state_dict = self.optimizer.state_dict()
            found["param_groups"] = state_dict["param_groups"]
            for index, entries in state_dict["state"].items():
                found |= {f"{key} of {index}": value for key, value in entries.items() if key != "master_param"}
        return {name: repr(value.tolist()) if torch.is_tensor(value) else value for name, value in found.items()}

"""What a rank that still has data hands to the owners that have run out: hyperparameters, and gradients.

A joined rank's schedulers no longer run, it has not seen whether gradients were clipped or set to None, and what
DistributedDataParallel reduces on it is not visible from outside. So one running rank sends each joined owner what it
is to step its shards with. Everything travels over the control channel and CPU memory.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from zeroshard_comm import Control, Message, RankGroup, receive, send
from zeroshard_core import Plan, Shard, storage_view

from zeroshard._torch_private import sparse_indices, sparse_values
from zeroshard.local_optimizer import NOT_SYNCED
from zeroshard.overlap.placeholder import GradPlaceholder
from zeroshard.param_groups import ParamGroup

TAG_LENGTH = 0x5A530050
TAG_TEXT = 0x5A530051
TAG_VALUES = 0x5A530052

_OPERATION = "a step inside Join"


@dataclass(frozen=True)
class Handover:
    """What a joined rank was given.

    Attributes:
        groups: the hyperparameters, one dict per param group.
        agreed: those of them that ranks compare, as their users have set them.
        absent: tensors that had no gradient.
        zeroed: tensors whose gradients lie at their owners, and were set to zero.
        settings: further numbers, such as the arguments of a clipping.
        arguments: keyword arguments of the step.
        gradients: by tensor, each in the shape of what this rank owns of it.
    """

    groups: Sequence[Mapping[str, Any]]
    agreed: Mapping[str, str]
    absent: frozenset[int]
    zeroed: frozenset[int]
    settings: Sequence[float]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    gradients: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def apply(self, groups: Sequence[ParamGroup]) -> None:
        """Write the hyperparameters to this rank's public groups."""
        for given, group in zip(self.groups, groups, strict=True):
            for key, value in given.items():
                present = group.get(key)
                if isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor):
                    present.copy_(value)
                elif not isinstance(present, torch.Tensor):
                    group[key] = value


def unwritable(groups: Sequence[ParamGroup], arguments: Mapping[str, Any]) -> TypeError | None:
    """Return an error that names what cannot be handed over, if something cannot.

    Args:
        groups: the public param groups.
        arguments: keyword arguments of the step.
    """
    named = [(f"the hyperparameter {k!r}", v) for group in groups for k, v in group.items() if k not in NOT_SYNCED]
    named += [(f"the argument {name!r} of step()", value) for name, value in arguments.items()]
    for name, value in named:
        try:
            _written(value)
        except TypeError:
            return TypeError(
                f"a rank has run out of data in Join, and cannot be told {name}, of type {type(value).__name__}: use "
                f"numbers, strings, tensors, or lists, tuples and dicts of them"
            )
    return None


def give(
    control: Control,
    joined: Sequence[int],
    groups: Sequence[ParamGroup],
    agreed: Mapping[str, str],
    params: Sequence[torch.Tensor],
    plan: Plan,
    settings: Sequence[float] = (),
    arguments: Mapping[str, Any] | None = None,
    *,
    gradients: bool,
) -> None:
    """Send the joined ranks what they need.

    Args:
        control: the channel.
        joined: the ranks.
        groups: the public param groups.
        agreed: the hyperparameters that ranks compare.
        params: all parameters, by tensor index.
        plan: who owns what.
        settings: further numbers.
        arguments: keyword arguments of the step.
        gradients: whether to send gradients too, as they are in ``.grad``.

    Raises:
        PeerLostError: if a rank is gone.
    """
    sender = _Sender(control)
    absent = [index for index, param in enumerate(params) if param.grad is None]
    text: dict[str, Any] = {
        "groups": [{k: _written(v) for k, v in group.items() if k not in NOT_SYNCED} for group in groups],
        "agreed": dict(agreed),
        "absent": absent,
        "zeroed": [i for i, param in enumerate(params) if type(param.grad) is GradPlaceholder and param.grad.is_zero()],
        "settings": [_number(setting) for setting in settings],
        "arguments": {name: _written(value) for name, value in (arguments or {}).items()},
        "sparse": {},
    }
    missing = frozenset(absent)
    for peer in joined:
        shards = [shard for shard in plan.of_rank(peer) if gradients and shard.tensor not in missing]
        found = {shard: params[shard.tensor].grad for shard in shards}
        sparse = _sparse({shard.tensor: grad for shard, grad in found.items() if grad is not None})
        sender.text(peer, json.dumps({**text, "sparse": sparse}).encode())
        for shard, grad in found.items():
            assert grad is not None
            for part in _parts(shard, params[shard.tensor], grad):
                sender.values(peer, part)
    sender.finish()


def take(
    control: Control,
    giver: int,
    params: Sequence[torch.Tensor],
    plan: Plan,
    *,
    gradients: bool,
) -> Handover:
    """Receive what :func:`give` sends; the arguments are as there.

    Raises:
        PeerLostError: if the rank that gives is gone.
    """
    receiver = _Receiver(control, giver)
    text = json.loads(receiver.text())
    absent = frozenset(text["absent"])
    found: dict[int, torch.Tensor] = {}
    for shard in plan.of_rank(control.ranks.rank):
        if not gradients or shard.tensor in absent:
            continue
        found[shard.tensor] = receiver.gradient(shard, params[shard.tensor], text["sparse"].get(str(shard.tensor)))
    groups = [{key: _read(value) for key, value in group.items()} for group in text["groups"]]
    arguments = {name: _read(value) for name, value in text["arguments"].items()}
    return Handover(groups, text["agreed"], absent, frozenset(text["zeroed"]), text["settings"], arguments, found)


def give_gradients(
    control: Control,
    joined: Sequence[int],
    params: Sequence[torch.Tensor],
    none: Collection[int],
    zero: Collection[int],
    *,
    values: bool,
) -> None:
    """Send the joined ranks what is in ``.grad``, whole.

    Args:
        control: the channel.
        joined: the ranks.
        params: the parameters, in the same order on all ranks.
        none: the indices of those whose gradients are None.
        zero: of those whose gradients are zero.
        values: whether to send the values of the others.

    Raises:
        PeerLostError: if a rank is gone.
    """
    sender = _Sender(control)
    grads = [param.grad for param in params]
    held = {index: grad for index, grad in enumerate(grads) if grad is not None and index not in zero and values}
    text = json.dumps({"none": sorted(none), "zero": sorted(zero), "sparse": _sparse(held)}).encode()
    for peer in joined:
        sender.text(peer, text)
    for index, grad in held.items():
        for part in _parts(_whole(index, params[index]), params[index], grad):
            for peer in joined:
                sender.values(peer, part)
    sender.finish()


def take_gradients(control: Control, giver: int, params: Sequence[torch.Tensor], *, values: bool) -> None:
    """Receive what :func:`give_gradients` sends, and put it into ``.grad``.

    Raises:
        PeerLostError: if the rank that gives is gone.
    """
    receiver = _Receiver(control, giver)
    text = json.loads(receiver.text())
    none, zero = frozenset(text["none"]), frozenset(text["zero"])
    for index, param in enumerate(params):
        if index in none:
            param.grad = None
        elif index in zero:
            if param.grad is not None:
                param.grad.zero_()
            elif values:
                param.grad = torch.zeros_like(param, requires_grad=False)
        elif values:
            param.grad = receiver.gradient(_whole(index, param), param, text["sparse"].get(str(index)))


def give_parameters(control: Control, peers: Sequence[int], params: Sequence[torch.Tensor]) -> None:
    """Send the values of parameters, whole.

    Args:
        control: the channel.
        peers: who needs them.
        params: dense.

    Raises:
        PeerLostError: if a rank is gone.
    """
    sender = _Sender(control)
    for index, param in enumerate(params):
        for part in _parts(_whole(index, param), param, param):
            for peer in peers:
                sender.values(peer, part)
    sender.finish()


def take_parameters(control: Control, giver: int, params: Sequence[torch.Tensor]) -> None:
    """Receive what :func:`give_parameters` sends, and write it to the parameters.

    Raises:
        PeerLostError: if the rank that gives is gone.
    """
    receiver = _Receiver(control, giver)
    with torch.no_grad():
        for index, param in enumerate(params):
            param.copy_(receiver.gradient(_whole(index, param), param, None))


def is_nonzero(grads: Sequence[torch.Tensor]) -> bool:
    """Whether any element of any of these gradients is other than zero, or may be.

    Args:
        grads: dense or sparse, of any shapes; those that stand for gradients of owners too.
    """
    for grad in grads:
        if isinstance(grad, GradPlaceholder):
            found = not grad.is_zero()
        else:
            found = bool(((sparse_values(grad) if grad.layout is torch.sparse_coo else grad) != 0).any())
        if found:
            return True
    return False


def _whole(index: int, param: torch.Tensor) -> Shard:
    return Shard(tensor=index, rank=0, dim=0, start=0, stop=1, row_numel=param.numel())


def _sparse(grads: Mapping[int, torch.Tensor]) -> dict[str, list[Any]]:
    return {
        str(index): [len(values := sparse_values(grad)), grad.sparse_dim(), list(values.shape[1:]), grad.is_coalesced()]
        for index, grad in grads.items()
        if grad.layout is torch.sparse_coo
    }


def _parts(shard: Shard, param: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """The values that travel, each 1-D and contiguous on the CPU: of a whole tensor in the order of its elements."""
    if type(grad) is GradPlaceholder:
        raise RuntimeError(f"tensor {shard.tensor} has its gradient at its owner; it cannot be handed over")
    if grad.layout is torch.sparse_coo:
        return [sparse_indices(grad).contiguous().view(-1).cpu(), sparse_values(grad).contiguous().view(-1).cpu()]
    grad = grad.detach().to(param.dtype)
    if shard.numel == param.numel():
        return [grad.contiguous().view(-1).cpu()]
    if grad.stride() != param.stride():
        grad = torch.empty_strided(grad.shape, param.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)
    return [storage_view(grad)[shard.flat].cpu()]


def _number(setting: object) -> float:
    """A setting as a number; what is none is refused by who uses it."""
    try:
        return float(setting)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def _written(value: Any) -> object:  # noqa: ANN401 - a hyperparameter
    """A hyperparameter as JSON; a TypeError if it cannot be written."""
    if isinstance(value, (int, float, str, type(None))):
        return value
    if isinstance(value, (tuple, list)):
        return {"tuple" if isinstance(value, tuple) else "list": [_written(part) for part in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_written(key), _written(part)] for key, part in value.items()]}
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_complex():
        return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch."), "shape": [*value.shape]}
    if getattr(value, "size", None) == 1 and hasattr(value, "item"):
        # Of numpy.
        return _written(value.item())
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(type(value).__name__)


def _read(value: Any) -> Any:  # noqa: ANN401 - a hyperparameter
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        made = torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]), device="cpu")
        return made.view(value["shape"])
    kind, parts = next(iter(value.items()))
    if kind == "dict":
        return {_read(key): _read(part) for key, part in parts}
    return (tuple if kind == "tuple" else list)(_read(part) for part in parts)


def _way_of(control: Control) -> RankGroup:
    """The group for messages of CPU tensors."""
    return control.channel or control.ranks


class _Sender:
    """Sends to several peers at once; what is sent lives until :meth:`finish`."""

    def __init__(self, control: Control) -> None:
        self._ranks, self._traffic = _way_of(control), control.traffic
        self._under_way: list[tuple[Message, torch.Tensor]] = []

    def text(self, peer: int, text: bytes) -> None:
        self._send(peer, torch.tensor([len(text)], device="cpu"), TAG_LENGTH)
        self._send(peer, torch.frombuffer(bytearray(text), dtype=torch.uint8), TAG_TEXT)

    def values(self, peer: int, values: torch.Tensor) -> None:
        if values.numel():
            self._send(peer, values.view(torch.uint8), TAG_VALUES)

    def finish(self) -> None:
        for message, _ in self._under_way:
            message.wait(_OPERATION)
        self._under_way = []

    def _send(self, peer: int, payload: torch.Tensor, tag: int) -> None:
        self._under_way.append((send(self._ranks, peer, payload, tag, _OPERATION), payload))
        self._traffic.add("control", sent=payload.nbytes, calls=1)


class _Receiver:
    """Receives from one peer."""

    def __init__(self, control: Control, giver: int) -> None:
        self._ranks, self._traffic, self._giver = _way_of(control), control.traffic, giver

    def text(self) -> bytes:
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._receive(length, TAG_LENGTH)
        text = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        self._receive(text, TAG_TEXT)
        return bytes(text.tolist())

    def values(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        values = torch.empty(count, dtype=dtype, device="cpu")
        if count:
            self._receive(values.view(torch.uint8), TAG_VALUES)
        return values

    def gradient(self, shard: Shard, param: torch.Tensor, sparse: Sequence[Any] | None) -> torch.Tensor:
        """In the shape of the shard; it was sent in storage order where that is a part, else in order of elements."""
        if sparse is not None:
            nnz, sparse_dim, inner, coalesced = sparse
            indices = self.values(sparse_dim * nnz, torch.int64).view(sparse_dim, nnz)
            count = nnz * int(torch.Size(inner).numel())
            values = self.values(count, param.dtype).view(nnz, *inner)
            made = torch.sparse_coo_tensor(indices, values, param.shape, is_coalesced=coalesced, check_invariants=False)
            return made.to(param.device)
        values = self.values(shard.numel, param.dtype)
        if shard.numel == param.numel():
            return torch.empty_like(param, requires_grad=False).copy_(values.view(param.shape))
        part = torch.empty_like(shard.box(param), requires_grad=False)
        storage_view(part).copy_(values)
        return part

    def _receive(self, target: torch.Tensor, tag: int) -> None:
        receive(self._ranks, self._giver, target, tag, _OPERATION).wait(_OPERATION)
        self._traffic.add("control", received=target.nbytes, calls=1)

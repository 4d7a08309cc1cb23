"""Tests whether an optimizer updates each tensor by itself, as sharding requires."""

from __future__ import annotations

import logging
import math
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import thread_time
from types import FunctionType, NoneType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import optim

from zeroshard._torch_private import DispatchMode
from zeroshard.plan.eligibility import OptimizerFactory, class_of, coupling_error, is_known, name_of
from zeroshard.plan.group_classes import GroupClass
from zeroshard.plan.groups import ParamGroup, hyperparameters_of

_logger = logging.getLogger(__name__)

_STEPS = 50
_LIKES = [torch.empty(shape, dtype=torch.float32, device="meta") for shape in ((6, 4), (5, 3), (4, 7))]
_GRADIENTS = [(spread, scale) for spread in (1.0, 0.1) for scale in (1.0, 1000.0)]
"""Kinds of gradients: with a spread of 0.1 they point mostly in one direction, with 1.0 they are random."""

_SMALL = [torch.empty(shape, dtype=torch.float64, device="meta") for shape in ((6, 4), (5,))]
_EXTREMES = [(1.0, 1e3), (1.0, 1e-3)]
_TRIED: WeakKeyDictionary[type, dict[str, OptimizerCheck]] = WeakKeyDictionary()
"""The results of this process so far, by class and arguments."""


@dataclass(frozen=True)
class OptimizerCheck:
    """Says whether an optimizer couples tensors; :func:`check_optimizer` returns it.

    Attributes:
        verdict: ``"equal"``: no tensor depended on the others. ``"coupled"``: one did. ``"draws random numbers"``:
            tensors are independent given the same random numbers; sharded runs are valid but not bitwise equal to
            a run of one process. ``"cannot tell"``: see ``reason``.
        first_step: the first step, from 1, after which tensors differed; None if not coupled.
        reason: why there is no verdict, or a remark, or empty.
    """

    verdict: Literal["equal", "coupled", "draws random numbers", "cannot tell"]
    first_step: int | None = None
    reason: str = ""


def check_optimizer(
    cls: OptimizerFactory,
    params: Iterable[torch.Tensor] | None = None,
    **defaults: Any,  # noqa: ANN401 - arguments of any optimizer class
) -> OptimizerCheck:
    """Step toy tensors with one optimizer for all, and with one for each, and compare the results.

    All take 50 steps with random gradients and 50 steps with gradients that point mostly in one direction, both at two
    scales, on the CPU and without compiling anything. This is evidence, not proof: a class may couple tensors later, or
    for other shapes or gradients. It takes seconds, for some classes a minute; constructors try only a few steps.

    Args:
        cls: an optimizer class, or a function that builds an optimizer from a list of parameters.
        params: two or more small tensors, whose shapes and dtypes the toy tensors get; float32 matrices if None.
        **defaults: arguments of ``cls``.

    Returns:
        The verdict. An error of the class becomes the reason of ``"cannot tell"``. Random generators are unchanged.

    Raises:
        ValueError: if there are fewer than two tensors.

    Example:
        >>> import torch
        >>> from zeroshard import check_optimizer
        >>> check_optimizer(torch.optim.AdamW, lr=0.01)
        OptimizerCheck(verdict='equal', first_step=None, reason='')
        >>> check_optimizer(torch.optim.LBFGS).verdict
        'coupled'
    """
    likes = _LIKES if params is None else list(params)
    if len(likes) < 2:
        raise ValueError(f"`params` must hold two tensors or more, which may be coupled, but it has {len(likes)}")
    return _compare(partial(cls, **defaults), likes, _GRADIENTS, _STEPS)


def refuse_coupling(built: optim.Optimizer, chosen: GroupClass, groups: Iterable[ParamGroup]) -> None:
    """Raise a ValueError if a class that is not a known one couples two small tensors.

    A class that cannot be tried is accepted. A process tries each class once with the same arguments, for at most
    100 ms of this thread's time.
    """
    if is_known(type(built)):
        return
    factory, arguments, name = class_of(chosen.factory), chosen.arguments, name_of(type(built))
    tried = _TRIED.setdefault(factory, {}) if isinstance(factory, type) else {}
    kinds: dict[str, ParamGroup] = {}
    for settings in map(hyperparameters_of, groups):
        # Groups that differ only in numbers, such as the learning rates of layers, are tried once.
        kind = {key: bool(value) if isinstance(value, float) else value for key, value in settings.items()}
        kinds.setdefault(repr(kind), settings)
    for settings in kinds.values():
        key = f"{arguments} {settings}"
        if key not in tried:
            tried[key] = found = _try_class(factory, arguments, settings)
            if found.verdict == "cannot tell":
                _logger.info("%s may couple tensors: it could not be tried, because %s", name, found.reason)
        if tried[key].verdict == "coupled":
            raise coupling_error(name, "steps two tensors together differently than each one separately")


def _try_class(factory: OptimizerFactory, arguments: Mapping[str, Any], settings: ParamGroup) -> OptimizerCheck:
    if not _is_plain([*arguments.values(), *settings.values()]):
        return OptimizerCheck("cannot tell", None, "it has arguments that a trial could change")
    chosen = GroupClass(factory, arguments)
    return _compare(
        lambda params: chosen.build([{**settings, "params": params}]), _SMALL, _EXTREMES, 5, thread_time() + 0.1
    )


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (int, float, str, NoneType, torch.dtype, type, FunctionType))


def _compare(
    build: OptimizerFactory,
    likes: Sequence[torch.Tensor],
    gradients: Sequence[tuple[float, float]],
    steps: int,
    until: float = math.inf,
) -> OptimizerCheck:
    """Return the verdict on a class without a closure, or with one if it raises. ``until`` is a time of this thread."""
    problem, python, numpy = "", random.getstate(), sys.modules.get("numpy.random")
    numpys = numpy.get_state() if numpy is not None else None
    for with_closure in (False, True):
        attempt = partial(_try, build, likes, steps=steps, until=until, with_closure=with_closure)
        try:
            # Compile nothing.
            with torch.random.fork_rng([]), torch.compiler.set_stance("force_eager"), torch.device("cpu"):
                trials = [attempt(*kind) for kind in gradients]
                differed = [kind for kind, trial in zip(gradients, trials, strict=True) if trial.differed]
                if any(attempt(*kind, repeats=True).differed for kind in differed):
                    return OptimizerCheck("cannot tell", None, "two runs of it with the same seed differ")
                return _judged(trials, steps)
        except Exception as error:  # noqa: BLE001 - an unsupported class may raise any exception
            # The first error says what the class needs.
            problem = problem or f"{type(error).__name__}: {error}".partition("\n")[0]
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.set_state(numpys)
    return OptimizerCheck("cannot tell", None, problem)


@dataclass(frozen=True)
class _Trial:
    """The result for gradients of one kind: the step after which tensors differed, and whether any did by rounding."""

    differed: int | None
    rounded: bool
    moved: bool
    drew: bool


def _judged(trials: Sequence[_Trial], steps: int) -> OptimizerCheck:
    drew = any(trial.drew for trial in trials)
    differed = [trial.differed for trial in trials if trial.differed is not None]
    if differed:
        return OptimizerCheck("coupled", min(differed), "it draws random numbers too" if drew else "")
    if not any(trial.moved for trial in trials):
        return OptimizerCheck("cannot tell", None, f"in {steps} steps no tensor took a value that is new and finite")
    rounded = any(trial.rounded for trial in trials)
    return OptimizerCheck("draws random numbers" if drew else "equal", None, "but for rounding" if rounded else "")


def _try(
    build: OptimizerFactory,
    likes: Sequence[torch.Tensor],
    spread: float,
    scale: float,
    *,
    steps: int,
    until: float,
    with_closure: bool,
    repeats: bool = False,
) -> _Trial:
    """Step all tensors together and each separately (all again if ``repeats``), until they differ or are not finite."""
    draws = _Draws()  # type: ignore[no-untyped-call]
    draws.until = until
    rounded = moved = False
    start = [values.to(like.dtype) for values, like in zip(_random(likes, 0), likes, strict=True)]
    together, others = ([torch.nn.Parameter(tensor.clone()) for tensor in start] for _ in range(2))
    apart = [dict(enumerate(others))] if repeats else [{place: param} for place, param in enumerate(others)]
    parts = [dict(enumerate(together)), *apart]
    optimizers = []
    for part in parts:
        with draws.of(0):
            optimizers.append(build(list(part.values())))
            # A schedule-free optimizer steps only after train().
            getattr(optimizers[-1], "train", bool)()
    for step in range(1, steps + 1):
        pairs = zip(_random(likes, 1), _random(likes, step + 1), strict=True)
        wanted = [(1 - spread) * direction + spread * noise for direction, noise in pairs]
        before = [param.detach().clone() for param in others]
        for optimizer, part in zip(optimizers, parts, strict=True):
            closure: Callable[[], Any] = partial(_evaluate, part, before, wanted, scale)
            closure()
            with draws.of(None if repeats else step):
                _step(optimizer, *([closure] if with_closure else []))
        for one, other, first in zip(together, others, start, strict=True):
            if not torch.equal(*(param.detach().reshape(-1).view(torch.uint8) for param in (one, other))):
                rounded = True
                last_bits = (step + 1) * torch.finfo(one.dtype).eps * one.abs().max()
                if not (one - other).abs().max() <= 1e-5 * (one - first).abs().max() + last_bits:
                    return _Trial(step, rounded, True, draws.drew)
        if not all(param.isfinite().all() for param in together):
            break
        moved = moved or not all(map(torch.equal, together, start))
    return _Trial(None, rounded, moved, draws.drew)


def _step(optimizer: optim.Optimizer, *arguments: Callable[[], Any]) -> None:
    """Step an optimizer without the user's hooks for all optimizers, which run in torch's wrapper of the class."""
    step: Any = type(optimizer).step
    if "step" in vars(optimizer) or not getattr(step, "hooked", False):
        optimizer.step(*arguments)
    else:
        step.__wrapped__(optimizer, *arguments)


def _random(likes: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(like.shape, generator=generator, dtype=torch.float32, device="cpu") for like in likes]


def _evaluate(
    part: Mapping[int, torch.Tensor], before: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], scale: float
) -> torch.Tensor:
    """Set the gradients of a part, smaller for each tensor, and return the loss, to which all tensors contribute."""
    # Tensors of other parts contribute their values before the step.
    values = [part.get(place, old).detach().float() for place, old in enumerate(before)]
    level = torch.stack([value.mean().tanh() for value in values]).sum()
    for place, param in part.items():
        param.grad = (scale * 0.1**place * (wanted[place] + level)).to(param.dtype)
    return 1 + level**2


class _Draws(DispatchMode):
    """Makes random numbers depend only on step and shape; ``drew`` is True if the optimizer drew any.

    It raises if the optimizer communicates, uses an accelerator, or runs past ``until``, a time of this thread.
    """

    step: int | None = 0
    drew, until = False, math.inf

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - of any operator
        kwargs = kwargs or {}
        if thread_time() > self.until:
            raise TimeoutError("it takes too long")
        if "c10d" in func.namespace:
            raise RuntimeError("it communicates")
        if torch.device(kwargs.get("device") or "cpu").type not in ("cpu", "meta"):
            raise RuntimeError(f"it works on {kwargs['device']}")
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drew = True
            drawn = [tuple(item.shape) if isinstance(item, torch.Tensor) else item for item in args]
            (kwargs.get("generator") or torch.default_generator).manual_seed(
                zlib.crc32(f"{self.step} {drawn}".encode())
            )
        return func(*args, **kwargs)

    @contextmanager
    def of(self, step: int | None) -> Iterator[None]:
        """Apply the mode within a step, and seed Python's own generator; None seeds it differently each time."""
        self.step = step
        random.seed(step)
        before = random.getstate()
        with self:
            yield
        self.drew = self.drew or random.getstate() != before

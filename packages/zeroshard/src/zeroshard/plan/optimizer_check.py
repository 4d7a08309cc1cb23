"""Tests whether an optimizer updates each tensor by itself, as sharding requires."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from zeroshard._torch_private import DispatchMode
from zeroshard.plan.eligibility import OptimizerFactory

_STEPS = 50
_LIKES = [torch.empty(shape, dtype=torch.float32, device="meta") for shape in ((6, 4), (5, 3), (4, 7))]
_GRADIENTS = [(spread, scale) for spread in (1.0, 0.1) for scale in (1.0, 1000.0)]
"""Kinds of gradients: with a spread of 0.1 they point mostly in one direction, with 1.0 they are random."""


@dataclass(frozen=True)
class OptimizerCheck:
    """The result of :func:`check_optimizer`.

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
    for other shapes or gradients. It takes seconds, for some classes a minute; constructors do not call it.

    Args:
        cls: an optimizer class, or a function that builds an optimizer from a list of parameters.
        params: two or more small tensors, whose shapes and dtypes the toy tensors get; float32 matrices if None.
        **defaults: arguments of ``cls``.

    Returns:
        The verdict. An error of the class becomes the reason of ``"cannot tell"``. The random generators of torch and
        of Python are unchanged; NumPy's may have changed.

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
    problem, state_of_python = "", random.getstate()
    for with_closure in (False, True):
        build = partial(cls, **defaults)
        try:
            # Compile nothing.
            with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
                return _judged([_try(build, likes, *kind, with_closure=with_closure) for kind in _GRADIENTS])
        except Exception as error:  # noqa: BLE001 - an unsupported class may raise any exception
            # The first error says what the class needs.
            problem = problem or f"{type(error).__name__}: {error}".partition("\n")[0]
        finally:
            random.setstate(state_of_python)
    return OptimizerCheck("cannot tell", None, problem)


@dataclass(frozen=True)
class _Trial:
    """The result for gradients of one kind: the step after which tensors differed, and whether any did by rounding."""

    differed: int | None
    rounded: bool
    moved: bool
    drew: bool


def _judged(trials: Sequence[_Trial]) -> OptimizerCheck:
    drew = any(trial.drew for trial in trials)
    differed = [trial.differed for trial in trials if trial.differed is not None]
    if differed:
        return OptimizerCheck("coupled", min(differed), "it draws random numbers too" if drew else "")
    if not any(trial.moved for trial in trials):
        return OptimizerCheck("cannot tell", None, f"in {_STEPS} steps no tensor took a value that is new and finite")
    rounded = any(trial.rounded for trial in trials)
    return OptimizerCheck("draws random numbers" if drew else "equal", None, "but for rounding" if rounded else "")


def _try(
    build: OptimizerFactory, likes: Sequence[torch.Tensor], spread: float, scale: float, *, with_closure: bool
) -> _Trial:
    """Step all tensors together and each separately, until they differ or are no longer finite."""
    draws = _SeededDraws()  # type: ignore[no-untyped-call]
    rounded = moved = False
    start = [values.to(like.dtype) for values, like in zip(_random(likes, 0), likes, strict=True)]
    together, apart = ([torch.nn.Parameter(tensor.clone()) for tensor in start] for _ in range(2))
    parts = [dict(enumerate(together)), *({place: param} for place, param in enumerate(apart))]
    with draws.of(0):
        optimizers = [build(list(part.values())) for part in parts]
    for optimizer in optimizers:
        # A schedule-free optimizer steps only after train().
        getattr(optimizer, "train", bool)()
    for step in range(1, _STEPS + 1):
        pairs = zip(_random(likes, 1), _random(likes, step + 1), strict=True)
        wanted = [scale * ((1 - spread) * direction + spread * noise) for direction, noise in pairs]
        before = [param.detach().clone() for param in apart]
        for optimizer, part in zip(optimizers, parts, strict=True):
            closure: Callable[[], Any] = partial(_evaluate, part, before, wanted)
            closure()
            with draws.of(step):
                optimizer.step(closure) if with_closure else optimizer.step()
        for one, other, first in zip(together, apart, start, strict=True):
            if not torch.equal(*(param.detach().reshape(-1).view(torch.uint8) for param in (one, other))):
                rounded = True
                last_bits = (step + 1) * torch.finfo(one.dtype).eps * one.abs().max()
                if not (one - other).abs().max() <= 1e-5 * (one - first).abs().max() + last_bits:
                    return _Trial(step, rounded, True, draws.drew)
        if not all(param.isfinite().all() for param in together):
            break
        moved = moved or not all(map(torch.equal, together, start))
    return _Trial(None, rounded, moved, draws.drew)


def _random(likes: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(like.shape, generator=generator, dtype=torch.float32, device="cpu") for like in likes]


def _evaluate(
    part: Mapping[int, torch.Tensor], before: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Set the gradients of a part, smaller for each tensor, and return the loss, to which all tensors contribute."""
    # Tensors of other parts contribute their values before the step.
    values = [part.get(place, old).detach().float() for place, old in enumerate(before)]
    level = torch.stack([value.mean().tanh() for value in values]).sum()
    for place, param in part.items():
        param.grad = (0.1**place * (wanted[place] + level)).to(param.dtype)
    return 1 + level**2


class _SeededDraws(DispatchMode):
    """Makes random numbers depend only on step and shape; ``drew`` is True if the optimizer drew any."""

    step, drew = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - of any operator
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drew = True
            drawn = [tuple(item.shape) if isinstance(item, torch.Tensor) else item for item in args]
            (kwargs.get("generator") or torch.default_generator).manual_seed(
                zlib.crc32(f"{self.step} {drawn}".encode())
            )
        return func(*args, **kwargs)

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Apply the mode within a step, and seed Python's own generator with the step."""
        self.step = step
        random.seed(step)
        before = random.getstate()
        with self:
            yield
        self.drew = self.drew or random.getstate() != before

"""``strategy="ddp_zeroshard"`` for Lightning's Trainer and for Fabric; importing this module registers it with both.

Lightning's own strategies also train with a sharded optimizer, but ``"ddp"`` all-reduces every gradient. This strategy
calls :func:`~zeroshard_integrations.ddp.register_reduce_to_owner`, so each gradient is sent only to its owner. Before
it opens a file, it refuses a checkpoint that lacks values of other ranks. Clipping, precision and checkpoints are
Lightning's own: it consolidates an optimizer's state to rank 0 before it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_info
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from zeroshard import ZeroRedundancyOptimizer, check_whole
from zeroshard_core import Cost, repartition, state_bytes

from zeroshard_integrations.ddp import ONE_OPTIMIZER, register_reduce_to_owner

__all__ = ["NAME", "FabricZeroShardStrategy", "ZeroRedundancyOptimizer", "ZeroShardStrategy"]

NAME = "ddp_zeroshard"
"""The value of ``strategy`` for ``Trainer`` and ``Fabric``."""


class ZeroShardStrategy(DDPStrategy):
    """DistributedDataParallel for Lightning's Trainer, with gradients sent only to their owners.

    ``configure_optimizers()`` returns a :class:`zeroshard.ZeroRedundancyOptimizer` of all parameters that are trained.
    The strategy logs the size of its state if the Trainer logs the model summary.

    Args:
        norms: whether ranks exchange the 2-norms of gradients; see
            :func:`~zeroshard_integrations.ddp.register_reduce_to_owner`.
        **options: the options of Lightning's ``DDPStrategy``, which passes unknown ones to DistributedDataParallel.

    Raises:
        TypeError: when ``fit()`` begins, on every rank, if ``configure_optimizers()`` returns another optimizer, or
            several.
        ValueError: likewise, if the optimizer lacks a parameter, or has other ranks than the model.
    """

    def __init__(self, *, norms: bool = True, **options: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(**options)
        self._norms = norms

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Register the hook. Lightning calls this after it has wrapped the model."""
        super().setup_optimizers(trainer)
        _register_hook(self, self.model, self.optimizers, "configure_optimizers() returned")
        if any(isinstance(callback, ModelSummary) for callback in trainer.callbacks):
            for optimizer in self.optimizers:
                rank_zero_info(_describe_state(optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed on
        """Save a checkpoint on rank 0, as Lightning does, unless it lacks values of other ranks. Collective.

        Raises:
            RuntimeError: on every rank, before a file is opened, if the checkpoint lacks values.
        """
        _check_saved(self, checkpoint)
        super().save_checkpoint(checkpoint, *args, **kwargs)


class FabricZeroShardStrategy(FabricDDPStrategy):
    """DistributedDataParallel for Fabric, with gradients sent only to their owners.

    ``fabric.setup(model, optimizer)`` receives the model and its optimizer together. Arguments are ``norms``, as for
    :class:`ZeroShardStrategy`, and the options of Fabric's ``DDPStrategy`` and of DistributedDataParallel.
    """

    def __init__(self, *, norms: bool = True, **options: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(**options)
        self._norms = norms

    def setup_module_and_optimizers(
        self,
        module: torch.nn.Module,
        optimizers: list[Optimizer],
        *scheduler: Any,  # noqa: ANN401 - newer versions of Fabric pass one, and want it back
    ) -> tuple[Any, ...]:
        """Wrap the model and register the hook.

        Raises:
            TypeError: on every rank, if there are several optimizers, or one that is not sharded.
            ValueError: if the optimizer lacks a parameter, or has other ranks than the model.
        """
        ddp = self.setup_module(module)
        _register_hook(self, ddp, optimizers, "setup() received")
        return (ddp, optimizers, *scheduler)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:  # noqa: ARG002 - Fabric's signature
        """Refuse an optimizer without its model, by a RuntimeError."""
        raise RuntimeError(
            f"strategy={NAME!r} sets up a model and its optimizers together: call fabric.setup(model, optimizer), and "
            f"not setup_module() and setup_optimizers()"
        )

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed on
        """Save a checkpoint as Fabric does, if :meth:`ZeroShardStrategy.save_checkpoint` would save it. Collective."""
        _check_saved(self, state)
        super().save_checkpoint(path, state, *args, **kwargs)


def _describe_state(optimizer: ZeroRedundancyOptimizer) -> str:
    """Return text with the size of the optimizer state, on the rank with most of it and unsharded. Not collective."""
    plan = optimizer.plan
    kinds: list[Any] = [type(optimizer.local_optimizers[number]) for number in optimizer.group_assignment]
    names = " + ".join(dict.fromkeys(kind.__name__ for kind in kinds))

    def cost_of(group: dict[str, Any], kind: Callable[..., Optimizer]) -> Cost:
        # A group has all hyperparameters, as the class has filled them in.
        return state_bytes(lambda params: kind([{**group, "params": params}]))

    costs = [*map(cost_of, optimizer.param_groups, kinds)]
    try:
        # The same owners, with the size of the state as cost.
        loads = repartition(plan, plan.tensors, cost=lambda spec: costs[spec.group](spec)).loads
    except ValueError:
        return f"Optimizer state, sharded by zeroshard: unknown before the first step of {names}"
    return (
        f"Optimizer state, sharded by zeroshard: {max(loads) / 1e6:,.3f} MB per rank at most, on {plan.world_size} "
        f"ranks; {sum(loads) / 1e6:,.3f} MB unsharded ({names})"
    )


def _register_hook(strategy: Any, ddp: DistributedDataParallel, optimizers: Sequence[Any], source: str) -> None:  # noqa: ANN401 - of either kind
    for optimizer in optimizers:
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            name = type(optimizer).__name__
            raise TypeError(
                f"rank {strategy.global_rank}: strategy={NAME!r} trains with zeroshard.ZeroRedundancyOptimizer, but "
                f"{source} {name}: build ZeroRedundancyOptimizer(params, {name}, ...) instead, or use strategy='ddp'"
            )
    if len(optimizers) != 1:
        raise TypeError(
            f"rank {strategy.global_rank}: strategy={NAME!r} trains a model with one optimizer, but {source} "
            f"{len(optimizers)}: {ONE_OPTIMIZER}. strategy='ddp' has no hook"
        )
    register_reduce_to_owner(ddp, optimizers[0], norms=strategy._norms)


def _check_saved(strategy: Any, checkpoint: object) -> None:  # noqa: ANN401 - of either kind
    """Raise rank 0's error of pickling the checkpoint on every rank."""
    error = ""
    if strategy.is_global_zero:
        try:
            check_whole(checkpoint)
        except RuntimeError as found:
            error = str(found)
    if error := strategy.broadcast(error):
        raise RuntimeError(error)


# Without gradient_as_bucket_view each rank would keep its gradients twice: in .grad, and in DDP's buckets.
for registry, strategy in ((StrategyRegistry, ZeroShardStrategy), (STRATEGY_REGISTRY, FabricZeroShardStrategy)):
    registry.register(
        NAME, strategy, description="DDP, gradients sent only to their owners", gradient_as_bucket_view=True
    )

"""``strategy="ddp_zeroshard"`` for Lightning's Trainer and for Fabric; importing this module registers it with both.

Lightning's own strategies also train with a sharded optimizer, but ``"ddp"`` all-reduces every gradient. This strategy
calls :func:`~zeroshard_integrations.ddp.register_reduce_to_owner`, so each gradient is sent only to its owner. Before
it opens a file, it raises if a checkpoint lacks values of other ranks. Clipping, precision and checkpoints are
Lightning's own: it consolidates an optimizer's state to rank 0 before it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer
from zeroshard import ZeroRedundancyOptimizer, check_whole
from zeroshard_core import Cost, repartition, state_bytes

from zeroshard_integrations.ddp import ONE_OPTIMIZER
from zeroshard_integrations.model_gradients import ModelGradients

__all__ = ["NAME", "FabricZeroShardStrategy", "ZeroRedundancyOptimizer", "ZeroShardStrategy"]

NAME = "ddp_zeroshard"
"""The value of ``strategy`` for ``Trainer`` and ``Fabric``."""


class _WithGradients:
    """Base class of both strategies: handles the options that decide where gradients are."""

    def __init__(
        self,
        *,
        norms: bool = True,
        gradients: str = "ddp",
        accumulate: str = "owner",
        **options: Any,  # noqa: ANN401 - passed on
    ) -> None:
        super().__init__(**options)
        ddp_options = {name: value for name, value in options.items() if name.startswith("ddp_comm_")}
        ddp_options.update(vars(self)["_ddp_kwargs"])
        self._gradients = ModelGradients(ddp_options, norms=norms, gradients=gradients, accumulate=accumulate)


class _Caller(torch.nn.Module):
    """Calls a module whose gradients are sharded. Its ``state_dict()`` has the module's names, without a prefix."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.state_dict, self.load_state_dict = module.state_dict, module.load_state_dict  # type: ignore[method-assign]

    def forward(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - the module's
        return self.module(*arguments, **options)


class ZeroShardStrategy(_WithGradients, DDPStrategy):
    """DistributedDataParallel for Lightning's Trainer, with gradients sent only to their owners.

    ``configure_optimizers()`` returns a :class:`zeroshard.ZeroRedundancyOptimizer` of all parameters that are trained.
    The strategy logs the size of its state if the Trainer logs the model summary.

    Args:
        norms: whether ranks exchange the 2-norms of gradients; see
            :func:`~zeroshard_integrations.ddp.register_reduce_to_owner`.
        gradients: ``"ddp"`` uses the hook. ``"sharded"`` uses :func:`~zeroshard.shard_gradients` instead of
            DistributedDataParallel: each rank keeps only its part of the gradients.
        accumulate: how sharded gradients accumulate over batches. ``"owner"`` reduces each batch's gradients to their
            owners. ``"local"`` keeps all gradients and reduces only the sums.
        **options: the options of Lightning's ``DDPStrategy``, which passes unknown ones to DistributedDataParallel.

    Raises:
        TypeError: when ``fit()`` begins, on every rank, if ``configure_optimizers()`` returns another optimizer, or
            several.
        ValueError: likewise, if the optimizer lacks a parameter, or has other ranks than the model, or if gradients
            cannot be sharded; in the constructor, if ``gradients`` or ``accumulate`` is unknown, or ``"sharded"`` does
            not support an option.
    """

    def configure_ddp(self) -> None:
        """Wrap the model."""
        if self._gradients.is_sharded:
            self.model = _Caller(self.lightning_module)
        else:
            super().configure_ddp()

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Return the context for a batch that no step follows."""
        return self._gradients.no_backward_sync(self.model)

    def teardown(self) -> None:
        """Unwrap the model."""
        # If an error ended a backward, disconnecting raises, too: do not hide the first error.
        with suppress(RuntimeError):
            self._gradients.disconnect()
        if isinstance(self.model, _Caller):
            self.model = self.lightning_module
        super().teardown()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Register the hook, or shard the gradients. Lightning calls this after it has wrapped the model."""
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


class FabricZeroShardStrategy(_WithGradients, FabricDDPStrategy):
    """DistributedDataParallel for Fabric, with gradients sent only to their owners.

    Pass the model and its optimizer together to ``fabric.setup(model, optimizer)``. Arguments are ``norms``,
    ``gradients`` and ``accumulate``, as for :class:`ZeroShardStrategy`, and the options of Fabric's ``DDPStrategy`` and
    of DistributedDataParallel.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(**options)
        self._backward_sync_control = self._gradients

    def setup_module_and_optimizers(
        self,
        module: torch.nn.Module,
        optimizers: list[Optimizer],
        *scheduler: Any,  # noqa: ANN401 - newer versions of Fabric pass one, and want it back
    ) -> tuple[Any, ...]:
        """Wrap the model and register the hook, or shard the gradients.

        Raises:
            TypeError: on every rank, if there are several optimizers, or one that is not sharded.
            ValueError: if the optimizer lacks a parameter, or has other ranks than the model.
        """
        wrapped = _Caller(module) if self._gradients.is_sharded else self.setup_module(module)
        _register_hook(self, wrapped, optimizers, "setup() received")
        return (wrapped, optimizers, *scheduler)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:  # noqa: ARG002 - Fabric's signature
        """Raise a RuntimeError, because an optimizer must be set up together with its model."""
        raise RuntimeError(
            f"strategy={NAME!r} sets up a model and its optimizers together: call fabric.setup(model, optimizer) "
            f"instead of setup_module() and setup_optimizers()"
        )

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed on
        """Save a checkpoint as Fabric does, if :meth:`ZeroShardStrategy.save_checkpoint` would save it. Collective."""
        _check_saved(self, state)
        super().save_checkpoint(path, state, *args, **kwargs)


def _describe_state(optimizer: ZeroRedundancyOptimizer) -> str:
    """Return text with the size of the optimizer state: the largest of any rank, and unsharded. Not collective."""
    plan = optimizer.plan
    kinds: list[Any] = [type(optimizer.local_optimizers[number]) for number in optimizer.group_assignment]
    names = " + ".join(dict.fromkeys(kind.__name__ for kind in kinds))

    def cost_of(group: dict[str, Any], kind: Callable[..., Optimizer]) -> Cost:
        # A group has all hyperparameters, as the class has filled them in.
        return state_bytes(lambda params: kind([{**group, "params": params}]))

    costs = [*map(cost_of, optimizer.param_groups, kinds)]
    try:
        # Keep the owners, and use the size of the state as the cost.
        loads = repartition(plan, plan.tensors, cost=lambda spec: costs[spec.group](spec)).loads
    except ValueError:
        return f"Optimizer state, sharded by zeroshard: unknown before the first step of {names}"
    return (
        f"Optimizer state, sharded by zeroshard: {max(loads) / 1e6:,.3f} MB per rank at most, on {plan.world_size} "
        f"ranks; {sum(loads) / 1e6:,.3f} MB unsharded ({names})"
    )


def _register_hook(strategy: Any, wrapped: torch.nn.Module, optimizers: Sequence[Any], source: str) -> None:  # noqa: ANN401 - of either kind
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
    strategy._gradients.connect(wrapped, optimizers[0])


def _check_saved(strategy: Any, checkpoint: object) -> None:  # noqa: ANN401 - of either kind
    """If the checkpoint of rank 0 lacks values, raise the error on every rank."""
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

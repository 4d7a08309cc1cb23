"""Connects the models that a framework trains to their sharded optimizers. Gradients are in DDP, or sharded too."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zeroshard import GradientSharding, ZeroRedundancyOptimizer, shard_gradients

from zeroshard_integrations.ddp import register_reduce_to_owner

_UNNEEDED = ("dim", "check_reduction", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")


class ModelGradients:
    """Registers the hook with models in DistributedDataParallel, or shards their gradients if ``is_sharded``.

    ``ddp_options`` are options of DistributedDataParallel. Raises a ValueError for an argument that is not supported.
    """

    def __init__(
        self, ddp_options: Mapping[str, Any], *, norms: bool = True, gradients: str = "ddp", accumulate: str = "owner"
    ) -> None:
        if gradients not in ("ddp", "sharded") or accumulate not in ("owner", "local"):
            raise ValueError(
                f"gradients={gradients!r}, accumulate={accumulate!r}: pass gradients='ddp' or 'sharded', and "
                f"accumulate='owner' or 'local'"
            )
        self.is_sharded, self._accumulate, self._norms = gradients == "sharded", accumulate, norms
        options = {name: value for name, value in ddp_options.items() if name not in _UNNEEDED and value is not None}
        self._bucket_mb, self._broadcasts = options.pop("bucket_cap_mb", 25), options.pop("broadcast_buffers", True)
        if self.is_sharded and options:
            raise ValueError(
                f"gradients='sharded' does not use DistributedDataParallel or its options {', '.join(options)}: leave "
                f"them out, or use gradients='ddp'"
            )
        self._shardings: dict[nn.Module, GradientSharding] = {}

    def connect(self, model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
        """Register the hook, or shard the gradients of the model. Collective."""
        # Under torch.compile, DistributedDataParallel is a child of the model.
        wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        if self.is_sharded:
            options = {"bucket_mb": self._bucket_mb, "broadcast_buffers": self._broadcasts, "norms": self._norms}
            # This raises for a model that is already wrapped.
            self._shardings[model] = shard_gradients(wrapped[0] if wrapped else model, optimizer, **options)
        else:
            for ddp in wrapped:
                register_reduce_to_owner(ddp, optimizer, norms=self._norms)

    def no_backward_sync(self, model: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Return the context for a batch that no step follows, with the signature that Fabric and Accelerate expect."""
        sharding = self._shardings.get(model)
        if not enabled or (sharding is not None and self._accumulate == "owner"):
            return nullcontext()
        context: AbstractContextManager[None] = getattr(sharding or model, "no_sync", nullcontext)()
        return context

    def disconnect(self) -> None:
        """Remove the hooks of models whose gradients are sharded."""
        while self._shardings:
            self._shardings.popitem()[1].remove()

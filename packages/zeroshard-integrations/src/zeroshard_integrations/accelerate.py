"""Trains with sharded optimizers under Hugging Face's Accelerate, and lets ``save_state`` save the whole state.

:class:`~zeroshard.ZeroRedundancyOptimizer` can be imported from here too, so that a script needs only one import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from zeroshard import ZeroRedundancyOptimizer, check_whole

from zeroshard_integrations.ddp import ONE_OPTIMIZER
from zeroshard_integrations.model_gradients import ModelGradients

__all__ = ["ZeroRedundancyOptimizer", "ZeroShardPlugin"]

ParamGroups = Callable[[nn.Module], Sequence[Mapping[str, Any]]]


class ZeroShardPlugin:
    """Prepares models and their sharded optimizers. Call its ``prepare()`` instead of the ``Accelerator``'s.

    Each model that Accelerate wraps in DistributedDataParallel gets the communication hook
    :func:`~zeroshard_integrations.ddp.reduce_to_owner_hook`. ``accelerator.save_state()``, called on every rank,
    consolidates the state first: it saves the same files as for a plain optimizer, and ``accelerator.load_state()``
    loads them on any number of ranks. Use all other methods of the accelerator as with a plain optimizer.

    Args:
        accelerator: an accelerator with no other parallelism than DistributedDataParallel, or with a single process.
        norms: whether ranks exchange the 2-norms of gradients; see
            :func:`~zeroshard_integrations.ddp.register_reduce_to_owner`.
        gradients: ``"ddp"`` uses the hook. ``"sharded"`` uses :func:`~zeroshard.shard_gradients` instead of
            DistributedDataParallel for models with a sharded optimizer: each rank keeps only its part of the gradients.
        accumulate: how sharded gradients accumulate in ``accelerator.accumulate()`` and ``no_sync()``. ``"owner"``
            reduces each batch's gradients to their owners. ``"local"`` keeps all gradients and reduces only the sums.

    Raises:
        ValueError: if the accelerator uses another parallelism, or has options of DistributedDataParallel that
            ``"sharded"`` does not support, or if ``gradients`` or ``accumulate`` is unknown.

    Example::

        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-3)
        model, optimizer, batches = ZeroShardPlugin(accelerator).prepare(model, optimizer, batches)
    """

    def __init__(
        self, accelerator: Accelerator, *, norms: bool = True, gradients: str = "ddp", accumulate: str = "owner"
    ) -> None:
        self._gradients = replace_ddp(
            accelerator, self._is_trained, norms=norms, gradients=gradients, accumulate=accumulate
        )
        self._accelerator = accelerator
        self._optimizers: list[ZeroRedundancyOptimizer] = []
        accelerator.register_save_state_pre_hook(self._before_saving)

    def create_optimizer(
        self,
        model: nn.Module,
        param_groups: ParamGroups,
        optimizer_class: Callable[..., Optimizer],
        **options: Any,  # noqa: ANN401 - passed on
    ) -> ZeroRedundancyOptimizer:
        """Move a model to the accelerator's device, and build its sharded optimizer. Collective.

        Args:
            model: the model, before ``prepare()``.
            param_groups: takes the model and returns its param groups, each of which may name an ``optimizer_class``.
            optimizer_class: the class of groups that name none.
            **options: other arguments of :class:`~zeroshard.ZeroRedundancyOptimizer`.

        Raises:
            TypeError: if ``param_groups`` is not a function, or does not return a list of dicts.
        """
        if self._accelerator.device_placement:
            model.to(self._accelerator.device)
        return ZeroRedundancyOptimizer(call_param_groups(param_groups, model), optimizer_class, **options)

    def prepare(self, *objects: Any, **options: Any) -> Any:  # noqa: ANN401 - as Accelerate's
        """Call ``accelerator.prepare()``, and register the communication hooks or shard the gradients.

        Args:
            *objects: the objects for Accelerate. Pass a sharded optimizer together with its model.
            **options: the options for Accelerate.

        Returns:
            The result of ``accelerator.prepare()``.

        Raises:
            TypeError: if a model has several sharded optimizers.
            ValueError: if a sharded optimizer is passed without its model, or lacks a parameter of the model, or as
                :func:`~zeroshard.shard_gradients`.
        """
        optimizers = [each for each in objects if isinstance(each, ZeroRedundancyOptimizer)]
        for optimizer in optimizers:
            if not any(isinstance(each, nn.Module) and _shares_parameters(each, optimizer) for each in objects):
                raise ValueError(
                    "a ZeroRedundancyOptimizer was passed to prepare() without the model of its parameters: pass both "
                    "in one call, so that the communication hook can be registered"
                )
        self._optimizers += optimizers
        prepared = self._accelerator.prepare(*objects, **options)
        for each in prepared if len(objects) > 1 else [prepared]:
            if isinstance(each, nn.Module):
                reduce_to_owners(each, optimizers, self._gradients)
        return prepared

    def _is_trained(self, model: nn.Module) -> bool:
        return any(_shares_parameters(model, optimizer) for optimizer in self._optimizers)

    def _before_saving(self, *_: object) -> None:
        if self._accelerator.project_configuration.save_on_each_node:
            raise ValueError(
                "ProjectConfiguration(save_on_each_node=True) writes the optimizer's state on every node, but "
                "ZeroShardPlugin gathers it only on rank 0: leave the option out, and copy the checkpoint where needed"
            )
        for optimizer in self._optimizers:
            optimizer.consolidate_state_dict()
        if self._accelerator.is_main_process:
            check_whole([optimizer.state_dict() for optimizer in self._optimizers])


def reduce_to_owners(
    model: nn.Module, optimizers: Iterable[ZeroRedundancyOptimizer], gradients: ModelGradients
) -> None:
    """Connect a model to the optimizer that has its parameters. No-op if Accelerate would not wrap the model.

    Raises a TypeError if several optimizers have its parameters.
    """
    owners = [optimizer for optimizer in optimizers if _shares_parameters(model, optimizer)]
    is_wrapped = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    if len(owners) > 1 and (is_wrapped or gradients.is_sharded):
        raise TypeError(f"ZeroShardPlugin trains a model with one optimizer, but got {len(owners)}: {ONE_OPTIMIZER}")
    for optimizer in owners:
        gradients.connect(model, optimizer)


def replace_ddp(accelerator: Accelerator, is_trained: Callable[[nn.Module], bool], **options: Any) -> ModelGradients:  # noqa: ANN401 - passed on
    """Return the object that connects models to optimizers. If it shards gradients, trained models are not wrapped."""
    check_parallelism(accelerator)
    handler = accelerator.ddp_handler
    ddp_options = {} if handler is None else handler.to_kwargs()
    if handler is not None and handler.comm_hook != DDPCommunicationHookType.NO:
        ddp_options["comm_hook"] = handler.comm_hook
    connected = ModelGradients(ddp_options, **options)
    connected.is_sharded &= accelerator.distributed_type != DistributedType.NO
    if connected.is_sharded:
        prepare_model = accelerator.prepare_model

        def prepare(model: nn.Module, *rest: Any, evaluation_mode: bool = False, **options: Any) -> Any:  # noqa: ANN401 - passed on
            # In evaluation mode, Accelerate does everything except wrapping.
            return prepare_model(model, *rest, evaluation_mode=evaluation_mode or is_trained(model), **options)

        accelerator.prepare_model, accelerator.no_sync = prepare, connected.no_backward_sync
    return connected


def call_param_groups(function: ParamGroups, model: nn.Module) -> Iterator[Mapping[str, Any]]:
    """Call the function only when an optimizer reads its groups, so that every rank raises the error of one rank."""
    groups = function(model) if callable(function) else function
    if not (callable(function) and isinstance(groups, Sequence) and all(isinstance(each, Mapping) for each in groups)):
        listed = f" with a {type(groups[0]).__name__}" if isinstance(groups, Sequence) and groups else ""
        name = f"{'its result' if callable(function) else 'it'} is a {type(groups).__name__}{listed}"
        raise TypeError(f"param_groups must be a function that takes the model and returns a list of dicts, but {name}")
    yield from groups


def check_parallelism(accelerator: Accelerator) -> None:
    """Raise a ValueError if an accelerator uses other parallelism than DistributedDataParallel; name what it uses."""
    kind = accelerator.distributed_type
    others = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)
    found = [kind.value] if kind in others else []
    # Accelerate has had this since 1.10. cp and sp are context and sequence parallelism.
    config = getattr(accelerator, "parallelism_config", None)
    sizes = {name: getattr(config, name, 1) for name in ("dp_shard_size", "tp_size", "cp_size", "sp_size")}
    found += [f"{name}={size}" for name, size in sizes.items() if size > 1]
    if found:
        raise ValueError(
            f"the accelerator uses {', '.join(found)}: ZeroRedundancyOptimizer shards optimizers of models under "
            f"DistributedDataParallel, and supports no other parallelism"
        )


def _shares_parameters(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> bool:
    params = {param for group in optimizer.param_groups for param in group["params"]}
    return any(param in params for param in model.parameters())

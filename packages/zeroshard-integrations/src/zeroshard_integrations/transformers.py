"""Shards the optimizer that ``TrainingArguments`` select in Hugging Face's Trainer, and saves whole checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback
from transformers.training_args import ParallelMode
from zeroshard import ZeroRedundancyOptimizer, check_whole

from zeroshard_integrations.accelerate import ParamGroups, call_param_groups, reduce_to_owners, replace_ddp


class ZeroShardTrainerMixin(Trainer):
    """Shards the optimizer of a ``Trainer`` class. Put it before that class in the list of bases.

    The Trainer builds the optimizer that ``TrainingArguments`` or ``optimizer_cls_and_kwargs`` select, with its groups
    of parameters, as :class:`~zeroshard.ZeroRedundancyOptimizer`; DistributedDataParallel gets the communication hook
    :func:`~zeroshard_integrations.ddp.reduce_to_owner_hook`. Checkpoints have the plain optimizer's file: any number of
    ranks can resume from them, and so can the plain Trainer. A single process without a process group shards nothing.

    Args:
        *arguments: arguments of the Trainer. An optimizer in ``optimizers`` must be a ``ZeroRedundancyOptimizer``.
        param_groups: takes the model and returns param groups, each of which may name an ``optimizer_class``; they
            replace the Trainer's groups and its ``weight_decay``.
        gradients: ``"ddp"`` or ``"sharded"``, as for :class:`~zeroshard_integrations.accelerate.ZeroShardPlugin`.
        accumulate: ``"owner"`` or ``"local"``, likewise, for ``gradient_accumulation_steps``.
        **options: keyword arguments of the Trainer.

    Attributes:
        sharding_options: keyword arguments for :class:`~zeroshard.ZeroRedundancyOptimizer`, such as ``partition``; set
            them in a subclass.

    Raises:
        ValueError: if a plain optimizer is passed, or ``param_groups`` with an optimizer or without torchrun; for
            another parallelism, ``save_on_each_node``, or unknown ``gradients`` or ``accumulate``; when training
            begins, if the optimizer or the gradients cannot be sharded.
        TypeError: when training begins, if ``param_groups`` is not a function, or does not return a list of dicts.

    Example::

        class ShardedSeq2SeqTrainer(ZeroShardTrainerMixin, Seq2SeqTrainer):
            sharding_options = {"partition": "split"}
    """

    sharding_options: ClassVar[Mapping[str, Any]] = {}
    optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None

    def __init__(
        self,
        *arguments: Any,  # noqa: ANN401 - the Trainer's
        param_groups: ParamGroups | None = None,
        gradients: str = "ddp",
        accumulate: str = "owner",
        **options: Any,  # noqa: ANN401 - the Trainer's
    ) -> None:
        super().__init__(*arguments, **options)
        self._gradients = replace_ddp(
            self.accelerator, lambda model: model is self.model, gradients=gradients, accumulate=accumulate
        )
        if self.args.save_on_each_node:
            raise ValueError(
                "save_on_each_node=True writes the optimizer's state on every node, but ZeroShardTrainer gathers it "
                "only on rank 0: leave the option out, and copy the checkpoint where needed"
            )
        if param_groups is not None and (self.optimizer is not None or not self._is_distributed):
            raise ValueError(
                "ZeroShardTrainer builds the optimizer from param_groups: pass no optimizer, and launch with torchrun"
            )
        if self._is_distributed and self.optimizer is not None and sharded_optimizer(self.optimizer) is None:
            raise ValueError(
                f"ZeroShardTrainer was given an optimizer that is not sharded, {type(self.optimizer).__name__}: pass a "
                f"ZeroRedundancyOptimizer, or let the Trainer build the optimizer"
            )
        self._param_groups = param_groups
        self.add_callback(_RegisterHook(self))

    def create_optimizer(self, *arguments: Any) -> Optimizer:  # noqa: ANN401 - one since transformers 5.2, none before
        """Build the optimizer as the Trainer does, and shard it; raise a ValueError if its class cannot be sharded."""
        given = self.optimizer_cls_and_kwargs
        if self._is_distributed and self.optimizer is None:
            found = given or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer_cls_and_kwargs = self._sharded(*found)
        try:
            built: Optimizer = super().create_optimizer(*arguments)
        finally:
            # Another call of train() may build the optimizer again.
            self.optimizer_cls_and_kwargs = given
        return built

    # Private in the Trainer: no public method runs on every rank between its decision to save and the save.
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = sharded_optimizer(self.optimizer)
        if optimizer is not None:
            optimizer.consolidate_state_dict()
            if self.args.should_save:
                check_whole(optimizer.state_dict())
        super()._save_optimizer_and_scheduler(output_dir)

    @property
    def _is_distributed(self) -> bool:
        return bool(self.args.parallel_mode == ParallelMode.DISTRIBUTED)

    def _sharded(self, optimizer_class: Any, options: dict[str, Any]) -> tuple[type[Optimizer], dict[str, Any]]:  # noqa: ANN401 - checked
        reason = None
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            reason = "is not a subclass of torch.optim.Optimizer"
        elif "model" in options or "optimizer_dict" in options:
            reason = "updates parameters during backward, before their gradients are averaged"
        elif options.get("optim_bits") == 8:
            reason = "keeps 8-bit state by rules for each module, which it cannot look up"
        if reason is not None:
            name = getattr(optimizer_class, "__name__", optimizer_class)
            raise ValueError(f"ZeroShardTrainer cannot shard {name}: it {reason}. Choose another optim, or use Trainer")
        options = {**self.sharding_options, **options}
        if self._param_groups is not None:
            # The Trainer uses these in place of its own.
            options["params"] = call_param_groups(self._param_groups, self.model)
        if issubclass(optimizer_class, ZeroRedundancyOptimizer):
            return optimizer_class, options
        return ZeroRedundancyOptimizer, {"optimizer_class": optimizer_class, **options}


class ZeroShardTrainer(ZeroShardTrainerMixin):
    """The ``Trainer`` with a sharded optimizer. See :class:`ZeroShardTrainerMixin`."""


class _RegisterHook(TrainerCallback):
    """Connects the model to its optimizer when training begins, after the Trainer has prepared both."""

    def __init__(self, trainer: ZeroShardTrainerMixin) -> None:
        self._trainer = trainer
        self._connected: tuple[nn.Module, ZeroRedundancyOptimizer] | None = None

    def on_train_begin(self, *_: object, **__: object) -> None:
        model, optimizer = self._trainer.model_wrapped, sharded_optimizer(self._trainer.optimizer)
        # A second call of train() uses the same wrapped model.
        if optimizer is not None and (model, optimizer) != self._connected:
            self._trainer._gradients.disconnect()
            reduce_to_owners(model, [optimizer], self._trainer._gradients)
            self._connected = model, optimizer


def sharded_optimizer(optimizer: Optimizer | None) -> ZeroRedundancyOptimizer | None:
    """Return the sharded optimizer, without Accelerate's wrapper; None for another optimizer."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, ZeroRedundancyOptimizer) else None

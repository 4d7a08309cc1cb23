"""What else ZeroShardTrainer does, as Hugging Face's Trainer does it unsharded; and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.example_scripts import PLUGINS
from support.framework_training import ROUNDING, forget_accelerator, needs, two_ranks
from support.training import assert_same_state
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_testing import raises_on

pytestmark = [needs("accelerate"), needs("transformers")]


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers(x) - labels).square().mean()}


ROWS = [{"x": torch.arange(8.0).sin() * number / 16, "labels": torch.ones(1) * number} for number in range(32)]


def small_trainer(
    folder: Path,
    is_sharded: bool,
    *,
    base: Any = None,
    given: dict[str, Any] | None = None,
    model=None,
    plugin: str = "hook",
    **options,
):
    from transformers import Trainer, TrainingArguments
    from zeroshard_integrations.transformers import ZeroShardTrainer

    defaults = {"use_cpu": True, "max_steps": 4, "report_to": [], "disable_tqdm": True, "learning_rate": 1e-2}
    arguments = TrainingArguments(str(folder), **{**defaults, "save_strategy": "no", **options})
    base = base or (ZeroShardTrainer if is_sharded else Trainer)
    given = {**(given or {}), **(PLUGINS[plugin] if is_sharded else {})}
    return base(model or Line(), arguments, train_dataset=ROWS, eval_dataset=ROWS, **given)


@two_ranks
@pytest.mark.parametrize("plugin", ["hook", "sharded"])
def test_gradients_go_to_their_owners_and_each_rank_has_its_share_of_the_state(tmp_path, plugin):
    from transformers import TrainerCallback

    class Look(TrainerCallback):
        kinds: set[str]

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            self.kinds = {type(param.grad).__name__ for param in model.parameters()}
            assert (trainer.model_wrapped is model) == (plugin == "sharded")

    look, trainer = Look(), small_trainer(tmp_path, is_sharded=True, plugin=plugin)
    trainer.add_callback(look)
    trainer.train()
    assert look.kinds == {"GradPlaceholder"}
    held = [None] * 2
    dist.all_gather_object(held, len(trainer.optimizer.optimizer.optim.state))
    assert sum(held) == len(list(trainer.model.parameters()))
    assert min(held) > 0


SHARDED = ["sharded", "sharded, local"]


@two_ranks
@pytest.mark.parametrize("plugin", PLUGINS)
def test_training_again_goes_on_with_the_same_optimizer(tmp_path, plugin):
    def run(is_sharded: bool) -> list[nn.Parameter]:
        trainer = small_trainer(tmp_path, is_sharded, plugin=plugin)
        if is_sharded and plugin in SHARDED:
            # After it, the plain Trainer builds no DistributedDataParallel, and its ranks differ.
            trainer.evaluate()
        trainer.train()
        trainer.train()
        return list(trainer.model.parameters())

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


class TooLarge(Line):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training and len(x) > 4:
            raise RuntimeError("CUDA out of memory.")
        return super().forward(x, labels)


@two_ranks
@pytest.mark.parametrize(
    ("plugin", "model", "options"),
    [
        ("hook", TooLarge, {"auto_find_batch_size": True}),
        ("sharded", Line, {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1}),
        ("sharded, local", Line, {"gradient_accumulation_steps": 3, "dataloader_drop_last": True, "logging_steps": 3}),
    ],
    ids=["hook-batch size", "sharded-plateau", "sharded, local-accumulation"],
)
def test_features_of_the_trainer_that_change_the_loop(tmp_path, model, options, plugin):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    from transformers import TrainerCallback

    class Average(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

        def on_step_end(self, args, state, control, model=None, **kwargs):
            self.averaged.update_parameters(model)

    def run(is_sharded: bool) -> list[nn.Parameter]:
        average, trainer = Average(), small_trainer(tmp_path, is_sharded, model=model(), plugin=plugin, **options)
        trainer.add_callback(average)
        trainer.train()
        return [*trainer.model.parameters(), *average.averaged.parameters()]

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


@two_ranks
@pytest.mark.parametrize(
    ("plugin", "checkpointing"),
    [("hook", None), ("sharded", True), ("sharded, local", False)],
    ids=["hook", "sharded-reentrant", "sharded, local-not reentrant"],
)
def test_a_model_of_transformers_with_tied_weights(tmp_path, checkpointing, plugin):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    from zeroshard_integrations.transformers import ZeroShardTrainer

    def run(is_sharded: bool) -> list[Any]:
        forget_accelerator()
        torch.manual_seed(0)
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, **dropout))
        options: dict[str, Any] = {"gradient_checkpointing": checkpointing is not None}
        if checkpointing is not None:
            options["gradient_checkpointing_kwargs"] = {"use_reentrant": checkpointing}
        arguments = TrainingArguments(
            str(tmp_path), use_cpu=True, max_steps=4, report_to=[], disable_tqdm=True, save_strategy="no",
            eval_strategy="steps", eval_steps=2, gradient_accumulation_steps=2, **options
        )  # fmt: skip
        rows = [{"input_ids": (torch.arange(16) * row) % 64, "labels": torch.arange(16)} for row in range(64)]
        base, given = (ZeroShardTrainer, PLUGINS[plugin]) if is_sharded else (Trainer, {})
        trainer = base(model.double(), arguments, train_dataset=rows, eval_dataset=rows[:8], **given)
        trainer.train()
        return [*model.parameters(), *(torch.tensor(each["eval_loss"]) for each in trainer.state.log_history[:1])]

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=ROUNDING)


KINDS = ["sharded", "plain"]

OPTIMIZER_FILE = "optimizer.pt"


@two_ranks
@pytest.mark.parametrize(("plugin", "strategy"), [("hook", "epoch"), ("sharded", "best")])
def test_whenever_the_trainer_saves_all_state_is_there(tmp_path, strategy, plugin):
    from transformers import EarlyStoppingCallback

    saved = []
    for kind in KINDS:
        options = {"save_strategy": strategy, "eval_strategy": "epoch", "num_train_epochs": 3, "max_steps": -1}
        best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
        trainer = small_trainer(tmp_path / kind, kind == "sharded", plugin=plugin, **options, **best)
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=1))
        trainer.train()
        folders = sorted((tmp_path / kind).glob("checkpoint-*"))
        saved.append(([each.name for each in folders], [torch.load(each / OPTIMIZER_FILE) for each in folders]))
        saved[-1] += (list(trainer.model.parameters()), trainer.state.best_metric)
    (ours, states, *others), (theirs, expected, *rest) = saved
    assert ours == theirs != []
    for state, plain in zip(states, expected, strict=True):
        assert_same_state(state, plain)
    torch.testing.assert_close(others, rest, rtol=0, atol=0)


@two_ranks
def test_where_state_is_missing_saving_raises_and_leaves_the_earlier_file(tmp_path):
    trainer = small_trainer(tmp_path, is_sharded=True, save_strategy="steps", save_steps=4)
    trainer.train()
    file = tmp_path / "checkpoint-4" / OPTIMIZER_FILE
    before = file.read_bytes()
    trainer.optimizer.optimizer.consolidate_state_dict = lambda: None
    trainer.optimizer.optimizer.load_state_dict(torch.load(file))
    with raises_on(RuntimeError, ranks=0, match="consolidate_state_dict"):
        trainer._save_optimizer_and_scheduler(str(file.parent))
    assert file.read_bytes() == before


@two_ranks
@pytest.mark.parametrize("how", ["optimizers", "optimizer_cls_and_kwargs", "mixin"])
def test_an_optimizer_may_be_given_too(tmp_path, how):
    from transformers import Trainer
    from zeroshard_integrations.transformers import ZeroShardTrainerMixin

    class Mine(Trainer):
        def compute_loss(self, *arguments: Any, **options: Any):
            return super().compute_loss(*arguments, **options) / 2

    class MineSharded(ZeroShardTrainerMixin, Mine):
        """A Trainer class of a user's, sharded."""

    def run(is_sharded: bool) -> list[nn.Parameter]:
        options: dict[str, Any] = {}
        if how == "optimizer_cls_and_kwargs":
            options["given"] = {how: (optim.Adam, {"lr": 1e-2})}
        if how == "mixin":
            options["base"] = MineSharded if is_sharded else Mine
        trainer = small_trainer(tmp_path, is_sharded, **options)
        if how == "optimizers":
            ours = ZeroRedundancyOptimizer(trainer.model.parameters(), optim.Adam, lr=1e-2)
            trainer.optimizer = ours if is_sharded else optim.Adam(trainer.model.parameters(), lr=1e-2)
        trainer.train()
        assert isinstance(trainer.optimizer.optimizer, ZeroRedundancyOptimizer) == is_sharded
        return list(trainer.model.parameters())

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


@two_ranks
def test_param_groups_take_the_place_of_the_trainers_and_of_no_optimizer(tmp_path, monkeypatch, rank):
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": model.parameters(), "weight_decay": 0.25, "name": "all"}]

    trainer = small_trainer(tmp_path, is_sharded=True, given={"param_groups": groups}, weight_decay=0.5)
    trainer.train()
    assert [group["name"] for group in trainer.optimizer.param_groups] == ["all"]
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.25]
    assert trainer.optimizer.optimizer.defaults["lr"] == 1e-2
    with raises_on(TypeError, ranks=[0, 1], match="rank 1: .*but its result is a NoneType"):
        small_trainer(tmp_path, True, given={"param_groups": lambda of: None if rank else groups(of)}).train()
    optimizer = ZeroRedundancyOptimizer(Line().parameters(), optim.SGD)
    with pytest.raises(ValueError, match="builds the optimizer from param_groups: pass no optimizer"):
        small_trainer(tmp_path, True, given={"param_groups": groups, "optimizers": (optimizer, None)})
    forget_accelerator()
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ValueError, match="launch with torchrun"):
        small_trainer(tmp_path, True, given={"param_groups": groups})


@pytest.mark.ranks(1, backend="gloo")
def test_a_single_process_has_the_plain_optimizer(tmp_path, monkeypatch):
    forget_accelerator()
    monkeypatch.delenv("LOCAL_RANK")
    trainer = small_trainer(tmp_path, is_sharded=True, save_strategy="steps", save_steps=4)
    trainer.train()
    assert type(trainer.optimizer.optimizer) is optim.AdamW
    assert (tmp_path / "checkpoint-4" / OPTIMIZER_FILE).exists()


# ---------------------------------------------------------------------- refused


@two_ranks
def test_what_cannot_be_sharded_is_refused_by_name(tmp_path):
    def factory():
        """Builds several optimizers from a model."""

    def refused(message: str, **given: Any):
        with pytest.raises(ValueError, match=message):
            small_trainer(tmp_path, is_sharded=True, given=given).train()

    refused("LBFGS", optimizer_cls_and_kwargs=(optim.LBFGS, {}))
    refused("cannot shard factory: it is not a subclass", optimizer_cls_and_kwargs=(factory, {}))
    refused("SGD: it updates parameters during", optimizer_cls_and_kwargs=(optim.SGD, {"model": nn.Linear(2, 2)}))
    refused("AdamW: it keeps 8-bit state", optimizer_cls_and_kwargs=(optim.AdamW, {"optim_bits": 8}))
    refused("pass gradients='ddp' or 'sharded'", gradients="shard")
    refused("pass gradients='ddp' or 'sharded'", gradients="sharded", accumulate="all")
    refused("not sharded, SGD", optimizers=(optim.SGD([nn.Parameter(torch.ones(1))]), None))
    with pytest.raises(ValueError, match="save_on_each_node"):
        small_trainer(tmp_path, is_sharded=True, save_on_each_node=True)


@two_ranks
def test_other_parallelism_is_refused_by_its_name(tmp_path):
    from accelerate.utils import DistributedType
    from zeroshard_integrations.transformers import ZeroShardTrainer

    class Fsdp(ZeroShardTrainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            # Which needs GPUs.
            self.accelerator.state.distributed_type = DistributedType.FSDP

    with pytest.raises(ValueError, match="uses FSDP"):
        small_trainer(tmp_path, is_sharded=True, base=Fsdp)

"""Hugging Face's Trainer, ours and with ours in it: training and checkpoints are those of the unsharded optimizer."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from support.example_scripts import PLUGINS, Trained, assert_equal, lines_that_differ, script
from support.example_scripts import train as train_script
from support.framework_training import (
    MUON_ROUNDING,
    SEQUENCES,
    STEPS,
    MuonAndAdamW,
    Run,
    Windows,
    adamw,
    assert_equal_to_unsharded,
    assert_same_muon_state,
    assert_shared,
    assert_unreadable,
    muon_groups,
    muon_model,
    needs,
    new_model,
    warmup,
)
from support.training import assert_same_state, cutting
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_testing import assert_replicas_equal, raises_on, run_on_ranks

pytestmark = [needs("accelerate"), needs("transformers")]
two_ranks = pytest.mark.ranks(2, backend="gloo")
# In float64, another order of additions changes results by some 1e-16.
ROUNDING = 1e-12
KINDS = ["sharded", "plain"]
SHARDED = ["sharded", "sharded, local"]


def skip_where_the_trainer_cannot_resume_on_cpus() -> None:
    import transformers

    if Version(transformers.__version__) < Version("5.18"):
        pytest.skip("before 5.18, transformers loads no optimizer's state on several ranks of CPUs, plain ones neither")


OPTIMIZER_FILE = "optimizer.pt"


class WithLoss(nn.Module):
    """Gives the loss as the Trainer wants it."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = model or new_model()
        self.losses: list[float] = []

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.model(inputs, targets)
        self.losses.append(loss.item())
        return {"loss": loss}


def new_trainer(folder: Path, is_sharded: bool, *, is_built_by_trainer: bool = False, **options: Any):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    module = WithLoss()
    optimizer = adamw(module.model, is_sharded)

    class Consolidate(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if control.should_save and is_sharded:
                optimizer.consolidate_state_dict()

    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=SEQUENCES,
        max_grad_norm=0.5,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        **{"max_steps": STEPS, "save_strategy": "no", **options},
    )
    if is_built_by_trainer:
        built = (ZeroRedundancyOptimizer, {"optimizer_class": optim.AdamW}) if is_sharded else (optim.AdamW, {})
        return Trainer(module, arguments, train_dataset=Windows(), optimizer_cls_and_kwargs=built)
    pair = optimizer, warmup(optimizer)
    return Trainer(module, arguments, train_dataset=Windows(), optimizers=pair, callbacks=[Consolidate()])


def muon_trainer(folder: Path, is_sharded: bool, partition: str, max_steps: int):
    from transformers import Trainer, TrainingArguments
    from zeroshard_integrations.transformers import ZeroShardTrainer

    class Sharded(ZeroShardTrainer):
        sharding_options: ClassVar[dict[str, Any]] = {"partition": partition}

    module = WithLoss(muon_model(partition))
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        optim="adamw_torch",
        per_device_train_batch_size=SEQUENCES,
        max_grad_norm=0.5,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=4,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        max_steps=max_steps,
        save_strategy="steps",
        save_steps=STEPS // 2,
    )
    if is_sharded:
        groups = {"param_groups": lambda trained: muon_groups(trained.model)}
        return Sharded(module, arguments, train_dataset=Windows(), **groups)
    plain = MuonAndAdamW(muon_groups(module.model))
    return Trainer(module, arguments, train_dataset=Windows(), optimizers=(plain, None))


@two_ranks
@pytest.mark.parametrize("partition", MUON_ROUNDING)
def test_muon_and_adamw_train_save_and_resume_as_two_plain_optimizers(tmp_path, partition):
    skip_where_the_trainer_cannot_resume_on_cpus()
    folders, half = {True: tmp_path / "ours", False: tmp_path / "theirs"}, STEPS // 2
    checkpoint = folders[True] / f"checkpoint-{half}"
    compared = {"steps": half, "rounding": MUON_ROUNDING[partition]}

    def save(is_sharded: bool) -> Run:
        trainer = muon_trainer(folders[is_sharded], is_sharded, partition, half)
        trainer.train()
        if is_sharded:
            assert_shared(trainer.optimizer.optimizer, partition)
        return Run(trainer.model.model, trainer.model.losses)

    def resume(is_sharded: bool) -> Run:
        trainer = muon_trainer(tmp_path / "resumed", is_sharded, partition, STEPS)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        return Run(trainer.model.model, trainer.model.losses)

    assert_equal_to_unsharded(save, **compared)
    saved = [torch.load(folder / f"checkpoint-{half}" / OPTIMIZER_FILE) for folder in folders.values()]
    assert_same_muon_state(*saved, partition)
    assert_equal_to_unsharded(resume, **compared)


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
    with pytest.raises(ValueError, match="builds an optimizer of param_groups: pass no other one"):
        small_trainer(tmp_path, True, given={"param_groups": groups, "optimizers": (optimizer, None)})
    forget_accelerator()
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ValueError, match="start it with torchrun"):
        small_trainer(tmp_path, True, given={"param_groups": groups})


def train(folder: Path, is_sharded: bool, resume_from: Path | None = None, **options: Any) -> Run:
    trainer = new_trainer(folder, is_sharded, **options)
    trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
    return Run(trainer.model.model, trainer.model.losses)


@two_ranks
@pytest.mark.parametrize("is_built_by_trainer", [False, True], ids=["given", "built"])
def test_ten_steps_equal_the_unsharded_ones(tmp_path, is_built_by_trainer):
    assert_equal_to_unsharded(lambda is_sharded: train(tmp_path, is_sharded, is_built_by_trainer=is_built_by_trainer))


@two_ranks
def test_a_checkpoint_of_a_consolidated_state_is_the_unsharded_one_and_resumes(tmp_path):
    skip_where_the_trainer_cannot_resume_on_cpus()
    half = STEPS // 2
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    train(ours, True, max_steps=half, save_strategy="steps", save_steps=half)
    train(theirs, False, max_steps=half, save_strategy="steps", save_steps=half)
    saved = [torch.load(folder / f"checkpoint-{half}" / OPTIMIZER_FILE) for folder in (ours, theirs)]
    assert len(saved[1]["state"]) == len(list(new_model().parameters()))
    assert_same_state(*saved)
    checkpoint = ours / f"checkpoint-{half}"
    assert_equal_to_unsharded(lambda is_sharded: train(tmp_path, is_sharded, checkpoint), steps=half)


@two_ranks
def test_saving_without_consolidating_is_an_error_that_says_what_to_call(tmp_path):
    trainer = new_trainer(tmp_path, is_sharded=True, max_steps=1)
    trainer.train()
    # What the Trainer calls when it is time to save; the others would wait in its next collective otherwise.
    with raises_on(RuntimeError, ranks=0, match="consolidate_state_dict"):
        trainer._save_optimizer_and_scheduler(str(tmp_path))
    assert trainer.args.should_save == (dist.get_rank() == 0)
    if trainer.args.should_save:
        assert_unreadable(tmp_path / OPTIMIZER_FILE)


def forget_accelerator() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def _state_of_this_test_alone():
    yield
    forget_accelerator()


def run_script(kind: str, folder: Path, *arguments: Any, plugin: str = "hook", **options: Any) -> Trained:
    """Run a script of the page; sharded without our Trainer, that is the plain one whose Trainer is given our class."""
    forget_accelerator()
    options = {"disable_tqdm": True, **options}
    if kind == "plain":
        return train_script("trainer_plain", folder, *arguments, **options)
    if plugin == "none":
        return train_script("trainer_plain", folder, *arguments, replaced={"Trainer": trainer_without_hook}, **options)
    made = functools.partial(script("trainer_sharded").ZeroShardTrainer, **PLUGINS[plugin])
    return train_script("trainer_sharded", folder, *arguments, replaced={"ZeroShardTrainer": made}, **options)


def assert_as_plain(ours: Trained, theirs: Trained, plugin: str, **options: Any) -> None:
    """Compare two trainings; without DistributedDataParallel there are no warnings of it."""
    assert {*ours.complaints} <= {*theirs.complaints}
    assert_equal(replace(ours, complaints=theirs.complaints) if plugin in SHARDED else ours, theirs, **options)


def trainer_without_hook(model: nn.Module, arguments: Any, **options: Any):
    from transformers import Trainer

    optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    ours = ZeroRedundancyOptimizer, {"optimizer_class": optimizer_class, **kwargs}
    return Trainer(model, arguments, optimizer_cls_and_kwargs=ours, **options)


@pytest.mark.by_default(
    "2-hook-0.5-1-False | 2-hook-0.5-4-True | 2-hook-0.0-1-False | 2-sharded-0.5-4-True | "
    "2-sharded-0.0-1-False | 2-sharded-0.0-4-True | 2-sharded, local-0.5-1-True | 2-sharded, local-0.0-4-False | "
    "2-none-0.5-1-True | 2-none-0.0-4-False"
)
@two_ranks
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("accumulated", [1, 4])
@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0])
@pytest.mark.parametrize("plugin", [*PLUGINS, "none"])
def test_twenty_steps_of_the_script_equal_the_unsharded_ones(tmp_path, bf16, accumulated, max_grad_norm, plugin):
    options = {"bf16": bf16, "gradient_accumulation_steps": accumulated, "max_grad_norm": max_grad_norm}
    rounding = 0.0
    if plugin == "sharded" and accumulated > 1:
        # The means of four batches add up, and not the batches of a rank.
        options, rounding = {**options, "bf16": False, "dtype": torch.float64}, ROUNDING
    ours, theirs = (run_script(kind, tmp_path, plugin=plugin, save_strategy="no", **options) for kind in KINDS)
    assert_as_plain(ours, theirs, plugin, steps=20, rounding=rounding)
    assert len(ours.norms) in ((20,) if max_grad_norm else (0, 20))  # transformers 5.0 logs none without clipping
    assert_replicas_equal(ours.params)


@pytest.mark.by_default("2-hook-0.5 | 2-sharded-0.0")
@two_ranks
@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0])
@pytest.mark.parametrize("plugin", ["hook", "sharded"])
def test_cut_tensors_are_clipped_as_the_unsharded_ones(tmp_path, max_grad_norm, plugin, monkeypatch):
    monkeypatch.setattr(script("trainer_sharded").ZeroShardTrainer, "sharding_options", {"partition": cutting("split")})
    options = {"max_grad_norm": max_grad_norm, "dtype": torch.float64, "save_strategy": "no"}
    ours, theirs = (run_script(kind, tmp_path, plugin=plugin, **options) for kind in KINDS)
    assert_as_plain(ours, theirs, plugin, steps=20, rounding=ROUNDING)


@pytest.mark.by_default("2-hook-adamw_torch | 2-hook-sgd | 2-hook-eager | 2-sharded-adafactor | 2-sharded-rmsprop")
@two_ranks
@pytest.mark.parametrize(
    "options",
    [
        {"optim": "adamw_torch", "adam_beta2": 0.95, "lr_scheduler_type": "cosine"},
        {"optim": "adafactor"},
        {"optim": "sgd", "optim_args": "momentum=0.9"},
        {"optim": "rmsprop", "warmup_steps": 5},
        {"torch_compile_backend": "eager"},
    ],
    ids=lambda options: next(iter(options.values())),
)
@pytest.mark.parametrize("plugin", ["hook", "sharded"])
def test_arguments_mean_what_they_mean_to_the_trainer(tmp_path, options, plugin):
    ours, theirs = (run_script(kind, tmp_path, plugin=plugin, save_strategy="no", **options) for kind in KINDS)
    assert_as_plain(ours, theirs, plugin, steps=20)


@pytest.mark.by_default("hook-1 | sharded-3")
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("plugin", ["hook", "sharded"])
def test_what_two_ranks_save_is_resumed_by_other_numbers_of_ranks(tmp_path, ranks, plugin):
    if ranks > 1:
        skip_where_the_trainer_cannot_resume_on_cpus()
    for kind in KINDS:
        run_on_ranks(save, 2, kind, tmp_path / kind, plugin, init=False)
    saved = [torch.load(tmp_path / kind / "checkpoint-10" / OPTIMIZER_FILE) for kind in KINDS]
    assert_same_state(*saved)
    run_on_ranks(resume, ranks, tmp_path, plugin, init=False)


def save(kind: str, folder: Path, plugin: str) -> None:
    run_script(kind, folder, 0, 10, plugin=plugin, dtype=torch.float64)


def resume(folder: Path, plugin: str) -> None:
    options = {"plugin": plugin, "dtype": torch.float64}
    ours, theirs = (run_script(kind, folder / kind, 10, 20, **options) for kind in KINDS)
    assert_as_plain(ours, theirs, plugin, steps=10, rounding=ROUNDING)


@pytest.mark.by_default("2-hook-epoch | 2-sharded-best")
@two_ranks
@pytest.mark.parametrize("strategy", ["epoch", "best"])
@pytest.mark.parametrize("plugin", ["hook", "sharded"])
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


@pytest.mark.by_default("2-hook-TooLarge-options0 | 2-sharded-Line-options1 | 2-sharded, local-Line-options2")
@two_ranks
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (TooLarge, {"auto_find_batch_size": True}),
        (Line, {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1}),
        (Line, {"gradient_accumulation_steps": 3, "dataloader_drop_last": True, "logging_steps": 3}),
    ],
)
@pytest.mark.parametrize("plugin", PLUGINS)
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

    rounding = 1e-6 if plugin == "sharded" and "gradient_accumulation_steps" in options else 0.0
    torch.testing.assert_close(run(True), run(False), rtol=0, atol=rounding)


@pytest.mark.by_default("2-hook-no checkpointing | 2-sharded-reentrant | 2-sharded, local-not reentrant")
@two_ranks
@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["no checkpointing", "reentrant", "not reentrant"])
@pytest.mark.parametrize("plugin", PLUGINS)
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


@pytest.mark.ranks(1, backend="gloo")
def test_a_single_process_has_the_plain_optimizer(tmp_path, monkeypatch):
    forget_accelerator()
    monkeypatch.delenv("LOCAL_RANK")
    trainer = small_trainer(tmp_path, is_sharded=True, save_strategy="steps", save_steps=4)
    trainer.train()
    assert type(trainer.optimizer.optimizer) is optim.AdamW
    assert (tmp_path / "checkpoint-4" / OPTIMIZER_FILE).exists()


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


def test_the_scripts_differ_in_three_lines():
    assert len(lines_that_differ("trainer_plain", "trainer_sharded")) == 3

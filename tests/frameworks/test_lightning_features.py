"""What else Lightning's Trainer does, under ``strategy="ddp_zeroshard"``: as under ``"ddp"``, unsharded, bitwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from support.example_scripts import PLUGINS
from support.framework_training import needs
from support.lightning_training import recorded, script, strategy
from support.training import assert_bitwise_equal
from torch import optim
from torch.utils.data import DataLoader
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_testing import assert_replicas_equal

pytestmark = [needs("lightning"), pytest.mark.ranks(2, backend="gloo")]

EPOCHS, BATCHES = 4, 5
SUMMARY = "Optimizer state, sharded by zeroshard: "
PLUGIN = ["hook"]


@pytest.fixture(autouse=True, params=["hook", "sharded, local"])
def _plugin(request):
    PLUGIN[:] = [request.param]
    yield
    PLUGIN[:] = ["hook"]


def fit(is_sharded: bool, scheduler: str | None, prepare: Callable[[Any], Any], options: Mapping[str, Any]):
    """Train four epochs of five batches, each with a validation; return the model, and the Trainer."""
    import lightning.pytorch as pl

    examples = script("small_gpt")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = examples.SmallGPT()

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = self.model(**batch)
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
            self.log("val_loss", self.model(**batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            if is_sharded:
                optimizer = ZeroRedundancyOptimizer(self.parameters(), optim.AdamW, lr=1e-2)
            else:
                optimizer = optim.AdamW(self.parameters(), lr=1e-2)
            if scheduler == "plateau":
                reduced = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.1)
                return [optimizer], [{"scheduler": reduced, "monitor": "val_loss", "name": "rate"}]
            if scheduler == "one cycle":
                cycle = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=EPOCHS * BATCHES)
                return [optimizer], [{"scheduler": cycle, "interval": "step", "name": "rate"}]
            return optimizer

    module = Module()
    trainer = pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 2,
            "strategy": strategy("lightning", PLUGIN[0]) if is_sharded else "ddp",
            "max_epochs": EPOCHS,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            **options,
        }
    )
    batches = DataLoader(examples.Windows(2 * 4 * BATCHES), batch_size=4)
    trainer.fit(prepare(module), batches, DataLoader(examples.Windows(16), batch_size=4))
    return module, trainer


def assert_equal(
    options: Callable[[bool], Mapping[str, Any]],
    *,
    scheduler: str | None = None,
    prepare: Callable[[Any], Any] = lambda module: module,
) -> tuple[Any, Any]:
    """Train plainly and sharded; compare parameters, what was logged, and what was said; return both Trainers."""
    found, said = {}, {}
    for is_sharded in (False, True):
        torch.manual_seed(0)
        with recorded() as said[is_sharded]:
            found[is_sharded] = fit(is_sharded, scheduler, prepare, options(is_sharded))
    (theirs, plain), (ours, sharded) = found[False], found[True]
    assert sharded.global_step == plain.global_step
    assert sharded.callback_metrics == plain.callback_metrics
    assert_bitwise_equal(ours.model, theirs.model, "at the end")
    assert_replicas_equal(ours.parameters())
    assert not {line for line in said[True] - said[False] if not line.startswith(SUMMARY)}
    return sharded, plain


def test_early_stopping_and_the_best_model(tmp_path):
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    def options(is_sharded: bool) -> dict[str, Any]:
        # It stops when the loss does not fall by much.
        stopping = EarlyStopping("val_loss", min_delta=0.2, patience=1)
        best = ModelCheckpoint(tmp_path / str(is_sharded), "best", monitor="val_loss", save_last=True)
        return {"callbacks": [stopping, best], "enable_checkpointing": True, "max_epochs": 20}

    ours, theirs = assert_equal(options)
    assert ours.global_step < 20 * BATCHES
    for name in ("best.ckpt", "last.ckpt"):
        saved = [torch.load(tmp_path / str(kind) / name, weights_only=False) for kind in (True, False)]
        torch.testing.assert_close(*[each["optimizer_states"][0]["state"] for each in saved], rtol=0, atol=0)
        torch.testing.assert_close(*[each["state_dict"] for each in saved], rtol=0, atol=0)
    assert ours.checkpoint_callback.best_model_score == theirs.checkpoint_callback.best_model_score


def test_norms_of_gradients_are_logged():
    import lightning.pytorch as pl
    from lightning.pytorch.utilities import grad_norm

    class Log(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            module.log_dict(grad_norm(module, 2))

    ours, _ = assert_equal(lambda _: {"callbacks": [Log()]})
    assert ours.callback_metrics["grad_2.0_norm_total"] > 0


@pytest.mark.by_default("hook-2-unclipped | sharded, local-2-clipped")
@pytest.mark.parametrize("clip", [None, 0.5], ids=["unclipped", "clipped"])
def test_fp16_with_a_scaler(clip):
    from lightning.pytorch.plugins import MixedPrecision

    # It is too large at first: some steps are skipped.
    def options(_: bool) -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "gradient_clip_val": clip}

    ours, _ = assert_equal(options)
    assert ours.precision_plugin.scaler.get_scale() < 2.0**24


@pytest.mark.by_default("hook-2-plateau | sharded, local-2-one cycle")
@pytest.mark.parametrize("scheduler", ["plateau", "one cycle"])
def test_schedulers(scheduler, tmp_path):
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger

    def options(is_sharded: bool) -> dict[str, Any]:
        logger = CSVLogger(tmp_path, str(is_sharded), version=0)
        return {"callbacks": [LearningRateMonitor("step")], "logger": logger, "log_every_n_steps": 1}

    ours, _ = assert_equal(options, scheduler=scheduler)
    if ours.is_global_zero:
        logged = [(tmp_path / str(kind) / "version_0" / "metrics.csv").read_text() for kind in (True, False)]
        assert logged[0] == logged[1]


def test_stochastic_weight_averaging():
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    assert_equal(lambda _: {"callbacks": [StochasticWeightAveraging(1e-3, swa_epoch_start=2)]})


def test_exponential_averages_of_weights():
    callbacks = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")

    assert_equal(lambda _: {"callbacks": [callbacks.EMAWeightAveraging(decay=0.9)]})


def test_accumulation_that_changes():
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    assert_equal(lambda _: {"callbacks": [GradientAccumulationScheduler({0: 1, 2: 2})]})


def test_a_compiled_model():
    def prepare(module: Any) -> Any:
        module.model.compile(backend="aot_eager")
        return module

    assert_equal(lambda _: {}, prepare=prepare)


@pytest.mark.by_default("hook-2-find_unused_parameters | sharded, local-2-static_graph")
@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_options_of_ddp(option):
    def options(is_sharded: bool) -> dict[str, Any]:
        from lightning.pytorch.strategies import DDPStrategy
        from zeroshard_integrations.lightning import ZeroShardStrategy

        return {
            "strategy": ZeroShardStrategy(**{option: True}, **PLUGINS[PLUGIN[0]])
            if is_sharded
            else DDPStrategy(**{option: True})
        }

    assert_equal(options)


def test_a_learning_rate_is_found(tmp_path):
    from lightning.pytorch.callbacks import LearningRateFinder

    def options(_: bool) -> dict[str, Any]:
        finder = LearningRateFinder(num_training_steps=5, attr_name="rate")
        return {"callbacks": [finder], "max_epochs": 1, "default_root_dir": tmp_path}

    def prepare(module: Any) -> Any:
        module.rate = 1e-2
        return module

    assert_equal(options, prepare=prepare)


def test_fitting_again_and_testing():
    ours, theirs = assert_equal(lambda _: {"max_epochs": 1})
    for trainer in (theirs, ours):
        loader = DataLoader(script("small_gpt").Windows(2 * 4 * BATCHES), batch_size=4)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(trainer.lightning_module, loader)
        trainer.validate(trainer.lightning_module, loader, verbose=False)
    assert ours.callback_metrics == theirs.callback_metrics
    assert_bitwise_equal(ours.lightning_module.model, theirs.lightning_module.model, "after a second fit()")

"""The scripts of the page about Lightning and Fabric: sharding changes a few lines, and none of their numbers."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.combinations import each_of
from support.example_scripts import PLUGINS, lines_that_differ
from support.framework_training import ROUNDING, Run, assert_equal_to_unsharded, needs
from support.lightning_training import TWENTY, recorded, script, strategy, train
from torch import nn
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import PeerLostError
from zeroshard_testing import assert_replicas_equal, raises_on, run_on_ranks

pytestmark = needs("lightning")

FRAMEWORKS = ["lightning", "fabric"]
SUMMARY = "Optimizer state, sharded by zeroshard: "


def assert_trained_alike(
    framework: str, folder: Path, steps: int = TWENTY, rounding: float = 0.0, **options: Any
) -> None:
    """Train plainly, then sharded: the same numbers, and no line logged and no warning that is not there plainly."""
    said = {}

    def run(is_sharded: bool) -> Run:
        with recorded() as said[is_sharded]:
            return train(framework, is_sharded, folder / f"{is_sharded}.ckpt", **options)

    # Lightning shows some warnings once in a process: those of plain training come first.
    plain = run(False)
    assert_equal_to_unsharded(lambda is_sharded: run(True) if is_sharded else plain, steps, rounding)
    assert not {line for line in said[True] - said[False] if not line.startswith(SUMMARY)}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_three_lines_differ(framework: str) -> None:
    differences = lines_that_differ(f"{framework}_plain", f"{framework}_sharded")
    assert len(differences) == 3


@pytest.mark.ranks(2, backend="gloo")
@each_of(
    "clipping", ["norm", "value", "off"], framework=FRAMEWORKS, precision=["32-true", "bf16-mixed"], accumulated=[4, 1]
)
@pytest.mark.parametrize("plugin", [*PLUGINS, "none"])
def test_sharded_training_equals_plain_training(framework, precision, accumulated, clipping, plugin, tmp_path):
    options = {"precision": precision, "accumulated": accumulated, "clipping": clipping, "plugin": plugin}
    if plugin == "sharded" and accumulated > 1:
        # The means of four batches add up, and not the batches of a rank.
        options |= {"precision": "64-true", "rounding": ROUNDING}
    assert_trained_alike(framework, tmp_path, TWENTY * accumulated, **options)


@pytest.mark.ranks(2, backend="gloo")
@each_of("framework", FRAMEWORKS, clipping=["norm", "value"], plugin=["hook", "sharded"])
def test_cut_tensors_clipped_in_float64(framework, clipping, plugin, tmp_path):
    options = {"precision": "64-true", "partition": "split", "clipping": clipping, "plugin": plugin}
    ours, theirs = (train(framework, is_sharded, tmp_path / "run.ckpt", **options) for is_sharded in (True, False))
    for (name, value), expected in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, expected, rtol=0, atol=ROUNDING, msg=name)


def resumed(framework: str, is_sharded: bool, checkpoint: Path, **options: Any) -> list[torch.Tensor]:
    run = train(framework, is_sharded, checkpoint, precision="64-true", **options)
    return [param.detach() for param in run.model.parameters()]


@each_of("framework", FRAMEWORKS, partition=["whole", "split"], plugin=["hook", "sharded"])
def test_saved_at_two_ranks_and_resumed_at_one_and_three(
    framework: str, partition: str, plugin: str, tmp_path: Path
) -> None:
    run = functools.partial(run_on_ranks, resumed, init=False, plugin=plugin)
    for is_sharded in (True, False):
        saved = tmp_path / f"{is_sharded}.ckpt"
        run(ranks=2, framework=framework, is_sharded=is_sharded, checkpoint=saved, partition=partition, steps=10)
    for ranks in (1, 3):
        ours, theirs = (
            run(
                ranks=ranks,
                framework=framework,
                is_sharded=is_sharded,
                checkpoint=tmp_path / "resumed.ckpt",
                resume_from=tmp_path / f"{is_sharded}.ckpt",
                partition=partition,
            )[0]
            for is_sharded in (True, False)
        )
        # Three gradients may be added up in another order than by an all-reduce.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=ROUNDING)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_plain_optimizer_is_refused_on_every_rank(framework, tmp_path):
    with raises_on(TypeError, ranks=[0, 1], match="trains with zeroshard.ZeroRedundancyOptimizer.* AdamW: build"):
        train(framework, False, tmp_path / "run.ckpt", strategy="ddp_zeroshard")


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_several_optimizers_are_refused_on_every_rank(framework):
    import lightning.pytorch as pl
    from lightning.fabric import Fabric

    made = script(f"{framework}_sharded").ZeroRedundancyOptimizer

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.automatic_optimization = torch.nn.Linear(4, 4), False

        def training_step(self, batch):
            raise AssertionError

        def configure_optimizers(self):
            return [made([param], torch.optim.SGD, lr=0.1) for param in self.model.parameters()]

    module, options = Module(), {"accelerator": "cpu", "devices": 2, "strategy": "ddp_zeroshard"}
    match = "got|returned|received) 2: use one optimizer with a class per param group, or leave the hook out, or wrap"
    with raises_on(TypeError, ranks=[0, 1], match=f"({match}"):
        if framework == "lightning":
            trainer = pl.Trainer(**options, logger=False, enable_checkpointing=False)
            trainer.fit(module, torch.utils.data.DataLoader(torch.ones(4, 4)))
        else:
            fabric = Fabric(**options)
            fabric.launch()
            fabric.setup(module.model, *module.configure_optimizers())


@pytest.mark.ranks(2, backend="gloo")
def test_lightning_saves_nothing_that_lacks_values_and_keeps_the_earlier_file(tmp_path):
    import lightning.pytorch as pl

    path = tmp_path / "mine.ckpt"

    class SaveWhatIsHere(pl.Callback):
        def on_train_end(self, trainer, module):
            if trainer.is_global_zero:
                path.write_text("earlier")
            with raises_on(RuntimeError, ranks=[0, 1], match="consolidate_state_dict"):
                trainer.strategy.save_checkpoint({"mine": trainer.optimizers[0].state_dict()}, path)

    train("lightning", True, tmp_path / "run.ckpt", steps=2, callbacks=[SaveWhatIsHere()])
    assert path.read_text() == "earlier"


@pytest.mark.ranks(2, backend="gloo")
def test_fabric_saves_nothing_that_lacks_values_and_keeps_the_earlier_file(tmp_path):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy=script("fabric_sharded") and "ddp_zeroshard")
    fabric.launch()
    model = torch.nn.Linear(64, 64)
    built = script("fabric_sharded").ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    model, optimizer = fabric.setup(model, built)
    fabric.backward(model(torch.ones(1, 64)).sum())
    optimizer.step()
    path = tmp_path / "mine.ckpt"
    if fabric.is_global_zero:
        path.write_text("earlier")
    with raises_on(RuntimeError, ranks=[0, 1], match="consolidate_state_dict"):
        fabric.save(path, {"optimizer": built.state_dict()})
    assert path.read_text() == "earlier"
    fabric.save(path, {"optimizer": optimizer})
    assert len(torch.load(path)["optimizer"]["state"]) == 2


@pytest.mark.ranks(2, backend="gloo")
def test_fabric_sets_up_model_and_optimizer_together(tmp_path):
    from lightning.fabric import Fabric

    module = script("fabric_sharded")
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_zeroshard")
    fabric.launch()
    model = torch.nn.Linear(4, 4)
    fabric.setup_module(model)
    optimizer = module.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    with raises_on(RuntimeError, ranks=[0, 1], match=r"call fabric\.setup\(model, optimizer\)"):
        fabric.setup_optimizers(optimizer)


def muon_and_adamw(params: Iterable[nn.Parameter], optimizer_class: Any, **options: Any) -> ZeroRedundancyOptimizer:
    params = list(params)
    matrices = {"params": [param for param in params if param.dim() == 2], "optimizer_class": torch.optim.Muon}
    rest = {"params": [param for param in params if param.dim() != 2]}
    return ZeroRedundancyOptimizer([matrices, rest], optimizer_class, **options)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("classes", ["AdamW", "Muon + AdamW"])
def test_the_size_of_the_state_is_logged_where_the_model_summary_is(tmp_path, classes, monkeypatch):
    import lightning.pytorch as pl
    import torch.distributed as dist

    if "Muon" in classes:
        monkeypatch.setattr("support.example_scripts.ZeroRedundancyOptimizer", muon_and_adamw)
    sizes = torch.zeros(2, dtype=torch.int64)

    class Measure(pl.Callback):
        def on_train_end(self, trainer, module):
            states = [entries for each in trainer.optimizers[0].local_optimizers for entries in each.state.values()]
            mine = sum(value.nbytes for entries in states for value in entries.values())
            sizes[dist.get_rank()] = mine
            dist.all_reduce(sizes)

    with recorded() as said:
        train("lightning", True, tmp_path / "run.ckpt", steps=2, callbacks=[Measure()])
    shown = [line for line in said if line.startswith(SUMMARY)]
    expected = (
        f"{SUMMARY}{sizes.max() / 1e6:,.3f} MB per rank at most, on 2 ranks; {sizes.sum() / 1e6:,.3f} MB unsharded "
        f"({classes})"
    )
    assert shown == ([expected] if dist.get_rank() == 0 else [])
    with recorded() as said:
        train("lightning", True, tmp_path / "run.ckpt", steps=2, enable_model_summary=False)
    assert not [line for line in said if line.startswith(SUMMARY)]


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("plugin", ["sharded", "sharded, local"])
def test_fabric_reduces_batches_where_the_strategy_says(plugin, rank, tmp_path):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy("fabric", plugin))
    fabric.launch()
    made = torch.nn.Linear(4, 4)
    model, optimizer = fabric.setup(made, ZeroRedundancyOptimizer(made.parameters(), torch.optim.SGD, lr=0.1))
    assert model.module is made
    kinds = []
    for is_accumulating in (True, False):
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            fabric.backward(model(torch.ones(1, 4)).sum())
        kinds.append({type(param.grad).__name__ for param in made.parameters()})
    assert kinds == [{"Tensor" if "local" in plugin else "GradPlaceholder"}, {"GradPlaceholder"}]
    optimizer.step()
    # Rank 0 evaluates alone.
    if rank == 0:
        with torch.no_grad():
            model(torch.ones(1, 4))
    fabric.save(tmp_path / "run.ckpt", {"model": model})
    assert [*torch.load(tmp_path / "run.ckpt")["model"]] == ["weight", "bias"]
    assert_replicas_equal(made.parameters())


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("fails", [False, True])
def test_a_module_has_no_hooks_after_training(fails, tmp_path, monkeypatch):
    module = script("lightning_sharded").Module()
    monkeypatch.setattr(script("lightning_sharded"), "Module", lambda: module)

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("in backward")

    def fit() -> None:
        train("lightning", True, tmp_path / "run.ckpt", plugin="sharded", steps=2)

    if fails:
        handle = next(module.parameters()).register_hook(fail)
        with raises_on(ArithmeticError, ranks=[0, 1], match="in backward"):
            fit()
        handle.remove()
        with raises_on(PeerLostError, ranks=[0, 1], match="an exception interrupted it. Start again from a checkpoint"):
            fit()
    else:
        fit()
        fit()
        assert_replicas_equal(module.parameters())
    module.zero_grad()
    sum(param.sum() for param in module.parameters()).backward()
    assert {type(param.grad) for param in module.parameters()} == {torch.Tensor}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradients": "shard"}, "gradients='shard', accumulate='owner': pass gradients='ddp' or 'sharded', and"),
        ({"gradients": "sharded", "accumulate": "all"}, "accumulate='all': pass gradients='ddp' or 'sharded', and"),
        ({"gradients": "sharded", "init_sync": False}, "not use DistributedDataParallel or its options init_sync"),
    ],
    ids=["gradients", "accumulate", "init_sync"],
)
def test_what_the_strategies_do_not_have_is_refused(framework, options, message):
    from zeroshard_integrations.lightning import FabricZeroShardStrategy, ZeroShardStrategy

    with pytest.raises(ValueError, match=message):
        (ZeroShardStrategy if framework == "lightning" else FabricZeroShardStrategy)(**options)

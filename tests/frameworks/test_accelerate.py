"""Accelerate, with ZeroShardPlugin and without: training and checkpoints are those of the unsharded optimizer."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.example_scripts import PLUGINS, Trained, assert_equal, lines_that_differ, script, sharded, train
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
from support.training import assert_same_state
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_testing import assert_replicas_equal, raises_on, run_on_ranks

pytestmark = needs("accelerate")
two_ranks = pytest.mark.ranks(2, backend="gloo")

OPTIMIZER_FILE = "optimizer.bin"


# In float64, another order of additions changes results by some 1e-16.
ROUNDING = 1e-12


def forget_accelerator() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def _state_of_this_test_alone():
    yield
    forget_accelerator()


def train_script(kind: str, *arguments: Any, plugin: str = "hook", partition: str = "whole", **options: Any) -> Trained:
    """Run a script of the page; sharded without the plugin, that is the plain one with our optimizer class."""
    from zeroshard_integrations.accelerate import ZeroShardPlugin

    forget_accelerator()
    ours = sharded(partition)
    if kind == "plain":
        return train("accelerate_plain", *arguments, **options)
    if plugin in PLUGINS:
        made = functools.partial(ZeroShardPlugin, **PLUGINS[plugin])
        replaced = {"ZeroRedundancyOptimizer": ours, "ZeroShardPlugin": made}
        return train("accelerate_sharded", *arguments, replaced=replaced, **options)
    without_hook = functools.partial(ours, optimizer_class=optim.AdamW)
    return train("accelerate_plain", *arguments, replaced={"AdamW": without_hook}, **options)


class Training:
    """A plain loop around what ``prepare()`` returned."""

    def __init__(self, is_sharded: bool, muon: str = "", plugin: str = "hook", **options: Any) -> None:
        from accelerate import Accelerator
        from zeroshard_integrations.accelerate import ZeroShardPlugin

        preparing = self.accelerator = Accelerator(cpu=True, **options)
        self.model, self.losses = muon_model(muon) if muon else new_model(), []
        if muon and is_sharded:
            preparing = ZeroShardPlugin(self.accelerator, **PLUGINS[plugin])
            self.built = preparing.create_optimizer(self.model, muon_groups, optim.AdamW, partition=muon)
            assert_shared(self.built, muon)
        else:
            self.built = MuonAndAdamW(muon_groups(self.model)) if muon else adamw(self.model, is_sharded)
        batches = DataLoader(Windows(), batch_size=SEQUENCES)
        prepared = preparing.prepare(self.model, self.built, batches, warmup(self.built))
        self.ddp, self.optimizer, self.batches, self.scheduler = prepared
        assert isinstance(self.ddp, DistributedDataParallel) == (not is_sharded or plugin == "hook")

    def run(self, steps: range = range(STEPS)) -> Run:
        for step, batch in enumerate(self.batches):
            if step not in steps:
                continue
            with self.accelerator.accumulate(self.ddp):
                loss = self.ddp(**batch)
                self.losses.append(loss.item())
                self.accelerator.backward(loss)
                self.accelerator.clip_grad_norm_(self.ddp.parameters(), 0.5)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return Run(self.model, self.losses)


@two_ranks
@pytest.mark.parametrize("accumulated", [1, 2])
def test_ten_steps_equal_the_unsharded_ones(accumulated):
    assert_equal_to_unsharded(lambda is_sharded: Training(is_sharded, gradient_accumulation_steps=accumulated).run())


@two_ranks
def test_an_optimizer_that_has_state_is_prepared():
    def train(is_sharded: bool) -> Run:
        training = Training(is_sharded)
        training.run(range(5))
        training.optimizer = training.accelerator.prepare(training.built)
        return training.run(range(5, STEPS))

    assert_equal_to_unsharded(train)


@two_ranks
def test_a_state_consolidated_before_it_is_saved_is_the_unsharded_one_and_resumes(tmp_path):
    half = STEPS // 2
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder, is_sharded in ((ours, True), (theirs, False)):
        training = Training(is_sharded)
        training.run(range(half))
        if is_sharded:
            consolidate = training.built.consolidate_state_dict
            training.accelerator.register_save_state_pre_hook(lambda *_, call=consolidate: call())
        training.accelerator.save_state(folder)
        training.accelerator.wait_for_everyone()
    saved = [torch.load(folder / OPTIMIZER_FILE) for folder in (ours, theirs)]
    assert len(saved[1]["state"]) == len(list(new_model().parameters()))
    assert_same_state(*saved)

    def resume(is_sharded: bool) -> Run:
        training = Training(is_sharded)
        training.accelerator.load_state(ours)
        return training.run(range(half, STEPS))

    assert_equal_to_unsharded(resume, steps=half)


@pytest.mark.by_default("2-hook-whole-1 | 2-sharded, local-level-2")
@two_ranks
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("partition", MUON_ROUNDING)
@pytest.mark.parametrize("plugin", ["hook", "sharded, local"])
def test_muon_and_adamw_train_save_and_resume_as_two_plain_optimizers(tmp_path, partition, accumulated, plugin):
    folders, half = {True: tmp_path / "ours", False: tmp_path / "theirs"}, STEPS // 2
    options = {"muon": partition, "gradient_accumulation_steps": accumulated, "plugin": plugin}
    compared = {"steps": half, "rounding": MUON_ROUNDING[partition]}

    def save(is_sharded: bool) -> Run:
        training = Training(is_sharded, **options)
        run = training.run(range(half))
        training.accelerator.save_state(folders[is_sharded])
        training.accelerator.wait_for_everyone()
        return run

    def resume(is_sharded: bool) -> Run:
        training = Training(is_sharded, **options)
        training.accelerator.load_state(folders[True])
        return training.run(range(half, STEPS))

    assert_equal_to_unsharded(save, **compared)
    saved = [torch.load(folder / OPTIMIZER_FILE) for folder in folders.values()]
    assert_same_muon_state(*saved, partition)
    assert_equal_to_unsharded(resume, **compared)


@two_ranks
def test_param_groups_that_are_no_function_to_a_list_are_refused_on_every_rank(rank):
    from accelerate import Accelerator
    from zeroshard_integrations.accelerate import ZeroShardPlugin

    plugin, model = ZeroShardPlugin(Accelerator(cpu=True)), new_model()

    def refused(error: type[Exception], message: str, given: Any) -> None:
        with raises_on(error, ranks=[0, 1], match=message):
            plugin.create_optimizer(model, given, optim.AdamW)

    refused(TypeError, "returns a list of dicts, but it is a list", muon_groups(model))
    refused(TypeError, "but its result is a NoneType", lambda _: None)
    refused(TypeError, "but its result is a dict", lambda of: muon_groups(of)[1])
    refused(TypeError, "but its result is a list", lambda of: list(of.parameters()))
    # What goes wrong on one rank.
    refused(TypeError, "rank 1: .*NoneType", lambda of: None if rank else muon_groups(of))
    refused(TypeError, "missing 1 required positional argument: 'head'", lambda of, head: muon_groups(of))


@two_ranks
def test_saving_without_consolidating_is_an_error_that_says_what_to_call(tmp_path):
    training = Training(is_sharded=True)
    training.run(range(1))
    with raises_on(RuntimeError, ranks=0, match="consolidate_state_dict"):
        training.accelerator.save_state(tmp_path)
    if training.accelerator.is_main_process:
        assert_unreadable(tmp_path / OPTIMIZER_FILE)


@pytest.mark.by_default(
    "2-hook-norm-1-no | 2-hook-norm-4-bf16 | 2-hook-value-4-bf16 | 2-hook-off-1-no | 2-sharded-norm-4-bf16 | "
    "2-sharded-value-1-no | 2-sharded-value-4-bf16 | 2-sharded-off-4-bf16 | 2-sharded, local-norm-4-no | "
    "2-sharded, local-value-1-no | 2-sharded, local-off-1-bf16 | 2-none-norm-1-no | 2-none-value-1-bf16 | "
    "2-none-off-4-no"
)
@two_ranks
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulated", [1, 4])
@pytest.mark.parametrize("clip", ["norm", "value", "off"])
@pytest.mark.parametrize("plugin", [*PLUGINS, "none"])
def test_twenty_steps_of_the_script_equal_the_unsharded_ones(precision, accumulated, clip, plugin):
    options, rounding = {"precision": precision, "accumulated": accumulated, "clip": clip}, 0.0
    if plugin == "sharded" and accumulated > 1:
        # The means of four batches add up, and not the batches of a rank.
        options, rounding = {**options, "precision": "no", "dtype": torch.float64}, ROUNDING
    ours, theirs = (train_script(kind, None, plugin=plugin, **options) for kind in ("sharded", "plain"))
    assert_equal(ours, theirs, steps=20 * accumulated, rounding=rounding)
    assert len(ours.norms) == (20 if clip == "norm" else 0)
    assert_replicas_equal(ours.params)


@pytest.mark.by_default("2-hook-norm | 2-sharded-value")
@two_ranks
@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize("plugin", ["hook", "sharded"])
def test_cut_tensors_are_clipped_as_the_unsharded_ones(clip, plugin):
    options = {"clip": clip, "dtype": torch.float64, "partition": "split"}
    ours = train_script("sharded", None, plugin=plugin, **options)
    del options["partition"]
    assert_equal(ours, train_script("plain", None, **options), steps=20, rounding=ROUNDING)


@pytest.mark.by_default("hook-1 | sharded-3")
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("plugin", ["hook", "sharded"])
def test_what_two_ranks_save_is_resumed_by_other_numbers_of_ranks(tmp_path, ranks, plugin):
    for kind in ("sharded", "plain"):
        run_on_ranks(save, 2, kind, tmp_path / kind, plugin, init=False)
    assert_same_state(*(torch.load(tmp_path / kind / "000010" / OPTIMIZER_FILE) for kind in ("sharded", "plain")))
    run_on_ranks(resume, ranks, tmp_path, plugin, init=False)


def save(kind: str, folder: Path, plugin: str) -> None:
    train_script(kind, folder, 0, 10, plugin=plugin, dtype=torch.float64)


def resume(folder: Path, plugin: str) -> None:
    options = {"plugin": plugin, "dtype": torch.float64}
    ours, theirs = (train_script(kind, folder / kind, 10, 20, **options) for kind in ("sharded", "plain"))
    assert_equal(ours, theirs, steps=10, rounding=ROUNDING)


@two_ranks
def test_where_state_is_missing_saving_raises_and_leaves_the_earlier_files(tmp_path):
    accelerator, model, optimizer, _ = prepare_small_model()
    step(accelerator, model, optimizer)
    accelerator.save_state(tmp_path)
    accelerator.wait_for_everyone()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    step(accelerator, model, optimizer)
    optimizer.optimizer.consolidate_state_dict = lambda: None
    with raises_on(RuntimeError, ranks=0, match="consolidate_state_dict"):
        accelerator.save_state(tmp_path)
    if accelerator.is_main_process:
        mine = OPTIMIZER_FILE, "model.safetensors"
        assert {name: (tmp_path / name).read_bytes() for name in mine} == {name: before[name] for name in mine}


def prepare_small_model(plugin: str = "hook", **options: Any):
    from accelerate import Accelerator
    from zeroshard_integrations.accelerate import ZeroShardPlugin

    forget_accelerator()
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    preparing = ZeroShardPlugin(accelerator, **PLUGINS[plugin])
    built = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=1e-2)
    optimizer, prepared = preparing.prepare(built, model)
    return accelerator, prepared, optimizer, preparing


def step(accelerator: Any, model: nn.Module, optimizer: optim.Optimizer) -> None:
    accelerator.backward(model(torch.ones(4, 8) * (1 + accelerator.process_index)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


@two_ranks
@pytest.mark.parametrize("plugin", ["hook", "sharded"])
def test_two_models_have_an_optimizer_each(plugin):
    from accelerate import Accelerator
    from zeroshard_integrations.accelerate import ZeroShardPlugin

    def run(is_sharded: bool) -> list[nn.Parameter]:
        forget_accelerator()
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        built = [nn.Linear(8, 8), nn.Linear(8, 1)]
        plain = [optim.AdamW(model.parameters(), lr=1e-2) for model in built]
        ours = [ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=1e-2) for model in built]
        preparing = ZeroShardPlugin(accelerator, **PLUGINS[plugin]) if is_sharded else accelerator
        first, second, *optimizers = preparing.prepare(*built, *(ours if is_sharded else plain))
        for number in range(6):
            accelerator.backward(second(first(torch.ones(4, 8) * (1 + accelerator.process_index))).square().mean())
            for optimizer in optimizers[: 1 + number % 2]:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return [param for model in built for param in model.parameters()]

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


@two_ranks
@pytest.mark.parametrize("plugin", ["hook", "sharded"])
def test_two_optimizers_of_one_model_are_refused(plugin):
    from accelerate import Accelerator
    from zeroshard_integrations.accelerate import ZeroShardPlugin

    forget_accelerator()
    model = nn.Linear(8, 16)
    optimizers = [ZeroRedundancyOptimizer([param], optim.AdamW, lr=1e-2) for param in model.parameters()]
    match = "got 2: give one optimizer a class per param group, or leave the hook out, or wrap a model for each"
    with raises_on(TypeError, ranks=[0, 1], match=match):
        ZeroShardPlugin(Accelerator(cpu=True), **PLUGINS[plugin]).prepare(model, *optimizers)


@pytest.mark.by_default("2-hook-1-True-True | 2-sharded-2-False-False | 2-sharded, local-2-True-True")
@two_ranks
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("muon", [True, False])
@pytest.mark.parametrize(
    ("plugin", "accumulated"), [("hook", 1), ("sharded", 1), ("sharded", 2), ("sharded, local", 2)]
)
def test_a_gradient_scaler_skips_the_steps_that_it_skips_unsharded(clip, muon, plugin, accumulated):
    from accelerate import Accelerator
    from zeroshard_integrations.accelerate import ZeroShardPlugin

    def run(is_sharded: bool) -> list[Any]:
        forget_accelerator()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
        # Accelerate makes one for mixed_precision="fp16" on GPUs alone.
        accelerator.scaler = torch.amp.GradScaler("cpu", growth_interval=3)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        if muon:
            groups = script("muon").param_groups(model, model[2])
            ours, plain = ZeroRedundancyOptimizer(groups, optim.AdamW, partition="level"), MuonAndAdamW(groups)
        else:
            ours, plain = (build(model.parameters(), lr=1e-2) for build in (sharded_adam, optim.Adam))
        preparing = ZeroShardPlugin(accelerator, **PLUGINS[plugin]) if is_sharded else accelerator
        prepared, optimizer = preparing.prepare(model, ours if is_sharded else plain)
        skipped = []
        for number in range(12 * accumulated):
            overflows = number // accumulated in (4, 5) and accelerator.process_index == 1
            with accelerator.accumulate(prepared):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = prepared(torch.ones(4, 8) * (1 + accelerator.process_index)).square().mean()
                accelerator.backward(loss * (1e38 if overflows else 1.0))
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                skipped.append(accelerator.optimizer_step_was_skipped)
        assert skipped[4:6] == [True, True]
        assert not all(skipped[6:])
        return [skipped, accelerator.scaler.get_scale(), [param.detach() for param in model.parameters()]]

    # Means are added up in another order.
    rounding = 1e-5 if plugin == "sharded" and accumulated > 1 else 0.0
    torch.testing.assert_close(run(True), run(False), rtol=0, atol=rounding)


def sharded_adam(params: Any, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, optim.Adam, **options)


@two_ranks
@pytest.mark.parametrize("plugin", ["hook", "sharded"])
def test_clipping_a_plateau_and_an_average_of_the_model(plugin):
    from accelerate import Accelerator
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    from zeroshard_integrations.accelerate import ZeroShardPlugin

    def run(is_sharded: bool) -> list[torch.Tensor]:
        forget_accelerator()
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        ours, plain = ZeroRedundancyOptimizer(model.parameters(), optim.Adam), optim.Adam(model.parameters())
        preparing = ZeroShardPlugin(accelerator, **PLUGINS[plugin]) if is_sharded else accelerator
        prepared, optimizer = preparing.prepare(model, ours if is_sharded else plain)
        scheduler = accelerator.prepare(optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        norms = []
        for _ in range(6):
            accelerator.backward(prepared(torch.ones(4, 8) * (1 + accelerator.process_index)).square().mean())
            norms.append(accelerator.clip_grad_norm_(prepared.parameters(), 0.1))
            optimizer.step()
            scheduler.step(1.0)
            averaged.update_parameters(model)
            optimizer.zero_grad()
        return [*norms, *averaged.parameters()]

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


@two_ranks
@pytest.mark.parametrize("plugin", ["hook", "sharded"])
def test_a_compiled_model_has_the_hook_too(plugin):
    _, model, optimizer, _ = prepare_small_model(plugin, dynamo_backend="eager")
    model(torch.ones(4, 8)).square().mean().backward()
    assert {type(param.grad).__name__ for param in model.parameters()} == {"GradPlaceholder"}
    optimizer.step()
    assert_replicas_equal(model.parameters())


@pytest.mark.ranks(1, backend="gloo")
@pytest.mark.parametrize("plugin", ["hook", "sharded"])
def test_a_single_process_without_ddp_trains_and_saves(tmp_path, monkeypatch, plugin):
    monkeypatch.delenv("LOCAL_RANK")
    accelerator, model, optimizer, _ = prepare_small_model(plugin)
    assert not isinstance(model, DistributedDataParallel)
    step(accelerator, model, optimizer)
    accelerator.save_state(tmp_path)
    assert len(torch.load(tmp_path / OPTIMIZER_FILE)["state"]) == 4


def batch_of(accelerator: Any) -> torch.Tensor:
    return torch.ones(4, 8) * (1 + accelerator.process_index)


@two_ranks
def test_a_model_whose_gradients_are_sharded_stays_what_it_is(rank):
    accelerator, model, optimizer, _ = prepare_small_model("sharded")
    step(accelerator, model, optimizer)
    assert isinstance(model, nn.Sequential)
    assert accelerator.unwrap_model(model) is model
    # Rank 0 evaluates alone.
    if rank == 0:
        model.eval()
        with torch.no_grad():
            model(batch_of(accelerator))
        model.train()
    accelerator.backward(model(batch_of(accelerator)).sum())
    assert {type(param.grad).__name__ for param in model.parameters()} == {"GradPlaceholder"}
    optimizer.step()
    assert_replicas_equal(model.parameters())


@two_ranks
@pytest.mark.parametrize("plugin", ["sharded", "sharded, local"])
def test_batches_are_reduced_where_the_plugin_says(plugin):
    accelerator, model, _, _ = prepare_small_model(plugin, gradient_accumulation_steps=2)
    kinds = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch_of(accelerator)).sum())
        kinds.append({type(param.grad).__name__ for param in model.parameters()})
    assert kinds == [{"Tensor" if "local" in plugin else "GradPlaceholder"}, {"GradPlaceholder"}]


@two_ranks
def test_a_model_without_a_sharded_optimizer_is_wrapped():
    accelerator, model, _, preparing = prepare_small_model("sharded, local")
    other = nn.Linear(8, 8)
    prepared, _ = preparing.prepare(other, optim.SGD(other.parameters()))
    assert isinstance(prepared, DistributedDataParallel)
    with accelerator.accumulate(model, prepared), accelerator.no_sync(model), accelerator.no_sync(prepared):
        assert not prepared.require_backward_grad_sync
        accelerator.backward(model(prepared(batch_of(accelerator))).sum())
    assert all(type(param.grad) is torch.Tensor for param in model.parameters())


@two_ranks
def test_what_cannot_be_sharded_is_refused_on_every_rank():
    from accelerate import Accelerator
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
    from zeroshard_integrations.accelerate import ZeroShardPlugin

    def new(options: dict[str, Any], **plugin: Any):
        forget_accelerator()
        handler = DistributedDataParallelKwargs(**options)
        return ZeroShardPlugin(Accelerator(cpu=True, kwargs_handlers=[handler]), **plugin)

    for wrong in ({"gradients": "shard"}, {"gradients": "sharded", "accumulate": "no"}):
        with raises_on(ValueError, ranks=[0, 1], match="pass gradients='ddp' or 'sharded', and"):
            new({}, **wrong)
    hook = {"comm_hook": DDPCommunicationHookType.FP16}
    with raises_on(ValueError, ranks=[0, 1], match="no DistributedDataParallel, which has the options comm_hook"):
        new(hook, gradients="sharded")
    plugin = new({"find_unused_parameters": True, "bucket_cap_mb": 1}, gradients="sharded")
    model = nn.Linear(2, 2)
    wrapped = plugin.prepare(model)
    with raises_on(ValueError, ranks=[0, 1], match="takes the place of DistributedDataParallel: pass the module"):
        plugin.prepare(wrapped, ZeroRedundancyOptimizer(model.parameters(), optim.SGD))
    part = nn.Linear(2, 2)
    with raises_on(ValueError, ranks=[0, 1], match="the optimizer does not have 'bias', which is trained"):
        plugin.prepare(part, ZeroRedundancyOptimizer([part.weight], optim.SGD))


@two_ranks
def test_an_optimizer_without_its_model_is_refused():
    _, _, _, plugin = prepare_small_model()
    optimizer = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), optim.AdamW)
    with pytest.raises(ValueError, match="without a model whose parameters it has"):
        plugin.prepare(nn.Linear(2, 2), optimizer)


@two_ranks
def test_saving_on_every_node_is_refused(tmp_path):
    from accelerate.utils import ProjectConfiguration

    accelerator, *_ = prepare_small_model(project_config=ProjectConfiguration(save_on_each_node=True))
    with pytest.raises(ValueError, match="save_on_each_node"):
        accelerator.save_state(tmp_path)
    assert not (tmp_path / OPTIMIZER_FILE).exists()


@pytest.mark.parametrize("parallelism", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA", "tp_size"])
def test_other_parallelism_is_refused_by_its_name(parallelism):
    from accelerate.utils import DistributedType
    from zeroshard_integrations.accelerate import ZeroShardPlugin

    accelerator = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU)
    if parallelism == "tp_size":
        config = pytest.importorskip("accelerate.parallelism_config").ParallelismConfig
        accelerator.parallelism_config = config(tp_size=2)
    else:
        accelerator.distributed_type = DistributedType[parallelism]
    with pytest.raises(ValueError, match=f"{parallelism}.*no other parallelism"):
        ZeroShardPlugin(accelerator)


def test_the_scripts_differ_in_three_lines():
    assert len(lines_that_differ("accelerate_plain", "accelerate_sharded")) == 3

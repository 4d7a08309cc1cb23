"""What ZeroShardPlugin prepares: a hook or sharded gradients for a model with its optimizer; and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.example_scripts import PLUGINS
from support.framework_training import forget_accelerator, muon_groups, needs, new_model, two_ranks
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_testing import assert_replicas_equal, raises_on

pytestmark = needs("accelerate")


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


@two_ranks
@pytest.mark.parametrize("plugin", ["hook", "sharded"])
def test_a_compiled_model_has_the_hook_too(plugin):
    _, model, optimizer, _ = prepare_small_model(plugin, dynamo_backend="eager")
    model(torch.ones(4, 8)).square().mean().backward()
    assert {type(param.grad).__name__ for param in model.parameters()} == {"GradPlaceholder"}
    optimizer.step()
    assert_replicas_equal(model.parameters())


OPTIMIZER_FILE = "optimizer.bin"


def step(accelerator: Any, model: nn.Module, optimizer: optim.Optimizer) -> None:
    accelerator.backward(model(torch.ones(4, 8) * (1 + accelerator.process_index)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.ranks(1, backend="gloo")
@pytest.mark.parametrize("plugin", ["hook", "sharded"])
def test_a_single_process_without_ddp_trains_and_saves(tmp_path, monkeypatch, plugin):
    monkeypatch.delenv("LOCAL_RANK")
    accelerator, model, optimizer, _ = prepare_small_model(plugin)
    assert not isinstance(model, DistributedDataParallel)
    step(accelerator, model, optimizer)
    accelerator.save_state(tmp_path)
    assert len(torch.load(tmp_path / OPTIMIZER_FILE)["state"]) == 4


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


# ---------------------------------------------------------------------- sharded gradients


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


# ---------------------------------------------------------------------- refused


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
    with raises_on(ValueError, ranks=[0, 1], match="not use DistributedDataParallel or its options comm_hook"):
        new(hook, gradients="sharded")
    plugin = new({"find_unused_parameters": True, "bucket_cap_mb": 1}, gradients="sharded")
    model = nn.Linear(2, 2)
    wrapped = plugin.prepare(model)
    with raises_on(ValueError, ranks=[0, 1], match="takes the place of DistributedDataParallel: pass the module"):
        plugin.prepare(wrapped, ZeroRedundancyOptimizer(model.parameters(), optim.SGD))
    part = nn.Linear(2, 2)
    with raises_on(ValueError, ranks=[0, 1], match="the optimizer does not have 'bias', which is trainable"):
        plugin.prepare(part, ZeroRedundancyOptimizer([part.weight], optim.SGD))


@two_ranks
@pytest.mark.parametrize("plugin", ["hook", "sharded"])
def test_two_optimizers_of_one_model_are_refused(plugin):
    from accelerate import Accelerator
    from zeroshard_integrations.accelerate import ZeroShardPlugin

    forget_accelerator()
    model = nn.Linear(8, 16)
    optimizers = [ZeroRedundancyOptimizer([param], optim.AdamW, lr=1e-2) for param in model.parameters()]
    match = "got 2: use one optimizer with a class per param group, or leave the hook out, or wrap one model per"
    with raises_on(TypeError, ranks=[0, 1], match=match):
        ZeroShardPlugin(Accelerator(cpu=True), **PLUGINS[plugin]).prepare(model, *optimizers)


@two_ranks
def test_an_optimizer_without_its_model_is_refused():
    _, _, _, plugin = prepare_small_model()
    optimizer = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), optim.AdamW)
    with pytest.raises(ValueError, match="without the model of its parameters"):
        plugin.prepare(nn.Linear(2, 2), optimizer)


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

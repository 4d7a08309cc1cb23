"""Train until STEPS, and save as safetensors. A second run goes on where the first one ended.

Start it with: torchrun --nproc-per-node 2 checkpoint_safetensors.py run STEPS
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_training import make_model, newest, train
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import reduce_to_owner_hook

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
folder, last = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
model = make_model()
ddp = DistributedDataParallel(model)
optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, lr=1e-3)
ddp.register_comm_hook(optimizer, reduce_to_owner_hook)


def tensors() -> dict[str, torch.Tensor]:
    """Return the parameters, and the state of the optimizer without hyperparameters."""
    state = get_optimizer_state_dict(ddp, optimizer, options=FLAT)
    return model.state_dict(prefix="model.") | {key: state[key] for key in state if key.startswith("state.")}


first = 0
checkpoint = newest(folder, "rest.json")
if checkpoint is not None:
    rest = json.loads((checkpoint / "rest.json").read_text())
    first = rest["steps"]
    for group, hyperparameters in zip(optimizer.param_groups, rest["hyperparameters"], strict=True):
        group.update(hyperparameters)
    optimizer.init_state()
    saved = tensors()
    dcp.load(saved, storage_reader=HuggingFaceStorageReader(checkpoint))
    state = get_optimizer_state_dict(ddp, optimizer, options=FLAT)
    set_optimizer_state_dict(ddp, optimizer, state | saved, options=FLAT)

train(ddp, optimizer, range(first, last))

checkpoint = folder / f"{last:06}"
dcp.save(tensors(), storage_writer=HuggingFaceStorageWriter(checkpoint, save_distributed=True))
if dist.get_rank() == 0:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    (checkpoint / "rest.json").write_text(json.dumps({"steps": last, "hyperparameters": groups}))
    print(f"steps {first + 1} to {last} on {dist.get_world_size()} ranks")
dist.destroy_process_group()

"""Train until STEPS, and save as safetensors. A second run goes on where the first one ended.

Start it with: torchrun --nproc-per-node 2 checkpoint_safetensors.py FOLDER STEPS
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_training import build, train
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
folder, last = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
model, optimizer = build("sharded")

first = 0
checkpoints = [file.parent for file in folder.glob("*/rest.json")]
if checkpoints:
    rest = json.loads((max(checkpoints) / "rest.json").read_text())
    first = rest["steps"]
    for group, hyperparameters in zip(optimizer.param_groups, rest["hyperparameters"], strict=True):
        group.update(hyperparameters)
    optimizer.init_state()
    model_state, flat_state = get_state_dict(model, optimizer, options=FLAT)
    tensors = model_state | {key: value for key, value in flat_state.items() if key.startswith("state.")}
    dcp.load(tensors, storage_reader=HuggingFaceStorageReader(max(checkpoints)))
    model_state, flat_state = ({key: tensors.get(key, of[key]) for key in of} for of in (model_state, flat_state))
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=flat_state, options=FLAT)

if first >= last:
    raise SystemExit(f"{folder} has a checkpoint of step {first} already")
train(model, optimizer, range(first, last))

model_state, flat_state = get_state_dict(model, optimizer, options=FLAT)
tensors = model_state | {key: value for key, value in flat_state.items() if key.startswith("state.")}
checkpoint = folder / f"{last:06}"
dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(checkpoint, save_distributed=True))
if dist.get_rank() == 0:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    (checkpoint / "rest.json").write_text(json.dumps({"steps": last, "hyperparameters": groups}))
# Before its process group: a DistributedDataParallel that outlives its group may hang when it is freed (torch 2.13).
del model
dist.destroy_process_group()

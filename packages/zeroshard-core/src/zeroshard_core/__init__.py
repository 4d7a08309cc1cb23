"""Plans, buckets and state maps for sharding optimizer state: values and pure functions, without a process group.

Describe tensors, partition them, and ask the plan which rank owns which rows. A plan is a value: it can be printed,
compared and written to a file.

>>> import torch
>>> from zeroshard_core import Plan, TensorSpec, partition
>>> tensors = [
...     TensorSpec("embedding", (1000, 64), torch.float32),
...     TensorSpec("weight", (512, 64), torch.float32),
...     TensorSpec("bias", (512,), torch.float32),
... ]
>>> whole, cut = partition(tensors, 2), partition(tensors, 2, strategy="split")
>>> [tensors[shard.tensor].name for shard in whole.of_rank(1)]
['weight', 'bias']
>>> [(shard.rank, shard.start, shard.stop) for shard in cut.of_tensor(0)]
[(0, 0, 500), (1, 500, 1000)]
>>> whole.difference(cut)
"tensor 0 'embedding' belongs to rank 0 here, to ranks 0, 1 there"
>>> Plan.from_json(cut.to_json()) == cut
True
"""

from zeroshard_core.bucket import BucketLayout, Run, Slot, bucket_layouts
from zeroshard_core.cost import Cost, GroupCost, adam, cost_function, nbytes, newton_schulz, numel, state_bytes
from zeroshard_core.flat import FlatBuffer, is_dense, storage_view
from zeroshard_core.level import Level, level
from zeroshard_core.partition import SMALLEST_PART, STRATEGIES, Owners, Strategy, partition, repartition, split, whole
from zeroshard_core.plan import Plan
from zeroshard_core.predict import GroupBytes, Prediction, RankBytes, predict
from zeroshard_core.probe import Probed, StateEntry, probe, update_bytes
from zeroshard_core.spec import ALIGNMENT, Shard, TensorSpec, strides_are_dense
from zeroshard_core.state import StateMapError, cut_state, to_indices, to_names

__all__ = [
    "ALIGNMENT",
    "SMALLEST_PART",
    "STRATEGIES",
    "BucketLayout",
    "Cost",
    "FlatBuffer",
    "GroupBytes",
    "GroupCost",
    "Level",
    "Owners",
    "Plan",
    "Prediction",
    "Probed",
    "RankBytes",
    "Run",
    "Shard",
    "Slot",
    "StateEntry",
    "StateMapError",
    "Strategy",
    "TensorSpec",
    "adam",
    "bucket_layouts",
    "cost_function",
    "cut_state",
    "is_dense",
    "level",
    "nbytes",
    "newton_schulz",
    "numel",
    "partition",
    "predict",
    "probe",
    "repartition",
    "split",
    "state_bytes",
    "storage_view",
    "strides_are_dense",
    "to_indices",
    "to_names",
    "update_bytes",
    "whole",
]

__version__ = "0.1.0"

"""Plans, buckets and state maps for sharding optimizer state: values and pure functions, without a process group."""

from zeroshard_core.bucket import BucketLayout, Run, Slot, bucket_layouts
from zeroshard_core.cost import Cost, nbytes, numel, state_bytes
from zeroshard_core.flat import FlatBuffer, is_dense, storage_view
from zeroshard_core.partition import (
    SMALLEST_PART,
    STRATEGIES,
    Owners,
    Strategy,
    hybrid,
    partition,
    repartition,
    split,
    whole,
)
from zeroshard_core.plan import Plan
from zeroshard_core.spec import ALIGNMENT, Shard, TensorSpec, contiguous_strides, strides_are_dense
from zeroshard_core.state import (
    StateMapError,
    cut_state,
    to_indices,
    to_names,
)

__all__ = [
    "ALIGNMENT",
    "SMALLEST_PART",
    "STRATEGIES",
    "BucketLayout",
    "Cost",
    "FlatBuffer",
    "Owners",
    "Plan",
    "Run",
    "Shard",
    "Slot",
    "StateMapError",
    "Strategy",
    "TensorSpec",
    "bucket_layouts",
    "contiguous_strides",
    "cut_state",
    "hybrid",
    "is_dense",
    "nbytes",
    "numel",
    "partition",
    "repartition",
    "split",
    "state_bytes",
    "storage_view",
    "strides_are_dense",
    "to_indices",
    "to_names",
    "whole",
]

__version__ = "0.1.0"

"""Sharded optimizer state for data-parallel training with PyTorch."""

from zeroshard.averages import AveragedParameters
from zeroshard.debug.describe import BucketDescription, OptimizerDescription, TensorDescription
from zeroshard.grads.bucket import Bucket
from zeroshard.grads.exchange import GradExchange
from zeroshard.grads.placeholder import GradPlaceholder
from zeroshard.grads.source import StepMode
from zeroshard.optimizer import ZeroRedundancyOptimizer
from zeroshard.plan.eligibility import ELEMENTWISE
from zeroshard.plan.optimizer_check import OptimizerCheck, check_optimizer
from zeroshard.plan.predict import Planner, predict
from zeroshard.sharding import GradientSharding, shard_gradients
from zeroshard.state.classes import join_state_dicts, split_state_dict
from zeroshard.state.listing import check_whole
from zeroshard.state.names import full_optimizer_state_dict

__all__ = [
    "ELEMENTWISE",
    "AveragedParameters",
    "Bucket",
    "BucketDescription",
    "GradExchange",
    "GradPlaceholder",
    "GradientSharding",
    "OptimizerCheck",
    "OptimizerDescription",
    "Planner",
    "StepMode",
    "TensorDescription",
    "ZeroRedundancyOptimizer",
    "check_optimizer",
    "check_whole",
    "full_optimizer_state_dict",
    "join_state_dicts",
    "predict",
    "shard_gradients",
    "split_state_dict",
]

__version__ = "0.1.0"

"""Sharded optimizer state for data-parallel training with PyTorch."""

from zeroshard.averaged_parameters import AveragedParameters
from zeroshard.description import BucketDescription, OptimizerDescription, TensorDescription
from zeroshard.elementwise import ELEMENTWISE
from zeroshard.full_state_dict import full_optimizer_state_dict
from zeroshard.optimizer import ZeroRedundancyOptimizer
from zeroshard.optimizer_check import OptimizerCheck, check_optimizer
from zeroshard.overlap.backward import BackwardFollower
from zeroshard.overlap.bucket import Bucket
from zeroshard.overlap.placeholder import GradPlaceholder
from zeroshard.overlap.scheduler import StepMode
from zeroshard.state.partial import check_whole

__all__ = [
    "ELEMENTWISE",
    "AveragedParameters",
    "BackwardFollower",
    "Bucket",
    "BucketDescription",
    "GradPlaceholder",
    "OptimizerCheck",
    "OptimizerDescription",
    "StepMode",
    "TensorDescription",
    "ZeroRedundancyOptimizer",
    "check_optimizer",
    "check_whole",
    "full_optimizer_state_dict",
]

__version__ = "0.1.0"

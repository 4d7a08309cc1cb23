"""Sharded optimizer state for data-parallel training with PyTorch."""

from zeroshard.backward import BackwardFollower
from zeroshard.elementwise import ELEMENTWISE
from zeroshard.join_hook import OptimizerJoinHook
from zeroshard.optimizer import ZeroRedundancyOptimizer
from zeroshard.pipeline import Stepping
from zeroshard.reduced_gradient import ReducedGradient
from zeroshard.route import Bucket

__all__ = [
    "ELEMENTWISE",
    "BackwardFollower",
    "Bucket",
    "OptimizerJoinHook",
    "ReducedGradient",
    "Stepping",
    "ZeroRedundancyOptimizer",
]

"""Sharded optimizer state for data-parallel training with PyTorch."""

from zeroshard.elementwise import ELEMENTWISE
from zeroshard.optimizer import ZeroRedundancyOptimizer

__all__ = ["ELEMENTWISE", "ZeroRedundancyOptimizer"]

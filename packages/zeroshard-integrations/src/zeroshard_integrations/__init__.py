"""Communication hooks for DistributedDataParallel, Join, and training frameworks, for zeroshard's optimizers."""

__version__ = "0.1.0"

"""Communication hooks of DistributedDataParallel, Join and model averaging, for the optimizers of zeroshard."""

__version__ = "0.1.0"

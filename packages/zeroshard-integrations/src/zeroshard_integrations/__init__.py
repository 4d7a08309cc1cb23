"""Communication hooks of DistributedDataParallel and Join, for the optimizers of zeroshard."""

__version__ = "0.1.0"

"""zeroshard with the rest of a training script: DDP hooks, Join, AMP, averaging and training frameworks."""

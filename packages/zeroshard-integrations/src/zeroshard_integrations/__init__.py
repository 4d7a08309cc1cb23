"""What a training script needs beside the optimizers of zeroshard: DDP communication hooks, and Join."""

__version__ = "0.1.0"

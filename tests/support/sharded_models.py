"""All models with which sharded gradients are compared with one process; `sharded_training` trains them."""

from __future__ import annotations

from support import sharded_backwards, sharded_forwards, sharded_model, sharded_parameters
from support.sharded_model import Plain

_MODULES = (sharded_model, sharded_backwards, sharded_parameters, sharded_forwards)
MODELS = tuple(
    found
    for module in _MODULES
    for found in vars(module).values()
    if isinstance(found, type) and issubclass(found, Plain) and found.__module__ == module.__name__
)

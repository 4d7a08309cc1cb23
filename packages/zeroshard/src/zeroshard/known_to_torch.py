"""``isinstance(ours, torch.distributed.optim.ZeroRedundancyOptimizer)`` is true: frameworks ask that.

Importing torch's class takes seconds and warns, so ours is registered with it when it is imported by who asks.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


class _Registrar(MetaPathFinder):
    """Registers a class when the module of torch's class is imported, and leaves the import to others."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        """Return what the others find, such that the class is registered when the module is there."""
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                module.ZeroRedundancyOptimizer.register(self._kind)

            vars(spec.loader)["exec_module"] = execute_and_register
        return spec


def register(kind: type) -> None:
    """Make a class a virtual subclass of torch's: now if that is imported, else as soon as it is."""
    if MODULE in sys.modules:
        sys.modules[MODULE].ZeroRedundancyOptimizer.register(kind)
    else:
        sys.meta_path.insert(0, _Registrar(kind))

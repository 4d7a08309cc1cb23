"""The private names of torch that the emulated accelerator uses, each with its reason."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

# No public function makes a group that torch.distributed does not list.
from torch.distributed.distributed_c10d import ProcessGroupGloo


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:  # noqa: ANN401 - torch's stubs lack both
    """Return a gloo process group that `torch.distributed` does not list. Blocks until all ranks call it."""
    return ProcessGroupGloo(store, rank, size, timeout)

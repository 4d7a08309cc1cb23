"""Describes an optimizer, and adds the logs and checks of ``TORCH_DISTRIBUTED_DEBUG`` to its steps."""

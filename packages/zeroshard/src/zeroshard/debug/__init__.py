"""Describes an optimizer for people, and adds the logs and checks of ``TORCH_DISTRIBUTED_DEBUG`` to its steps."""

"""Describes an optimizer for people, and adds the logs and checks of ``TORCH_DISTRIBUTED_DEBUG`` to its steps.

``describe`` returns what this rank knows as a value, and ``checks`` compares the ranks at the level DETAIL. Neither
changes the optimizer.
"""

"""What an optimizer is and does, for people: ``describe()``, and what ``TORCH_DISTRIBUTED_DEBUG`` adds to a step.

``describe`` makes a value of what this rank knows, and ``checks`` compares the ranks at the level DETAIL. Neither
changes anything of the optimizer.
"""

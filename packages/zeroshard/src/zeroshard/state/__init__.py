"""What users see, save and load of the optimizer state, which flows between the local optimizers and one state dict.

Out: ranks tell each other by ``metadata`` which entries they have, as ``serialization`` writes them.
``view`` is ``optimizer.state``, ``listing`` makes ``state_dict()`` of one rank, both with a ``placeholder`` for what
other ranks own; ``consolidate`` gathers all values on one rank, and ``names`` puts names in the place of indices. In:
``check`` compares a state dict with what the optimizer class keeps and cuts it, and ``load`` installs what a rank owns;
``initialize`` makes the state before the first step. ``checkpoints`` has the collective calls.
"""

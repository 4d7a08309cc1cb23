"""Shows, saves and loads the optimizer state of all ranks, which the local optimizers keep in parts.

Reading: ``metadata`` exchanges which entries each rank has, and ``serialization`` describes them. ``view`` is
``optimizer.state``, and ``listing`` makes ``state_dict()`` of one rank; a ``placeholder`` represents values of other
ranks. ``consolidate`` gathers all values on one rank, and ``names`` replaces indices by names. Loading: ``check``
compares a state dict with what the optimizer class keeps and cuts it, ``load`` installs what a rank owns, and
``initialize`` makes the state before the first step. ``checkpoints`` has the collective calls.
"""

"""Computes a :class:`~zeroshard.plan.layout.Layout`, which says who owns what, from the user's arguments.

``groups`` reads and checks the parameters, ``hyperparameters`` writes the text that ranks compare, and ``eligibility``
decides which optimizers may be sharded, and how; ``optimizer_check`` tests the others. ``layout`` computes the first
plan, and the next plan after a change of the model. It changes nothing.
"""

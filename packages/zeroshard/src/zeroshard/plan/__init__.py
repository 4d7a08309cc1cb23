"""From the user's arguments to a :class:`~zeroshard.plan.layout.Layout`, which says who owns what.

``groups`` reads and checks the arguments, ``hyperparameters`` writes down what ranks compare, ``memory`` looks where
parameters lie, and ``eligibility`` says which optimizers may be sharded, and how. ``layout`` makes a plan of all this,
and the next one after a change of the model, without changing anything.
"""

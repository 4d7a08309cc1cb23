"""From the user's arguments to a :class:`~zeroshard.plan.layout.Layout`, which says who owns what.

``groups`` reads and checks the parameters, ``hyperparameters`` writes down what ranks compare, and ``eligibility`` says
which optimizers may be sharded, and how; ``optimizer_check`` tries out the others. ``layout`` makes a plan of all this,
and the next one after a change of the model, without changing anything.
"""

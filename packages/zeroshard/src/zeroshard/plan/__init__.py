"""Computes a :class:`~zeroshard.plan.layout.Layout`, which says who owns what, from the user's arguments."""

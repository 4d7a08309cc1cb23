"""Runs the user's optimizer class over this rank's shards.

``optimizer`` builds and steps it over tensors of ``shard``. ``extra_state`` keeps the entries that this package adds:
``master_weights``, and the averages of :mod:`zeroshard.averages`.
"""

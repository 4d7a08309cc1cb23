"""The user's optimizer class over this rank's shards.

``optimizer`` builds and steps it over tensors of ``shard``. ``extra_state`` is what this package adds to its state:
``master_weights``, and the averages of :mod:`zeroshard.averages`. ``train_mode`` calls its ``train()`` and ``eval()``.
"""

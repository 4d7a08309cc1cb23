"""Gradients that come in buckets while backward computes.

A communication hook hands each bucket to ``exchange``, which sends it to its owners; ``.grad`` is a ``placeholder``
then, until a step uses the gradients. ``table`` has the state of every gradient, and ``norms`` what all ranks know of
its values. Data flows from exchange to ``buckets`` and each ``bucket``; a step asks the exchange for the gradients.
"""

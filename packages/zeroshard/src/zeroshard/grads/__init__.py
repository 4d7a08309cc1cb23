"""Gradients that come in buckets while backward computes.

A communication hook hands each bucket to ``exchange``, which sends it to its owners. They add it to what they have
accumulated (``accumulation``); ``.grad`` is a ``placeholder`` then, until a step uses the gradients. Data flows from
exchange to ``buckets`` and accumulation; a step asks the exchange for the gradients.
"""

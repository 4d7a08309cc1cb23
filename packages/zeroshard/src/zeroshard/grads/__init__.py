"""Reduces gradients to their owners in buckets, while backward computes.

A communication hook hands each bucket to ``exchange``, which sends it to its owners. After backward, ``.grad`` is a
``placeholder`` until a step uses the gradients. ``table`` holds the state of every gradient, ``norms`` the 2-norms.
Data flows from ``exchange`` to ``buckets`` and each ``bucket``; a step binds the gradients of ``buckets``.
"""

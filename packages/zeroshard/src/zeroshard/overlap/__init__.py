"""Gradients bucket by bucket while backward computes.

A framework hands each bucket of a backward to :mod:`~zeroshard.overlap.backward`; the scheduler sends it to its owners,
who add it to what they accumulated, step, and send parameters back. Data flows from scheduler to bucket, accumulation
and worker; nothing below this folder knows of it.
"""

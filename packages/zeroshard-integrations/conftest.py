"""Modules of frameworks that are not installed are not searched for doctests, which would import them."""

from __future__ import annotations

import importlib.util

FRAMEWORKS = ["accelerate", "lightning", "transformers"]

collect_ignore_glob = [
    f"src/zeroshard_integrations/{name}*" for name in FRAMEWORKS if importlib.util.find_spec(name) is None
]

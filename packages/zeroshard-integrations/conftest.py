"""Leaves out of the doctests the modules whose framework is not installed."""

from __future__ import annotations

import importlib.util

FRAMEWORKS = ["accelerate", "lightning", "transformers"]

collect_ignore = [f"src/zeroshard_integrations/{name}.py" for name in FRAMEWORKS if not importlib.util.find_spec(name)]

"""Settings of Sphinx. A build needs no network: nothing is fetched from other projects' documentation."""

from __future__ import annotations

from importlib.metadata import version as version_of

project = "zeroshard"
author = "the zeroshard authors"
release = version = version_of("zeroshard")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"zeroshard {release}"

# Single backticks in docstrings name code.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}

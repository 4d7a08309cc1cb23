"""Settings of Sphinx. A build needs no network: nothing is fetched from other projects' documentation."""

from __future__ import annotations

from importlib.metadata import version as version_of

project = "zeroshard"
author = "the zeroshard authors"
release = version = version_of("zeroshard")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "examples", "measured"]
html_show_copyright = False
html_theme = "furo"
pygments_style = "tango"  # the colours of a diff
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_title = f"zeroshard {release}"

# Single backticks in docstrings name code.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
# Documented without being installed.
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}

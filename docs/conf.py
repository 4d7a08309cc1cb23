"""Settings of Sphinx. A build needs no network: nothing is fetched from other projects' documentation."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import zeroshard
import zeroshard_comm
import zeroshard_core
import zeroshard_testing
from pygments.lexers.special import TextLexer
from sphinx.util.logging import getLogger

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

project = "zeroshard"
author = "the zeroshard authors"
release = version = zeroshard.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
myst_heading_anchors = 3
exclude_patterns = ["_build", "examples"]
html_show_copyright = False
html_theme = "furo"
pygments_style = "tango"  # the colors of a diff
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_title = f"zeroshard {release}"
html_favicon = "_static/favicon.svg"
html_theme_options = {
    "source_repository": "https://github.com/zeroshard/zeroshard/",
    "source_branch": "main",
    "source_directory": "docs/",
}
# A copied command has no prompt, and no output.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Single backticks in docstrings name code.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autosummary_generate = False  # the tables link to what is on the same page
autodoc_member_order = "bysource"
# Documented without being installed.
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
maximum_signature_line_length = 100
autodoc_default_options = {"members": True, "show-inheritance": True}

# A link without a target fails. What other projects document is no target here, since nothing is fetched.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(torch|pytest|_pytest|rich|accelerate|lightning|transformers)(\..*)?"),
    ("py:.*", r"(abc|collections|contextlib|datetime|enum|pathlib|types|typing|unittest|weakref)\..*"),
    # Types in the signatures of internals that are not exported themselves.
    ("py:class", r"zeroshard\w*\.(\w+\.)+\w+"),
    ("py:class", r"(Averaging|Connections|Engine|GradTable|dict\[str|tuple\[bool)"),
    # Docstrings name what is not exported.
    ("py:.*", r"(Failed|broadcasts_buckets|write_value)"),
    # A colon in a Returns section, in front of which napoleon looks for a type.
    ("py:class", r"(The cost|in bytes\. .*|such as plain SGD|What was returned|by rank)"),
]


# What napoleon takes for the end of a type, kept from it in the first line about a property.
_COLON = "\uf03a"


def hide_colons(_app: object, what: str, _name: str, _value: object, _options: object, lines: list[str]) -> None:
    """Hide the colons in the first line about a property: what stands before one is no type there."""
    if what in {"attribute", "data", "property"} and lines:
        lines[0] = lines[0].replace(": ", f"{_COLON} ")


def show_colons(_app: object, _what: str, _name: str, _value: object, _options: object, lines: list[str]) -> None:
    """Show hidden colons again, and give each of several attributes on one line a line of its own."""
    found = [line.replace(_COLON, ":") for line in lines]
    lines.clear()
    for line in found:
        several = re.match(r":ivar ([\w ]+(?:, [\w ]+)+):(.*)", line)
        names = several[1].split(", ") if several else []
        lines += [f":ivar {name}:{several[2]}" for name in names] if several else [line]


def check_public_names(_app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of each name in an ``__all__`` that no page documents."""
    documented = env.get_domain("py").objects
    for module in (zeroshard, zeroshard_comm, zeroshard_core, zeroshard_testing):
        for name in module.__all__:
            if f"{module.__name__}.{name}" not in documented:
                getLogger(__name__).warning("no page documents %s.%s", module.__name__, name)


def setup(app: Sphinx) -> None:
    """Connect what this file defines."""
    # Pages show the source of diagrams, and hosts of code draw them.
    app.add_lexer("mermaid", TextLexer)
    app.connect("env-check-consistency", check_public_names)
    app.connect("autodoc-process-docstring", hide_colons, priority=400)
    app.connect("autodoc-process-docstring", show_colons, priority=600)

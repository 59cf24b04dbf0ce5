"""Settings of the documentation: `sphinx-build docs OUT`. Needs the extra `docs`, no network."""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import accuracy_page  # noqa: E402

from hymell_jax.version import __version__  # noqa: E402

project = "hymell_jax"
author = "the hymell_jax authors"
copyright = "the hymell_jax authors, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
myst_url_schemes = ("http", "https")
exclude_patterns = ["_build"]
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository that are no pages
html_theme = "furo"
html_title = f"hymell_jax {version}"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
add_module_names = False


def _as_literal(app, what, name, obj, options, lines: list[str]) -> None:
    """Indented equations of a module's docstring stay as they are written."""
    if what != "module":
        return
    found, inside = [], False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not inside:
            found += ["::", ""]
        inside = indented or (inside and not line.strip())
        found.append(re.sub(r"\|", r"\\|", line) if not inside else line)
    lines[:] = found


def setup(app) -> None:
    app.connect("autodoc-process-docstring", _as_literal)
    app.connect("builder-inited", lambda _: accuracy_page.write(HERE))

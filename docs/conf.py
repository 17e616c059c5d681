"""The site: `make docs`. Pages are Markdown; their programs run when it is built."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

import cells  # noqa: E402
import kept  # noqa: E402

URLS = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"].get(
    "urls", {}
)

project = "hostcall"
author = "the hostcall developers"
version = release = importlib.metadata.version("hostcall")
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docstrings",
    "head",
    "moved",
    "offline",
    "paths",
    "pictures",
    "words",
    "sphinx_gallery.gen_gallery",
    "sphinxcontrib.mermaid",
]
exclude_patterns = [f"gallery/*.{kind}" for kind in ("ipynb", "py", "json")]

templates_path = ["_templates"]

html_theme = "furo"
html_title = f"{project} {release}"
html_baseurl = URLS.get("Documentation", "")  # canonical addresses, the map of the site
html_theme_options = {}
if "Repository" in URLS:  # links to it, and to edit a page
    html_theme_options = {
        "source_repository": URLS["Repository"],
        "source_branch": "main",
        "source_directory": "docs/",
        "footer_icons": [
            {
                "name": "Repository",
                "url": URLS["Repository"],
                "html": "Repository",
                "class": "",
            }
        ],
    }
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
if (HERE.parent / "build" / "static").exists():  # Mermaid: see `make docs`
    html_static_path.append("../build/static")
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_search_scorer = str(HERE / "_static" / "scorer.js")
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
smartquotes = False  # "pure" is typed with these quotes

# --- Pages ---------------------------------------------------------------------------

# Each ```python block is a cell (see _ext/cells.py). Pages stay Markdown that any
# reader of the repository can read, and each block runs alone in the tests
# (tests/repo/test_readme.py).
nb_custom_formats = {".md": "cells.read"}
ENGINE = kept.engine()
nb_execution_mode = os.environ.get("DOCS_RUN", "cache")
nb_execution_cache_path = str(HERE.parent / "build" / "notebooks" / ENGINE)
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_timeout = 120
# Kernels take long to start: only pages whose programs show something have one.
nb_execution_excludepatterns = [
    str(page.relative_to(HERE))
    for page in HERE.rglob("*.md")
    if not any(
        "print(" in p or "progress" in p for p in cells.programs(page.read_text())
    )
]
nb_merge_streams = True
# Only what a program prints or draws is shown, not the value of its last line. A bar
# would be a widget, which needs scripts of other hosts.
nb_mime_priority_overrides = [
    ("html", "text/plain", None),
    ("html", "application/vnd.jupyter.widget-view+json", None),
]
suppress_warnings = ["mystnb.mime_priority"]  # values, which are left out
nb_ipywidgets_js = {}
myst_heading_anchors = 3
mermaid_height = "auto"
mermaid_fullscreen = False
mermaid_use_local = "mermaid/mermaid.esm.min.mjs"
myst_fence_as_directive = ["mermaid"]  # as the repository's own pages show them

# --- Reference -----------------------------------------------------------------------

NAMES = (HERE / "reference" / "index.md").read_text()
for page in (HERE / "reference").glob("hostcall.*.rst"):  # of names that have gone
    if f"   {page.stem}\n" not in NAMES:
        page.unlink()
default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_custom_sections = [
    ("Under transformations", "params_style"),
    ("Fields", "params_style"),
]
python_maximum_signature_line_length = 80

# --- Gallery -------------------------------------------------------------------------

kept.forget_gallery()
sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery",
    "plot_gallery": nb_execution_mode != "off",
    "parallel": 2 if nb_execution_mode != "off" else False,
    "abort_on_example_error": True,
    "matplotlib_animations": True,
    "download_all_examples": False,
    "capture_repr": (),
    "remove_config_comments": True,
    "show_signature": False,
    "write_computation_times": False,
    "reset_modules": ("matplotlib", "gallery_reset.reset"),
    "reset_modules_order": "both",
}

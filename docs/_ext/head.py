"""What a page says of itself in its head, to search engines and to previews of links.

Its description is its first paragraph. The address of a page, and the map of the site,
need that of the site: `Documentation` in project.urls of pyproject.toml.
"""

from __future__ import annotations

import html
import textwrap
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

# Pages that are made in the build, so no file of the repository is behind them.
MADE = ("gallery/", "reference/hostcall.")


def description(doctree: nodes.document) -> str:
    for paragraph in doctree.findall(nodes.paragraph):
        if isinstance(paragraph.parent, nodes.section | addnodes.desc_content):
            text = paragraph.astext()
            text = textwrap.shorten(text, 200, placeholder=" ...")
            return text.removesuffix(":") + "." * text.endswith(":")
    return ""


def tags(app: Any, page: str, template: str, context: Any, doctree: Any) -> None:
    if page.startswith(MADE):
        context["page_source_suffix"] = ""  # no link to edit it
    if doctree is None:
        return
    about = html.escape(description(doctree))
    said = {
        "og:title": html.escape(app.env.titles[page].astext()),
        "og:type": "website" if page == "index" else "article",
        "og:site_name": app.config.project,
        "og:description": about,
        "og:url": context["pageurl"],
    }
    context["metatags"] += f'\n<meta name="description" content="{about}">' + "".join(
        f'\n<meta property="{name}" content="{value}">'
        for name, value in said.items()
        if value
    )


def site_map(app: Any, failure: Exception | None) -> None:
    if failure or app.builder.format != "html" or not app.config.html_baseurl:
        return
    pages = sorted(app.builder.env.found_docs)
    places = [app.config.html_baseurl + app.builder.get_target_uri(p) for p in pages]
    lines = "".join(f"<url><loc>{html.escape(place)}</loc></url>\n" for place in places)
    Path(app.outdir, "sitemap.xml").write_text(
        '<?xml version="1.0" encoding="utf-8"?>\n'
        '<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n'
        f"{lines}</urlset>\n"
    )


def setup(app: Any) -> dict[str, bool]:
    app.connect("html-page-context", tags)
    app.connect("build-finished", site_map)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

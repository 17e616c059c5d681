"""Nothing that a page needs comes from another host.

Formulas are MathML, which browsers draw without a script. The player of matplotlib's
films has signs of its own (site.css) in place of a font.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

_FONT = re.compile(r"<link\s[^>]*font-awesome[^>]*>")


def inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(tex2mathml(node.astext(), as_block=True))
    raise nodes.SkipNode


def without_font(app: Any, page: str, source: list[str]) -> None:
    if page.startswith("gallery/"):
        source[0] = _FONT.sub("", source[0])


def setup(app: Any) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    app.connect("source-read", without_font)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

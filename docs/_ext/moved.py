"""Old addresses of the site lead to where their text is now.

For each page that has gone, the build writes a small page at its old address, which
sends the reader on. If the old address names a section, so does the new one. Most
sections have the same name in the new page; the others stand in `RENAMED`.

A page that goes, or whose sections get other names, gets its lines here.
"""

from __future__ import annotations

import html
import json
import os
from pathlib import Path
from typing import Any

# The page of an address, and where its text is now. An address with a section leads
# there always; one without hands the section of the old address on.
MOVED = {
    "clients": "external_callbacks#libraries-that-were-tried",
    "dependencies": "contributing#what-hostcall-depends-on",
    "design/buffers": "design/ownership#buffers",
    "design/quality": "contributing",
    "design/speed": "speed",
    "failures_over_processes": "processes",
    "migrating/host_callback": "host_callback",
    "migrating/others": "comparison",
    "monitoring": "watching",
    "pools": "running",
    "reference/counts": "reference/monitor",
    "reference/jax_tqdm": "reference/tools",
    "reference/observing": "reference/tools",
    "reference/sinks": "reference/tools",
    "releasing": "contributing",
    "waiting": "running",
    **{
        f"errors/{code}": f"errors/{page}#{code}"
        for page, codes in {
            "arguments": ("hc-32-bit", "hc-arguments", "hc-spec", "hc-traced"),
            "ended": ("hc-closed", "hc-worker"),
            "feeds": ("hc-feed", "hc-feed-end", "hc-feed-source"),
            "functions": ("hc-coroutine", "hc-object"),
            "leaving": ("hc-export", "hc-load", "hc-pickle", "hc-registry"),
            "memory": ("hc-buffer", "hc-escape", "hc-unwritten"),
            "options": ("hc-conflict", "hc-option"),
            "places": (
                *("hc-device", "hc-dropped", "hc-failed", "hc-package"),
                "hc-process",
            ),
            "recording": ("hc-record", "hc-watch"),
            "results": ("hc-result", "hc-result-dtype", "hc-result-spec"),
            "transformations": ("hc-batching", "hc-derivative", "hc-rule"),
            "waiting": ("hc-deadlock", "hc-recursion", "hc-timeout"),
        }.items()
        for code in codes
    },
}
# Sections of old pages that have another name in the new one. "" is the whole page.
RENAMED = {
    "design/quality": {"": "what-tests-the-tests"},
    "design/speed": {"": "inside-the-handler"},
    "failures_over_processes": {"": "if-a-process-fails"},
    "migrating/host_callback": {
        "call-a-result-from-the-host": "",
        "differences-from-the-old-module": "flags-and-differences",
        "flags": "flags-and-differences",
        "id-tap-id-print-send-values-to-the-host": "",
        "other-frameworks-and-devices-with-derivatives": "",
        "tangents-and-cotangents": "under-transformations",
    },
    "monitoring": {"": "what-calls-and-taps-do"},
    "pools": {"": "rows-on-a-pool-or-cluster"},
    "reference/counts": {"": "costs-and-queues"},
    "releasing": {"": "releasing"},
    "waiting": {"": "coroutine-functions"},
}

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="robots" content="noindex">
<title>This page has moved</title>
<link rel="canonical" href="{page}">
<noscript><meta http-equiv="refresh" content="0; url={place}"></noscript>
<p>This page is now part of <a href="{place}">another one</a>.</p>
<script>
const renamed = {renamed};
const asked = location.hash.slice(1);
const section = {fixed} ?? renamed[asked] ?? asked;
location.replace({page_text} + (section && "#" + section));
</script>
</html>
"""


def address(old: str) -> tuple[str, str]:
    """The page and the section that an old address leads to, if it names no section."""
    page, _, section = MOVED[old].partition("#")
    return page, section or RENAMED.get(old, {}).get("", "")


def write(app: Any, failure: Exception | None) -> None:
    if failure or app.builder.format != "html":
        return
    for old, new in MOVED.items():
        page, section = address(old)
        away = os.path.relpath(f"{page}.html", os.path.dirname(old) or ".")
        path = Path(app.outdir, f"{old}.html")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            PAGE.format(
                page=html.escape(away),
                place=html.escape(f"{away}#{section}" if section else away),
                renamed=json.dumps(RENAMED.get(old, {})),
                fixed=json.dumps(section if "#" in new else None),
                page_text=json.dumps(away),
            )
        )


def setup(app: Any) -> dict[str, bool]:
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

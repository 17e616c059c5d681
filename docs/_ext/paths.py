"""The site can be built in a folder with spaces in its path.

sphinx-gallery warns of spaces in the names of programs, and looks at their whole paths.
Names of the gallery's programs have none (tests/pages/test_gallery.py). The warning has
a type, by which it could be suppressed, from version 0.22 on only.
"""

from __future__ import annotations

import logging
from typing import Any

_WARNING = "Example file name(s) with spaces found"


def _is_shown(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_WARNING)


def setup(app: Any) -> dict[str, bool]:
    logging.getLogger("sphinx.sphinx-gallery").addFilter(_is_shown)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

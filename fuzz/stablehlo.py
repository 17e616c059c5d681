"""Edits the StableHLO in an exported program, as a tool of an attacker would."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import jax
from jax._src.export import _export
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

from hostcall._export import container

# What MLIR's printer adds behind operations; the parser does not need it.
_PLACES = re.compile(r" loc\((?:#loc\d*|unknown|\"[^\"]*\")\)")
# The first attributes of a call of hostcall's, which name its plan or describe it.
CONFIG = re.compile(r'mhlo\.backend_config = \{text = "(?:[^"\\]|\\.)*"\}')


def text_of(exported: jax.export.Exported) -> str:
    lines = exported.mlir_module().split("\n")
    kept = "\n".join(line for line in lines if not line.startswith("#loc"))
    return _PLACES.sub("", kept)


def edited(
    data: bytes,
    change: Callable[[str], str] = lambda text: text,
    header: Callable[[dict[str, Any]], dict[str, Any]] = lambda header: header,
) -> bytes:
    """The bytes of `hc.export` with another program and another manifest in them.

    Raises an error of JAX's if the changed text is no StableHLO.
    """
    manifest, program = container.unpack(data)
    exported = jax.export.deserialize(bytearray(program))
    changed = with_text(exported, change(text_of(exported)))
    return container.pack(header(manifest), bytes(changed.serialize()))


def with_text(exported: jax.export.Exported, text: str) -> jax.export.Exported:
    with mlir.make_ir_context():
        raw = _export._module_to_bytecode(ir.Module.parse(text))
    return dataclasses.replace(exported, mlir_module_serialized=raw)


def replaced(new: str) -> Callable[[str], str]:
    """A change of the attributes of the first call."""
    return lambda text: CONFIG.sub(
        lambda _: f"mhlo.backend_config = {{{new}}}", text, count=1
    )


def told_in(text: str) -> Any:
    """What the text of the first call says."""
    found = CONFIG.search(text)
    assert found is not None
    quoted = found[0].partition('"')[2].rpartition('"')[0]
    return json.loads(
        re.sub(
            r"\\(\\|[0-9A-F]{2})",
            lambda m: "\\" if m[1] == "\\" else chr(int(m[1], 16)),
            quoted,
        )
    )


def telling(told: Any) -> Callable[[str], str]:
    """A change of that text: what it says, or itself."""
    text = told if isinstance(told, str) else json.dumps(told)
    escaped = "".join(f"\\{ord(c):02X}" if c in '"\\' else c for c in text)
    return replaced(f'text = "{escaped}"')

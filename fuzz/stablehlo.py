"""Edits the StableHLO in an exported program, as a tool of an attacker would."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import struct
from collections.abc import Callable
from typing import Any

import jax
from jax._src.export import _export
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

# The start of a file (docs/exporting.md and src/hostcall/_export/container.py).
_START = struct.Struct("<15sBQ32s")
_VERSION = 6

# What MLIR's printer adds behind operations; the parser does not need it.
_PLACES = re.compile(r" loc\((?:#loc\d*|unknown|\"[^\"]*\")\)")
# The first attributes of a call of hostcall's, which name its plan or describe it.
CONFIG = re.compile(r'mhlo\.backend_config = \{text = "(?:[^"\\]|\\.)*"\}')


def unpacked(data: bytes) -> tuple[dict[str, Any], bytes]:
    """(the header of a file, what jax.export wrote)."""
    length = _START.unpack_from(data)[2]
    behind = data[_START.size :]
    return json.loads(behind[:length]), behind[length:]


def packed(header: Any, program: bytes) -> bytes:
    """A file with a checksum that fits."""
    said = json.dumps(header).encode()
    digest = hashlib.sha256(said + program).digest()
    start = _START.pack(b"hostcall export", _VERSION, len(said), digest)
    return start + said + program


def mlir_of(exported: jax.export.Exported) -> str:
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
    manifest, program = unpacked(data)
    exported = jax.export.deserialize(bytearray(program))
    changed = with_text(exported, change(mlir_of(exported)))
    return packed(header(manifest), bytes(changed.serialize()))


def with_text(exported: jax.export.Exported, text: str) -> jax.export.Exported:
    with mlir.make_ir_context():
        raw = _export._module_to_bytecode(ir.Module.parse(text))
    return dataclasses.replace(exported, mlir_module_serialized=raw)


def replaced(new: str) -> Callable[[str], str]:
    """A change of the attributes of the first call."""
    return lambda text: CONFIG.sub(
        lambda _: f"mhlo.backend_config = {{{new}}}", text, count=1
    )


def texts_in(mlir: str) -> list[str]:
    """The texts of all calls."""
    return [
        re.sub(
            r"\\(\\|[0-9A-F]{2})",
            lambda m: "\\" if m[1] == "\\" else chr(int(m[1], 16)),
            found[0].partition('"')[2].rpartition('"')[0],
        )
        for found in CONFIG.finditer(mlir)
    ]


def told_in(mlir: str) -> Any:
    """What the text of the first call says."""
    return json.loads(texts_in(mlir)[0])


def telling(told: Any) -> Callable[[str], str]:
    """A change of that text: what it says, or itself."""
    text = told if isinstance(told, str) else json.dumps(told)
    escaped = "".join(f"\\{ord(c):02X}" if c in '"\\' else c for c in text)
    return replaced(f'text = "{escaped}"')

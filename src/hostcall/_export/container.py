"""The bytes of an exported program: a header in JSON, and what jax.export wrote.

    15 bytes   b"hostcall export"
     1 byte    the version of this layout, and of the texts of calls in the program
     8 bytes   the header's length, little-endian
    32 bytes   SHA-256 of all that follows
               the header, then jax.export's bytes

The checksum finds damage. It proves nothing about where the bytes come from.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass

from hostcall._core import codec
from hostcall._core.codec import Json, Malformed
from hostcall._core.errors import LoadError
from hostcall._export.structures import CODEC, FORMAT

_MAGIC = b"hostcall export"
_START = struct.Struct("<15sBQ32s")


@dataclass(frozen=True)
class Header:
    """What is known before the program is read.

    Attributes:
        hostcall, jax: the versions that wrote the program.
        names: what must be registered, since the modules that do so also register the
            pytrees in the program.
    """

    hostcall: str
    jax: str
    names: tuple[tuple[str, int], ...]


def pack(header: Json, program: bytes) -> bytes:
    # Sorted, so that equal programs are equal bytes.
    encoded_header = json.dumps(header, sort_keys=True).encode()
    behind = encoded_header + program
    digest = hashlib.sha256(behind).digest()
    return _START.pack(_MAGIC, FORMAT, len(encoded_header), digest) + behind


def unpack(data: bytes) -> tuple[Header, bytes]:
    """(header, jax.export's bytes). Raises LoadError, which names the wrong part."""
    if not data.startswith(_MAGIC):
        raise LoadError(
            f"hostcall: these {len(data)} bytes are not a program that hc.export wrote:"
            f" they start with {data[:16]!r}. What jax.export wrote is read by"
            " jax.export.deserialize"
        )
    is_cut = len(data) < _START.size
    # A file that was cut off has some version, which says nothing: its checksum below
    # is wrong in any case.
    start = data[: _START.size].ljust(_START.size)
    _, version, length, digest = _START.unpack(start)
    if not is_cut and version != FORMAT:
        raise LoadError(
            f"hostcall: the exported program has version {version} of the file"
            f" layout, and this hostcall reads version {FORMAT}. Load it with"
            " the version that wrote it, or export it again"
        )
    # Before anything behind the start is read: JSON and jax.export's reader then see
    # only bytes that somebody has written like this.
    behind = data[_START.size :]
    if hashlib.sha256(behind).digest() != digest:
        raise LoadError(
            "hostcall: the exported program's checksum does not fit: bytes were"
            " changed, or are missing at the end. Copy it again"
        )
    try:
        header = CODEC.decode(codec.read(behind[:length]), Header, "a header")
    except (Malformed, KeyError) as error:
        fault = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise LoadError(
            f"hostcall: the header of the exported program can't be read: {fault}. It"
            " was damaged, or something else or another version of hostcall wrote it"
        ) from error
    return header, behind[length:]

"""Arrays, trees and their sizes as JSON, for programs that leave the process.

Types of containers are looked up by names that this process has registered with JAX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import ml_dtypes
import numpy as np

from hostcall import _jax
from hostcall._core import codec
from hostcall._core.codec import SIZE, Codec, Json, Malformed, NotPortable, encode_plain
from hostcall._core.spec import Opaque, Results, Template
from hostcall._jax.types import Aval, TreeDef

# The version of texts and of files with them. Counted up when older versions of
# hostcall could not read them.
FORMAT = 6

AVALS: TypeAlias = tuple[_jax.ShapedArray, ...]
_MOST_AXES = 64  # that NumPy's arrays have

# --- Arrays -------------------------------------------------------------------------

# The dtypes of arrays that calls pass, with XLA_FFI_DataType in XLA's c_api.h.
XLAS_DTYPES = {
    "bool": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "uint8": 6,
    "uint16": 7,
    "uint32": 8,
    "uint64": 9,
    "float16": 10,
    "float32": 11,
    "float64": 12,
    "complex64": 15,
    "bfloat16": 16,
    "complex128": 18,
    "float8_e5m2": 19,
    "float8_e4m3fn": 20,
    "int4": 21,
    "uint4": 22,
    "float8_e4m3b11fnuz": 23,
    "float8_e5m2fnuz": 24,
    "float8_e4m3fnuz": 25,
    "int2": 26,
    "uint2": 27,
    "float8_e4m3": 28,
    "float8_e3m4": 29,
    "float4_e2m1fn": 32,
    "float8_e8m0fnu": 33,
}


def _encode_aval(aval: Aval) -> list[Json]:
    """[dtype, *sizes]; a symbolic size is a dict with the one key SIZE."""
    sizes: list[Json] = []
    for size in aval.shape:
        sizes.append({SIZE: str(size)} if _jax.is_symbolic(size) else int(size))
    return [np.dtype(aval.dtype).name, *sizes]


def decode_aval(json: Json) -> Aval:
    """An aval without symbolic sizes. Raises Malformed."""
    dtype, *shape = json
    # All is checked before an aval is made of it: JAX and the engine trust its numbers.
    if len(shape) > _MOST_AXES:
        raise Malformed(f"an array of {len(shape)} axes")
    if not all(type(n) is int and 0 <= n < 2**63 for n in shape):
        raise Malformed(f"the shape {shape!r} of dtype {dtype!r}")
    # Only these: NumPy reads much else, such as "object" and "(2,3)f4, 07i4".
    if not isinstance(dtype, str) or dtype not in XLAS_DTYPES:
        raise Malformed(f"the dtype {dtype!r}")
    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    # Without zeros, beside which any other size would pass.
    elements = math.prod(max(n, 1) for n in shape)
    if elements * numpy_dtype.itemsize > 2**60:
        raise Malformed(f"the shape {shape!r}, too large for an array")
    return _jax.ShapedArray(tuple(shape), numpy_dtype)


# --- Trees --------------------------------------------------------------------------


def encode_tree(treedef: TreeDef) -> Json:
    """A leaf is "*", None is None, a node is [kind, what the kind needs, *children]."""
    data = treedef.node_data()
    if data is None:
        return "*"
    node_type, aux = data
    children = [encode_tree(child) for child in treedef.children()]
    if node_type is type(None):
        return None
    if node_type in (tuple, list):
        return [node_type.__name__, None, *children]
    if node_type is dict:
        # JSON has only texts as keys: 1 and "1" would become one.
        if not all(type(key) is str for key in aux):
            raise NotPortable(
                f"an argument or result holds a dict with the keys {list(aux)}, and"
                " only texts can be keys there"
            )
        return ["dict", list(aux), *children]
    named = _jax.node_name(node_type)
    if named is None:
        raise NotPortable(
            f"an argument or result holds a {node_type.__qualname__}, a pytree type"
            " that has no name for other processes. Give it one in all processes, with"
            " jax.export.register_pytree_node_serialization or, for a named tuple,"
            " jax.export.register_namedtuple_serialization"
        )
    name, to_bytes = named
    encoded_aux = codec.encode_bytes(bytes(to_bytes(aux)))
    return ["node", [name, encoded_aux], *children]


def decode_tree(json: Json) -> TreeDef:
    return jax.tree.structure(_node_of(json))


# As JAX's own: a class that looks at its children lets opaque objects pass, if any.
_LEAF = object()


def _node_of(json: Json) -> Any:
    """A pytree of this structure, with `_LEAF` in each leaf."""
    if json == "*":
        return _LEAF
    if json is None:
        return None
    kind, details, *rest = json
    children = [_node_of(child) for child in rest]
    if kind == "tuple":
        return tuple(children)
    if kind == "list":
        return children
    if kind == "dict":
        return dict(zip(details, children, strict=True))
    if kind != "node":
        raise Malformed(f"a pytree of kind {kind!r}")
    name, aux = details
    make = _jax.node_maker(name)
    if make is None:
        raise Malformed(
            f"the pytree type {name!r}, which this process does not know. Import the"
            " module that names it by jax.export.register_pytree_node_serialization"
        )
    return make(b"" if aux is None else codec.decode_bytes(aux), children)


def _encode_template(template: Template) -> Json:
    static_paths = iter(template.paths(static=True))
    marks: list[Json] = []
    for leaf in template.leaves:
        if isinstance(leaf, Opaque):
            argument = f"the argument {next(static_paths)}"
            marks.append({"is": encode_plain(leaf.value, argument)})
        else:
            # An array; what is said of it is whether it is a typed key, and which.
            marks.append(_jax.key_impl(leaf))
    return [encode_tree(template.treedef), marks]


def _decode_template(json: Json) -> Template:
    structure, marks = json
    leaves: list[Any] = []
    for mark in marks:
        if isinstance(mark, dict):  # a constant
            leaves.append(Opaque(_plain(mark["is"])))
        else:
            leaves.append(_jax.key_dtype(mark))
    treedef = decode_tree(structure)
    # The engine puts one argument into each leaf.
    if treedef.num_leaves != len(leaves):
        raise Malformed(f"{len(leaves)} arguments in a tree of {treedef.num_leaves}")
    return Template(treedef, tuple(leaves))


def _plain(json: Json) -> Any:
    """A constant; lists were tuples."""
    return tuple(map(_plain, json)) if isinstance(json, list) else json


def _encode_results(results: Results) -> Json:
    keys = [_jax.key_impl(key) for key in results.keys]
    avals = list(map(_encode_aval, results.avals))
    return [encode_tree(results.treedef), avals, keys]


def _decode_results(json: Json) -> Results:
    structure, avals, keys = json
    avals = CODEC.decode(avals, AVALS, "the results")
    key_dtypes = tuple(map(_jax.key_dtype, keys))
    return Results(decode_tree(structure), avals, key_dtypes)


CODEC = Codec(
    {
        _jax.ShapedArray: (_encode_aval, decode_aval),
        Template: (_encode_template, _decode_template),
        Results: (_encode_results, _decode_results),
    }
)

# --- Sizes that are not known when a program is exported ------------------------------


def sizes_in(json: Json) -> list[str]:
    """The symbolic sizes in JSON, each once. Raises Malformed."""
    if isinstance(json, dict) and json.keys() == {SIZE}:
        if not isinstance(json[SIZE], str):
            raise Malformed(f"the size {json[SIZE]!r}")
        return [json[SIZE]]
    sizes: dict[str, None] = {}
    for part in codec.children(json):
        sizes |= dict.fromkeys(sizes_in(part))
    return list(sizes)


def with_sizes(json: Json, values: Mapping[str, int]) -> Json:
    """The same with numbers in place of the symbolic sizes."""
    if isinstance(json, dict):
        if json.keys() == {SIZE}:
            return values[json[SIZE]]
        return {key: with_sizes(inner, values) for key, inner in json.items()}
    if isinstance(json, list):
        return [with_sizes(value, values) for value in json]
    return json

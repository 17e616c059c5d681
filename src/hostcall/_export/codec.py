"""Trees, dtypes and constants as JSON, for programs that leave the process.

Each `tell_*` makes plain lists, texts and numbers; the `read_*` of the same name makes
the object again. Reading runs no code of the text: types are looked up by names that
this process has registered, and constants are numbers and texts.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import math
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin

import jax
import ml_dtypes
import numpy as np

from hostcall import _jax
from hostcall._core.spec import Results, Static, Template
from hostcall._jax.types import Aval, TreeDef


class NotPortable(Exception):
    """Something can't leave the process; the text says why, and completes a sentence
    that ends in "can't be exported: ".
    """


# What a text says: JSON, which may say anything.
Told: TypeAlias = Any


class Malformed(Exception):
    """A text is not what `tell_*` makes; says which part."""


# The version of texts and of files with them. Counted up when older versions of
# hostcall could not read them.
FORMAT = 5

_SIZE = "symbolic size"  # the one key of a dict that stands for such a size

# --- Constants ----------------------------------------------------------------------


def tell_plain(value: Any, what: str) -> Told:
    """A constant as JSON has it; tuples become lists. NotPortable for anything else."""
    if type(value) in (bool, int, float, str, type(None)):
        return value
    if isinstance(value, tuple):
        return [tell_plain(each, what) for each in value]
    if _jax.is_symbolic(value):
        return _tell_size(value)
    raise NotPortable(
        f"{what} is {value!r}. Only None, bools, numbers and texts leave the process;"
        " let the registered function hold everything else"
    )


def read_plain(told: Told) -> Any:
    """The constant; lists become tuples."""
    return tuple(map(read_plain, told)) if isinstance(told, list) else told


def tell_bytes(value: bytes) -> str:
    return base64.b64encode(value).decode()


def read_bytes(told: Told) -> bytes:
    if type(told) is not str:
        raise Malformed(f"the bytes {told!r}")
    return base64.b64decode(told, validate=True)


# --- Arrays -------------------------------------------------------------------------


def read_dtype(told: Told) -> np.dtype:
    # Only these: NumPy reads much else, such as "object" and "(2,3)f4, 07i4".
    if not isinstance(told, str) or told not in XLAS_DTYPES:
        raise Malformed(f"the dtype {told!r}")
    return np.dtype(getattr(ml_dtypes, told, told))


# The dtypes of arrays that calls pass, with XLA_FFI_DataType in XLA's c_api.h.
XLAS_DTYPES = {
    "bool": 1,
    **{"int8": 2, "int16": 3, "int32": 4, "int64": 5},
    **{"uint8": 6, "uint16": 7, "uint32": 8, "uint64": 9},
    **{"float16": 10, "float32": 11, "float64": 12, "bfloat16": 16},
    **{"complex64": 15, "complex128": 18, "int4": 21, "uint4": 22},
    **{"float8_e5m2": 19, "float8_e4m3fn": 20, "float8_e4m3b11fnuz": 23},
    **{"float8_e5m2fnuz": 24, "float8_e4m3fnuz": 25, "int2": 26, "uint2": 27},
    **{"float8_e4m3": 28, "float8_e3m4": 29, "float4_e2m1fn": 32},
    "float8_e8m0fnu": 33,
}


def _tell_size(size: int) -> Told:
    return {_SIZE: str(size)} if _jax.is_symbolic(size) else int(size)


def check_flags(what: str, flags: Sequence[Any], rows: int, columns: int) -> None:
    """Refuses what is no table of so many rows and columns."""
    if len(flags) != rows or any(len(each) != columns for each in flags):
        raise Malformed(f"{what}={flags!r}")


def check_axes(
    sizes: Sequence[int], flags: Sequence[Sequence[bool]], operands: Sequence[Aval]
) -> None:
    """Refuses axes that no operand has, and operands with other leading sizes.

    Args:
        sizes: of the axes, outermost first.
        flags: for each operand, which of the axes it has.
        operands: the operands.
    """
    for number, size in enumerate(sizes):
        if not any(each[number] for each in flags):
            raise Malformed(f"an axis of {size} that no operand has")
    for operand, each in zip(operands, flags, strict=True):
        leading = tuple(n for n, has in zip(sizes, each, strict=True) if has)
        if operand.shape[: len(leading)] != leading:
            raise Malformed(f"an operand {operand} in rows of {tuple(sizes)}")


def tell_aval(aval: Aval) -> list[Told]:
    return [np.dtype(aval.dtype).name, *map(_tell_size, aval.shape)]


def read_aval(told: Told) -> Aval:
    dtype, *shape = told
    if not all(type(n) is int and 0 <= n < 2**63 for n in shape):
        raise Malformed(f"the shape {shape!r} of dtype {dtype!r}")
    found = read_dtype(dtype)
    if math.prod(max(n, 1) for n in shape) * found.itemsize > 2**60:
        raise Malformed(f"the shape {shape!r}, too large for an array")
    return _jax.ShapedArray(tuple(shape), found)


# --- Trees --------------------------------------------------------------------------


def tell_tree(treedef: TreeDef) -> Told:
    """A leaf is "*", None is None, a node is [kind, what the kind needs, *children]."""
    data = treedef.node_data()
    if data is None:
        return "*"
    node_type, aux = data
    children = [tell_tree(child) for child in treedef.children()]
    if node_type is type(None):
        return None
    if node_type in (tuple, list):
        return [node_type.__name__, None, *children]
    if node_type is dict:
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
    return ["node", [name, tell_bytes(bytes(to_bytes(aux)))], *children]


def read_tree(told: Told) -> TreeDef:
    return jax.tree.structure(_node_of(told))


# As JAX's own: a class that looks at its children lets opaque objects pass, if any.
_LEAF = object()


def _node_of(told: Told) -> Any:
    if told == "*":
        return _LEAF
    if told is None:
        return None
    kind, more, *rest = told
    children = [_node_of(child) for child in rest]
    if kind in ("tuple", "list"):
        return tuple(children) if kind == "tuple" else children
    if kind == "dict":
        return dict(zip(more, children, strict=True))
    if kind != "node":
        raise Malformed(f"a pytree of kind {kind!r}")
    name, aux = more
    make = _jax.node_maker(name)
    if make is None:
        raise Malformed(
            f"the pytree type {name!r}, which this process does not know. Import the"
            " module that names it by jax.export.register_pytree_node_serialization"
        )
    return make(b"" if aux is None else read_bytes(aux), children)


def tell_template(template: Template) -> Told:
    paths = iter(template.paths(static=True))
    marks = [
        {"is": tell_plain(leaf.value, f"the argument {next(paths)}")}
        if isinstance(leaf, Static)
        else _jax.key_impl(leaf)
        for leaf in template.leaves
    ]
    return [tell_tree(template.treedef), marks]


def read_template(told: Told) -> Template:
    structure, marks = told
    leaves = tuple(
        Static(read_plain(it["is"])) if isinstance(it, dict) else _jax.key_dtype(it)
        for it in marks
    )
    treedef = read_tree(structure)
    if treedef.num_leaves != len(leaves):
        raise Malformed(f"{len(leaves)} arguments in a tree of {treedef.num_leaves}")
    return Template(treedef, leaves)


def tell_results(results: Results) -> Told:
    keys = [_jax.key_impl(key) for key in results.keys]
    return [tell_tree(results.treedef), [*map(tell_aval, results.avals)], keys]


def read_results(told: Told) -> Results:
    structure, avals, keys = told
    avals = read_value(avals, AVALS, "the results")
    return Results(read_tree(structure), avals, tuple(map(_jax.key_dtype, keys)))


# --- Records ------------------------------------------------------------------------
# Things whose fields travel, each as its type says.

AVALS = tuple[_jax.ShapedArray, ...]

_WAYS: dict[type, tuple[Callable[[Any], Told], Callable[[Told], Any]]] = {
    bytes: (tell_bytes, read_bytes),
    _jax.ShapedArray: (tell_aval, read_aval),
    Template: (tell_template, read_template),
    Results: (tell_results, read_results),
}


def tell_record(thing: Any, hints: Iterable[str]) -> dict[str, Told]:
    """These attributes as JSON, for `read_record`. Raises NotPortable."""
    return {each: tell_value(getattr(thing, each), f"{each}=") for each in hints}


def tell_value(value: Any, what: str) -> Told:
    for kind, (tell, _) in _WAYS.items():
        if issubclass(type(value), kind):
            return tell(value)
    if type(value) is tuple:
        return [tell_value(each, what) for each in value]
    if type(value) is dict:
        return {key: tell_value(each, what) for key, each in value.items()}
    return tell_plain(value, what)


def read_record(told: Told, hints: Mapping[str, Any]) -> dict[str, Any]:
    """The values of these fields, and no others, each of its type.

    Raises KeyError or Malformed, or what reading a tree raises.
    """
    if not isinstance(told, dict):
        raise Malformed(f"{told!r} in place of fields")
    if unknown := told.keys() - hints.keys():
        raise Malformed(f"the options {sorted(unknown)}")
    return {each: read_value(told[each], hint, each) for each, hint in hints.items()}


def read_value(told: Told, hint: Any, what: str) -> Any:
    """The value of a type that a text tells. 1 is not True, and a number is finite."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return told
    if hint in _WAYS:
        return _WAYS[hint][1](told)
    if origin is Literal:
        if any(type(told) is type(each) and told == each for each in inner):
            return told
    elif origin in (Union, types.UnionType):
        if told is None and type(None) in inner:
            return None
        for each in inner:
            with contextlib.suppress(Malformed):
                return read_value(told, each, what)
    elif origin is tuple and type(told) is list:
        if inner[-1] is ...:
            inner = inner[:1] * len(told)
        if len(inner) == len(told):
            return tuple(map(read_value, told, inner, itertools.repeat(what)))
    elif origin is dict and type(told) is dict:
        return {key: read_value(each, inner[1], what) for key, each in told.items()}
    elif hint is int:
        if type(told) is int and -(2**63) <= told < 2**63:
            return told
    elif hint is float:
        if type(told) in (int, float) and math.isfinite(told):
            return told
    elif type(told) is hint:
        return told
    raise Malformed(f"the option {what}={told!r}")


# --- The text -----------------------------------------------------------------------


# How deep lists and dicts may be in each other. What reads them goes down by calls of
# functions, and Python has room for a thousand.
_DEEPEST = 200


def write(told: Told) -> str:
    """The text of what `tell_*` made; equal for equal things, in every process."""
    if _is_too_deep(told):
        raise NotPortable(
            f"its arguments or results are a pytree of more than {_DEEPEST} levels."
            " Pass its leaves in a flat list"
        )
    return json.dumps(told, separators=(",", ":"), sort_keys=True)


def read(text: str | bytes) -> Told:
    """What a text says.

    Raises Malformed, which says why it can't be read.
    """
    try:
        told = json.loads(text)
    except (ValueError, TypeError) as error:
        raise Malformed(f"{type(error).__name__}: {error}") from error
    except RecursionError:
        told = None
    else:
        if not _is_too_deep(told):
            return told
    raise Malformed(f"lists in lists, more than {_DEEPEST} deep")


def _is_too_deep(told: Told) -> bool:
    level = [told]
    for _ in range(_DEEPEST):
        level = [child for part in level for child in _children(part)]
        if not level:
            return False
    return True


def _children(told: Told) -> Collection[Told]:
    if isinstance(told, dict):
        return told.values()
    return told if isinstance(told, list) else ()


def sizes_in(told: Told) -> list[str]:
    """The symbolic sizes in what `tell_*` made, each once. Raises Malformed."""
    if isinstance(told, dict) and told.keys() == {_SIZE}:
        if not isinstance(told[_SIZE], str):
            raise Malformed(f"the size {told[_SIZE]!r}")
        return [told[_SIZE]]
    found = [size for part in _children(told) for size in sizes_in(part)]
    return list(dict.fromkeys(found))


def with_sizes(told: Told, values: Mapping[str, int]) -> Told:
    """The same with numbers in place of the symbolic sizes."""
    if isinstance(told, dict):
        if told.keys() == {_SIZE}:
            return values[told[_SIZE]]
        return {key: with_sizes(value, values) for key, value in told.items()}
    if isinstance(told, list):
        return [with_sizes(value, values) for value in told]
    return told

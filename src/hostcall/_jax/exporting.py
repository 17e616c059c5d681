"""What leaves the process with a program: trees, key types, symbolic sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.interpreters import mlir as _mlir
from jaxlib.mlir import ir as _ir

from hostcall._jax.door import export as _export
from hostcall._jax.door import mlir as _src_mlir
from hostcall._jax.door import xla_bridge as _xla_bridge
from hostcall._jax.dtypes import is_symbolic
from hostcall._jax.types import Attribute, Dtype, Operation, Value
from hostcall._jax.versions import module_of

# Makes bytes of a node's auxiliary data, and nodes of those and of children.
ToBytes: TypeAlias = Callable[[Any], bytes]
MakeNode: TypeAlias = Callable[[bytes, Sequence[Any]], object]


def node_name(node_type: type) -> tuple[str, ToBytes] | None:
    """(name, function that makes bytes of auxiliary data) of a pytree type.

    Users give both by jax.export.register_pytree_node_serialization, or by
    register_namedtuple_serialization.
    """
    registered: tuple[str, ToBytes] | None
    registered = _export.serialization_registry.get(node_type)
    return registered


def node_maker(name: str) -> MakeNode | None:
    """A function (auxiliary data, children) -> node, for a name that was registered."""
    registered = _export.deserialization_registry.get(name)
    if registered is None:
        return None
    _, read, make = registered
    return lambda aux, children: make(read(aux), children)


def key_impl(dtype: Dtype) -> str | None:
    """The implementation behind the dtype of typed keys; None for None."""
    return None if dtype is None else str(dtype._impl.name)


def key_dtype(impl: str | None) -> Dtype:
    """The dtype of typed keys of an implementation; None for None. Or a ValueError."""
    if impl is None:
        return None
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


# --- Symbolic sizes ------------------------------------------------------------------


def size_from(text: str, known: Mapping[str, int]) -> int | None:
    """The value of a symbolic size, if that or those of all its variables are known."""
    if text in known:
        return known[text]
    (size,) = jax.export.symbolic_shape(text)
    if not is_symbolic(size):
        return int(size)
    names = set(map(str, size._get_vars()))
    if not names <= known.keys():
        return None
    return int(size._evaluate({name: known[name] for name in names}))


# The client of a platform on which this process runs programs.
client_of = _xla_bridge.get_backend


def marked(
    exported: jax.export.Exported, calls: Sequence[object]
) -> jax.export.Exported:
    """The same program, unequal to itself if it calls other things.

    JAX keeps compiled programs by equality of what was loaded. The mark is the name of
    a custom call that may be exported, by the numbers of the calls: it goes nowhere
    else. It keeps the calls alive, so that no other has the number of one while JAX
    compares with it.
    """
    get_vjp = exported._get_vjp
    marked_vjp = None
    if get_vjp is not None:
        # The program of the derivative calls the same things.
        marked_vjp = lambda primal: marked(get_vjp(primal), calls)  # noqa: E731
    return dataclasses.replace(
        exported,
        disabled_safety_checks=(*exported.disabled_safety_checks, _Mark(calls)),
        _get_vjp=marked_vjp,
    )


class _Mark(jax.export.DisabledSafetyCheck):  # type: ignore[misc]
    """Allows a custom call that nobody makes, named by the calls of one program.

    Attributes:
        calls: alive as long as the program.
    """

    def __init__(self, calls: Sequence[object]) -> None:
        numbers = [id(call) for call in calls]
        plain = jax.export.DisabledSafetyCheck.custom_call(f"hostcall {numbers}")
        super().__init__(str(plain))
        self.calls = calls


class CustomCall(NamedTuple):
    """A custom call in a program that was exported, maybe by somebody else.

    Attributes:
        operation: what MLIR calls it: "stablehlo.custom_call".
        target: the name of its handler.
        config: the attributes that the handler gets: texts; None for all else.
        operands, results: their types, as MLIR writes them. Operands that only say
            which symbolic sizes the results have are left out.
        has_side_effect: whether XLA may neither drop nor merge it.
        aliases: whether results may take the memory of operands.
        odd: names of attributes that no call of hostcall's has, or has like this.
    """

    operation: str
    target: str
    config: dict[str, str | None]
    operands: list[str]
    results: list[str]
    has_side_effect: bool
    aliases: bool
    odd: list[str]


def custom_calls(exported: jax.export.Exported) -> list[CustomCall]:
    """The custom calls of a program, in all of its functions."""
    calls: list[CustomCall] = []

    def look(op: Operation) -> _ir.WalkResult:
        if "call_target_name" in op.attributes:
            calls.append(_custom_call(op))
        return _ir.WalkResult.ADVANCE

    with _mlir.make_ir_context() as context:
        # Else MLIR starts threads, and a process that has some may not fork.
        context.enable_multithreading(False)
        try:  # not printed and parsed, which takes long with large constants
            module_of(exported).operation.walk(look)
        finally:
            context.set_thread_pool(_src_mlir.global_thread_pool)
    return calls


def _custom_call(op: Operation) -> CustomCall:
    """Reads one custom call; `odd` names what hostcall never writes so."""
    attributes = {name: op.attributes[name] for name in op.attributes}
    count = len(op.operands)
    # Where shapes are symbolic, the last operands are the shapes of the results.
    shapes = _numbers(attributes.get("indices_of_shape_operands"), count) or []
    config = attributes.get(_CONFIG)
    odd = [name for name in attributes if name not in _KNOWN]
    if config is not None and not isinstance(config, _ir.DictAttr):
        odd.append(_CONFIG)
    if str(attributes.get("backend_config", '""')) != '""':  # older targets' own
        odd.append("backend_config")
    if shapes != list(range(count - len(shapes), count)):
        odd.append("indices_of_shape_operands")
    layouts = {"operand_layouts": op.operands, "result_layouts": op.results}
    for name, values in layouts.items():
        if name in attributes and not _is_row_major(attributes[name], values):
            odd.append(name)
    config_texts: dict[str, str | None] = {}
    if _CONFIG not in odd:
        config_texts = {entry.name: _text(entry.attr) for entry in config or ()}
    target = attributes["call_target_name"]
    operands = list(op.operands)[: count - len(shapes)]
    return CustomCall(
        operation=op.name,
        target=_text(target) or str(target),
        config=config_texts,
        operands=[str(value.type) for value in operands],
        results=[str(value.type) for value in op.results],
        has_side_effect=str(attributes.get("has_side_effect")) == "true",
        aliases=str(attributes.get("output_operand_aliases", "[]")) != "[]",
        odd=odd,
    )


_CONFIG = "mhlo.backend_config"
_KNOWN = {
    *("call_target_name", "backend_config", _CONFIG, "indices_of_shape_operands"),
    *("operand_layouts", "result_layouts"),
    # Those decide neither which memory a call gets nor what its handler reads.
    *("has_side_effect", "output_operand_aliases", "mhlo.frontend_attributes"),
    *("mhlo.sharding", "sdy.sharding"),
}


def _text(attribute: Attribute) -> str | None:
    if not isinstance(attribute, _ir.StringAttr):
        return None
    try:
        return str(_ir.StringAttr(attribute).value_bytes, "utf-8")
    except UnicodeDecodeError:
        return None


def _numbers(attribute: Attribute | None, most: int) -> list[int] | None:
    """The numbers of an attribute; None if it has none, or too many."""
    if not isinstance(attribute, _ir.DenseIntElementsAttr):
        return None
    return None if len(attribute) > most else list(attribute)


def _is_row_major(layouts: Attribute, values: Sequence[Value]) -> bool:
    if not isinstance(layouts, _ir.ArrayAttr) or len(layouts) != len(values):
        return False
    for layout, value in zip(layouts, values, strict=True):
        ranked = isinstance(value.type, _ir.RankedTensorType)
        rank = len(value.type.shape) if ranked else 0  # a token has none
        if _numbers(layout, rank) != list(range(rank))[::-1]:
            return False
    return True


def type_text(dtype: str, sizes: Sequence[object]) -> str:
    """How MLIR writes the type of an array; a size that is no int is symbolic."""
    texts = [str(size) if type(size) is int else "?" for size in sizes]
    return f"tensor<{'x'.join([*texts, _element_text(dtype)])}>"


def _element_text(dtype: str) -> str:
    """How MLIR writes the type of an element."""
    if dtype == "bool":
        return "i1"
    if dtype == "bfloat16":
        return "bf16"
    if dtype.startswith("complex"):
        bits = int(dtype.removeprefix("complex"))
        return f"complex<f{bits // 2}>"
    if dtype.startswith("float"):  # "float8_e4m3fn" is f8E4M3FN
        form = dtype.removeprefix("float").replace("_", "")
        return f"f{form.upper()}"
    return dtype.replace("uint", "ui").replace("int", "i")

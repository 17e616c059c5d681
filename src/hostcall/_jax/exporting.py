"""What leaves the process with a program: trees, key types, symbolic sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import core as _core
from jax._src import xla_bridge as _xla_bridge
from jax._src.export import _export
from jax._src.interpreters import mlir as _mlir
from jax._src.lib.mlir import ir as _ir


def node_name(node_type: type) -> tuple[str, Callable[[Any], bytes]] | None:
    """(name, function that makes bytes of auxiliary data) of a pytree type.

    Users give both by jax.export.register_pytree_node_serialization, or by
    register_namedtuple_serialization.
    """
    found: tuple[str, Callable[[Any], bytes]] | None
    found = _export.serialization_registry.get(node_type)
    return found


def node_maker(name: str) -> Callable[[bytes, Sequence[Any]], Any] | None:
    """A function (auxiliary data, children) -> node, for a name that was registered."""
    found = _export.deserialization_registry.get(name)
    if found is None:
        return None
    _, read, make = found
    return lambda aux, children: make(read(aux), children)


def key_impl(dtype: Any) -> str:
    """The name of the implementation behind the dtype of typed keys."""
    return str(dtype._impl.name)


def key_dtype(impl: str) -> Any:
    """The dtype of typed keys with this implementation. Raises ValueError."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def key_ndim(dtype: Any) -> int:
    """How many axes the data of one typed key has."""
    return len(dtype._impl.key_shape)


# --- Symbolic sizes ------------------------------------------------------------------


def is_symbolic(size: Any) -> bool:
    return not _core.is_constant_dim(size) and _core.is_dim(size)


def has_symbolic(avals: Sequence[Any]) -> bool:
    """Whether some of these shapes are symbolic. A token has no shape."""
    return any(is_symbolic(n) for aval in avals for n in getattr(aval, "shape", ()))


def evaluate_sizes(
    texts: Sequence[str], known: Sequence[tuple[str, int]]
) -> list[int] | None:
    """The values of symbolic sizes, given other sizes with their values.

    A size that is not among the known ones is computed from its variables. These are
    solved from the known sizes, as far as one is linear in one unknown variable. None
    if something stays unknown, or if the known sizes contradict each other.
    """
    direct = dict(known)
    if any(direct[text] != value for text, value in known):
        return None
    if all(text in direct for text in texts):
        return [direct[text] for text in texts]
    joined = ", ".join([*texts, *(text for text, _ in known)])
    sizes = jax.export.symbolic_shape(joined)
    wanted, given = sizes[: len(texts)], sizes[len(texts) :]
    values = _solved(given, [value for _, value in known])
    needed = {name for size in wanted for name in _variables(size)}
    if not needed <= values.keys():
        return None
    for size, (_, value) in zip(given, known, strict=True):
        if set(_variables(size)) <= values.keys() and _value(size, values) != value:
            return None
    return [_value(size, values) for size in wanted]


def unknown_sizes(texts: Sequence[str], known: Sequence[str]) -> list[str]:
    """The symbolic sizes that `evaluate_sizes` can't find from the known ones."""
    missing = [text for text in texts if text not in known]
    if not missing:
        return []
    sizes = jax.export.symbolic_shape(", ".join([*missing, *known]))
    given = sizes[len(missing) :]
    names = sorted(set[str]().union(*map(_variables, sizes)))
    # Which variables can be found does not depend on their values.
    trial = {name: 1009 + 10 * number for number, name in enumerate(names)}
    found = _solved(given, [_value(size, trial) for size in given]).keys()
    return [
        text
        for text, size in zip(missing, sizes, strict=False)
        if not _variables(size) <= found
    ]


def _solved(given: Sequence[Any], at: Sequence[int]) -> dict[str, int]:
    """The variables that follow from sizes with these values."""
    values: dict[str, int] = {}
    left = list(zip(given, at, strict=True))
    while left:
        later = [pair for pair in left if not _solve(*pair, values)]
        if len(later) == len(left):
            break
        left = later
    return values


def _variables(size: Any) -> set[str]:
    if not is_symbolic(size):
        return set()
    return set(map(str, size._get_vars()))


def _value(size: Any, values: dict[str, int]) -> int:
    return int(size._evaluate(values)) if is_symbolic(size) else int(size)


def _solve(size: Any, value: int, values: dict[str, int]) -> bool:
    """Puts the one unknown variable of a size into `values`, if it can be found."""
    unknown = _variables(size) - values.keys()
    if not unknown:
        return True
    if len(unknown) > 1:
        return False
    (name,) = unknown
    first, *others = (
        (n, _value(size, {**values, name: n})) for n in (1, 2, 3, 5, 8, 64, 1001)
    )
    slope = others[0][1] - first[1]
    # Nothing else determines the unknown: mod(n, 4) does not, nor n // 2.
    linear = all(y - first[1] == slope * (n - first[0]) for n, y in others)
    if slope == 0 or not linear or (value - first[1]) % slope:
        return False
    found = first[0] + (value - first[1]) // slope
    if _value(size, {**values, name: found}) != value:
        return False
    values[name] = found
    return True


def shapes_of_results(ctx: Any, avals: Sequence[Any]) -> list[Any] | None:
    """The shapes of results as values of the program, which XLA needs in a custom call
    if one of them is symbolic; else None.
    """
    if not has_symbolic(avals):
        return None
    return [
        _mlir.eval_dynamic_shape_as_tensor(ctx, getattr(aval, "shape", ()))
        for aval in avals
    ]


def client_of(platform: str) -> Any:
    """The client of a platform on which this process runs programs."""
    return _xla_bridge.get_backend(platform)


def marked(exported: jax.export.Exported, mark: str) -> jax.export.Exported:
    """The same program, unequal to itself with another mark or none.

    JAX keeps compiled programs by equality of what was loaded. The mark is the name of
    a custom call that may be exported: it goes nowhere else.
    """
    checks = exported.disabled_safety_checks
    inner = exported._get_vjp
    return dataclasses.replace(
        exported,
        disabled_safety_checks=(
            *checks,
            jax.export.DisabledSafetyCheck.custom_call(mark),
        ),
        _get_vjp=None if inner is None else lambda one: marked(inner(one), mark),
    )


def attribute_texts(
    module: str | jax.export.Exported, name: str, targets: Sequence[str]
) -> list[str]:
    """The texts that the custom calls of these targets have as this attribute.

    Calls of other libraries may have attributes of this name too.
    """
    found: list[str] = []

    def look(op: Any) -> Any:
        target = op.attributes.get("call_target_name")
        config = op.attributes.get("mhlo.backend_config")
        is_ours = isinstance(target, _ir.StringAttr) and target.value in targets
        if is_ours and isinstance(config, _ir.DictAttr) and name in config:
            found.append(str(_ir.StringAttr(config[name]).value))
        return _ir.WalkResult.ADVANCE

    with _mlir.make_ir_context():
        if isinstance(module, str):
            read = _ir.Module.parse(module)
        else:  # without printing it, which takes long with large constants
            read = module.mlir_module(serialized=False)
        read.operation.walk(look)
    return found

"""`hc.derivatives`: taps of tangents and cotangents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hostcall._api.tap import FACE, prepare, rebuilt
from hostcall._core import mistakes
from hostcall._core.errors import SpecError
from hostcall._jax.types import Primitive
from hostcall._primitives.tap import tangents

T = TypeVar("T")


def tap_tangent(fn: Callable[..., Any], x: T, **options: Any) -> T:
    """Returns `x`, and taps its tangent in forward-mode derivatives.

    Args:
        fn: called with the tangent, a pytree like `x`, with None for leaves that have
            no tangent (integers, strings).
        x: a pytree.
        **options: the options of `hc.tap`.

    Returns:
        `x`. Use it in place of the argument.

    Under transformations: jvp, jacfwd: taps; a linearized function taps when it is
    called with a tangent. grad, jacrev: does not tap, since the tangent is only
    transposed and has no value; use `tap_cotangent`. Nested derivatives: taps in the
    innermost.

    Cost: that of `hc.tap` in the derivative; nothing without one.
    """
    name = "hc.derivatives.tap_tangent"
    return _tap_derivative(name, tangents.tangent_tap_p, fn, x, options)


def tap_cotangent(fn: Callable[..., Any], x: T, **options: Any) -> T:
    """Returns `x`, and taps its cotangent in reverse-mode derivatives.

    Args:
        fn: called with the cotangent, a pytree like `x`, with None for leaves that have
            no cotangent (integers, strings).
        x: a pytree.
        **options: the options of `hc.tap`.

    Returns:
        `x`. Use it in place of the argument.

    Under transformations: grad, vjp, jacrev: taps each time the backward pass reaches
    it. jvp: does not tap. Nested derivatives: taps in the innermost; the others stay
    correct.

    Cost: that of `hc.tap` in the backward pass; nothing without one.
    """
    name = "hc.derivatives.tap_cotangent"
    return _tap_derivative(name, tangents.cotangent_tap_p, fn, x, options)


def _tap_derivative(
    name: str,
    primitive: Primitive,
    fn: Callable[..., Any],
    x: T,
    options: Mapping[str, Any],
) -> T:
    """Puts a tap's equation into the program that is the identity, and whose rules of
    derivatives tap (_primitives/tap/tangents.py).
    """
    for unknown in sorted(options.keys() - FACE.options.keys()):
        taps_options = ", ".join(sorted(FACE.options))
        hint = FACE.hint(unknown) or f"Its options are those of hc.tap: {taps_options}"
        raise SpecError(
            f"hostcall: {name} has no option {unknown}=. {hint}",
            code="hc-option",
        )
    face = mistakes.Face(name, f"{name}({{fn}}, ({{args}}))")
    # Integers have no derivatives, so they go around the equation.
    operands, params = prepare(fn, (tangents.split(x),), {}, options, face)
    arrays = primitive.bind(*operands, params=params)
    out: T = tangents.joined(rebuilt(params, arrays), x)
    return out

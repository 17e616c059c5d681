"""The transformations: a program of an `op`, and the same in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from meshes import line

import hostcall as hc

X = np.float32(1.25)
XS = np.float32([1.25, 0.5, 3, 2])  # a value for each of the four devices
DOT = np.float32(3)
SCALAR = jax.ShapeDtypeStruct((), np.float32)
WHOLE = jax.ShapeDtypeStruct(XS.shape, XS.dtype)


def slope(y: Any, x: Any) -> Any:
    """The derivative of an op with the value `y` at `x`: it is x * x times a constant."""
    return 2 * y / x


@dataclass(frozen=True)
class Transformation:
    """`program(op)` runs on JAX, `oracle(plain)` in Python. Both return a value.

    Attributes:
        parallel: devices call at the same time, so that values and calls have no order.
        spec: of the argument of `op`.
    """

    program: Callable[[Any], Any]
    oracle: Callable[[Any], Any]
    parallel: bool = False
    spec: Any = SCALAR


def _twice(op: Any) -> Any:
    return lambda x: op(op(x))


def _repeat(op: Any, times: int) -> Any:
    y = X
    for _ in range(times):
        y = op(y)
    return y


def _until(op: Any) -> Any:
    y = X
    while y < 20:
        y = op(y)
    return y


def _derivative(op: Any) -> Any:
    y = op(X)
    return y, slope(y, X)


def _tangent(op: Any) -> Any:
    y, dy = _derivative(op)
    return y, dy * DOT


def _linear(op: Any) -> Any:
    y, dy = _derivative(op)
    return y, dy, dy * DOT


def _linearize(op: Any) -> Any:
    y, linear = jax.linearize(op, X)
    return y, linear(np.float32(1)), linear(DOT)


def _remat(op: Any) -> Any:
    """`op` is not differentiated, and the backward pass needs its value."""
    f = jax.checkpoint(lambda x: op(lax.stop_gradient(x)) * x * x)
    return jax.jit(jax.value_and_grad(f))(X)


def _remat_oracle(op: Any) -> Any:
    y = op(X)
    return y * X * X, y * 2 * X


def _beside(op: Any, loop: Any) -> Any:
    """A function of `x`, whose loop calls `op` beside what is differentiated.

    Of the carried values only the last depends on `x`: JAX splits such a loop in two.
    """

    def f(x: Any) -> Any:
        return loop(lambda c: (c[0] + 1, op(c[1]), c[2] * x), (0, X, x))[1:]

    return f


def _three_of_scan(body: Any, init: Any) -> Any:
    return lax.scan(lambda c, _: (body(c), None), init, length=3)[0]


def _three_of_while(body: Any, init: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 3, body, init)


def _grad_of_scan(op: Any) -> Any:
    def f(x: Any) -> Any:
        v, y = _beside(op, _three_of_scan)(x)
        return y, v

    (y, v), dy = jax.jit(jax.value_and_grad(f, has_aux=True))(X)
    return v, y, dy


def _linearize_while(op: Any) -> Any:
    (v, y), linear = jax.linearize(_beside(op, _three_of_while), X)
    return v, y, linear(np.float32(1))[1]


def _linearize_remat(op: Any) -> Any:
    f = jax.checkpoint(_beside(op, _three_of_while))
    (v, y), linear = jax.linearize(f, X)
    return v, y, linear(np.float32(1))[1]


def _beside_oracle(op: Any) -> Any:
    return _repeat(op, 3), X**4, 4 * X**3


def _jvp_of_while(op: Any) -> Any:
    def f(x: Any) -> Any:
        return lax.while_loop(
            lambda c: c[0] < 1, lambda c: (c[0] + 1, op(c[1])), (0, x)
        )[1]

    return jax.jit(lambda x: jax.jvp(f, (x,), (DOT,)))(X)


def _custom_jvp(op: Any) -> Any:
    f = jax.custom_jvp(op)

    @f.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        y = f(*primals)
        return y, slope(y, *primals) * tangents[0]

    return jax.jit(jax.value_and_grad(f))(X)


def _custom_vjp(op: Any) -> Any:
    f = jax.custom_vjp(op)

    def forward(x: Any) -> Any:
        y = op(x)
        return y, slope(y, x)

    f.defvjp(forward, lambda dy, ct: (dy * ct,))
    return jax.jit(jax.value_and_grad(f))(X)


def _blocks_of(op: Any) -> Any:
    """A program that maps `op` over the rows of an array, each on its device."""

    def block(x: Any) -> Any:
        return op(x[0])[None]

    spec = jax.P("x")
    return jax.jit(jax.shard_map(block, mesh=line(), in_specs=spec, out_specs=spec))


def _shard_map(op: Any) -> Any:
    return _blocks_of(op)(XS) / (XS * XS)


def _pmap(op: Any) -> Any:
    return np.asarray(jax.pmap(op)(XS)) / (XS * XS)


def _blocks(op: Any) -> Any:
    return np.stack([op(x) for x in XS]) / (XS * XS)


def _shards(op: Any) -> Any:
    sharding = jax.NamedSharding(line(), jax.P("x"))
    return jax.jit(op)(jax.device_put(XS, sharding))


def _export(op: Any) -> Any:
    return hc.load(bytes(hc.export(jax.jit(op))(X))).call(X)


TRANSFORMATIONS = {
    "eager": Transformation(lambda op: _twice(op)(X), lambda op: _twice(op)(X)),
    "jit": Transformation(lambda op: jax.jit(_twice(op))(X), lambda op: _twice(op)(X)),
    "vmap": Transformation(
        lambda op: jax.jit(jax.vmap(op))(XS), lambda op: np.stack([op(x) for x in XS])
    ),
    "grad": Transformation(
        lambda op: jax.jit(jax.value_and_grad(op))(X),
        _derivative,
    ),
    "jvp": Transformation(
        lambda op: jax.jit(lambda x: jax.jvp(op, (x,), (DOT,)))(X), _tangent
    ),
    "linearize": Transformation(_linearize, _linear),
    "scan": Transformation(
        lambda op: jax.jit(
            lambda x: lax.scan(lambda c, _: (op(c), None), x, length=3)[0]
        )(X),
        lambda op: _repeat(op, 3),
    ),
    "while_loop": Transformation(
        lambda op: jax.jit(lambda x: lax.while_loop(lambda v: v < 20, op, x))(X),
        _until,
    ),
    "cond": Transformation(
        lambda op: jax.jit(
            lambda x: lax.cond(x > 5, op, lambda v: v, lax.cond(x > 1, op, jnp.sin, x))
        )(X),
        lambda op: op(X),
    ),
    "remat": Transformation(_remat, _remat_oracle),
    "jvp of while_loop": Transformation(_jvp_of_while, _tangent),
    "grad beside a scan": Transformation(_grad_of_scan, _beside_oracle),
    "linearize beside a while_loop": Transformation(_linearize_while, _beside_oracle),
    "remat beside a while_loop": Transformation(_linearize_remat, _beside_oracle),
    "custom_jvp": Transformation(_custom_jvp, _derivative),
    "custom_vjp": Transformation(_custom_vjp, _derivative),
    "shard_map": Transformation(_shard_map, _blocks, parallel=True),
    "pmap": Transformation(_pmap, _blocks, parallel=True),
    "jit over shards": Transformation(_shards, lambda op: op(XS), spec=WHOLE),
    "export": Transformation(_export, lambda op: op(X)),
}

# What test_smoke.py tries of each face, before all else.
SETTINGS = ("eager", "jit", "vmap", "grad", "scan", "shard_map")
DEVICES = ("shard_map", "pmap", "jit over shards")


def has_devices_for(name: str) -> bool:
    """Whether this machine has the four devices that a transformation may need."""
    return name not in DEVICES or len(jax.devices()) >= ROWS


# --- Programs for values of any dtype ------------------------------------------------

# Four values or rows: one for each device.
ROWS = 4


def _stacked(x: Any) -> Any:
    if isinstance(x, jax.Array):  # typed keys
        return jnp.stack([x] * ROWS)
    return jnp.asarray(np.stack([x] * ROWS))  # STACKS_OF_INT2 in tests/older_jax.py


def _spec(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _rows(transform: Callable[[Any], Any], x: Any, **more: Any) -> Transformation:
    """`transform(op)` maps `op` over rows that are all `x`."""

    def oracle(op: Any) -> Any:
        return [op(x) for _ in range(ROWS)]

    return Transformation(
        lambda op: list(transform(op)(_stacked(x))), oracle, spec=_spec(x), **more
    )


def _two_steps(op: Any) -> Any:
    return jax.jit(lambda x: lax.scan(lambda c, _: (op(c), None), x, length=2)[0])


# By the names of TRANSFORMATIONS, each a function of the value.
MOVES: dict[str, Callable[[Any], Transformation]] = {
    "jit": lambda x: Transformation(
        lambda op: jax.jit(op)(x), lambda op: op(x), spec=_spec(x)
    ),
    "vmap": lambda x: _rows(lambda op: jax.jit(jax.vmap(op)), x),
    "scan": lambda x: Transformation(
        lambda op: _two_steps(op)(x), lambda op: op(op(x)), spec=_spec(x)
    ),
    "cond": lambda x: Transformation(
        lambda op: jax.jit(lambda x, p: lax.cond(p, op, lambda v: v, x))(x, True),
        lambda op: op(x),
        spec=_spec(x),
    ),
    "shard_map": lambda x: _rows(_blocks_of, x, parallel=True),
}

"""JAX's transfer guards: transfers that hostcall makes count as explicit."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback

import hostcall as hc

SPEC = jax.ShapeDtypeStruct((3,), jnp.float32)
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
GUARDS = {
    f"{which or 'all'} {level}": (which, level)
    for which in ("", "host_to_device", "device_to_device", "device_to_host")
    for level in ("disallow", "disallow_explicit")
}


def guarded(which="", level="disallow"):
    return getattr(jax, f"transfer_guard_{which}" if which else "transfer_guard")(level)


def host_sine(x):
    return np.sin(x)


def write_twice(ctx, out, x):
    np.asarray(out)[...] = np.asarray(x) * 2


def nothing(*args):
    pass


class Counter:
    def __init__(self):
        self.n = np.float32(0)

    def add(self, k):
        self.n += k
        return self.n


def host_functions():
    forward = hc.host(np.sin, result=hc.results.like(0))
    forward.defjvp(lambda p, t: np.cos(p[0]) * t[0])
    reverse = hc.host(np.sin, result=hc.results.like(0))
    reverse.defvjp(lambda x: (np.sin(x), x), lambda x, ct: (np.cos(x) * ct,))
    differences = hc.derivatives.finite_difference(
        hc.host(np.sin, result=hc.results.elementwise)
    )
    return forward, reverse, differences


FORWARD, REVERSE, DIFFERENCES = host_functions()
COUNTER = hc.Object(Counter, methods={"add": SCALAR})

# Functions of a float32[3], a float32[], a bool[] and a key, all jax.Arrays.
EAGER = {
    "call": lambda x, y, m, k: hc.call(np.sin, SPEC, x),
    "ordered call": lambda x, y, m, k: hc.call(np.sin, SPEC, x, order="ordered"),
    "masked call": lambda x, y, m, k: hc.call(np.sin, SPEC, x, where=m),
    "call with numbers": lambda x, y, m, k: hc.call(
        lambda x, *_: x, SPEC, x, 1.0, np.ones(3)
    ),
    "call with a key": lambda x, y, m, k: hc.call(lambda k, x: x, SPEC, k, x),
    "call with jax.Arrays": lambda x, y, m, k: hc.call(jnp.sin, SPEC, x, arrays="jax"),
    "rows": lambda x, y, m, k: jax.vmap(lambda v: hc.call(np.sin, SCALAR, v))(x),
    "parallel rows": lambda x, y, m, k: jax.vmap(
        lambda v: hc.call(np.sin, SCALAR, v, vmap_method="parallel")
    )(x),
    "lent": lambda x, y, m, k: hc.call(
        lambda x, out: out.__setitem__(..., x), SPEC, x, lend="out"
    ),
    "tap": lambda x, y, m, k: hc.tap(nothing, x, where=m),
    "tap of numbers": lambda x, y, m, k: hc.tap(nothing, 1.0, np.ones(3)),
    "tap_through": lambda x, y, m, k: hc.tap_through(nothing, x),
    "debug.callback": lambda x, y, m, k: hc.debug.callback(nothing, x, 1.0),
    "io_callback": lambda x, y, m, k: hc.io_callback(host_sine, SPEC, x, ordered=True),
    "host function": lambda x, y, m, k: FORWARD(x),
    "jvp": lambda x, y, m, k: jax.jvp(FORWARD, (x,), (x,)),
    "vjp": lambda x, y, m, k: jax.vjp(REVERSE, x)[1](x),
    "differences": lambda x, y, m, k: jax.jvp(DIFFERENCES, (x,), (x,)),
    "object": lambda x, y, m, k: COUNTER.add(y),
}
# Arguments and results of a callback, on whatever thread it runs.
COMPILED = {
    "pure": lambda x: hc.pure_callback(host_sine, SPEC, x),
    "unordered": lambda x: hc.io_callback(host_sine, SPEC, x),
    "jax.Arrays": lambda x: hc.call(jnp.sin, SPEC, x, arrays="jax"),
}


@pytest.mark.parametrize("program", EAGER.values(), ids=EAGER)
@pytest.mark.parametrize("which", ["", "host_to_device", "device_to_host"])
def test_eager_calls_on_arrays_of_jax_pass_where_only_implicit_ones_do_not(
    program, which
):
    values = jnp.arange(3.0), jnp.float32(2), jnp.bool_(True), jax.random.key(0)
    for _ in range(3):  # repeated eager calls are compiled
        with guarded(which, "disallow"):
            jax.block_until_ready(program(*values))


# --- Drop-ins behave as JAX's callbacks ----------------------------------------------

PAIRS = {
    "pure": (hc.pure_callback, jax.pure_callback),
    "io": (hc.io_callback, io_callback),
    "debug": (
        lambda fn, spec, x: hc.debug.callback(nothing, x),
        lambda fn, spec, x: jax.debug.callback(nothing, x),
    ),
    "buffer": (
        lambda fn, spec, x: hc.buffers.buffer_callback(write_twice, spec)(x),
        lambda fn, spec, x: buffer_callback(write_twice, spec)(x),
    ),
}
# Debug and buffer callbacks that run eagerly take their arrays to hostcall's own device,
# which under "disallow_explicit" is one transfer more than JAX has.
REFUSED = [
    pytest.param(guard, pair, id=f"{name} {what}")
    for what, guard in GUARDS.items()
    for name, pair in PAIRS.items()
    if guard[1] == "disallow" or name in ("pure", "io")
]


@pytest.mark.parametrize(("guard", "drop_in"), REFUSED)
@pytest.mark.parametrize("kind", ["jax.Array", "NumPy", "jit"])
def test_drop_ins_refuse_what_jax_refuses(guard, drop_in, kind):
    ours, theirs = drop_in
    x = np.float32([1, 2, 3]) if kind == "NumPy" else jnp.arange(3.0)

    def outcome(callback):
        program = lambda x: callback(host_sine, SPEC, x)
        if kind == "jit":
            program = jax.jit(program)
            jax.block_until_ready(program(x))
        refused = []
        for _ in range(2):  # eagerly, then compiled
            with guarded(*guard):
                try:
                    jax.block_until_ready(program(x))
                    refused.append("not at all")
                except (jax.errors.JaxRuntimeError, ValueError) as error:
                    refused.append("Disallowed host-to-device transfer" in str(error))
        return refused

    assert outcome(ours) == outcome(theirs)


def test_a_guard_of_the_whole_process():
    x = jnp.arange(3.0)
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        programs = [*COMPILED.values(), *map(jax.jit, COMPILED.values())]
        outs = [program(x) for _ in range(2) for program in programs]
        jax.block_until_ready(outs)
    finally:
        jax.config.update("jax_transfer_guard", "allow")
    for out in outs:
        np.testing.assert_allclose(out, np.sin(np.arange(3)), rtol=1e-6)


def test_the_guard_stays_as_it_was_on_each_thread():
    x = jnp.zeros(3)
    found = []

    def work():
        with jax.transfer_guard("disallow"):
            # On this thread, its argument and its result are put on devices.
            hc.call(jnp.sin, SPEC, x, arrays="jax")
            try:
                jnp.sin(np.zeros(3))
            except jax.errors.JaxRuntimeError as error:
                found.append("Disallowed" in str(error))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work()
    assert found == [True] * 3

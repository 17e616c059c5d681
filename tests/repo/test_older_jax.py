"""Each thing that an older JAX can't do (tests/older_jax.py), tried in plain JAX.

A program here returns whether JAX can do it, or raises what JAX raises.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jobs
import numpy as np
import older_jax
import pytest
from jax import lax

SPEC = jax.ShapeDtypeStruct((), np.float32)


def small_callbacks(run_python):
    x = jnp.arange(-8, 7, dtype=jnp.int4)
    out = jax.jit(lambda x: jax.pure_callback(lambda a: a, x, x))(x)
    return np.array_equal(np.asarray(out), np.asarray(x))


def stacks_of_int2(run_python):
    done = run_python(
        "import jax.numpy as jnp; print(jnp.stack([jnp.zeros(4, jnp.int2)] * 4).shape)",
        check=False,
    )
    assert done.returncode in (0, -6), done.stderr
    return done.returncode == 0


def options_alone(run_python):
    jax.debug.print(ordered=True)("{}", 1)
    return True


def vectorized(run_python):
    jax.pure_callback(lambda x, vectorized: x, SPEC, 1.0, vectorized=True)
    return True


def names_callbacks(run_python):
    with pytest.raises(TypeError) as error:
        jax.pure_callback(lambda text: 1.0, SPEC, "text")
    return "<function pure_callback at 0x" not in str(error.value)


def loops_linearized_twice(run_python):
    def square(x):
        step = lambda c: (c[0] + 1, c[1] * x)
        return lax.while_loop(lambda c: c[0] < 2, step, (0, jnp.ones_like(x)))[1]

    one = jnp.float32(1)
    f = jax.checkpoint(square)
    slope = lambda x: jax.linearize(f, x)[1](one)
    return float(jax.linearize(slope, jnp.float32(5))[1](one)) == 2


def plain_reports(run_python):
    # In a process of its own, whose end raises the failure again.
    source = """
    import jax, numpy as np
    from jax.sharding import PartitionSpec as P
    def fails(x):
        raise LookupError("no such row")
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:2], ("x",))
    call = lambda x: jax.pure_callback(fails, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    f = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    try:
        f(np.zeros(2, np.float32)).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        print("Buffer Definition Event" in str(error), "no such row" in str(error))
    """
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    begins, tells = run_python(source, env=flags, check=False).stdout.split()
    assert tells == "True"
    return begins == "False"


def lost_jobs_abort(run_python):
    source = """
    import jax, os, sys, threading
    me, port = int(sys.argv[1]), sys.argv[2]
    jax.distributed.initialize(f"localhost:{port}", 2, me, heartbeat_timeout_seconds=5)
    jax.devices()  # which both wait for
    if me == 1:
        os._exit(7)
    threading.Event().wait()
    """

    def run(me, port):
        return run_python(source, str(me), port, check=False).returncode

    left, gone = jobs.in_each(2, run)
    assert gone == 7
    assert left in (1, -6)
    return left == -6


def numpy_primals(run_python):
    types = []
    f = jax.custom_jvp(jnp.sin)
    f.defjvp(lambda x, t: (types.append(type(x[0])) or x[0], t[0]))
    jax.grad(lambda x: f(x).sum())(np.ones(3, np.float32))
    return issubclass(types[0], np.ndarray)


# What a JAX that can't raises, where it raises.
RAISES = {
    "options_alone": "missing 1 required positional argument: 'fmt'",
    "vectorized": "'vectorized' argument of jax.pure_callback was removed",
    "loops_linearized_twice": "'NoneType' and 'tuple'",
}
LACKS = {
    name.lower(): lack
    for name, lack in vars(older_jax).items()
    if isinstance(lack, older_jax.Lack)
}


@pytest.mark.parametrize("name", LACKS)
def test_plain_jax_can_do_it_from_that_version_on(name, run_python):
    can_do = globals()[name]
    if not LACKS[name].is_missing:
        assert can_do(run_python)
    elif name in RAISES:
        with pytest.raises((TypeError, ValueError), match=RAISES[name]):
            can_do(run_python)
    else:
        assert not can_do(run_python)

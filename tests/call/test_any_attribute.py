"""Callables that have every attribute, raise for one, or lead back to themselves.

A Mock answers any name, and a proxy may go over the network for one. So hostcall asks a
user's callable for nothing but Python's own attributes, and takes only what has the
type that Python gives it.
"""

from __future__ import annotations

import functools
import threading
import types
import xmlrpc.client
import xmlrpc.server
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from limits import HANG_SECONDS

import hostcall as hc

X = jnp.arange(3.0)
WANT = np.asarray(X) * 2


def double(x):
    return np.asarray(x) * 2


# The second is what `inspect` asks for.
PYTHONS = ("__", "_is_coroutine_marker")


class Anything:
    """Each attribute that it lacks is another such object, and is noted."""

    def __init__(self, asked=None):
        self.asked = [] if asked is None else asked

    def __call__(self, x):
        return double(x)

    def __getattr__(self, name):
        self.asked.append(name)
        return type(self)(self.asked)


class Raising:
    """A proxy of nothing: attributes raise what no `getattr` with a default catches."""

    def __call__(self, x):
        return double(x)

    def __getattr__(self, name):
        raise RuntimeError("no object is bound")


class Disguised:
    """Says that it is of another class, as proxies do."""

    def __init__(self, kind):
        self.kind = kind

    @property
    def __class__(self):
        return self.kind

    def __call__(self, x):
        return double(x)


class Undecided:
    """Raises if it is asked for its truth, as an array does."""

    def __call__(self, x):
        return double(x)

    def __bool__(self):
        raise RuntimeError("neither true nor false")


class CallIsUndecided:
    __call__ = Undecided()


def wraps_itself():
    @functools.wraps(double)
    def wrapper(x):
        return double(x)

    wrapper.__wrapped__ = wrapper
    return wrapper


def wraps_in_a_ring():
    one, other = (lambda x: double(x)), (lambda x: double(x))
    one.__wrapped__, other.__wrapped__ = other, one
    return one


CALLABLES = {
    "MagicMock": lambda: mock.MagicMock(side_effect=double),
    "Mock": lambda: mock.Mock(side_effect=double),
    "Mock of a function": lambda: mock.Mock(spec=double, side_effect=double),
    "Mock of a method": lambda: mock.Mock(spec=[].append, side_effect=double),
    "Mock of a partial": lambda: mock.Mock(
        spec=functools.partial(double), side_effect=double
    ),
    "autospec": lambda: mock.create_autospec(double, side_effect=double),
    "method of a Mock": lambda: mock.Mock(**{"a.b.side_effect": double}).a.b,
    "partial of a Mock": lambda: functools.partial(mock.Mock(side_effect=double)),
    "Anything": Anything,
    "method bound to Anything": lambda: types.MethodType(Anything(), 3).__func__,
    "Raising": Raising,
    "Undecided": Undecided,
    "__call__ is Undecided": CallIsUndecided,
    "Disguised as a function": lambda: Disguised(types.FunctionType),
    "Disguised as a method": lambda: Disguised(types.MethodType),
    "Disguised as a partial": lambda: Disguised(functools.partial),
    "wraps itself": wraps_itself,
    "wraps in a ring": wraps_in_a_ring,
}


def tapped(f):
    seen = []
    jax.jit(lambda x: hc.tap(lambda v: seen.append(f(v)), x))(X)
    jax.jit(lambda x: hc.tap(f, x))(X)
    hc.barrier()
    return seen[0]


def exported(f):
    f = hc.register("tests.any_attribute", version=id(f) % 10**9)(f)
    return hc.load(bytes(hc.export(jax.jit(lambda x: hc.call(f, x, x)))(X))).call(X)


FACES = {
    "call": lambda f: jax.jit(lambda x: hc.call(f, x, x))(X),
    "eager": lambda f: hc.call(f, X, X),
    "vmap": lambda f: jax.vmap(lambda x: hc.call(f, x, x))(X),
    "ordered": lambda f: jax.jit(lambda x: hc.call(f, x, x, order="ordered"))(X),
    "timeout": lambda f: jax.jit(lambda x: hc.call(hc.host(f, timeout=600), x, x))(X),
    "tap": tapped,
    "host": lambda f: jax.jit(hc.host(f, result=hc.results.like(0)))(X),
    "pure_callback": lambda f: jax.jit(lambda x: hc.pure_callback(f, x, x))(X),
    "debug.callback": lambda f: [hc.debug.callback(f, X), WANT][1],
    "patched": lambda f: _patched(f),
    "exported": exported,
    "Object": lambda f: jax.jit(
        lambda x: hc.Object(_Has(f), methods={"method": x}).method(x)
    )(X),
}


class _Has:
    """A factory of objects whose method is the callable."""

    def __init__(self, f):
        self.f = f

    def __call__(self):
        return types.SimpleNamespace(method=self.f)


def _patched(f):
    with hc.patch_jax():
        return jax.jit(lambda x: jax.pure_callback(f, x, x))(X)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("kind", CALLABLES)
def test_values(kind, face):
    np.testing.assert_array_equal(FACES[face](CALLABLES[kind]()), WANT)


def test_python_alone_names_the_attributes_that_are_asked_for():
    for face in FACES.values():
        f = Anything()
        face(f)
        assert not [name for name in f.asked if not name.startswith(PYTHONS)]


def test_an_async_mock_is_awaited():
    f = mock.AsyncMock(side_effect=double)
    np.testing.assert_array_equal(jax.jit(lambda x: hc.call(f, x, x))(X), WANT)
    f.assert_awaited_once()


def test_tracing_makes_no_remote_call():
    asked = []

    class Server:
        def _dispatch(self, method, params):
            asked.append(method)
            return 2.0

    with xmlrpc.server.SimpleXMLRPCServer(
        ("127.0.0.1", 0), logRequests=False
    ) as server:
        server.register_instance(Server())
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            port = server.server_address[1]
            remote = xmlrpc.client.ServerProxy(f"http://127.0.0.1:{port}/").sqrt

            def call(x):
                return hc.call(lambda v: remote(float(v)), x, x)

            spec = jax.ShapeDtypeStruct((), jnp.float32)
            lowered = jax.jit(lambda x: hc.call(remote, spec, x)).lower(spec)
            jax.jit(lambda x: hc.tap(remote, x)).lower(spec)
            jax.jit(hc.host(remote, result=spec)).lower(spec)
            hc.register("tests.remote", version=port)(remote)
            lowered.compile()
            assert asked == []
            assert jax.jit(call)(np.float32(4)) == 2
            assert asked == ["sqrt"]
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("face", ["call", "eager", "host", "pure_callback"])
def test_a_partial_of_itself_is_refused(face):
    f = functools.partial(double)
    f.__setstate__((f, (), {}, {}))
    with pytest.raises(hc.errors.SpecError, match="hold themselves"):
        FACES[face](f)
    f.__setstate__((double, (), {}, {}))  # no cycle is left behind


def test_an_error_with_every_attribute_is_reported():
    class Failed(ValueError):
        def __getattr__(self, name):
            return mock.MagicMock()

    def fail(x):
        raise Failed("assignment destination is read-only")

    with pytest.raises(
        jax.errors.JaxRuntimeError, match="Failed: assignment.*lend=True"
    ):
        jax.jit(jax.vmap(lambda x: hc.call(fail, x, x, lend=True)))(
            X
        ).block_until_ready()


def test_an_awaitable_with_every_attribute_is_late():
    """The text of the error follows what the coroutine waits for."""

    class Waits(Anything):
        def __await__(self):
            return self

        def __iter__(self):
            return self

        def __next__(self):
            return None  # to the loop: go on with others, and come back

    async def wait(x):
        if x.any():
            await Waits()
        return x

    # The loop has begun by then: a call that waits for its turn would be late otherwise.
    jax.block_until_ready(jax.jit(lambda x: hc.call(wait, x, x))(0 * X))
    for timeout in (0.1, 1, 10, HANG_SECONDS):
        late = hc.host(wait, timeout=timeout)
        with pytest.raises(jax.errors.JaxRuntimeError, match="CallTimeoutError") as got:
            jax.jit(lambda x, late=late: hc.call(late, x, x))(X).block_until_ready()
        if "it has not begun to wait" not in str(got.value):  # a busy machine
            break
    assert "waits in" in str(got.value)


def test_an_error_with_every_attribute_that_keeps_a_view():
    """The error's frames are searched for the view, and those of errors behind it."""

    class Failed(Exception):
        def __getattr__(self, name):
            return mock.Mock()

    def fail(x):
        raise Failed(x)

    f = jax.jit(lambda x: hc.call(fail, x, x, lend=True))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Failed"):
        f(X).block_until_ready()

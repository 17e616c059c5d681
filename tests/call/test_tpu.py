"""Programs that are lowered for TPUs, oneAPI and ROCm, through JAX's own callbacks.

No such device is needed: the text of the lowered program says what the device sends,
and what it waits for. `Backend` stands for the one that JAX asks for a TPU's callbacks.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import line

import hostcall as hc

S = jax.ShapeDtypeStruct((8,), np.float32)


class Backend:
    """Keeps what a send and its answers would call."""

    platform = "tpu"

    def __init__(self):
        self.calls = []

    def make_python_callback_from_host_send_and_recv(
        self, fn, ins, outs, send, recv, _
    ):
        self.calls.append((fn, send, recv))
        return object()

    def process_index(self):
        return 0


@pytest.fixture
def backend(monkeypatch):
    made = Backend()
    monkeypatch.setattr(mlir.ModuleContext, "get_backend", lambda *_, **__: made)
    jax.clear_caches()
    yield made
    jax.clear_caches()


def lowered(f, x=S, platform="tpu"):
    return jax.jit(f).trace(x).lower(lowering_platforms=(platform,)).as_text()


def told(tell):
    return lambda x: (tell(x), x * 2)[1]


def see(x):
    pass


def in_a_scan(tell):
    return lambda x: jax.lax.scan(lambda c, i: ((tell(i), c)[1], None), x, x)[0]


def one_device(tell):
    """In a `cond`, with a mask, beside others: each is one send with an answer."""
    return lambda x: jax.lax.cond(x[0] > 0, lambda: tell(x), lambda: None)


EFFECTS = {
    "tap": lambda x: hc.tap(see, x),
    "tap with where": lambda x: hc.tap(see, x, where=x.sum() > 0),
    "ordered tap": lambda x: hc.tap(see, x, order="ordered"),
    "print": lambda x: hc.print("{}", x),
    "call": lambda x: hc.call(see, None, x, order="unordered"),
    "ordered call": lambda x: hc.call(see, None, x, order="ordered"),
    "debug.callback": lambda x: hc.debug.callback(see, x),
    "debug.print": lambda x: hc.debug.print("{}", x),
    "JAX's own": lambda x: jax.debug.callback(see, x),
}


@pytest.mark.parametrize("around", [told, in_a_scan, one_device])
@pytest.mark.parametrize("name", EFFECTS)
def test_what_tells_waits_for_an_answer(name, around, backend):
    """Else a barrier returns before the host has the values."""
    text = lowered(around(EFFECTS[name]))
    assert text.count("stablehlo.send") >= 1
    assert text.count("stablehlo.recv") == 1
    assert all(recv for _, _, recv in backend.calls)


def test_taps_that_follow_one_another_are_sent_in_order(backend):
    def f(x):
        hc.tap(see, x)
        hc.print("{}", x)
        hc.tap(see, x)
        return x

    text = lowered(f)
    # Each send takes the token of the answer before it; the first makes one.
    assert text.count("stablehlo.recv") == 3
    assert text.count("stablehlo.create_token") == 1


def test_what_is_sent_reaches_the_function(backend):
    seen = []
    lowered(told(lambda x: hc.tap(lambda v: seen.append(v.tolist()), x)))
    ((deliver, _, _),) = backend.calls
    deliver(np.arange(8, dtype=np.float32))
    hc.barrier()
    assert seen == [list(range(8))]


# --- Which device sends ---------------------------------------------------------------


def over_devices():
    return jax.ShapeDtypeStruct(
        (8,), np.float32, sharding=NamedSharding(line(), P("x"))
    )


def senders(text):
    """The numbers of the devices on which sends and receives are placed."""
    lines = [
        each for each in text.splitlines() if re.search(r"stablehlo\.(send|recv)", each)
    ]
    assert lines
    return {int(n) for each in lines for n in re.findall(r"maximal.*?(\d+)", each)}


@pytest.mark.parametrize("number", range(4))
def test_the_given_device_sends(number, backend):
    device = jax.devices()[number]
    for f in (
        told(lambda x: hc.tap(see, x, on=device)),
        told(lambda x: hc.print("{}", x, on=device)),
        lambda x: hc.call(np.sin, S, x, on=device),
    ):
        assert senders(lowered(f, over_devices())) == {number}


def test_the_first_device_sends_otherwise(backend):
    assert senders(lowered(told(lambda x: hc.tap(see, x)), over_devices())) == {0}


def test_a_tap_of_shards_is_refused_with_what_to_write(backend):
    with pytest.raises(hc.errors.HostcallError, match=r"on='shards'.*jax.shard_map"):
        lowered(told(lambda x: hc.tap(see, x, on="shards")), over_devices())
    f = jax.shard_map(
        told(lambda x: hc.tap(see, x, on="shards")),
        mesh=line(),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    text = lowered(f, over_devices())
    sends = [x for x in text.splitlines() if "stablehlo.send" in x]
    number, block = sends
    assert "tensor<ui32>" in number  # which device sends it
    assert "tensor<2xf32>" in block


def test_a_device_in_a_shard_map_is_refused(backend):
    f = jax.shard_map(
        told(lambda x: hc.tap(see, x, on=jax.devices()[0])),
        mesh=line(),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    with pytest.raises(hc.errors.SpecError, match="each device makes its own call"):
        lowered(f, over_devices())


# --- Which platforms ------------------------------------------------------------------


FACES = {
    "call": lambda x: hc.call(np.sin, x, x),
    "host": lambda x: hc.host(np.sin, result=hc.results.like(0))(x),
    "tap": told(lambda x: hc.tap(see, x)),
    "print": told(lambda x: hc.print("{}", x)),
    "pure_callback": lambda x: hc.pure_callback(np.sin, x, x),
}


@pytest.mark.parametrize("platform", ["rocm", "oneapi"])
@pytest.mark.parametrize("name", FACES)
def test_gpus_that_jax_serves(name, platform):
    """An older JAX has no callback for some of them, and then hostcall has none."""
    refused = _refusal(lambda x: jax.pure_callback(np.sin, x, x), platform)
    if refused:
        assert _refusal(FACES[name], platform)
    else:
        assert "python_gpu_callback" in lowered(FACES[name], platform=platform)


def _refusal(f, platform):
    try:
        lowered(f, platform=platform)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["call", "host", "tap", "print"])
def test_other_platforms_are_refused_with_advice_that_jax_takes(name):
    with pytest.raises(hc.errors.HostcallError, match="lowered for METAL") as caught:
        lowered(FACES[name], platform="METAL")
    assert 'jax.device_put(x, jax.devices("cpu")[0])' in str(caught.value)
    x = jax.device_put(jnp.arange(8.0), jax.devices("cpu")[0])
    assert jax.jit(FACES[name])(x).shape == (8,)

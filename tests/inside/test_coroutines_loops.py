"""Coroutine functions on a loop of the user's that ends under them."""

from __future__ import annotations

import asyncio
import gc
import threading

import jax
import jax.numpy as jnp
import pytest
from limits import HANG_SECONDS
from loops import close_under

import hostcall as hc
from hostcall._core import failures
from hostcall._policies import layer

F32 = jax.ShapeDtypeStruct((), jnp.float32)


@pytest.mark.parametrize("timeout", [None, HANG_SECONDS])
def test_a_loop_that_is_closed_while_a_call_runs(timeout):
    loop, begun = asyncio.new_event_loop(), threading.Event()

    async def waits(x):
        begun.set()
        await asyncio.Event().wait()

    f = jax.jit(lambda x: hc.call(hc.host(waits, timeout=timeout), F32, x))
    outcome = []

    def call():
        try:
            outcome.append(f(1.0).block_until_ready())
        except jax.errors.JaxRuntimeError as error:
            outcome.append(str(error))

    hc.configure(loop=loop)
    try:
        close_under(loop, call, begun)
    finally:
        hc.configure(loop="own")
    (text,) = outcome
    assert "the event loop was closed before the coroutine function" in text
    assert "Keep the loop of hc.configure(loop=) open until the programs" in text
    while failures._ledger.kept:  # the frames of the last error hold the call
        failures._ledger.release_oldest()
    gc.collect()
    assert not any(loop in key for key in list(layer.shared.things))

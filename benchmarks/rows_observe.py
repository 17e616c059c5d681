"""Rows: what `hc.observe` costs, beside JAX's own ways to look into programs.

The program is the forward and backward pass of a small transformer, and a loop with
steps of some 100 us.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from benchmarks.harness import Case, Row, at_most, run_time
from hostcall import observe

HAS_JAX_TAP = importlib.util.find_spec("jaxtap") is not None
WIDTH, LAYERS, LENGTH, BATCH, HEADS = 128, 4, 64, 8, 4


def norm(x: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5)


def layer(x: Any, p: Any) -> Any:
    shape = BATCH, LENGTH, HEADS, 3 * WIDTH // HEADS
    q, k, v = jnp.split((norm(x) @ p["qkv"]).reshape(shape), 3, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH // HEADS) ** 0.5
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    attention = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", attention, v)
    x = x + mixed.reshape(BATCH, LENGTH, WIDTH) @ p["out"]
    return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]


def loss_of(params: Any, tokens: Any) -> Any:
    x = params["embedding"][tokens]
    for i in range(LAYERS):
        x = layer(x, {name: w[i] for name, w in params["layers"].items()})
    logits = norm(x) @ params["embedding"].T
    chosen = jnp.take_along_axis(
        jax.nn.log_softmax(logits)[:, :-1], tokens[:, 1:, None], -1
    )
    loss = -chosen.mean()
    return loss


def made() -> tuple[Any, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def weights(*shape: int) -> Any:
        return jax.random.normal(next(keys), (LAYERS, *shape)) * 0.05

    layers = {
        "qkv": weights(WIDTH, 3 * WIDTH),
        "out": weights(WIDTH, WIDTH),
        "up": weights(WIDTH, 4 * WIDTH),
        "down": weights(4 * WIDTH, WIDTH),
    }
    embedding = jax.random.normal(next(keys), (256, WIDTH))
    tokens = jax.random.randint(next(keys), (BATCH, LENGTH), 0, 256)
    return {"layers": layers, "embedding": embedding}, tokens


def within(block: Callable[[], Any], run: Case) -> Case:
    def case() -> float:
        with block():
            return run()

    return case


def again(block: Any) -> Callable[[], Any]:
    """The same object again, so that its programs are compiled once."""
    return lambda: block


def of_a_transformer(quick: bool) -> dict[str, Case]:
    del quick
    args = made()
    f = jax.jit(jax.value_and_grad(loss_of))
    checked = checkify.checkify(
        jax.value_and_grad(loss_of), errors=checkify.float_checks
    )
    run = run_time(f, *args)
    return {
        "plain": run,
        "nans": within(again(observe(nans=True)), run),
        "debug_nans": within(lambda: jax.debug_nans(True), run),
        "checkify": run_time(jax.jit(checked), *args),
    }


def of_a_loop(quick: bool) -> dict[str, Case]:
    n = 300 if quick else 3000

    def body(x: Any, _: Any) -> Any:
        loss = (x * x).sum()
        for _ in range(2):
            x = jnp.tanh(x @ weights)
        return x, loss

    def loop(x: Any) -> Any:
        return jax.lax.scan(body, x, None, length=n)[1]

    weights = jnp.ones((128, 128)) / 128
    f = jax.jit(loop)

    def ignored(record: Any, value: Any) -> None:
        del record, value

    blocks = {
        "plain": contextlib.nullcontext(),
        "progress": observe(progress=True),
        "a value": observe("loss", to=ignored),
    }
    run = run_time(f, weights, per=n)
    cases = {name: within(again(block), run) for name, block in blocks.items()}
    if HAS_JAX_TAP:
        import jaxtap

        seen = jaxtap.verbose(
            loop, on_step=lambda event: None, select=lambda leaves: leaves[0][0, 0]
        )
        cases["jax-tap"] = run_time(jax.jit(seen), weights, per=n)
    return cases


ROWS = (
    Row(
        "observe: forward and backward pass of a transformer",
        (at_most(1.4, "plain", ours="nans"),),
        of_a_transformer,
    ),
    Row(
        "observe: a step of 100 us of a loop",
        tuple(at_most(1.02, "plain", ours=case) for case in ("progress", "a value")),
        of_a_loop,
    ),
)

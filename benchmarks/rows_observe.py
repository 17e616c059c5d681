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


def beside_nans(f: Any, *args: Any) -> dict[str, Case]:
    run = run_time(jax.jit(f), *args)
    return {"plain": run, "nans": within(again(observe(nans=True)), run)}


def of_innocent_infinities(quick: bool) -> dict[str, Case]:
    """Viterbi's algorithm with a state that is forbidden."""
    del quick

    def step(best: Any, score: Any) -> Any:
        ways = best[:, None] + allowed
        return ways.max(0) + score, ways.argmax(0)

    allowed = jnp.zeros((8, 8)).at[:, 7].set(-jnp.inf)
    scores = jnp.sin(jnp.arange(4000.0)).reshape(500, 8)
    return beside_nans(lambda x: jax.lax.scan(step, x[0], x), scores)


def of_a_buffer(quick: bool) -> dict[str, Case]:
    """A buffer into which some steps write a row, as solvers save their results."""
    del quick

    def body(state: Any) -> Any:
        i, x, rows = state
        x = jnp.tanh(x)
        write = lambda rows: rows.at[i].set(x)
        rows = jax.lax.cond(i % 2 == 0, write, lambda rows: rows, rows)
        return i + 1, x, rows

    def loop(x: Any) -> Any:
        start = 0, x, jnp.zeros((1000, 8))
        return jax.lax.while_loop(lambda state: state[0] < 1000, body, start)[2]

    return beside_nans(loop, jnp.ones(8))


def of_a_solver(quick: bool) -> dict[str, Case]:
    """The classical method of Runge and Kutta, which saves its steps in a buffer of
    infinities, of which half stay.
    """
    del quick
    size = 0.01

    def body(state: Any) -> Any:
        i, x, rows = state
        a = jnp.cos(x)
        b = jnp.cos(x + size / 2 * a)
        c = jnp.cos(x + size / 2 * b)
        d = jnp.cos(x + size * c)
        x = x + size / 6 * (a + 2 * b + 2 * c + d)
        return i + 1, x, rows.at[i].set(x)

    def loop(x: Any) -> Any:
        start = 0, x, jnp.full((1000, 8), jnp.inf)
        return jax.lax.while_loop(lambda state: state[0] < 500, body, start)[2]

    return beside_nans(loop, jnp.ones(8))


def of_a_gradient(quick: bool) -> dict[str, Case]:
    """The gradient of a recurrent network."""
    del quick

    def loss(w: Any) -> Any:
        body = lambda h, x: (jnp.tanh(h @ w + x), h.sum())
        return jax.lax.scan(body, jnp.zeros((16, 64)), xs)[1].sum()

    xs = jnp.ones((50, 16, 64))
    return beside_nans(jax.grad(loss), jnp.eye(64) * 0.5)


def without_loops(quick: bool) -> dict[str, Case]:
    """A step of some 100 us."""
    del quick
    x = jnp.linspace(-1, 1, 128 * 128).reshape(128, 128)
    return beside_nans(lambda x: [jnp.tanh(x @ x), (x * x).sum()], x)


ROWS = (
    Row(
        "observe: forward and backward pass of a transformer",
        (at_most(1.4, "plain", ours="nans"),),
        of_a_transformer,
    ),
    *(
        Row(f"observe: {name}", (at_most(bound, "plain", ours="nans"),), cases)
        for name, bound, cases in (
            ("a loop with innocent infinities", 3, of_innocent_infinities),
            ("a loop that updates a buffer in a branch", 3, of_a_buffer),
            ("a loop that returns innocent infinities", 3, of_a_solver),
            ("the gradient of a loop", 3, of_a_gradient),
            ("a program without loops", 1.5, without_loops),
        )
    ),
    Row(
        "observe: a step of 100 us of a loop",
        tuple(at_most(1.02, "plain", ours=case) for case in ("progress", "a value")),
        of_a_loop,
    ),
)

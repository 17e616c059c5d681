"""Rows: what a progress bar costs, beside jax-tqdm's and numpyro's own."""

from __future__ import annotations

import importlib.util
import io
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import hostcall as hc
from benchmarks.harness import Case, Row, at_most
from benchmarks.raw_handler import empty_call

HAS_TQDM, HAS_JAX_TQDM, HAS_NUMPYRO = (
    importlib.util.find_spec(name) is not None
    for name in ("tqdm", "jax_tqdm", "numpyro")
)


def sink(**options: Any) -> Any:
    """A bar of tqdm that draws into memory."""
    from tqdm import tqdm

    return tqdm(**{"file": io.StringIO(), "mininterval": 0, "miniters": 1, **options})


def timed(f: Callable[..., Any], *args: Any, per: int) -> Case:
    """Microseconds per step until the results are there. Bars may still be drawn."""

    def run() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(f(*args))
        seconds = time.perf_counter() - begin
        hc.barrier()
        return seconds / per * 1e6

    return run


# --- A loop ---------------------------------------------------------------------------


def scanned(n: int, work: Callable[[Any], Any], wrap: Callable[[Any], Any]) -> Any:
    def body(c: Any, i: Any) -> Any:
        return work(c), None

    return jax.jit(lambda x: jax.lax.scan(wrap(body), x, jnp.arange(n))[0])


def ours(n: int) -> Callable[[Any], Any]:
    return lambda body: hc.progress.scan(body, n, bar=sink)


def theirs(n: int) -> Callable[[Any], Any]:
    from jax_tqdm import scan_tqdm

    return scan_tqdm(n, file=io.StringIO())


def bars(n: int, work: Callable[[Any], Any], x: Any) -> dict[str, Case]:
    """A loop of `n` steps without a bar, with ours, and with jax-tqdm's."""
    wraps = {"hostcall": ours(n), "no bar": lambda body: body}
    if HAS_JAX_TQDM:
        wraps["jax-tqdm"] = theirs(n)
    return {
        name: timed(scanned(n, work, wrap), x, per=n) for name, wrap in wraps.items()
    }


def twenty(quick: bool) -> dict[str, Case]:
    """Steps of about 20 us: a product of two matrices on one thread."""
    x = jnp.eye(72) * 0.999
    return bars(1000 if quick else 20_000, lambda c: jnp.tanh(c @ c.T) @ x, x)


def ten(quick: bool) -> dict[str, Case]:
    """Steps of about 10 us. The floor of all bars: one call of XLA's that does nothing,
    which no loop with a call to the host can go below.
    """
    n, x = 2000 if quick else 40_000, jnp.eye(56) * 0.999
    work = lambda c: jnp.tanh(c @ c.T) @ x
    empty = empty_call(jax.ShapeDtypeStruct((), jnp.float32))

    def called(body: Any) -> Any:
        def wrapped(c: Any, i: Any) -> Any:
            empty()
            return body(c, i)

        return wrapped

    floor = timed(scanned(n, work, called), x, per=n)
    return {**bars(n, work, x), "a call that does nothing": floor}


def short(quick: bool) -> dict[str, Case]:
    """Steps that cost little more than XLA's entry into a loop's body."""
    n, x = 20_000 if quick else 200_000, jnp.ones((4, 4))
    work = lambda c: jnp.sort(c, axis=0) * 0.999 + 1

    def masked(body: Any) -> Any:
        def wrapped(c: Any, i: Any) -> Any:
            hc.tap(lambda c: None, c, where=c[0, 0] < 0)
            return body(c, i)

        return wrapped

    def added(wrap: Any) -> Case:
        with_it = timed(scanned(n, work, wrap), x, per=n)
        without = timed(scanned(n, work, lambda body: body), x, per=n)

        def run() -> float:
            before = without()
            return with_it() - before

        return run

    return {"hostcall": added(ours(n)), "a masked tap": added(masked)}


# --- numpyro --------------------------------------------------------------------------


def svi(quick: bool) -> dict[str, Case]:
    """A fit of numpyro's, in seconds; see `SVI.run` for its own bar.

    With 3,000 rows of data or fewer, XLA compiles the loop without a bar into a single
    kernel (`xla_cpu_small_call` in the compiled text), so that a step of 9 us takes 25
    with any call to the host. 10,000 rows are above that limit.
    """
    import numpyro
    from numpyro import distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    steps = 2000 if quick else 20_000
    keys = jax.random.split(jax.random.key(1))
    x = jax.random.normal(keys[0], (10_000, 20))
    data = x, x @ jnp.arange(20.0) + jax.random.normal(keys[1], (10_000,))

    def model(data: Any) -> None:
        x, y = data
        weights = numpyro.sample("weights", dist.Normal(0, 1).expand((20,)).to_event(1))
        with numpyro.plate("data", len(y)):
            numpyro.sample("obs", dist.Normal(x @ weights, 1), obs=y)

    fit = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.01), Trace_ELBO())
    state = fit.init(jax.random.key(0), data)

    def scanned(show: Callable[[Any, Any], None], wrap: Any = lambda f: f) -> Case:
        def body(state: Any, i: Any) -> Any:
            state, loss = fit.update(state, data)
            show(i, loss)
            return state, loss

        run = jax.jit(lambda s: jax.lax.scan(wrap(body), s, jnp.arange(steps)))
        return timed(run, state, per=1_000_000)

    def show(i: Any, loss: Any) -> None:
        hc.progress(i, steps, bar=sink, loss=loss)

    def with_its_own() -> float:
        begin = time.perf_counter()
        fit.run(jax.random.key(0), steps, data, progress_bar=True, init_state=state)
        return time.perf_counter() - begin

    cases = {
        "hostcall": scanned(show),
        "no bar": scanned(lambda i, loss: None),
        "a masked tap": scanned(
            lambda i, loss: hc.tap(print, loss, where=loss != loss)
        ),
        "numpyro's bar": with_its_own,
    }
    if HAS_JAX_TQDM:
        cases["jax-tqdm"] = scanned(lambda i, loss: None, theirs(steps))
    return cases


for _name, _there in {
    "tqdm": HAS_TQDM,
    "jax-tqdm": HAS_JAX_TQDM,
    "numpyro": HAS_NUMPYRO,
}.items():
    if not _there:
        print(
            f"  {_name} is not installed: the rows of bars leave it out"
            f" (pip install {_name})",
            file=sys.stderr,
        )

ROWS = (
    *(
        (
            Row("step of 20 us with a bar", (at_most(1.02, "no bar"),), twenty),
            Row(
                "step of 10 us with a bar",
                (at_most(1.02, "no bar"), at_most(1.02, "a call that does nothing")),
                ten,
            ),
            Row(
                "a bar, added to a step on the device",
                (at_most(0.15, None), at_most(1.5, "a masked tap")),
                short,
            ),
        )
        if HAS_TQDM
        else ()
    ),
    *(
        (
            Row(
                "numpyro's SVI with a bar, 20,000 steps",
                (at_most(1.05, "no bar"), at_most(1.05, "a masked tap")),
                svi,
                unit="s",
            ),
        )
        if HAS_TQDM and HAS_NUMPYRO
        else ()
    ),
)

"""Rows: what recorders cost, beside JAX's callback into a list and stacked ys."""

from __future__ import annotations

import importlib.util
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from benchmarks.harness import Case, Row, at_most, times_faster

HAS_PYARROW = importlib.util.find_spec("pyarrow") is not None


class Folder:
    """A recorder of a folder that lives as long as the case."""

    def __init__(self) -> None:
        self.home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.rec = hc.Recorder(Path(self.home.name) / "run")


def looped(record: Callable[[Any, Any], Any], n: int) -> Callable[[Any], Any]:
    def body(i: Any, c: Any) -> Any:
        record(i, c)
        return c * 0.999 + 1

    return jax.jit(lambda x: jax.lax.fori_loop(0, n, body, x))


def stacked(n: int) -> Callable[[Any], Any]:
    def body(c: Any, _: Any) -> Any:
        return c * 0.999 + 1, c

    return jax.jit(lambda x: jax.lax.scan(body, x, None, length=n)[1])


def timed(run: Callable[[], Any], per: int) -> Case:
    def case() -> float:
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) / per * 1e6

    return case


# --- Scalars --------------------------------------------------------------------------


def into_arrow(quick: bool) -> dict[str, Case]:
    """The processor's time from the queue of taps to the file, on all threads.

    The taps wait in the queue behind a slow function until the program is over.
    """
    n, folder = 50_000 if quick else 200_000, Folder()
    f = looped(lambda i, c: folder.rec(step=i, loss=c), n)

    def case() -> float:
        entered, go_on = threading.Event(), threading.Event()
        hc.tap(lambda: (entered.set(), go_on.wait(60)))
        entered.wait(60)
        jax.block_until_ready(f(jnp.float32(1)))
        begin = time.process_time()
        go_on.set()
        folder.rec.flush()
        return (time.process_time() - begin) / n * 1e6

    return {"hostcall": case}


def scalars(quick: bool) -> dict[str, Case]:
    n, folder, x = 100_000 if quick else 1_000_000, Folder(), jnp.float32(1)
    few, rows = n // 1000, list[tuple[Any, Any]]()
    ours = looped(lambda i, c: folder.rec(step=i, loss=c), n)
    ys = stacked(n)

    def append(i: Any, c: Any) -> None:
        rows.append((int(i), float(c)))

    theirs = looped(lambda i, c: jax.experimental.io_callback(append, None, i, c), few)

    def recorded() -> None:
        jax.block_until_ready(ours(x))
        folder.rec.flush()

    def called() -> None:
        rows.clear()
        jax.block_until_ready(theirs(x))
        jax.effects_barrier()
        assert len(rows) == few

    return {
        "hostcall": timed(recorded, n),
        "JAX, io_callback into a list": timed(called, few),
        "stacked ys, in memory": timed(lambda: np.asarray(ys(x)), n),
    }


# --- Arrays ---------------------------------------------------------------------------


def trajectory(quick: bool) -> dict[str, Case]:
    """A state of 4 KiB in each step."""
    n, folder = 500 if quick else 5000, Folder()
    x = jnp.ones(1024)
    ours, ys = looped(lambda i, c: folder.rec(step=i, x=c), n), stacked(n)
    file = Path(folder.home.name) / "ys.npy"

    def recorded() -> None:
        jax.block_until_ready(ours(x))
        folder.rec.flush()

    return {
        "hostcall": timed(recorded, n),
        "stacked ys, np.save": timed(lambda: np.save(file, np.asarray(ys(x))), n),
        "stacked ys, in memory": timed(lambda: np.asarray(ys(x)), n),
    }


ROWS = (
    (
        Row(
            "scalar rows from the queue into an Arrow file, processor's time, each",
            (at_most(0.2, None),),
            into_arrow,
        ),
        Row(
            "loop that records a scalar, until it is in the file, each step",
            (times_faster(100, base="JAX, io_callback into a list"),),
            scalars,
        ),
        Row("loop that records 4 KiB to a file, each step", (), trajectory),
    )
    if HAS_PYARROW
    else ()
)

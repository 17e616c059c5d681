"""Rows of a batch at the same time, and rows that are left out.

A slow function that releases the GIL (a request, a subprocess, a C library) is called
once for each row, all rows at once on a pool of threads: `vmap_method="parallel"`.
`where=` leaves out the rows that do not need it.
"""

import threading
import time
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc

PAUSE = 0.05  # seconds


class Service:
    """Answers after a pause, and counts how many calls wait."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.asked = self.waiting = self.most_waiting = 0

    def ask(self, x: np.ndarray) -> np.ndarray:
        with self.lock:
            self.asked += 1
            self.waiting += 1
            self.most_waiting = max(self.most_waiting, self.waiting)
        time.sleep(PAUSE)
        with self.lock:
            self.waiting -= 1
        return np.sqrt(x)


def main() -> None:
    service = Service()
    pool = futures.ThreadPoolExecutor(8)

    @jax.jit
    @jax.vmap
    def roots(x: jax.Array) -> jax.Array:
        return hc.call(
            hc.host(service.ask, executor=pool),
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            x,
            where=x >= 0,  # no call for the root of a negative number
            fill=-1,
            vmap_method="parallel",
        )

    xs = jnp.arange(-4, 8, dtype=jnp.float32)
    begin = time.perf_counter()
    answers = jax.block_until_ready(roots(xs))
    seconds = time.perf_counter() - begin
    print(f"{service.asked} of {xs.size} rows asked, {service.most_waiting} at a time:")
    print(f"{seconds:.2f} s instead of {service.asked * PAUSE:.2f} s")

    expected = np.where(xs >= 0, np.sqrt(np.maximum(xs, 0)), -1)
    np.testing.assert_array_equal(answers, expected)
    assert service.asked == 8
    assert service.most_waiting > 1


if __name__ == "__main__":
    main()

"""Rows: calls in programs over several devices.

The devices are CPU devices of one process, and their number is fixed when it starts. So
the cases run in a child process, one after the other, as this one asks for them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.harness import (
    Case,
    Row,
    at_most,
    dispatch_time,
    run_time,
    times_faster,
)

DEVICES = 32


def _in_child(devices: int, names: Iterable[str], quick: bool) -> dict[str, Case]:
    """These cases in a process with so many devices."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    child = subprocess.Popen(
        [sys.executable, "-m", __name__, *(["quick"] if quick else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XLA_FLAGS": flags},
    )

    def case(name: str) -> Case:
        def run() -> float:
            assert child.stdin
            assert child.stdout
            print(name, file=child.stdin, flush=True)
            return float(child.stdout.readline())

        return run

    # The child ends when its stdin closes: with this process, or with the cases.
    return {name: case(name) for name in names}


# --- A loop ---------------------------------------------------------------------------


def shard_map(quick: bool) -> dict[str, Case]:
    return _in_child(DEVICES, _STEPS, quick)


_STEPS = {
    "hostcall, 2 devices": ("hostcall", 2),
    "hostcall, 8 devices": ("hostcall", 8),
    "hostcall, 32 devices": ("hostcall", 32),
    "hostcall, 1 device": ("hostcall", 1),
    "JAX, 2 devices": ("JAX", 2),
    "JAX, 8 devices": ("JAX", 8),
}


def _case(kind: str, devices: int, quick: bool) -> Case:
    import jax
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    import hostcall as hc
    from benchmarks.rows_call import SCALAR, same

    calls: dict[str, tuple[Callable[..., Any], int]] = {
        "hostcall": (hc.call, 200 if quick else 5000),
        "JAX": (jax.pure_callback, 50 if quick else 200),
    }
    call, n = calls[kind]

    def shard(x: Any) -> Any:
        def step(_: Any, c: Any) -> Any:
            return call(same, SCALAR, c)

        return jax.lax.fori_loop(0, n, step, x[0])[None]

    mesh = Mesh(np.array(jax.devices()[:devices]), ("d",))
    over = PartitionSpec("d")
    f = jax.shard_map(shard, mesh=mesh, in_specs=over, out_specs=over, check_vma=False)
    xs = np.ones(devices, np.float32)
    return run_time(jax.jit(f), xs, per=n * devices)


# --- Dispatch -------------------------------------------------------------------------

FEW_DEVICES = 4
# What remains if nothing is called: the sign that each device makes (_jax/signs.py).
_SIGN_ALONE = "none, an empty result more"
# A tap without its deliveries, which are Python on another thread.
_HELD_BACK = "tap, held back by where="
_KINDS = (
    "none",
    _SIGN_ALONE,
    "tap",
    _HELD_BACK,
    "unordered call",
    "debug.callback",
    "io_callback",
)
_WAYS = ("jit", "shard_map")


def dispatch(way: str) -> Callable[[bool], dict[str, Case]]:
    names = [f"{way}, {kind}" for kind in _KINDS]
    return lambda quick: _in_child(FEW_DEVICES, names, quick)


def _dispatch_case(way: str, kind: str, quick: bool) -> Case:
    import jax
    import jax.numpy as jnp
    from jax.experimental import io_callback
    from jax.sharding import NamedSharding, PartitionSpec

    import hostcall as hc

    def nothing(x: Any) -> None:
        pass

    effects: dict[str, Callable[[Any], object]] = {
        "none": lambda x: None,
        _SIGN_ALONE: lambda x: None,
        "tap": lambda x: hc.tap(nothing, x),
        _HELD_BACK: lambda x: hc.tap(nothing, x, where=x < 0),
        "unordered call": lambda x: hc.call(nothing, None, x, order="unordered"),
        "debug.callback": lambda x: jax.debug.callback(nothing, x),
        "io_callback": lambda x: io_callback(nothing, None, x),
    }
    effect = effects[kind]
    mesh = jax.make_mesh((FEW_DEVICES,), ("d",))
    over = PartitionSpec("d")
    xs = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, over))

    extra = (jnp.zeros((0,), bool),) if kind == _SIGN_ALONE else ()

    def whole(x: Any) -> Any:
        total = x.sum()
        effect(total)
        return x * 2 + total, *extra

    def block(x: Any) -> Any:
        effect(x.sum())
        return x * 2 + jax.lax.psum(x.sum(), "d"), *extra

    f = whole
    if way == "shard_map":
        specs = (over, *(PartitionSpec() for _ in extra))
        f = jax.shard_map(block, mesh=mesh, in_specs=over, out_specs=specs)
    return dispatch_time(jax.jit(f), xs, repeat=64 if quick else 512)


def _dispatch_row(way: str) -> Row:
    none = f"{way}, none"
    return Row(
        f"dispatch, {FEW_DEVICES} devices, {way}",
        (
            at_most(1.1, none, f"{way}, tap"),
            at_most(1.4, none, f"{way}, unordered call"),
            at_most(1.2, f"{way}, {_SIGN_ALONE}", f"{way}, tap"),
        ),
        dispatch(way),
    )


ROWS = (
    *map(_dispatch_row, _WAYS),
    Row(
        "scalar call in a shard_map, in a loop, a shard",
        (
            at_most(5, None, "hostcall, 2 devices"),
            at_most(2, "hostcall, 2 devices", "hostcall, 8 devices"),
            at_most(4, "hostcall, 2 devices", "hostcall, 32 devices"),
            times_faster(20, "hostcall, 8 devices", "JAX, 8 devices"),
        ),
        shard_map,
    ),
)


def main() -> None:
    quick = "quick" in sys.argv
    cases: dict[str, Case] = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in cases:
            way, _, kind = name.partition(", ")
            if way in _WAYS:
                cases[name] = _dispatch_case(way, kind, quick)
            else:
                cases[name] = _case(*_STEPS[name], quick)
        print(cases[name](), flush=True)


if __name__ == "__main__":
    main()

"""Reports what works on this machine: versions, devices, the engine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Sequence

import jax
import numpy as np

import hostcall as hc
from hostcall import _jax


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def line(name: str, value: object) -> None:
    print(f"  {name:<36} {value}")


def engine_answers(device: jax.Device) -> str:
    """Tries the engine on a device: a compiled loop counts with a callback."""
    counts = []
    result = jax.ShapeDtypeStruct((), np.float32)

    def count(x: np.ndarray) -> np.ndarray:
        counts.append(float(x))
        return x + 1

    def body(_: jax.Array, x: jax.Array) -> jax.Array:
        counted: jax.Array = hc.call(count, result, x, order="ordered")
        return counted

    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, body, x)

    program = jax.jit(loop)
    x = jax.device_put(np.float32(0), device)
    total = float(program(x))
    if total != 3.0 or counts != [0.0, 1.0, 2.0]:
        return f"BROKEN: the program returned {total}, and its calls got {counts}"
    # On a platform that the engine does not serve, the calls are right all the same.
    if "hostcall_call" not in program.lower(x).as_text():
        return "not used: calls run through JAX's own callback"
    return "works (tried: ordered calls in a compiled loop)"


def engine_on(platform: str, devices: Sequence[jax.Device]) -> str:
    """Tries the engine on the first device of a platform, if there is one."""
    on_platform = [device for device in devices if device.platform == platform]
    if not on_platform:
        return f"not tried: JAX sees no {platform.upper()} here"
    try:
        return engine_answers(on_platform[0])
    except Exception as error:  # a driver may raise anything, and the report goes on
        first_line = str(error).partition("\n")[0]
        return f"BROKEN: {type(error).__name__}: {first_line}"


def replaced() -> None:
    """Lists what hostcall replaces in JAX, and whether this process has it so far."""
    heading("replaced in JAX (a call has been tried above)")
    for patch, state in _jax.states():
        line(state, patch)


def report() -> list[str]:
    """Prints versions and devices; returns the engine's state on each platform."""
    heading("hostcall")
    line("hostcall", hc.__version__)
    jaxlib = importlib.metadata.version("jaxlib")
    line("jax, jaxlib", f"{jax.__version__}, {jaxlib}")
    line("numpy", np.__version__)
    line("python", platform.python_version())
    line("platform", f"{platform.system()} {platform.machine()}")
    line("devices", ", ".join(map(str, jax.devices())))
    # The CPU's are not among JAX's default devices if there are others.
    devices = [*jax.local_devices(backend="cpu"), *jax.local_devices()]
    kinds = ["cpu", "gpu", *(device.platform for device in devices)]
    states = []
    for kind in dict.fromkeys(kinds):  # each once
        state = engine_on(kind, devices)
        line(f"engine on {kind}", state)
        states.append(state)
    line("running calls", len(hc.monitor.status()))
    replaced()
    return states

"""`hc.breakpoint`: opens a debugger in the middle of a compiled program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.typing import ArrayLike

import hostcall as hc
from hostcall._core.host_code import HostCode
from hostcall.tools._debugger import UserLine, stop, users_lines
from hostcall.tools._values import without_derivative


def breakpoint(*, where: ArrayLike | None = None, **values: Any) -> None:
    """Opens your debugger each time a program reaches this line::

        @jax.jit
        def step(x):
            y = jnp.log(x)
            hc.breakpoint(where=jnp.isnan(y).any(), x=x, y=y)
            return y

    The debugger is the one that Python's `breakpoint()` opens: pdb, or what
    PYTHONBREAKPOINT, `sys.breakpointhook` or a notebook sets. It stops in a frame whose
    names are the values, as NumPy arrays. `list` shows the line of this call, and `up`
    the lines that called it while JAX traced, with the names of their modules. The
    program waits. `continue` lets it go on, and `quit` ends it with `bdb.BdbQuit`.

    Args:
        where: a bool scalar. If it is False, the program does not stop. Under vmap each
            row has its own.
        **values: pytrees, by the names that they get in the debugger. `where` is the
            one name that is taken.

    Raises:
        SpecError: a value is invalid.
        bdb.BdbQuit: the debugger was quit. A compiled program raises it where JAX
            raises the JaxRuntimeError of a failed callback.

    One debugger is open at a time: other threads and devices wait for it. Once it is
    quit, those that waited end too.

    Under transformations:
        jit, scan, while_loop, fori_loop, cond, map: stops each time it is reached.
        vmap: stops for each row, in order. For cond and while_loop, JAX computes all
            branches for all rows: pass the condition as `where=` too.
        jvp, grad: stops with the primal values.
        checkpoint: stops in the forward pass, not in the recomputation.
        shard_map: stops for each device, with its shard. The others wait.
        jit over sharded arrays: stops once, with the whole values.

    Cost: where `where` is False, about 0.2 us on a CPU. Results are the same,
    but for about one rounding (1 ulp of a product that is among `values`): XLA no
    longer fuses it into a multiply-add (FMA).
    """
    lines = users_lines()
    stopped = without_derivative(values)
    hc.call(_Stops(lines), None, stopped, order="unordered", where=where)


@dataclass(frozen=True)
class _Stops(HostCode):
    """The function of the call. Equal for equal lines, so that JAX's caches hit."""

    lines: tuple[UserLine, ...]
    __name__ = "hc.breakpoint"
    stays = (
        "hc.breakpoint opens a debugger in this process, at this source. Leave it out"
    )

    def __call__(self, values: dict[str, Any]) -> None:
        stop(self.lines, dict(values))

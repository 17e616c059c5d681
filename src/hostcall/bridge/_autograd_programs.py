"""Programs that are functions of autograd's NumPy, differentiated by autograd."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hostcall._host_function.function import HostFunction
from hostcall.bridge._programs import HostProgram, Struct, has_tangent, pick_moving


@functools.cache
def make_thread_safe() -> None:
    """Gives each thread its own count of nested traces.

    Autograd has one count for the process. If two threads trace at once, one confuses
    an inner variable with an outer one, and its derivative is silently wrong.
    """
    from autograd import tracer

    class PerThread(threading.local):
        top = -1
        new_trace = tracer.TraceStack.new_trace

    tracer.trace_stack = PerThread()


class OfFlat(HostProgram):
    """A function of flat arrays, differentiable `derivatives` times."""

    def __init__(
        self,
        name: str,
        flat: Callable[..., list[Any]],
        in_avals: tuple[Struct, ...],
        out_avals: tuple[Struct, ...],
        derivatives: int,
        options: dict[str, Any],
        advice: str = "",
    ) -> None:
        self.name, self.flat, self.options = name, flat, options
        self.in_avals, self.out_avals = in_avals, out_avals
        self.derivatives = derivatives
        self.advice = advice or (
            f"`{name}` was made with derivatives={derivatives}. To differentiate it"
            " more often, write hc.bridge.autograd(fn, derivatives=n)"
        )

    def run(self, *arrays: Any) -> list[Any]:
        return self.flat(*arrays)

    def add_rules(self, host: HostFunction[..., Any]) -> None:
        """For one derivative the rules are host code; for more they are programs."""
        if self.derivatives > 1:
            super().add_rules(host)
        elif self.derivatives == 1:
            host.defjvp(self._host_jvp)
            host.defvjp(self._host_forward, self._host_backward)

    # --- Programs of derivatives ----------------------------------------------------

    def push(self) -> HostProgram:
        n = len(self.in_avals)
        tangents = pick_moving(self.in_avals, self.in_avals)
        out_tangents = pick_moving(self.out_avals, self.out_avals)

        def flat(*operands: Any) -> list[Any]:
            outs, touts = self._jvp_at(operands[:n], operands[n:])
            return [*outs, *touts]

        return self._derived(
            "jvp", flat, (*self.in_avals, *tangents), (*self.out_avals, *out_tangents)
        )

    def pull(self) -> HostProgram:
        n = len(self.in_avals)
        coming = pick_moving(self.out_avals, self.out_avals)
        back = pick_moving(self.in_avals, self.in_avals)

        def flat(*operands: Any) -> list[Any]:
            return list(self._vjp_at(operands[:n])[1](operands[n:]))

        return self._derived("vjp", flat, (*self.in_avals, *coming), tuple(back))

    def _derived(
        self, what: str, flat: Any, in_avals: Any, out_avals: Any
    ) -> HostProgram:
        name, left = f"{what} of {self.name}", self.derivatives - 1
        return OfFlat(name, flat, in_avals, out_avals, left, self.options, self.advice)

    # --- Rules in host code ---------------------------------------------------------

    def _host_jvp(self, primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        moving = pick_moving(tangents, self.in_avals)
        outs, touts = self._jvp_at(primals, moving)
        rest = iter(touts)
        return outs, [next(rest) if has_tangent(a) else None for a in self.out_avals]

    def _host_forward(self, *args: Any) -> tuple[list[Any], Any]:
        return self._vjp_at(args)

    def _host_backward(self, pullback: Any, cotangents: Any) -> tuple[Any, ...]:
        back = iter(pullback(pick_moving(cotangents, self.out_avals)))
        return tuple(next(back) if has_tangent(a) else None for a in self.in_avals)

    # --- Derivatives by autograd ----------------------------------------------------

    def _jvp_at(self, args: Sequence[Any], tangents: Sequence[Any]) -> Any:
        from autograd import make_jvp

        along, outs = self._along(args)
        moving = tuple(pick_moving(args, self.in_avals))
        found, touts = make_jvp(along)(moving)(tuple(tangents))
        return self._whole(found, outs), list(touts)[:-1]

    def _vjp_at(self, args: Sequence[Any]) -> tuple[list[Any], Callable[..., Any]]:
        from autograd import make_vjp

        along, outs = self._along(args)
        moving = tuple(pick_moving(args, self.in_avals))
        pull, found = make_vjp(along)(moving)
        last = np.zeros(np.shape(moving[0]), self._first.dtype)

        def pullback(cotangents: Sequence[Any]) -> list[Any]:
            return list(pull((*cotangents, last)))

        return self._whole(found, outs), pullback

    @property
    def _first(self) -> Struct:
        return next(aval for aval in self.in_avals if has_tangent(aval))

    def _along(self, args: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
        """(function, all results).

        The function maps the tuple of arguments that have tangents to the tuple of
        results that have them. The list of all results is filled when it runs.

        The last result is the first argument, since autograd warns of a result that
        depends on no argument, as second derivatives often do.
        """
        from autograd.builtins import tuple as traced_tuple

        held: list[Any] = []

        def along(moving: Any) -> Any:
            at = 0
            whole = list(args)
            for i, aval in enumerate(self.in_avals):
                if has_tangent(aval):
                    whole[i] = moving[at]
                    at += 1
            held[:] = self.flat(*whole)
            return traced_tuple((*pick_moving(held, self.out_avals), moving[0]))

        return along, held

    def _whole(self, found: Sequence[Any], held: Sequence[Any]) -> list[Any]:
        rest = iter(found)
        return [
            next(rest) if has_tangent(aval) else x
            for x, aval in zip(held, self.out_avals, strict=True)
        ]

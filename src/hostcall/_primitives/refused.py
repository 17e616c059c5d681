"""The errors about calls where XLA can't compile a host function, or would crash."""

from __future__ import annotations

from hostcall import _jax
from hostcall._core.callback import CallSpec
from hostcall._core.errors import HostcallError, SpecError
from hostcall._engine.params.equation import Equation

TOKEN_ALONE = (
    "hostcall: a call with results and without array arguments, which comes after"
    " another effect or has order='ordered', can't be compiled for a program over"
    " several processes, since XLA would crash. Give it where=, which may be"
    " jnp.array(True), or an array that the function ignores; to a feed,"
    " feed(where=jnp.array(True))"
)


def in_reducer(callback: CallSpec) -> SpecError:
    return SpecError(
        f"hostcall: `{callback.name}` is called in the function that a reduction or"
        " a scatter applies to single elements (lax.reduce, lax.reduce_window,"
        " x.at[...].apply), where XLA can run no host function. Call it in lax.scan"
        " or lax.map, or once with the whole arrays"
    )


def _in_branch(equation: dict[str, Equation]) -> HostcallError:
    params = equation["params"]
    return HostcallError(
        f"hostcall: {params.shown} (at {params.callback.place}) is in a shard_map that"
        " uses no array that has elements, in a branch of lax.cond or lax.switch, where"
        " XLA would end the process. Give the shard_map an array that the call gets,"
        " such as jnp.zeros(()) with in_specs=jax.P(); or put the cond into the"
        " shard_map",
        code="hc-device",
    )


_jax.refuse_tokens_alone(_in_branch)

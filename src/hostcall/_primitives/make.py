"""Makes a call that its face has checked and flattened.

`hc.call`, HostFunctions and objects all end here.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from hostcall import _jax
from hostcall._core.callback import CallSpec
from hostcall._engine.params.equation import CallParams
from hostcall._primitives.call import bind
from hostcall._primitives.eager import run_and_keep


def bind_call(
    callback: CallSpec, operands: Sequence[jax.Array], mask: jax.Array | None
) -> list[jax.Array]:
    """Binds the call and returns one array for each leaf of its results.

    Args:
        callback: what is called, with the options of its place.
        operands: one array for each array of its arguments. A typed key is passed as
            its uint32 block, here and in the results.
        mask: the condition of `where=`, or None.
    """
    if callback.options.arrays == "cuda":
        # Imported here, since most programs call no function on a GPU's memory.
        from hostcall._primitives.buffer import make as make_on_device

        return make_on_device(callback, operands, mask)
    avals = callback.results.avals
    given = (*operands,)
    params = CallParams(callback=callback, avals=avals, masked=mask is not None)
    if mask is not None:
        given = mask, *operands
    if _jax.traces_nothing() and _jax.are_arrays(given):
        # JAX's `bind` would take 20 us more.
        return run_and_keep(*given, params=params)
    return bind(*given, params=params)

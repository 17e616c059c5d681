"""Makes a call that its face has checked and flattened.

`hc.call`, HostFunctions and objects all end here.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from hostcall._core.callback import CallSpec
from hostcall._engine.params.equation import CallParams
from hostcall._primitives.call import call_p
from hostcall._primitives.eager import bind_or_call


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
    params = CallParams(callback=callback, avals=avals, masked=mask is not None)
    if mask is not None:
        operands = [mask, *operands]
    return bind_or_call(call_p, operands, params=params)

"""A debug callback with partitioned=True: each device calls for its own block."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from hostcall import _jax, _native
from hostcall._core.spec import Results, Static, Template
from hostcall._engine import plans, targets
from hostcall._engine.params.drop_in import DropInInfo, DropInParams
from hostcall._primitives import emit
from hostcall._primitives.blocks import NUMBER, Site, emit_block, lower_blocks

block_call_p = _jax.Primitive("host_block_call")


def _abstract_eval(number: Any, *operands: Any, site: Site) -> Any:
    del number, operands, site
    return NUMBER


def _lower(ctx: Any, number: Any, *operands: Any, site: Site) -> Any:
    """The call of one device on its own, which takes and returns the number."""
    params = _with_number(site.params)
    avals = _jax.physical_avals(ctx.avals_in)
    info = DropInInfo(params, emit.by_ordinal(site.client), None)
    info.across = site.across
    signature = plans.signature(params, avals)
    plan = plans.make_plan(
        params,
        avals,
        info,
        emit.host_device_of(site.client, params),
        packed=True,
        number=signature,
        inside=emit.inside(ctx, params),
    )
    return emit_block(ctx, targets.TARGET, [number, *operands], site, plan, signature)


block_call_p.def_abstract_eval(_abstract_eval)
_jax.register_lowering(block_call_p, _lower)


def _with_number(params: DropInParams) -> DropInParams:
    """The same call, with the number as its first argument and as its result."""
    callback = params.callback
    fn, template = callback.function, callback.template

    def call(number: Any, *leaves: Any) -> np.ndarray:
        args, kwargs = template.fill(leaves)
        fn(*args, **kwargs)
        return np.zeros((), np.int32)

    call.__qualname__ = callback.name
    return replace(
        params,
        callback=replace(
            callback,
            fn=Static(call),
            template=Template.flat(None, *template.keys),
            results=Results(jax.tree.structure(0), (NUMBER,), (None,)),
            fills=(None,),
        ),
        avals=(NUMBER,),
        results_as="leaves",
    )


def lower(ctx: Any, *operands: Any, params: DropInParams) -> list[Any]:
    """The lowering in a partitioned program."""
    client = _jax.lowering_client(ctx)
    targets.start_on(client)
    _native.bury()
    site = Site(ctx, params, client)
    _jax.run_where_dispatched(ctx)
    call = partial(_call_block, site=site)
    return lower_blocks(
        ctx, operands, site, lambda *shardings: call, unpartitioned=call
    )


def _call_block(number: Any, *blocks: Any, site: Site) -> Any:
    return block_call_p.bind(number, *blocks, site=site)

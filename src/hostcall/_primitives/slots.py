"""Slots: where the engine keeps the plan of a compiled call or tap.

The program's text can't hold a Python function. It holds the key of the call instead,
which says what the call is, and a count that tells it from other live calls with the
same key. Under these the engine keeps the plan (function, dtypes, shapes). The slot is
tied to the executable, and is freed with it.

So the text of a program depends on what it calls, not on what else was compiled, nor in
which order or process: JAX's compilation cache finds it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np

from hostcall import _jax, _native
from hostcall._core.callback import Callback
from hostcall._core.errors import ExportError
from hostcall._core.portable import NotPortable
from hostcall._engine.info import CallInfo
from hostcall._engine.plans import Entrance, plan_in_program
from hostcall._jax.types import Aval
from hostcall._primitives import travel


def put(
    program: _jax.Program,
    info: CallInfo,
    avals: Sequence[Aval],
    *,
    only: Sequence[int] = (),
    whole: bool = True,
    entry: Entrance,
) -> dict[str, str | np.uint64]:
    """Makes a plan, and puts it into a slot that lives as long as the program.

    Returns the attributes by which the program finds it. An exported program has no
    slot: its attribute is a text, from which whoever loads it makes the plan.

    Args:
        program: the program.
        info: the call or tap.
        avals: as in `plan_in_program`.
        only: the ordinals of the devices that tap; empty for all.
        whole: False if each device finds the plan of its own block by this slot.
        entry: as in `plan_in_program`, without what this function adds.
    """
    text, why = "", ""
    try:
        if not whole:
            raise NotPortable(_BY_BLOCKS)
        text = travel.tell(program, info, avals, entry.team, only)
    except NotPortable as error:
        why = str(error)
    if program.is_exported:
        if why:
            refuse_export(info.callback, why)
        return {travel.ATTRIBUTE: text}
    key = info.params.key(avals)
    entry = replace(entry, text=text)
    info.of_program = _jax.all_devices(program)
    plan = plan_in_program(program.client, program.platforms, info, avals, entry)
    slot = _native.Slot(plan, key, program.across)
    _jax.keep_alive(program, KeptAlive(slot, info.name, why))
    attributes: dict[str, str | np.uint64] = {
        "key": np.uint64(key),
        "count": np.uint64(slot.count),
    }
    return {**attributes, travel.ATTRIBUTE: text} if text else attributes


_BY_BLOCKS = (
    "each device calls it for its own block, and this process chooses the blocks when"
    " it compiles the program. Give the whole value (on='once', partitioned=False)"
)


def refuse_export(callback: Callback, reason: str) -> NoReturn:
    raise ExportError(
        f"hostcall: a program that calls `{callback.name}` (at {callback.place}) can't"
        f" be exported: {reason}"
    )


class KeptAlive:
    """Something that an executable keeps alive, and that can't leave the process.

    Args:
        thing: what is kept.
        name: names the call in messages.
        why: why another process can't make the call; "" if the program has its text.
    """

    def __init__(self, thing: _native.Slot | None, name: str, why: str) -> None:
        self.thing = thing
        self.name = name
        self.why = why

    def __reduce__(self) -> tuple[type[KeptAlive], tuple[None, str, str]]:
        if not self.why:
            return KeptAlive, (None, self.name, "")
        raise ExportError(
            f"hostcall: a compiled program that calls `{self.name}` can't be"
            f" serialized: {self.why}. (To compile a program only once, without"
            " serializing it, use JAX's compilation cache, jax_compilation_cache_dir)"
        )

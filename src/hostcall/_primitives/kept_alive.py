"""What an executable keeps alive of its calls, and why it can't leave the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from hostcall import _native
from hostcall._core.callback import CallSpec
from hostcall._core.errors import ExportError
from hostcall._engine.params.equation import Equation
from hostcall._jax.types import Aval

# Why a call that each device of a partitioned program makes can't leave the process.
BY_BLOCKS = (
    "each device calls it for its own block, and this process chooses the blocks when"
    " it compiles the program. Give the whole value (on='once', partitioned=False)"
)


@dataclass(eq=False)
class KeptAlive:
    """Something that an executable keeps alive, and that can't leave the process.

    JAX pickles what an executable keeps alive if somebody serializes the executable.

    Attributes:
        slot: what is kept; None in another process.
        name: names the call in messages.
        why: why another process can't make the call, or a function that says it; ""
            if the program has its text.
        made_of: what its plan was made of, if other programs may share it.
    """

    slot: _native.Slot | None
    name: str
    why: Callable[[], str] | str
    made_of: tuple[object, ...] = ()

    def __reduce__(self) -> tuple[type[KeptAlive], tuple[None, str, str]]:
        why = self.why
        if callable(why):
            why = why() or "it got its name after the program was lowered; lower it now"
        if not why:
            return KeptAlive, (None, self.name, "")
        raise ExportError(
            f"hostcall: a compiled program that calls `{self.name}` can't be"
            f" serialized: {why}. (To compile a program only once, without"
            " serializing it, use JAX's compilation cache, jax_compilation_cache_dir)"
        )


def why_here(params: Equation, operands: Sequence[Aval]) -> str:
    """Why no other process can make this call; "" if one could."""
    from hostcall._export import texts  # only who serializes a program needs it

    return texts.why_here(params, operands)


def refuse_export(callback: CallSpec, reason: str) -> NoReturn:
    raise ExportError(
        f"hostcall: a program that calls `{callback.name}` (at {callback.place}) can't"
        f" be exported: {reason}"
    )

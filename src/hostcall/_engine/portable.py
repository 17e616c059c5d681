"""Equations of calls and taps as JSON, for programs that leave the process.

The function goes by a name: that of `hc.register`, or, for the callables that hostcall
itself makes (a HostFunction's rules, the printer of `hc.print`, an object's methods), a
kind and what the kind needs. All else is written down by value.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

from hostcall import _jax
from hostcall._core import portable, registry
from hostcall._core.host_code import own, why_here
from hostcall._core.portable import Malformed, NotPortable
from hostcall._core.source import Place
from hostcall._core.spec import Static
from hostcall._engine import checked
from hostcall._engine.checked import EQUATIONS, options_of
from hostcall._engine.params.equation import Callback
from hostcall._engine.params.tap import TapParams

# hostcall's own callables say their kind in `travels_as`. The module that knows how
# a kind travels is imported when the kind is met: a process that loads a program may
# not have needed it so far. It has two functions:
#   tell: (callable, whether the program is exported) -> JSON. Raises NotPortable.
#   read: JSON -> (the callable, fields of its `Callback` that don't travel). It also
#     checks the JSON, which may say anything.
_HOMES = {
    "print": "hostcall._api.print",
    "object": "hostcall._api.object.portable",
    "host": "hostcall._host_function.portable",
}


def _home(kind: str) -> Any:
    if kind not in _HOMES:
        raise Malformed(f"a function of kind {kind!r}")
    return importlib.import_module(_HOMES[kind])


_NAMES = {made: name for name, made in EQUATIONS.items()}


# --- Telling ------------------------------------------------------------------------


def tell(params: Any, operands: Sequence[Any], *, exported: bool) -> dict[str, Any]:
    """An equation as JSON.

    Args:
        params: its parameters.
        operands: their avals.
        exported: whether the program is exported. Otherwise the text also decides
            whether JAX's compilation cache finds it, so it has nothing that changes
            from run to run or when a line is moved.

    Raises NotPortable.
    """
    name, callback = _NAMES.get(type(params)), params.callback
    if name is None:
        raise NotPortable(
            "it is a buffer callback or stands for one of JAX's own callbacks, whose"
            " options name things of this process. Use hc.call, hc.tap or hc.host"
        )
    if params.devices:
        raise NotPortable("it is a feed with sharding=, which names devices")
    traced = None if callback.traced is None else _jax.tell_traced(callback.traced)
    if callback.traced is not None and traced is None:
        raise NotPortable(
            "it was traced under a setting of JAX that has no text, of"
            f" {', '.join(name for name, _ in callback.traced.values)}. Set it for"
            " the whole process (jax.config.update) where the program is loaded"
        )
    place = callback.place
    return {
        "equation": name,
        "function": _tell_function(callback, exported),
        "operands": [*map(portable.tell_aval, operands)],
        "avals": [*map(portable.tell_aval, params.avals)],
        **portable.tell_record(callback, ("template", "results", "fills")),
        "params": portable.tell_record(params, options_of(EQUATIONS[name])),
        "callback": portable.tell_record(callback, options_of(Callback)),
        "parallel": params.vmap_method == "parallel",
        "traced": traced,
        "place": [os.path.basename(place.file), place.line, place.function]
        if exported
        else None,
    }


def _tell_function(callback: Callback, exported: bool) -> Any:
    function = callback.function
    mine = own(function)
    kind = "" if mine is None else mine.travels_as
    if kind:
        return [kind, _home(kind).tell(function, exported)]
    name = name_of(
        function,
        "it has no name in other processes. Give it one where it is defined, for"
        f" example @hc.register({_suggested(callback)!r}, version=1), and in every"
        " process that loads the program",
    )
    if callback.executor is not None:
        raise NotPortable(
            "its executor= is an object of this process. Write"
            " hc.register(name)(hc.host(function, executor=...)) in each process"
        )
    return ["registered", name]


def name_of(held: Any, remedy: str, code: Any = None) -> list[Any]:
    """The registered name of what a program holds, for `registry.find`.

    Raises NotPortable with why it has none. Callables that hostcall makes say why they
    stay: users can't name them. `code` is such a callable in it.
    """
    name = registry.name_of_held(held)
    if name is None:
        why = why_here(code or held) or registry.why_nameless(held)
        raise NotPortable(why or remedy)
    return list(name)


def _suggested(callback: Callback) -> str:
    last = callback.name.rpartition(".")[2]
    return f"my_package.{last if last.isidentifier() else 'function'}"


def names_in(told: Any) -> list[registry.Name]:
    """The registered names that an equation needs."""
    kind, more = told["function"]
    named = more if kind == "registered" else more.get("registered")
    return [registry.Name(*named)] if named else []


# --- Reading ------------------------------------------------------------------------


def read(told: Any) -> tuple[Any, dict[str, Any]]:
    """(the parameters of an equation without symbolic sizes, what else its text says).

    Raises RegistryError if its function is not registered here, or lacks what is called
    of it; what `checked.read` raises; LoadError.
    """
    found = checked.read(told)
    kind, more = found["function"]
    extra: dict[str, Any] = {}
    if kind == "registered":
        function = registry.held_of(registry.find(*more))
    else:
        function, extra = _home(kind).read(more)
    traced = None
    if found["traced"] is not None:
        traced = _jax.read_traced(found["traced"])
        if traced is None:
            raise Malformed(f"the settings of JAX {found['traced']!r}")
    callback = Callback(
        fn=Static(function),
        **{part: found[part] for part in ("template", "results", "fills")},
        place=Place(*(found["place"] or ("a loaded program", 0, "?"))),
        traced=traced,
        **found["callback"],
        **extra,
    )
    cls, plain = EQUATIONS[found["equation"]], found["params"]
    if cls is not TapParams:
        plain |= {
            "avals": found["avals"],
            "sharding": None,
            "vmap_method": "parallel" if found["parallel"] else "sequential",
        }
    return cls(callback=callback, **plain), found

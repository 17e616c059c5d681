"""Equations of calls and taps as JSON, for programs that leave the process.

The function goes by a name: that of `hc.register`, or, for the callables that hostcall
itself makes (a HostFunction's rules, the printer of `hc.print`, an object's methods), a
kind and what the kind needs. All else is written down by value.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hostcall import _jax
from hostcall._core import portable, registry
from hostcall._core.coroutines import is_coroutine_function
from hostcall._core.errors import LoadError
from hostcall._core.host_code import is_function, own, why_here
from hostcall._core.portable import Malformed, NotPortable
from hostcall._core.source import Place
from hostcall._core.spec import Static
from hostcall._engine.checked import EQUATIONS, method_of, options_of
from hostcall._engine.options import POLICY, pair_refused
from hostcall._engine.params.equation import Callback, Policy
from hostcall._engine.params.tap import TapParams


class Kind(NamedTuple):
    """How one class of hostcall's own callables travels.

    Attributes:
        tell: (callable, whether the program is exported) -> JSON; raises NotPortable.
        read: JSON -> (the callable, fields of its `Callback` that don't travel).
        check: refuses JSON that `read` could not use, and makes nothing.
    """

    tell: Callable[[Any, bool], Any]
    read: Callable[[Any], tuple[Any, dict[str, Any]]]
    check: Callable[[Any], Any]


# hostcall's own callables say their kind in `travels_as`. The module that knows how
# a kind travels is imported when the kind is met: a process that loads a program may
# not have needed it so far.
_HOMES = {
    "print": "hostcall._api.print",
    "object": "hostcall._api.object.portable",
    "host": "hostcall._host_function.portable",
}
_kinds: dict[str, Kind] = {}


def add_kind(kind: str, tell: Any, read: Any, check: Any) -> None:
    """Called by the module of a kind, when it is imported."""
    _kinds[kind] = Kind(tell, read, check)


def _kind(name: Any) -> Kind:
    if name not in _HOMES:
        raise Malformed(f"a function of kind {name!r}")
    if name not in _kinds:
        importlib.import_module(_HOMES[name])
    return _kinds[name]


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
    told: dict[str, Any] = {
        "equation": name,
        "function": _tell_function(callback, exported),
        "operands": portable.tell_avals(operands),
        "template": portable.tell_template(callback.template),
        "results": portable.tell_results(callback.results),
        "fills": [portable.tell_bytes(fill) for fill in callback.fills],
        "avals": portable.tell_avals(params.avals),
        "parallel": params.vmap_method == "parallel",
        "params": {
            option: portable.tell_plain(getattr(params, option), f"{option}=")
            for option in options_of(EQUATIONS[name])
        },
        "callback": {
            option: portable.tell_plain(getattr(callback, option), f"{option}=")
            for option in options_of(Callback)
        },
    }
    if callback.traced is not None:
        told["traced"] = _jax.tell_traced(callback.traced)
        if told["traced"] is None:
            raise NotPortable(
                "it was traced under a setting of JAX that has no text, of"
                f" {', '.join(name for name, _ in callback.traced.values)}. Set it for"
                " the whole process (jax.config.update) where the program is loaded"
            )
    if exported:
        place = callback.place
        told["place"] = [os.path.basename(place.file), place.line, place.function]
    return told


def _tell_function(callback: Callback, exported: bool) -> Any:
    function = callback.function
    mine = own(function)
    kind = "" if mine is None else mine.travels_as
    if kind:
        return [kind, _kind(kind).tell(function, exported)]
    policy, owner = callback.policy, callback.policy.owner
    name = registry.name_of_held(function) or registry.name_of_held(owner)
    if name is not None and policy != Policy() and registry.find(*name) is not owner:
        raise NotPortable(
            "it is run in a way (timeout=, executor= or the like) that its hc.host"
            f" function says, while {name} is another one. Register the hc.host"
            " function: hc.register(name, version=1)(hc.host(fn, ...))"
        )
    if name is None:
        # Callables that hostcall makes say why they stay: users can't name them.
        why = why_here(function) or registry.why_nameless(function)
        if why:
            raise NotPortable(why)
        raise NotPortable(
            "it has no name in other processes. Give it one where it is defined, for"
            f" example @hc.register({_suggested(callback)!r}, version=1), and in every"
            " process that loads the program"
        )
    return ["registered", list(name)]


def _suggested(callback: Callback) -> str:
    last = callback.name.rpartition(".")[2]
    return f"my_package.{last if last.isidentifier() else 'function'}"


def names_in(told: Any) -> list[registry.Name]:
    """The registered names that an equation needs."""
    kind, more = told["function"]
    named = more if kind == "registered" else more.get("registered")
    return [registry.Name(*named)] if named else []


# --- Reading ------------------------------------------------------------------------


def check(told: Any) -> None:
    """Raises RegistryError, LoadError or Malformed if the function of an equation is
    not here, or is run in a way that does not go with the equation.
    """
    for name in names_in(told):
        registry.find(*name)
    kind, more = told["function"]
    if kind == "registered":
        _registered(told, more)
    else:
        _kind(kind).check(more)


def _registered(told: Any, name: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
    """A registered function, and the policy of a HostFunction."""
    thing = registry.find(*name)
    if not is_function(thing):
        return registry.held_of(thing), {}
    policy = Policy.of(owner=thing, **{key: thing.options.get(key) for key in POLICY})
    given = {**told["callback"], **told["params"], **vars(policy)}
    given["vmap_method"] = method_of(told)
    given["awaits"] = is_coroutine_function(thing.fn)
    what = pair_refused(given)
    if what is not None:
        raise LoadError(
            f"hostcall: what the program does with {registry.Name(*name)} does not go"
            f" with the hc.host function that is registered here: it has {what}"
        )
    return thing.fn, {"policy": policy}


def read(told: Any) -> Any:
    """The parameters of an equation without symbolic sizes.

    Raises RegistryError if its function is not registered here.
    """
    check(told)
    kind, more = told["function"]
    if kind == "registered":
        function, extra = _registered(told, more)
    else:
        function, extra = _kind(kind).read(more)
    traced = None
    if told.get("traced") is not None:
        traced = _jax.read_traced(told["traced"])
        if traced is None:
            raise Malformed(f"the settings of JAX {told['traced']!r}")
    file, line, where = told.get("place", ["a loaded program", 0, "?"])
    callback = Callback(
        fn=Static(function),
        template=portable.read_template(told["template"]),
        results=portable.read_results(told["results"]),
        fills=tuple(map(portable.read_bytes, told["fills"])),
        place=Place(file, line, where),
        traced=traced,
        **{key: portable.read_plain(value) for key, value in told["callback"].items()},
        **extra,
    )
    cls = EQUATIONS[told["equation"]]
    plain = {key: portable.read_plain(value) for key, value in told["params"].items()}
    if cls is not TapParams:
        plain["avals"] = portable.read_avals(told["avals"])
        plain["sharding"] = None
        plain["vmap_method"] = "parallel" if told["parallel"] else "sequential"
    return cls(callback=callback, **plain)

"""Equations of calls and taps as JSON, for programs that leave the process.

The function goes by a name: that of `hc.register`, or, for the callables that hostcall
itself makes (a HostFunction's rules, the printer of `hc.print`, an object's methods), a
kind and what the kind needs. All else is written down by value: the fields of the
equation and of its options, but for those that stay (_core/options.py).

A text comes from a file that may say anything. Options are checked as `hc.call` and
`hc.tap` check them, and the numbers and sizes of operands as their primitives make
them. What the checks refuse is `Malformed`. (The engine compares the bytes of XLA's
buffers once more.)
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, Literal, get_type_hints

from hostcall import _jax
from hostcall._core import host_code, options, portable, registry
from hostcall._core.callback import Callback
from hostcall._core.errors import LoadError
from hostcall._core.host_code import is_coroutine_function, is_function, own
from hostcall._core.options import PlaceOptions, Policy
from hostcall._core.portable import AVALS, Malformed, NotPortable
from hostcall._core.source import Place
from hostcall._core.spec import Results, Static, Template
from hostcall._engine.params.equation import Equation
from hostcall._jax.types import Aval

Told = portable.Told


def kind_of(told: Told) -> type[Equation]:
    """The kind of equation that a text describes. Raises Malformed."""
    name = told["equation"]
    if isinstance(name, str) and name.isidentifier():
        # Its file may not have been needed so far, if no program has such an equation.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"hostcall._engine.params.{name}")
        for kind in _below(Equation):  # type: ignore[type-abstract]
            if kind.name == name:
                return kind
    raise Malformed(f"the option equation={name!r}")


def _below(cls: type[Equation]) -> Iterator[type[Equation]]:
    for kind in cls.__subclasses__():
        yield kind
        yield from _below(kind)


def that_travel(cls: type) -> dict[str, object]:
    """The fields that leave the process, of an equation or of options: their types."""
    hints = _hints(cls)
    return {name: hints[name] for name in options.that_travel(cls)}


_hints: Callable[[type], dict[str, object]] = functools.cache(get_type_hints)


# What the text of an equation says, and the types.
_TEXT = {
    "hostcall": int,
    "equation": str,
    "function": tuple[str, Told],
    "operands": AVALS,
    "template": Template,
    "results": Results,
    "fills": tuple[bytes | None, ...],
    "avals": AVALS,
    "params": Told,
    "options": Told,
    "parallel": bool,
    "linked": bool,
    "only": tuple[int, ...],
    "team": tuple[Literal["ONCE", "EACH"], int, int | None] | None,
    "mesh": tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]] | None,
    "traced": Told,
    "place": tuple[str, int, str] | None,
}

# What neither the types say nor the rows of options, of values other than None.
_MORE: dict[str, Callable[[Told], bool]] = {
    "arrays": lambda value: value != "cuda",
    "only": lambda value: all(-1 <= ordinal < 2**31 for ordinal in value),
    "team": lambda value: 0 < value[1] < 2**20 and (value[2] or 0) >= 0,
    "mesh": lambda value: (
        min(value[1], default=1) > 0 and min(value[2], default=0) >= 0
    ),
    "place": lambda value: value[1] >= 0,
}

# hostcall's own callables say their kind in `travels_as`. The module that knows how
# a kind travels is imported when the kind is met: a process that loads a program may
# not have needed it so far. It has two functions:
#   tell: (callable, whether the program is exported) -> JSON. Raises NotPortable.
#   read: JSON -> (the callable, the policy by which it runs). It also checks the JSON,
#     which may say anything.
_HOMES = {
    "print": "hostcall._api.print",
    "object": "hostcall._api.object.portable",
    "host": "hostcall._host_function.portable",
}


def _home(kind: str) -> ModuleType:
    if kind not in _HOMES:
        raise Malformed(f"a function of kind {kind!r}")
    return importlib.import_module(_HOMES[kind])


# --- Telling ------------------------------------------------------------------------


def tell(
    params: Equation, operands: Sequence[Aval], *, exported: bool
) -> dict[str, Told]:
    """An equation as JSON.

    Args:
        params: its parameters.
        operands: their avals.
        exported: whether the program is exported. Otherwise the text also decides
            whether JAX's compilation cache finds it, so it has nothing that changes
            from run to run or when a line is moved.

    Raises NotPortable.
    """
    callback, how = params.callback, params.options
    if why := params.why_here():
        raise NotPortable(why)
    traced = None if callback.traced is None else _jax.tell_traced(callback.traced)
    if callback.traced is not None and traced is None:
        raise NotPortable(
            "it was traced under a setting of JAX that has no text, of"
            f" {', '.join(name for name, _ in callback.traced.values)}. Set it for"
            " the whole process (jax.config.update) where the program is loaded"
        )
    place = callback.place
    line = [os.path.basename(place.file), place.line, place.function]
    return {
        "equation": params.name,
        "function": _tell_function(callback, exported),
        "operands": [*map(portable.tell_aval, operands)],
        "avals": [*map(portable.tell_aval, params.avals)],
        **portable.tell_record(callback, ("template", "results", "fills")),
        "params": portable.tell_record(params, that_travel(type(params))),
        "options": portable.tell_record(how, that_travel(type(how))),
        "parallel": params.method == "parallel",
        "traced": traced,
        "place": line if exported else None,
    }


def may_travel(callback: Callback) -> bool:
    """A quick look: False if its function has no form in other processes."""
    function, owner = callback.function, callback.policy.owner
    named = registry.name_of_held(function) is not None
    return named or owner is not None or own(function) is function


def why_here(params: Equation, operands: Sequence[Aval]) -> str:
    """Why an equation can't leave the process; "" if it can."""
    try:
        tell(params, operands, exported=False)
    except NotPortable as error:
        return str(error)
    return ""


def _tell_function(callback: Callback, exported: bool) -> Told:
    function = callback.function
    kind = own(function).travels_as
    if kind:
        return [kind, _home(kind).tell(function, exported)]
    policy, owner = callback.policy, callback.policy.owner
    if owner is not None:  # else its executor has a form of the function
        function = owner if registry.name_of_held(owner) else owner.fn
    name = name_of(
        function,
        "it has no name in other processes. Give it one where it is defined, for"
        f" example @hc.register({_suggested(callback)!r}, version=1), and in every"
        " process that loads the program",
    )
    if (policy != Policy() or policy.cache) and registry.find(*name) is not owner:
        raise NotPortable(
            "it is run in a way (timeout=, executor= or the like) that its hc.host"
            f" function says, while {registry.Name(*name)} is another one. Register the"
            " hc.host function: hc.register(name, version=1)(hc.host(fn, ...))"
        )
    return ["registered", name]


def name_of(held: object, remedy: str, code: object = None) -> list[Told]:
    """The registered name of what a program holds, for `registry.find`.

    Raises NotPortable with why it has none. Callables that hostcall makes say why they
    stay: users can't name them. `code` is such a callable in it.
    """
    name = registry.name_of_held(held)
    if name is None:
        why = host_code.why_here(held if code is None else code)
        raise NotPortable(why or registry.why_nameless(held) or remedy)
    return list(name)


def _suggested(callback: Callback) -> str:
    last = callback.name.rpartition(".")[2]
    return f"my_package.{last if last.isidentifier() else 'function'}"


def names_in(told: Told) -> list[registry.Name]:
    """The registered names that an equation needs."""
    kind, more = told["function"]
    named = more if kind == "registered" else more.get("registered")
    return [registry.Name(*named)] if named else []


# --- Reading ------------------------------------------------------------------------


def read(told: Told) -> tuple[Equation, dict[str, Told]]:
    """(the parameters of an equation without symbolic sizes, what else its text says).

    Raises RegistryError if its function is not registered here, or lacks what is called
    of it; what reading a tree or a text that lacks a part raises; Malformed.
    """
    cls = kind_of(told)
    found = _parts(told, cls)
    kind, more = found["function"]
    function, policy = (_registered if kind == "registered" else _home(kind).read)(more)
    if policy.owner is not None and not cls.runs_by_policy:
        function, policy = policy.owner, Policy()
    _check_policy(found, function, policy)
    traced = None
    if found["traced"] is not None:
        traced = _jax.read_traced(found["traced"])
        if traced is None:
            raise Malformed(f"the settings of JAX {found['traced']!r}")
    callback = Callback(
        fn=Static(function),
        **{part: found[part] for part in ("template", "results", "fills", "options")},
        policy=policy,
        place=Place(*(found["place"] or ("a loaded program", 0, "?"))),
        traced=traced,
    )
    params = cls(callback=callback, avals=found["avals"], **found["params"])
    _check_shapes(params, found["operands"])
    return params, found


def _registered(name: Sequence[Told]) -> tuple[Any, Policy]:
    """A registered function, and the policy of a HostFunction."""
    thing = registry.find(*name)
    if not is_function(thing):
        return registry.held_of(thing), Policy()
    return thing.fn, Policy.of(thing.options, thing)


def _check_policy(found: dict[str, Told], function: object, policy: Policy) -> None:
    """Refuses an equation that does not go with how its function is run here."""
    ours = {**policy.at_a_place(), "awaits": is_coroutine_function(function)}
    what = options.pair_refused({**_meeting(found), **ours})
    if what is not None:
        called = ", ".join(map(str, names_in(found)))
        raise LoadError(
            f"hostcall: what the program does with {called} does not go with what is"
            f" registered here: it has {what}"
        )


def _meeting(found: dict[str, Told]) -> dict[str, Told]:
    """The options of an equation, for `pair_refused`."""
    return {**found["params"], **vars(found["options"])}


def _parts(told: Told, cls: type[Equation]) -> dict[str, Told]:
    """What the text of an equation without symbolic sizes says.

    Raises Malformed, and what reading a tree or a text that lacks a part raises.
    """
    found = portable.read_record(told, _TEXT)
    params = portable.read_record(found["params"], that_travel(cls))
    how = portable.read_record(found["options"], that_travel(cls.takes))
    checks = {name: row.fits for name, row in options.table(cls.takes).items()}
    for check in (checks, _MORE):
        for option, value in (found | params | how).items():
            if value is not None and option in check and not check[option](value):
                raise Malformed(f"the option {option}={value!r}")
    place: PlaceOptions = cls.takes(**how)
    found["params"] = params
    found["options"] = cls.place_of_text(place, found)
    what = options.pair_refused(_meeting(found))
    if what is not None:
        raise Malformed(what)
    return found


def _check_shapes(params: Equation, operands: Sequence[Aval]) -> None:
    """Refuses what the primitives never make."""
    grid, given = params.grid, params.arguments(operands)
    portable.read_aval(["bool", *grid])
    portable.check_flags(
        "batched", params.batched, len(operands) if grid else 0, len(grid)
    )
    arrays = len(params.callback.template.keys)
    before = len(params.mask(operands))
    if before < params.masked or len(operands) < before + len(given):
        raise Malformed(f"{len(operands)} operands, too few for its masks")
    params.check_text(operands)
    axes = params.batched if grid else ((),) * len(operands)
    portable.check_axes(grid, axes, operands)
    if params.masked:
        mask = operands[0]
        flags = params.batched[0] if grid else ()
        whole = params.compresses(operands)
        if mask.dtype != bool or (not whole and mask.ndim != sum(flags)):
            raise Malformed(f"where= of {mask}")
    if arrays != len(given):
        raise Malformed(f"{len(operands)} operands for {arrays} arguments")
    _check_results(params)


def _check_results(params: Equation) -> None:
    avals, fills = params.avals, params.callback.fills
    results, levels = params.callback.results, params.levels
    wanted = [len(results.avals), len(results.keys), len(fills)]
    if wanted != [len(avals)] * 3:
        raise Malformed(f"{len(avals)} results with {len(fills)} fills for {wanted}")
    for fill, aval in zip(fills, avals, strict=True):
        if levels > aval.ndim:
            raise Malformed(f"levels={levels} of a result {aval}")
        if fill is None:
            continue
        item = aval.dtype.itemsize
        if len(fill) not in (item, item * math.prod(aval.shape[levels:])):
            raise Malformed(f"a fill of {len(fill)} bytes for {aval}")
        if len(fill) == item and math.prod(aval.shape) * item >= 2**48:
            raise Malformed(f"a fill for {aval}")

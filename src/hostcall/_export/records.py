"""A call as a record, for programs that leave the process.

The function goes by a name: that of `hc.register`, or, for the callables that hostcall
itself makes (a HostFunction's rules, the printer of `hc.print`, an object's methods), a
kind and what the kind needs. All else is written down by value: the fields of the
equation and of its options, but for those that stay (_core/options.py).

A record comes from a file that may say anything. Options are checked as `hc.call` and
`hc.tap` check them, and the numbers and sizes of operands as their primitives make
them (array_checks.py). What the checks refuse is `Malformed`. (inspection.py compares
the record with the program, and the engine the bytes of XLA's buffers once more.)
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MethodType, ModuleType
from typing import Annotated, Any, Literal

from hostcall import _jax
from hostcall._core import option_checks, options
from hostcall._core.callback import CallSpec
from hostcall._core.codec import Json, Malformed, Natural, NotPortable
from hostcall._core.errors import LoadError
from hostcall._core.host_code import as_host_code, is_function
from hostcall._core.options import CallOptions, PlaceOptions, Policy
from hostcall._core.registered import Name, names
from hostcall._core.source import Place, inspect_callable
from hostcall._core.spec import Opaque, Results, Template
from hostcall._engine.params.equation import Equation
from hostcall._export import registry
from hostcall._export.array_checks import check_operands, check_results
from hostcall._export.structures import AVALS, CODEC, FORMAT
from hostcall._jax.types import Aval

Ordinal = Annotated[int, range(-1, 2**31)]
Size = Annotated[int, range(1, 2**20)]


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """What a program says of one call. The sizes of arrays may be symbolic.

    Attributes:
        hostcall: the version of this form.
        equation: the kind of equation, its class's `name`.
        function: the kind of function, and what says which of that kind.
        operands: the avals of the equation's operands.
        template, results, fills: as in `CallSpec`.
        avals: of one row's results.
        params, options: of the equation and of its place. In a record that was read
            they are JSON: the kind of equation says what it should be.
        parallel: whether its rows run at the same time.
        linked: whether a number stands for its token (_primitives/lowering.py).
        only: the ordinals of the devices that tap; empty for all.
        team: how the devices make the call together, as in `Team`.
        mesh: names of axes, their sizes, ids of devices; None without devices.
        traced: the settings of JAX, as in `CallSpec`.
        place: the user's line, in an exported program.
    """

    hostcall: int = FORMAT
    equation: str
    function: tuple[str, Json]
    operands: AVALS
    template: Template
    results: Results
    fills: tuple[bytes | None, ...]
    avals: AVALS
    params: Json
    options: Json
    parallel: bool
    linked: bool = False
    only: tuple[Ordinal, ...] = ()
    team: tuple[Literal["ONCE", "EACH"], Size, Natural | None] | None = None
    mesh: tuple[tuple[str, ...], tuple[Size, ...], tuple[Natural, ...]] | None = None
    traced: Json
    place: tuple[str, Natural, str] | None


def kind_of(name: str) -> type[Equation]:
    """The kind of equation with this name. Raises Malformed."""
    if name.isidentifier():
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


# hostcall's own callables say their kind in `travels_as`. The file that knows how a
# kind travels is imported when the kind is met: a process that loads a program may not
# have needed it so far. It has two functions:
#   record_of: (callable, whether the program is exported) -> its record, a dataclass.
#     Raises NotPortable.
#   read: JSON, which may say anything -> (the callable, the policy by which it runs).
_HOMES = {"print": "prints", "object": "methods", "host": "host_functions"}


def _home(kind: str) -> ModuleType:
    if kind not in _HOMES:
        raise Malformed(f"a function of kind {kind!r}")
    return importlib.import_module(f"hostcall._export.{_HOMES[kind]}")


# --- Writing ------------------------------------------------------------------------


def record_of(params: Equation, operands: Sequence[Aval], exported: bool) -> CallRecord:
    """The record of an equation, without what its program says. Raises NotPortable.

    Args:
        params: its parameters.
        operands: their avals.
        exported: whether the program is exported. Otherwise the text also decides
            whether JAX's compilation cache finds it, so it has nothing that changes
            from run to run or when a line is moved.
    """
    if params.stays:
        raise NotPortable(params.stays)
    callback = params.callback
    place = callback.place
    traced = callback.traced
    settings = None if traced is None else _jax.tell_traced(traced)
    if traced is not None and settings is None:
        raise NotPortable(
            "it was traced under a setting of JAX that has no text, of"
            f" {', '.join(name for name, _ in traced.values)}. Set it for"
            " the whole process (jax.config.update) where the program is loaded"
        )
    # The file's name alone: the rest of the path means nothing on another machine.
    line = os.path.basename(place.file), place.line, place.function
    return CallRecord(
        equation=params.name,
        function=_function_of(callback, exported),
        operands=tuple(operands),
        template=callback.template,
        results=callback.results,
        fills=callback.fills,
        avals=params.avals,
        params=params,
        options=params.options,
        parallel=params.method == "parallel",
        traced=settings,
        place=line if exported else None,
    )


def _function_of(callback: CallSpec, exported: bool) -> tuple[str, object]:
    """(kind, what says which of that kind) of a call's function. Raises NotPortable.

    A callable of hostcall's own goes by its kind, any other by its registered name.
    """
    function = callback.function
    kind = as_host_code(function).travels_as
    if kind:
        return kind, _home(kind).record_of(function, exported)
    policy = callback.policy
    owner = callback.policy.owner
    if owner is not None:  # else its executor has a form of the function
        function = owner if names.of(owner) else owner.fn
    name = name_of(
        function,
        remedy=(
            "it has no name in other processes. Give it one where it is defined, for"
            f" example @hc.register({_suggested(callback)!r}, version=1), and in every"
            " process that loads the program"
        ),
    )
    if policy != Policy():
        registered = registry.find(name.name, name.version)
        if registered is not owner:
            raise NotPortable(
                "it is run in a way (timeout=, executor= or the like) that its hc.host"
                f" function says, while {name} is another one. Register the hc.host"
                " function: hc.register(name, version=1)(hc.host(fn, ...))"
            )
    return "registered", name


def name_of(target: object, remedy: str, code: object = None) -> Name:
    """The registered name of what a program holds.

    Raises NotPortable with why it has none. Callables that hostcall makes say why they
    stay: users can't name them. `code` is such a callable in it.
    """
    name = names.of(target)
    if name is not None:
        return name
    code = target if code is None else code
    if type(code) is MethodType:
        code = code.__self__
    why = as_host_code(code).stays or registry.why_nameless(target)
    raise NotPortable(why or remedy)


def _suggested(callback: CallSpec) -> str:
    last = callback.name.rpartition(".")[2]
    if not last.isidentifier():  # a lambda
        last = "function"
    return f"my_package.{last}"


# --- Reading ------------------------------------------------------------------------


def name_in(record: CallRecord) -> Name | None:
    """The registered name that a call needs."""
    kind, details = record.function
    named = details if kind == "registered" else details.get("registered")
    if not named:  # a print has none
        return None
    name, version = named
    return Name(name, version)


def equation_of(record: CallRecord) -> Equation:
    """The parameters of the equation of a record without symbolic sizes.

    Raises RegistryError if its function is not registered here, or lacks what is called
    of it; LoadError, if the function is run in a way that does not go with it; what
    reading a tree or a record that lacks a part raises; Malformed.
    """
    cls = kind_of(record.equation)
    params = CODEC.fields(record.params, cls)
    place_options = _options(record, cls, params)
    kind, details = record.function
    read = _registered if kind == "registered" else _home(kind).read
    function, policy = read(details)
    if policy.owner is not None and cls.ignores_results:
        # A tap calls the HostFunction itself, and not the function in it.
        function = policy.owner
        policy = Policy()
    _check_policy(record, place_options, function, policy)
    traced = None
    if record.traced is not None:
        traced = _jax.read_traced(record.traced)
        if traced is None:
            raise Malformed(f"the settings of JAX {record.traced!r}")
    file, line, in_function = record.place or ("a loaded program", 0, "?")
    callback = CallSpec(
        fn=Opaque(function),
        template=record.template,
        results=record.results,
        fills=record.fills,
        options=place_options,
        policy=policy,
        place=Place(file, line, in_function),
        traced=traced,
    )
    equation = cls(callback=callback, avals=record.avals, **params)
    check_operands(equation, record.operands)
    check_results(equation)
    return equation


def _options(record: CallRecord, cls: type[Equation], params: dict[str, Any]) -> Any:
    """The options of the place, checked by their table."""
    fields = CODEC.fields(record.options, cls.takes)
    unfit = option_checks.unfit(fields, options.table(cls.takes))
    if unfit is not None:
        raise Malformed(f"the option {unfit}={fields[unfit]!r}")
    place_options: PlaceOptions = cls.takes(**fields)
    if isinstance(place_options, CallOptions):
        # The record has what the method came to: its levels, and whether rows are
        # parallel. Which method of those was named does not matter any more.
        method = "expand_dims" if params["levels"] else None
        if record.parallel:
            method = "parallel"
        place_options = replace(place_options, vmap_method=method)
    if place_options.arrays == "cuda":  # another kind of equation, which stays
        raise Malformed("the option arrays='cuda'")
    refused = option_checks.pair_refused(vars(place_options))
    if refused is not None:
        raise Malformed(refused)
    return place_options


def _registered(name: Sequence[Json]) -> tuple[Any, Policy]:
    """A registered function, and the policy of a HostFunction."""
    text, version = name
    target = registry.find(text, version)
    if not is_function(target):
        return registry.held_of(target), Policy()
    return target.fn, replace(target.policy, owner=target)


def _check_policy(
    record: CallRecord, place_options: PlaceOptions, function: object, policy: Policy
) -> None:
    """Refuses an equation that does not go with how its function is run here."""
    met = place_options.met(policy.at_least())
    awaits = inspect_callable(function).awaits
    refused = option_checks.pair_refused({**met, "awaits": awaits})
    if refused is not None:
        raise LoadError(
            f"hostcall: what the program does with {name_in(record) or 'a function'}"
            f" does not go with what is registered here: it has {refused}"
        )

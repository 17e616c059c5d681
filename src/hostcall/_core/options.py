"""What the options of calls, taps and host functions may be, and which may not meet.

Each option of a place is one field of `CallOptions` or `TapOptions`, and each option of
a function one of `Policy`. The field has the option's row (`Option`): the values that
fit, whether the key of a program has it, and whether it leaves the process with a
program. Each pair that is refused has a row too. The faces check with them what a user
gives, and _export/records.py what a file says. Pairs that only a transformation or a
lowering shows are refused there.

A face builds one of the three dataclasses, and everything below passes it on.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeGuard, get_args

import jax

from hostcall._core import config
from hostcall._core.errors import choices, conflict, wrong
from hostcall._core.order import ORDERS, Order
from hostcall._core.signatures import own_option
from hostcall._core.source import name_of
from hostcall._core.spec import Opaque
from hostcall._jax.types import Device, Sharding

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ROWS = ("sequential", "parallel")
WHOLE = ("expand_dims", "broadcast_all", "legacy_vectorized")

Arrays = Literal["numpy", "jax", "dlpack", "cuda"]
TapArrays = Literal["numpy", "jax", "dlpack"]
# "free" is for drop-ins: jax.Arrays that are not committed to a device.
AnyArrays = Literal[Arrays, "free"]
Fail = Literal["together", "alone"]
Lend = Literal[False, True, "out"]
WhenFull = Literal["block", "drop_newest", "drop_oldest"]
Rows = Literal["batched", "each"]
Remat = Literal["once", "repeat"]
On = Literal["once", "shards"]

VmapMethod = str | Callable[..., Any] | None
_OWNED: Lend = False
_UNSEEN: str | None = None


# --- What an option may be -----------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """What an option may be.

    Attributes:
        wanted: what that is, in the words of an error.
        fits: whether a value is that.
        needed: whether None is no value of it; else None says that it is not given.
        values: those that fit, if there are only these.
    """

    wanted: str
    fits: Callable[[object], bool]
    needed: bool = False
    values: tuple[object, ...] = ()


def choice(*values: object, or_none: bool = False) -> Option:
    """An option that has one of these values."""
    # Other kinds may be equal to one of the values, as 1 is to True, or have an `==`
    # that raises, as an array has.
    kinds = (str, bool, types.NoneType)
    return Option(
        wanted=choices(values) + (" or None" if or_none else ""),
        fits=lambda value: isinstance(value, kinds) and value in values,
        needed=not or_none,
        values=values,
    )


def _number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def count(of_things: str) -> Option:
    """An option that says how many."""
    return Option(
        wanted=f"{of_things}, an int of 1 or more (below 2**31)",
        fits=lambda v: _number(v) and isinstance(v, int) and 0 < v < 2**31,
    )


def _is_executor(value: object) -> bool:
    """Whether this is an Executor, a Dask client, or a pool like multiprocessing's.

    Ray's pool is one of the last kind.
    """
    return any(hasattr(value, name) for name in ("submit", "apply_async"))


def _on(*words: str) -> Option:
    """Where a call or a tap is made."""
    return Option(
        wanted=f"{', '.join(map(repr, words))} or a device, such as jax.devices()[0]",
        fits=lambda v: isinstance(v, jax.Device) or (isinstance(v, str) and v in words),
        needed=True,
        values=words,
    )


SECONDS = Option(
    "a number of seconds above 0",
    # An int may be too large for a float.
    lambda v: _number(v) and v > 0 and (v < 2**63 or isinstance(v, float)),
)
_TEXT = Option("a non-empty string", lambda v: isinstance(v, str) and v != "")
_METHODS = choice(*ROWS, *WHOLE, None)

# What the metadata of a field says.
_ROW = "row"
_KEY = "key"
_STAYS = "stays"
# Of a field that says where a program runs, not what it is: two programs that differ in
# it may have one key, and it stays in the process.
LOCAL_ONLY = types.MappingProxyType({_KEY: False, _STAYS: True})


def option(
    row: Option,
    default: object = None,
    *,
    key: bool = True,
    stays: bool = False,
    **options: Any,
) -> Any:
    """The field of an option.

    Args:
        row: what it may be.
        default: its value if it is not given.
        key: whether the keys of programs differ that differ in it.
        stays: whether it does not leave the process with a program.
        options: as for `dataclasses.field`.
    """
    metadata = {_ROW: row, _KEY: key, _STAYS: stays}
    return field(default=default, metadata=metadata, **options)


def table(*classes: type) -> dict[str, Option]:
    """The rows of the options that these dataclasses have."""
    return {
        member.name: member.metadata[_ROW]
        for cls in classes
        for member in fields(cls)
        if _ROW in member.metadata
    }


def _keyed(cls: type[DataclassInstance]) -> operator.attrgetter[Any]:
    key_names = [
        member.name for member in fields(cls) if member.metadata.get(_KEY, True)
    ]
    return operator.attrgetter(*key_names)


# Of a dataclass, what gets the values of those fields that the key of a program has.
keyed: Callable[[type[DataclassInstance]], operator.attrgetter[Any]]
keyed = functools.cache(_keyed)


def that_travel(cls: type) -> Iterable[str]:
    """The fields of a dataclass that leave the process with a program."""
    return [
        member.name for member in fields(cls) if not member.metadata.get(_STAYS, False)
    ]


# --- The options ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """The options of every place: of each call and tap.

    Attributes:
        order: how often and in which order the function runs (_core/order.py).
        arrays: the kind of array that the function gets.
        tag: the name in statistics, `status()` and collectors; None for the function's
            name.
        sharding: a sharding on the device that makes the call, or taps the whole value,
            in a program over several; None for the program's first device.
    """

    order: Order = option(choice(*ORDERS), "pure")
    arrays: AnyArrays = option(choice("numpy", "jax", "dlpack", "cuda"), "numpy")
    tag: str | None = option(_TEXT)
    sharding: Sharding | None = field(default=None, metadata=LOCAL_ONLY)

    # What holds for a kind of place without such an option. They have no annotation:
    # a dataclass would make fields of them.
    lend = _OWNED  # a field of calls
    collected = _UNSEEN  # the tag under which collectors see what it gets

    @property
    def device(self) -> Device | None:
        """The device that `on` names."""
        return None if self.sharding is None else next(iter(self.sharding.device_set))

    def met(self, policy: Policy, mask: object = None) -> dict[str, object]:
        """All that is said of a call, for `check`: what of it may not meet."""
        return {"on": self.sharding, **vars(self), **vars(policy), "where": mask}

    @classmethod
    def of(cls, options: Mapping[str, Any], defaults: Self | None = None) -> Self:
        """Those of the options that a place has; `defaults` has what is not given."""
        values = {} if defaults is None else vars(defaults).copy()
        # A face passes all of its options, those of the function and the mask too.
        for name, value in options.items():
            if name in cls.__dataclass_fields__:
                values[name] = value
        device = options.get("on")
        if isinstance(device, jax.Device):
            values["sharding"] = jax.sharding.SingleDeviceSharding(device)
            values.pop("on", None)  # a tap's `on` is then "once"
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class CallOptions(PlaceOptions):
    """The options of a call's place.

    Attributes:
        vmap_method: as given to `hc.call`. A text says whether rows run at once, and
            all else is in the equation that JAX has batched.
        lend: whether the function gets views of XLA's memory; "out" if it gets `out`
            too, arrays for its results.
        fail: as given to `hc.call`.
        counted: of hc.watch: executions are counted. Its programs don't travel.
    """

    vmap_method: VmapMethod = option(
        replace(_METHODS, fits=lambda v: callable(v) or _METHODS.fits(v)), stays=True
    )
    lend: Lend = option(choice(False, True, "out"), False)
    fail: Fail | None = option(choice(*config.FAILS, or_none=True), key=False)
    counted: bool = field(default=False, metadata={_STAYS: True})


@dataclass(frozen=True, kw_only=True)
class TapOptions(PlaceOptions):
    """The options of a tap's place, as given to `hc.tap`.

    Attributes:
        order: "pure" if the value passes through the tap (`hc.tap_through`).
        on: "once" if that was a device.
    """

    order: Order = option(choice("unordered", "ordered", "pure"), "unordered")
    arrays: AnyArrays = option(choice("numpy", "jax", "dlpack"), "numpy")
    when_full: WhenFull = option(choice(*get_args(WhenFull)), "block")
    rows: Rows = option(choice(*get_args(Rows)), "batched")
    remat: Remat = option(choice(*get_args(Remat)), "once", key=False)
    on: On = option(_on(*get_args(On)), "once")
    every: int | float | None = option(
        Option(
            "a number of executions (an int) or of seconds (a float) above 0 and below"
            " 2**31",  # the engine counts nanoseconds in 64 bits
            lambda v: _number(v) and 0 < v < 2**31,
        )
    )
    sample: float | None = option(
        Option(
            "a float above 0 and up to 1.0, the share of executions that tap",
            lambda v: isinstance(v, float) and 0 < v <= 1,
        )
    )
    batch: int | None = option(count("the most taps that a call gets"))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        # 2 executions are not 2.0 seconds, though the numbers are equal.
        same_unit = type(self.every) is type(other.every)
        return same_unit and vars(self) == vars(other)

    @property
    def collected(self) -> str | None:  # type: ignore[override]
        """The tag under which collectors see what it gets."""
        return self.tag

    @property
    def thinned(self) -> bool:
        """Whether some executions don't tap."""
        return self.every is not None or self.sample is not None

    @property
    def in_blocks(self) -> bool:
        """Whether blocks of the value are delivered, each by itself."""
        return self.on != "once"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a function is run, wherever it is called (`hc.host`). Nothing of it travels.

    Attributes:
        timeout: the limit in seconds, or None.
        executor: runs the rows of a parallel call; see _policies/executors.py.
        concurrency: how many calls of a coroutine function wait at the same time, or
            None for the default. A plain rule of such a function ignores it.
        float64: whether floating arguments are float64 on the host, and complex ones
            complex128.
        owner: the HostFunction that has it, or None.
    """

    timeout: float | None = option(SECONDS)
    executor: Opaque | None = option(
        Option(
            "a concurrent.futures.Executor, a Dask client or a pool such as"
            " multiprocessing.Pool",
            _is_executor,
        )
    )
    concurrency: int | None = option(count("how many of its calls wait at a time"))
    float64: bool = option(choice(True, False), False)
    owner: Any = field(default=None, compare=False)

    def owned_by(self, function: Any) -> Policy:
        """The same, as calls of a HostFunction have it; `replace` takes longer."""
        values = {**vars(self), "owner": function}  # its fields, and nothing else
        return Policy(**values)

    @property
    def pool(self) -> Any:
        """The executor itself; None for the default."""
        return None if self.executor is None else self.executor.value

    @property
    def layered(self) -> bool:
        """Whether any call has a layer for it (_policies/)."""
        return self.timeout is not None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Policy:
        """The policy in options as `hc.host` takes them."""
        names = cls.__dataclass_fields__
        values = {name: value for name, value in options.items() if name in names}
        executor = values.get("executor")
        if executor is not None:
            values["executor"] = Opaque(executor)  # it may not be hashable
        return cls(**values)

    def at_least(self) -> Policy:
        """What holds for each call: rows one by one do without the executor, and plain
        rules of a coroutine function without its limit.
        """
        return replace(self, executor=None, concurrency=None)

    def sent(self) -> Policy:
        """The same in another process, which does not get the executor."""
        return replace(self, executor=None)


# Those of a function, which `hc.host` takes; all others are a place's.
POLICY = tuple(table(Policy))

CALL: Mapping[str, Option] = {**table(CallOptions, Policy), "on": _on("once")}
TAP: Mapping[str, Option] = table(TapOptions)
FEED: Mapping[str, Option] = {
    "batch": count("a number of rows"),
    "prefetch": replace(count("a number of items"), needed=True),
    "on_end": choice("mask", "raise", "repeat"),
    "timeout": SECONDS,
    "tag": _TEXT,
}

# Options of `hc.host` that are gone, and what to write instead.
_KEEP = (
    "wrap the function before hc.host gets it. joblib.Memory(folder).cache(fn) keeps"
    " results on a disk, and functools.lru_cache over the bytes of the arguments in"
    " memory (the page 'Questions that are often asked' has the lines)"
)
_MERGE = (
    'give vmap_method="expand_dims", which calls once for a batch, or send the calls to'
    " a server that batches them (the page 'Questions that are often asked')"
)
GONE: Mapping[str, str] = {
    "cache": _KEEP,
    "version": f"it said which code's results cache= kept, and that is gone: {_KEEP}",
    "coalesce": _MERGE,
    "wait": f"it said how long coalesce= waited, and that is gone: {_MERGE}",
}

# Values that others take, or that were there once, and what to write instead.
_INSTEAD = {
    "process": ". For the blocks of each device write on='shards', which moves nothing;"
    " 'once' gathers the whole value",
    "sequential_unrolled": ". 'sequential' does the same",
    "shards": ". A call with results is made once, with the whole value. To call it on"
    " each device with its block, make the call inside jax.shard_map. To send out"
    " blocks without results, write hc.tap({fn}, ..., on='shards')",
}


# --- Pairs ---------------------------------------------------------------------------

Test = Callable[[object], bool]
Pair = tuple[dict[str, Test], dict[str, Test], str]


def _given(value: object) -> bool:
    # None, and the False of lend= and float64=, say that an option is not given. 0 does
    # not: no option may be 0, and `unfit` has refused it where it was given.
    return value is not None and value is not False


def _missing(value: object) -> bool:
    return not _given(value)


def _is(text: str) -> Test:
    return lambda value: isinstance(value, str) and value == text


def _is_not(*texts: object) -> Test:
    return lambda value: callable(value) or value not in texts


_TOGETHER = "Taps of a batch are delivered together, not one by one between others"
_LENT = "A function on another thread could outlive the memory it was lent"

# Which options may not meet, a row for each reason: (options, others, why). A row
# refuses what has one of `options` together with one of `others`, where an option
# counts if its test is true of the value. `pair_refused` names both in the error, and
# `why` goes on from there: what it is, and what to write instead. For example
#
#     ({"batch": _given}, {"order": _is("ordered")}, "...: leave out order=, or batch=")
#
# makes hc.tap(f, x, batch=8, order="ordered") an error that says "batch= and
# order='ordered'. ...: leave out order=, or batch=".
#
# The tests get the values as `PlaceOptions.met` has them, so "where" is the mask, "on"
# the sharding of a device, and "awaits", which is no option, says whether the function
# is a coroutine function. An option that is not among the values is not tested, so a
# face that has no `timeout=` passes all rows of it. The first row that fits is named.
# tests/call/test_option_pairs.py tries all pairs of all faces: it finds a row that is
# missing or refuses too much.
_PAIRS: tuple[Pair, ...] = (
    (
        {"lend": _given},
        {"timeout": _given, "vmap_method": _is("parallel")},
        f"{_LENT}: drop one of the two",
    ),
    ({"lend": _given}, {"awaits": _given}, f"{_LENT}: leave out lend="),
    (
        {"concurrency": _given},
        {"awaits": _missing},
        "Make it an `async def`, or leave out concurrency=: rows of a plain function"
        ' run on the threads of executor= with vmap_method="parallel"',
    ),
    (
        {"executor": _given},
        {"awaits": _given},
        "It runs on the event loop: leave out executor=, and give concurrency=",
    ),
    (
        {"executor": _given},
        {"vmap_method": _is_not("parallel")},
        'Rows go to an executor with vmap_method="parallel"',
    ),
    (
        {"arrays": _is("cuda")},
        {
            **dict.fromkeys(("where", "timeout", "lend"), _given),
            "on": lambda value: value not in (None, "once"),
            "vmap_method": _is_not(None, "sequential", *WHOLE),
        },
        "That is for arrays on the host: leave out one of the two",
    ),
    (
        {"arrays": _is("cuda")},
        {"awaits": _given},
        "XLA's memory and stream are a function's own only while XLA's thread runs it:"
        " leave out arrays=",
    ),
    (
        {"float64": _given},
        {"arrays": _is_not("numpy", "dlpack")},
        "Such arrays have the dtypes of the program: leave out one of the two",
    ),
    (
        {"batch": _given},
        {"order": _is("ordered")},
        f"{_TOGETHER}: leave out order=, or batch=",
    ),
    (
        {"batch": _given},
        {"rows": _is("each")},
        f"{_TOGETHER}: use rows='batched', or leave out batch=",
    ),
)


def pair_refused(values: Mapping[str, object]) -> str | None:
    """Which two of these may not meet, and why; None if all may."""
    for options, others, why in _PAIRS:
        first = _first_that_counts(options, values)
        if first is None:  # most options are not given
            continue
        second = _first_that_counts(others, values)
        if second is not None:
            return f"{first} and {second}. {why}"
    return None


def _first_that_counts(
    tests: Mapping[str, Test], values: Mapping[str, object]
) -> str | None:
    """The first of these options whose test is true, in the words of an error."""
    for option, test in tests.items():
        if option in values and test(values[option]):
            return _shown(option, values[option])
    return None


def _shown(option: str, value: object) -> str:
    if option == "awaits":
        return f"is {'' if value else 'not '}a coroutine function"
    if _missing(value):
        return f"no {option}="
    if isinstance(value, (str, bool)):
        return f"{option}={value!r}"
    return f"{option}="


# --- Checks --------------------------------------------------------------------------


def unfit(values: Mapping[str, object], options: Mapping[str, Option]) -> str | None:
    """The option that is given a value which it can't have; None if there is none."""
    for name, value in values.items():
        option = options.get(name)
        if option is None or (value is None and not option.needed):
            continue
        if not option.fits(value):
            return name
    return None


def check(
    owner: str,
    values: Mapping[str, object],
    options: Mapping[str, Option] = CALL,
    fn: Callable[..., Any] | None = None,
) -> None:
    """Refuses wrong values of options, and those that may not meet.

    Args:
        owner: what has them, in the words of an error.
        values: what is given, and "awaits". Pairs with what is not here are not looked
            for.
        options: what they may be; empty if only pairs are looked for.
        fn: the function, if its own keywords come with them, so that a value may have
            been meant for it.
    """
    name = unfit(values, options)
    if name is not None:
        value = values[name]
        advice = _advice(name, value, fn)
        raise wrong(name, owner, options[name].wanted, value, advice)
    refused = pair_refused(values)
    if refused is not None:
        raise conflict(owner, refused)


def _advice(name: str, value: object, fn: Callable[..., Any] | None) -> str:
    """What to write in place of a wrong value of an option; "" for nothing."""
    if isinstance(value, str) and value in _INSTEAD:
        shown = "fn" if fn is None else name_of(fn)
        return _INSTEAD[value].format(fn=shown)
    return "" if fn is None else own_option(fn, name, value)

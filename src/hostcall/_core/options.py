"""What the options of calls, taps and host functions may be.

Each option of a place is one field of `CallOptions` or `TapOptions`, and each option of
a function one of `Policy`. The field has the option's row (`Option`): the values that
fit, whether the key of a program has it, and whether it leaves the process with a
program. The faces check with the rows what a user gives (option_checks.py has which of
them may not meet), and _export/records.py what a file says.

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
from hostcall._core.errors import choices
from hostcall._core.order import ORDERS, Order
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

"""Refuses options that have a wrong value, or that may not meet another.

What an option may be is in its row (options.py). Each pair that is refused has a row
here. Pairs that only a transformation or a lowering shows are refused there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hostcall._core.errors import conflict, wrong
from hostcall._core.options import CALL, WHOLE, Option
from hostcall._core.signatures import own_option
from hostcall._core.source import name_of

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


# Values that others take, or that were there once, and what to write instead.
_INSTEAD = {
    "process": ". For the blocks of each device write on='shards', which moves nothing;"
    " 'once' gathers the whole value",
    "sequential_unrolled": ". 'sequential' does the same",
    "shards": ". A call with results is made once, with the whole value. To call it on"
    " each device with its block, make the call inside jax.shard_map. To send out"
    " blocks without results, write hc.tap({fn}, ..., on='shards')",
}


def _advice(name: str, value: object, fn: Callable[..., Any] | None) -> str:
    """What to write in place of a wrong value of an option; "" for nothing."""
    if isinstance(value, str) and value in _INSTEAD:
        shown = "fn" if fn is None else name_of(fn)
        return _INSTEAD[value].format(fn=shown)
    return "" if fn is None else own_option(fn, name, value)

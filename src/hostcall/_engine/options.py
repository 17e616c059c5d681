"""What the options of calls, taps and host functions may be, and which may not meet.

Each option has one row, and so has each pair that is refused. The faces check with them
what a user gives, and portable.py what a file says. Pairs that only a transformation or
a lowering shows are refused there.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hostcall._core import config
from hostcall._core.arguments import choices, conflict, wrong
from hostcall._core.order import ORDERS
from hostcall._core.signatures import own_option

ROWS = ("sequential", "parallel")
WHOLE = ("expand_dims", "broadcast_all", "legacy_vectorized")


@dataclass(frozen=True)
class Option:
    """What an option may be.

    Attributes:
        wanted: what that is, in the words of an error.
        fits: whether a value is that.
        needed: whether None is no value of it; else None says that it is not given.
    """

    wanted: str
    fits: Callable[[Any], bool]
    needed: bool = False


def choice(*values: Any, or_none: bool = False) -> Option:
    """An option that has one of these values."""
    kinds = (str, bool, types.NoneType)
    return Option(
        choices(values) + (" or None" if or_none else ""),
        lambda v: isinstance(v, kinds) and v in values,
        needed=not or_none,
    )


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def count(what: str) -> Option:
    """An option that says how many."""
    return Option(
        f"{what}, an int of 1 or more",
        lambda v: _number(v) and isinstance(v, int) and v > 0,
    )


def _is_executor(value: Any) -> bool:
    # Imported here, since most programs have none.
    from hostcall._policies.executors import is_executor

    return is_executor(value)


def _is_cache(value: Any) -> bool:
    from hostcall._policies.stores import is_cache

    return is_cache(value)


SECONDS = Option("a number of seconds above 0", lambda v: _number(v) and v > 0)
_METHODS = choice(*ROWS, *WHOLE, None)

CALL: Mapping[str, Option] = {
    "order": choice(*ORDERS),
    "vmap_method": Option(
        _METHODS.wanted, lambda v: callable(v) or _METHODS.fits(v), needed=True
    ),
    "arrays": choice("numpy", "jax", "dlpack", "cuda"),
    "lend": choice(False, True, "out"),
    "timeout": SECONDS,
    "executor": Option(
        "a concurrent.futures.Executor, a Dask client or a pool such as"
        " multiprocessing.Pool",
        _is_executor,
    ),
    "concurrency": count("how many of its calls wait at the same time"),
    "coalesce": count("how many calls are merged into one at most"),
    "wait": Option(
        "the seconds that a call waits for others, a number of 0 or more",
        lambda v: _number(v) and v >= 0,
    ),
    "cache": Option("'memory', a diskcache.Cache or a joblib.Memory", _is_cache),
    "version": Option("a string or an int", lambda v: type(v) in (str, int)),
    "fail": choice(*config.FAILS, or_none=True),
    "tag": Option("a non-empty string", lambda v: isinstance(v, str) and v != ""),
}

TAP: Mapping[str, Option] = {
    "order": choice("unordered", "ordered", "pure"),
    "when_full": choice("block", "drop_newest", "drop_oldest"),
    "rows": choice("batched", "each"),
    "remat": choice("once", "repeat"),
    "arrays": choice("numpy", "jax", "dlpack"),
    "every": Option(
        "a number of executions (an int) or of seconds (a float) above 0",
        SECONDS.fits,
    ),
    "sample": Option(
        "a float above 0 and up to 1.0, the share of executions that tap",
        lambda v: isinstance(v, float) and 0 < v <= 1,
    ),
    "batch": count("the most taps that a call gets"),
    "tag": CALL["tag"],
}

FEED: Mapping[str, Option] = {
    "batch": count("a number of rows"),
    "prefetch": replace(count("a number of items"), needed=True),
    "on_end": choice("mask", "raise", "repeat"),
    "timeout": SECONDS,
    "tag": CALL["tag"],
}

# Those of a function, which `hc.host` takes; all others are a place's.
POLICY = ("timeout", "executor", "concurrency", "coalesce", "wait", "cache")

# Values that were there once, and what to write instead.
_GONE = {"sequential_unrolled": ". 'sequential' does the same"}


# --- Pairs ---------------------------------------------------------------------------

Test = Callable[[Any], bool]


def _given(value: Any) -> bool:
    return value is not None and value is not False


def _missing(value: Any) -> bool:
    return not _given(value)


def _is(text: str) -> Test:
    return lambda value: isinstance(value, str) and value == text


def _is_not(*texts: Any) -> Test:
    return lambda value: callable(value) or value not in texts


_TOGETHER = "Taps of a batch are delivered together, not one by one between others"
_LENT = "A function on another thread could outlive the memory it was lent"

# (options, others, why): none of the first may meet one of the others. "awaits" is
# whether the function is a coroutine function.
_PAIRS: tuple[tuple[dict[str, Test], dict[str, Test], str], ...] = (
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
        {"wait": _given},
        {"coalesce": _missing},
        "Calls wait for others to be merged with: give coalesce=, or leave out wait=",
    ),
    (
        {"coalesce": _given},
        {"order": _is_not("pure")},
        "Merged calls have no order among each other: leave out one of the two",
    ),
    (
        {"coalesce": _given},
        {"vmap_method": _is_not(None, *ROWS)},
        "The rows of a batch are merged anyway: leave out vmap_method=",
    ),
    (
        {"coalesce": _given},
        {"lend": _given, "executor": _given, "arrays": _is("cuda")},
        "That is for calls that are made one by one: leave out one of the two",
    ),
    (
        {"coalesce": _given},
        {"result": _is("infer")},
        "A merged function gets several entries, and it is inferred from one: say what"
        " it returns with result=",
    ),
    (
        {"arrays": _is("cuda")},
        {
            **dict.fromkeys(("where", "timeout", "lend", "on"), _given),
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
        {"version": _given},
        {"cache": _missing},
        "It is the version of the code whose results are kept: give cache=, or drop"
        " version=",
    ),
    (
        {"cache": _given},
        {"order": _is_not("pure")},
        "A result that is found needs no call, and then the function's effects would be"
        " missing: make it pure, or drop cache=",
    ),
    (
        {"cache": _given},
        {"lend": _is("out")},
        "Results are kept as copies: use lend=True, or drop cache=",
    ),
    (
        {"cache": _given},
        {"arrays": _is("cuda")},
        "Keys are made of bytes on the host: use another arrays=, or drop cache=",
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


def _by_option() -> dict[str, list[tuple[Test, str, Test, str]]]:
    found: dict[str, list[tuple[Test, str, Test, str]]] = {}
    for ones, others, why in _PAIRS:
        for one, test in ones.items():
            rows = ((test, other, of_other, why) for other, of_other in others.items())
            found.setdefault(one, []).extend(rows)
    return found


_REFUSED = _by_option()


def pair_refused(given: Mapping[str, Any]) -> str | None:
    """Which two of these may not meet, and why; None if all may."""
    for option, value in given.items():
        for test, other, of_other, why in _REFUSED.get(option, ()):
            if test(value) and other in given and of_other(given[other]):
                return (
                    f"{_shown(option, value)} and {_shown(other, given[other])}. {why}"
                )
    return None


def _shown(option: str, value: Any) -> str:
    if option == "awaits":
        return f"is {'' if value else 'not '}a coroutine function"
    if _missing(value):
        return f"no {option}="
    return f"{option}={value!r}" if isinstance(value, (str, bool)) else f"{option}="


# --- Checks --------------------------------------------------------------------------


def check(
    of: str,
    given: Mapping[str, Any],
    options: Mapping[str, Option] = CALL,
    fn: Callable[..., Any] | None = None,
) -> None:
    """Refuses wrong values of options, and those that may not meet.

    Args:
        of: what has them, in the words of an error.
        given: the values, and "awaits". Pairs with what is not here are not looked for.
        options: what they may be.
        fn: the function, if its own keywords come with them, so that a value may have
            been meant for it.
    """
    for name, value in given.items():
        option = options.get(name)
        if option is None or (value is None and not option.needed):
            continue
        if not option.fits(value):
            gone = _GONE.get(value, "") if isinstance(value, str) else ""
            own = "" if fn is None else own_option(fn, name, value)
            raise wrong(name, of, option.wanted, value, gone or own)
    refuse_pairs(of, given)


def refuse_pairs(of: str, given: Mapping[str, Any]) -> None:
    what = pair_refused(given)
    if what is not None:
        raise conflict(of, what)

"""Checks and reads the arguments that declare an `hc.Object`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hostcall._core.arguments import of_a_number, wrong
from hostcall._core.errors import SpecError
from hostcall._core.spec import Results, parse_result

# The methods of hc.Object itself, which a declaration can't use as names.
OWN = ("close", "renew", "restore", "save")


def check(name: str, methods: Any, order: Any, vmap_method: Any) -> dict[str, Results]:
    """Refuses wrong options; returns what each method returns."""
    if not isinstance(methods, Mapping) or not methods:
        raise SpecError(
            f"hostcall: methods= of `{name}` should be a dict from method names to"
            f" result specs, got {methods!r}",
            code="hc-object",
        )
    results = {}
    for method, result in methods.items():
        if not isinstance(method, str) or not method.isidentifier() or method[0] == "_":
            raise SpecError(
                f"hostcall: methods= of `{name}` has the key {method!r}, which is not"
                " the name of a public method",
                code="hc-object",
            )
        if method in OWN:
            raise SpecError(
                f"hostcall: `{name}` can't declare `{method}`, since hc.Object has its"
                " own method of that name. Add a method with another name that calls"
                " it, and declare that one",
                code="hc-object",
            )
        if not isinstance(result, Results):  # read from an exported program
            result = parse_result(result, f"{name}.{method}")
        results[method] = result
    if order not in ("ordered", "unordered"):
        why = ". An object has state, so its calls can't be dropped or repeated"
        raise wrong("order", f"`{name}`", "'ordered' or 'unordered'", order, why)
    if vmap_method not in ("sequential", "parallel"):
        wanted, why = "'sequential' or 'parallel'", ". Each row has its own object"
        raise wrong("vmap_method", f"`{name}`", wanted, vmap_method, why)
    return results


def maker(factory: Callable[..., Any], name: str) -> Callable[[Any], Any]:
    """A function from an object's index to a new object, for every kind of factory."""
    return of_a_number(
        factory,
        lambda needed: (
            f"hostcall: the factory of `{name}` should require no argument, or only the"
            f" object's index, but it requires {needed}. Write lambda: ... or lambda"
            " index: ..."
        ),
    )


def hook(
    name: str, option: str, given: Any, optional: bool = False
) -> Callable[..., Any] | None:
    """The function of an object that an option gives, directly or as a method's name.

    If `optional`, a method that the object lacks is not called.
    """
    if given is None or callable(given):
        return given  # type: ignore[no-any-return]
    if not isinstance(given, str):
        raise wrong(option, f"`{name}`", "a method's name or a function", given)

    def by_name(value: Any, *args: Any) -> Any:
        if optional and not hasattr(value, given):
            return None
        return getattr(value, given)(*args)

    return by_name

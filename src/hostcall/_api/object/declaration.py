"""What declares an `hc.Object`: checks and reads its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hostcall._core.arguments import conflict, of_a_number, wrong
from hostcall._core.coroutines import is_coroutine_function
from hostcall._core.errors import SpecError
from hostcall._core.options import check
from hostcall._core.order import Order
from hostcall._core.spec import Results, parse_result

# What closes, saves or restores an object: a method's name, or a function of it.
Hook = str | Callable[..., Any] | None

# The methods of hc.Object itself, which a declaration can't use as names.
OWN = ("close", "renew", "restore", "save")


@dataclass(frozen=True)
class Declaration:
    """What `hc.Object` was given.

    Attributes:
        methods: what each method returns.
        name: as given, or the factory's.
    """

    factory: Callable[..., Any]
    methods: Mapping[str, Results]
    name: str
    order: Order
    vmap_method: str
    executor: object
    concurrency: int | None
    close: Hook
    save: Hook
    restore: Hook

    def __post_init__(self) -> None:
        name = self.name
        if self.order not in ("ordered", "unordered"):
            why = ". An object has state, so its calls can't be dropped or repeated"
            wanted = "'ordered' or 'unordered'"
            raise wrong("order", f"`{name}`", wanted, self.order, why)
        if self.vmap_method not in ("sequential", "parallel"):
            wanted, why = "'sequential' or 'parallel'", ". Each row has its own object"
            raise wrong("vmap_method", f"`{name}`", wanted, self.vmap_method, why)
        awaits = any(is_coroutine_function(self.definition(m)) for m in self.methods)
        check(f"`{name}`", {**self.options, "awaits": awaits})
        if (self.save is None) != (self.restore is None):
            what = "only one of save= and restore=. Pass both, or neither"
            raise conflict(f"`{name}`", what)

    @property
    def options(self) -> dict[str, object]:
        """Those of the calls of all methods."""
        options = ("order", "vmap_method", "executor", "concurrency")
        return {option: getattr(self, option) for option in options}

    def definition(self, method: str) -> object:
        """The method as its class defines it; None if the factory is not a class."""
        is_class = isinstance(self.factory, type)
        return getattr(self.factory, method, None) if is_class else None

    def hook(self, option: str, optional: bool = False) -> Callable[..., Any] | None:
        """The function of an object that an option gives, itself or as a method's name.

        If `optional`, a method that the object lacks is not called.
        """
        given = getattr(self, option)
        if given is None or callable(given):
            function: Callable[..., Any] | None = given
            return function
        if not isinstance(given, str):
            wanted = "a method's name or a function"
            raise wrong(option, f"`{self.name}`", wanted, given)

        def by_name(value: Any, *args: Any) -> Any:
            if optional and not hasattr(value, given):
                return None
            return getattr(value, given)(*args)

        return by_name

    def maker(self) -> Callable[[tuple[int, ...]], Any]:
        """A function from an index to a new object, for every kind of factory."""
        return of_a_number(
            self.factory,
            lambda needed: (
                f"hostcall: the factory of `{self.name}` should require no argument, or"
                f" only the object's index, but it requires {needed}. Write lambda: ..."
                " or lambda index: ..."
            ),
        )


def parse_methods(name: str, methods: object) -> dict[str, Results]:
    """What each method returns; refuses wrong names."""

    def wrong_methods(what: str) -> SpecError:
        return SpecError(f"hostcall: {what}", code="hc-object")

    if not isinstance(methods, Mapping) or not methods:
        raise wrong_methods(
            f"methods= of `{name}` should be a dict from method names to result specs,"
            f" got {methods!r}"
        )
    results = {}
    for method, result in methods.items():
        if not isinstance(method, str) or not method.isidentifier() or method[0] == "_":
            raise wrong_methods(
                f"methods= of `{name}` has the key {method!r}, which is not the name of"
                " a public method"
            )
        if method in OWN:
            raise wrong_methods(
                f"`{name}` can't declare `{method}`, since hc.Object has its own method"
                " of that name. Add a method with another name that calls it, and"
                " declare that one"
            )
        if not isinstance(result, Results):  # read from an exported program
            result = parse_result(result, f"{name}.{method}")
        results[method] = result
    return results

"""`hc.register`: names host code, so that programs can leave the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hostcall._core.arguments import wrong
from hostcall._export import registry

T = TypeVar("T", bound=Callable[..., Any])


def register(name: str, *, version: int = 1) -> Callable[[T], T]:
    """Names host code, so that programs that call it can leave the process.

    ::

        @hc.register("my_package.simulate", version=1)
        def simulate(x): ...

    An exported program (`hc.export`, `jax.export`) and a serialized executable hold the
    name, never the code. Where they are loaded, the same name must be registered first,
    mostly by importing the module that does so here.

    Args:
        name: words joined by dots, such as "my_package.simulate". One object has one
            name.
        version: an int. Count it up when the arguments or results change, so that old
            programs are refused and not misread. Several versions may be registered
            side by side, for old programs and new ones.

    Returns:
        A decorator, which returns what it gets: a function, what `hc.host` returned, a
        `hc.feed`, or the factory of a `hc.Object`.

    Running a cell or a module again registers its objects anew, whatever they are.
    What `hc.load` reads afterwards calls the new ones; programs that were loaded before
    keep the old ones, and so does what `jax.export.deserialize` reads, until
    jax.clear_caches().

    Raises:
        SpecError: the name, the version or the object can't be used.
        RegistryError: something else has this name, or the object has another one. Two
            closures of one factory, two lambdas, and bound methods of two objects may
            hold different data, so they need two names.

    Cost: none when a program runs.
    """

    if not isinstance(name, str):
        raise wrong(
            "name",
            "hc.register",
            "a text, such as 'my_package.simulate'",
            name,
            '. Write hc.register("my_package.simulate")(f), or it as a decorator',
        )

    def decorate(thing: T) -> T:
        registry.add(thing, name, version)
        return thing

    return decorate

"""Functions of flat arrays whose derivatives are functions of the same kind.

The idea: JAX differentiates and batches a call by its rules, and here each rule is the
call of another program. The library that runs f makes two programs from it:

    push    (x, t)  -> (f(x), f'(x) t)       the jvp rule calls it
    pull    (x, ct) -> f'(x)^T ct            the backward rule calls it

These are programs too, with rules made in the same way. So every order and both modes
work, and no program is made before JAX asks for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp

from hostcall._core.errors import PackageError, SpecError
from hostcall._core.host_code import HostCode
from hostcall._core.spec import Static, Template, is_array_like
from hostcall._host_function import results
from hostcall._host_function.function import HostFunction

tree = jax.tree_util
Struct: TypeAlias = jax.ShapeDtypeStruct


def has_tangent(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def needed(package: str, bridge: str) -> Any:
    """Imports the package of a bridge, when the bridge is used."""
    return PackageError.needed(
        package,
        f"hc.bridge.{bridge}",
        f"hostcall[{bridge}]",
        "write the rules yourself with hc.host",
    )


class HostProgram(ABC):
    """A function of flat arrays that runs on the host.

    Attributes:
        name: for messages.
        in_avals, out_avals: ShapeDtypeStructs of the arguments and the results.
        options: options of `hc.host`.
    """

    name: str
    in_avals: tuple[Struct, ...]
    out_avals: tuple[Struct, ...]
    options: dict[str, Any]
    advice = ""

    @abstractmethod
    def run(self, *arrays: Any) -> Sequence[Any]:
        """The results, on the host."""

    @abstractmethod
    def push(self) -> HostProgram:
        """The program (args, tangents) -> (outs, their tangents).

        Arrays without a tangent (integers) have none in either list.
        """

    @abstractmethod
    def pull(self) -> HostProgram:
        """The program (args, cotangents) -> cotangents of the args."""

    def batch(self, size: int, batched: tuple[bool, ...]) -> HostProgram | None:
        """The same program for a batch along first axes; None to use `vmap_method`."""
        del size, batched
        return None

    def add_rules(self, host: HostFunction[..., Any]) -> None:
        """Gives `host`, the function that calls this program, its derivative rules."""
        host.defjvp(self._jvp, where="jax")
        host.defvjp(self._forward, self._backward, where="jax")

    # --- The program as a function of JAX code --------------------------------------

    @cached_property
    def host(self) -> HostFunction[..., Any]:
        """The function that JAX code calls: arrays in, a list of arrays out."""
        host = HostFunction(
            _Run(self),
            **{
                "name": self.name,
                "result": list(self.out_avals),
                "nondiff": (),
                "order": "pure",
                "lend": False,
                "vmap_method": None,
                "arrays": "numpy",
                "timeout": None,
                "executor": None,
                **self.options,
            },
        )
        host.advice = self.advice
        self.add_rules(host)
        if type(self).batch is not HostProgram.batch:
            host.defbatch(self._batch)
        return host

    @cached_property
    def _pushed(self) -> HostProgram:
        return self.push()

    @cached_property
    def _pulled(self) -> HostProgram:
        return self.pull()

    @cached_property
    def _batches(self) -> dict[Any, HostProgram]:
        return {}

    # --- Rules, in JAX code ---------------------------------------------------------

    def _jvp(self, primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        moving = pick_moving(tangents, self.in_avals)
        found = iter(self._pushed.host(*primals, *moving))
        outs = [next(found) for _ in self.out_avals]
        return outs, [next(found) if has_tangent(a) else None for a in self.out_avals]

    def _forward(self, *args: Any) -> tuple[list[Any], Any]:
        return self.host(*args), args

    def _backward(self, args: Any, cotangents: Any) -> tuple[Any, ...]:
        coming = pick_moving(cotangents, self.out_avals)
        back = iter(self._pulled.host(*args, *coming))
        return tuple(next(back) if has_tangent(a) else None for a in self.in_avals)

    def _batch(self, size: int, batched: Any, *args: Any) -> tuple[list[Any], Any]:
        key = (size, tuple(batched))
        if key not in self._batches:
            program = self.batch(*key)
            assert program is not None
            self._batches[key] = program
        return self._batches[key].host(*args), True


class _Run(HostCode):
    """A program as a callable. Equal to another of the same program."""

    stays = (
        "a bridge makes it when the program is traced, so it can have no name. Register"
        " a hc.host function that calls the library, with rules of its own"
    )

    def __init__(self, program: HostProgram) -> None:
        self.program = program
        self.__name__ = self.__qualname__ = program.name
        self.__module__ = type(program).__module__

    def __call__(self, *arrays: Any) -> list[Any]:
        return list(self.program.run(*arrays))


def pick_moving(values: Any, avals: Any) -> list[Any]:
    return [v for v, a in zip(values, avals, strict=True) if has_tangent(a)]


class Bridged(HostFunction[..., Any]):
    """A function of pytrees that finds the program for its arguments' types.

    The other library gives its derivatives, so it takes no rules.
    """

    def _program(
        self, template: Template, avals: tuple[Struct, ...], x64: bool
    ) -> tuple[HostProgram, Any, Sequence[Any]]:
        """(the program, the treedef of its results, more operands).

        The operands are arrays that go in front of those of the arguments.
        """
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function and returns its result."""
        leaves, treedef = tree.tree_flatten((args, kwargs))
        there = [isinstance(x, jax.Array) or is_array_like(x) for x in leaves]
        marks = tuple(
            None if flag else Static(x) for x, flag in zip(leaves, there, strict=True)
        )
        arrays = [x for x, flag in zip(leaves, there, strict=True) if flag]
        avals = results.avals_of(tuple(arrays))
        program, out_tree, more = self._program(
            Template(treedef, marks), avals, bool(jax.config.jax_enable_x64)
        )
        return out_tree.unflatten(program.host(*more, *arrays))

    def _add(self, kind: str, rule: Any) -> NoReturn:
        del rule
        raise SpecError(
            f"hostcall: `{self.__name__}` is a bridge, whose rules come from the other"
            f" library, so it takes no def{kind}. To give a rule yourself, make the"
            " function with hc.host",
            code="hc-rule",
        )

    def defbatch(self, rule: Any) -> NoReturn:
        """Raises SpecError: a bridge takes no rules."""
        self._add("batch", rule)

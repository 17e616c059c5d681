"""`hc.export` and `hc.load`: programs with host calls that leave the process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

import hostcall
from hostcall import _jax
from hostcall._api.export import container
from hostcall._api.object.handle import Object
from hostcall._api.object.portable import object_of
from hostcall._core import registry
from hostcall._core.errors import LoadError, RegistryError, SpecError
from hostcall._engine import portable, targets
from hostcall._primitives import travel

_OURS = tuple(
    jax.export.DisabledSafetyCheck.custom_call(target)
    for target in (targets.TARGET, targets.TAP_TARGET, targets.LINK_TARGET)
)


@dataclasses.dataclass(frozen=True)
class HostCode:
    """Host code that an exported program calls (`Manifest.calls`).

    Attributes:
        name, version: as given to `hc.register`; None and 0 for `hc.print`.
        kind: "call", "tap", "feed", "print" or "method step"; for a `hc.host` function
            "value", or the rule that is called: "forward", "backward", "jvp", ...
        order: "pure", "unordered" or "ordered".
        arguments: dtype and sizes of each array that the call gets, such as
            "float32[b,3]".
        results: the same, of what it returns.
        places: at how many places of the program it is called like this.
    """

    name: str | None
    version: int
    kind: str
    order: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    places: int

    def __str__(self) -> str:
        name = "hc.print" if self.name is None else f"{self.name} v{self.version}"
        times = f", at {self.places} places" if self.places > 1 else ""
        return (
            f"{name}: {self.order} {self.kind}, ({', '.join(self.arguments)}) ->"
            f" ({', '.join(self.results)}){times}"
        )


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What an exported program is and needs (`Exported.manifest`).

    Attributes:
        function: the name of the exported function.
        hostcall, jax: the versions that exported it.
        platforms: where it runs.
        vjp_order: how many derivatives are in the file.
        calls: its host code.
    """

    function: str
    hostcall: str
    jax: str
    platforms: tuple[str, ...]
    vjp_order: int
    calls: tuple[HostCode, ...]

    def __str__(self) -> str:
        lines = "".join(f"\n  {call}" for call in self.calls) or "\n  no host code"
        return (
            f"{self.function} for {', '.join(self.platforms)}, vjp_order="
            f"{self.vjp_order}, by hostcall {self.hostcall} and jax {self.jax}{lines}"
        )


class Exported:
    """A program with host calls, outside of the process. `hc.export` and `hc.load`
    make it.

    Attributes:
        manifest: what the program is and needs.
        exported: the jax.export.Exported.
        objects: the hc.Objects whose methods it calls, by name: to save, restore,
            renew and close them. Programs exported with one object share it here too.
    """

    def __init__(
        self,
        exported: jax.export.Exported,
        manifest: Manifest,
        objects: dict[str, Object],
    ) -> None:
        self.exported, self.manifest, self.objects = exported, manifest, objects

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program, like the function that was exported; also inside jit, vmap
        over nothing that was fixed at export, and grad up to `vjp_order`.
        """
        return self.exported.call(*args, **kwargs)

    def serialize(self) -> bytes:
        """The program as bytes, for `hc.load` in any process. `bytes(x)` does the same.

        Needs the package flatbuffers, as jax.export does.
        """
        program = bytes(self.exported.serialize(vjp_order=self.manifest.vjp_order))
        return container.pack(dataclasses.asdict(self.manifest), program)

    __bytes__ = serialize

    def __repr__(self) -> str:
        return f"<hc.Exported {self.manifest}>"


def export(
    f: Callable[..., Any],
    *,
    platforms: Sequence[str] | None = None,
    vjp_order: int = 0,
    disabled_checks: Sequence[jax.export.DisabledSafetyCheck] = (),
) -> Callable[..., Exported]:
    """Exports a function with host calls, so that other processes can run it.

    ::

        @hc.register("demo.sine", version=1)
        def sine(x):
            return np.sin(x)

        data = bytes(hc.export(lambda x: hc.call(sine, x, x))(jnp.ones(3)))
        loaded = hc.load(data)              # where demo.sine is registered too
        loaded.call(jnp.ones(3))

    Args:
        f: a jitted function, or any function, which is then jitted. Its host code must
            be registered (`hc.register`); hc.print needs no name.
        platforms: such as ("cpu", "cuda"), for one file that runs on both. Default: the
            platform of this process.
        vjp_order: how often the loaded program can be differentiated by jax.vjp and
            jax.grad. The derivatives' programs are exported too.
        disabled_checks: as in jax.export.export. Those for hostcall's own calls are off
            anyway.

    Returns:
        A function that takes the arguments of `f`, or jax.ShapeDtypeStructs of them,
        also with symbolic shapes (jax.export.symbolic_shape), and returns an Exported.

    Raises:
        ExportError: some host code has no registered name, or can't leave the process:
            buffer callbacks and JAX's own, on="shards", sharded feeds, executor= of a
            plain function, file= of hc.print.

    Only names and numbers go into the file: no code, no closure, no pickle. What the
    host code holds (weights, settings) must be there where the program is loaded.

    Under transformations: exporting traces `f` as jax.jit does, so vmap, grad and the
    like inside of `f` are in the program.

    Cost: a host call of a loaded program costs what it costs here. When the program is
    loaded, each call takes about 0.2 ms.
    """
    if isinstance(vjp_order, bool) or not isinstance(vjp_order, int) or vjp_order < 0:
        raise SpecError(
            f"hostcall: vjp_order= of hc.export should be 0, 1, 2, ..., got"
            f" {vjp_order!r}"
        )
    # An argument that is not used must stay: see `of`.
    jitted: Any = f if hasattr(f, "trace") else jax.jit(f, keep_unused=True)
    make = jax.export.export(
        jitted, platforms=platforms, disabled_checks=(*disabled_checks, *_OURS)
    )

    def of(*args: Any, **kwargs: Any) -> Exported:
        if not jax.tree.leaves((args, kwargs)):
            raise SpecError(
                "hostcall: hc.export got no array among the arguments, and jax.export"
                " can't export ordered calls and feeds without one. Add an argument,"
                " such as a step number: hc.export(lambda step: ...)(0)"
            )
        exported = make(*args, **kwargs)
        texts = _texts(exported, vjp_order)
        manifest = _manifest(exported, vjp_order, texts)
        return Exported(exported, manifest, _objects(texts))

    return of


def load(data: bytes | bytearray | memoryview) -> Exported:
    """Reads what `Exported.serialize` wrote, in this process or another.

    Everything is checked before anything runs: the bytes, the versions, and that all
    names are registered here. Nothing in the bytes is executed or unpickled.

    Args:
        data: the bytes. Like any compiled program they must come from somebody you
            trust: a program may also call other code that XLA knows by name.

    Raises:
        LoadError: the bytes are damaged, cut off, foreign, or of another version; the
            text says which part.
        RegistryError: names that this process has not registered.

    Cost: some ms; XLA compiles the program when it is first called.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise SpecError(
            f"hostcall: hc.load takes bytes, got {type(data).__name__}. For a file"
            " write hc.load(pathlib.Path(path).read_bytes())"
        )
    header, program = container.unpack(bytes(data))
    manifest = _read_manifest(header)
    lacking = [
        registry.Name(call.name, call.version)
        for call in manifest.calls
        if call.name is not None
    ]
    lacking = [name for name in dict.fromkeys(lacking) if not registry.is_here(name)]
    if lacking:
        raise RegistryError(registry.missing(lacking))
    try:
        exported = jax.export.deserialize(bytearray(program))
        texts = _texts(exported, 0)
    except ImportError:
        raise
    except Exception as error:
        raise LoadError(
            "hostcall: jax.export can't read the program in the file, which jax"
            f" {manifest.jax} wrote (this is {jax.__version__}; JAX reads what it or an"
            f" older one wrote): {type(error).__name__}: {error}"
        ) from error
    return Exported(exported, manifest, _objects(texts))


# --- The manifest --------------------------------------------------------------------


def _texts(exported: jax.export.Exported, vjp_order: int) -> list[str]:
    """The texts of all calls, in the program and in the programs of its derivatives."""
    texts = _jax.attribute_texts(exported.mlir_module(), travel.ATTRIBUTE)
    return texts + (_texts(exported.vjp(), vjp_order - 1) if vjp_order else [])


def _objects(texts: Sequence[str]) -> dict[str, Object]:
    found = (travel.parse(text)["function"] for text in dict.fromkeys(texts))
    objects = (object_of(more) for kind, more in found if kind == "object")
    return {made._group.name: made for made in objects}


def _manifest(
    exported: jax.export.Exported, vjp_order: int, texts: Sequence[str]
) -> Manifest:
    return Manifest(
        function=exported.fun_name,
        hostcall=hostcall.__version__,
        jax=jax.__version__,
        platforms=tuple(exported.platforms),
        vjp_order=vjp_order,
        calls=tuple(
            _described(text, texts.count(text)) for text in dict.fromkeys(texts)
        ),
    )


def _described(text: str, places: int) -> HostCode:
    told = travel.parse(text)
    kind, more = told["function"]
    if kind == "object":
        kind = f"method {more['method']}"
    (name,) = portable.names_in(told) or [registry.Name("", 0)]
    grid = told["params"]["grid"]
    if kind == "registered":
        kind = told["equation"]
    elif kind == "host":
        kind = more["kind"]
    return HostCode(
        name=name.name or None,
        version=name.version,
        kind=kind,
        order=told["params"]["order"],
        arguments=tuple(_spec(dtype, sizes) for dtype, *sizes in told["operands"]),
        results=tuple(_spec(d, [*grid, *sizes]) for d, *sizes in told["avals"]),
        places=places,
    )


def _spec(dtype: str, sizes: Sequence[Any]) -> str:
    shown = [next(iter(n.values())) if isinstance(n, dict) else str(n) for n in sizes]
    return f"{dtype}[{','.join(shown)}]"


def _read_manifest(header: Any) -> Manifest:
    try:
        calls = tuple(
            HostCode(
                **{
                    **call,
                    "arguments": tuple(call["arguments"]),
                    "results": tuple(call["results"]),
                }
            )
            for call in header["calls"]
        )
        platforms = tuple(header["platforms"])
        return Manifest(**{**header, "platforms": platforms, "calls": calls})
    except (TypeError, KeyError, ValueError) as error:
        raise LoadError(
            "hostcall: the manifest of the exported program lacks a field, or has one"
            f" of another type ({type(error).__name__}: {error}). Another version of"
            " hostcall may have written it"
        ) from error

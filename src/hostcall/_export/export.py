"""`hc.export` and `hc.load`: programs with host calls that leave the process."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

import hostcall
from hostcall import _jax
from hostcall._core.errors import (
    ExportError,
    HostcallError,
    LoadError,
    SpecError,
    wrong,
)
from hostcall._core.registered import Name
from hostcall._export import container, registry
from hostcall._export.inspection import TARGETS, calls_in, derivatives
from hostcall._export.manifest import Manifest, described
from hostcall._export.methods import objects_of

_OURS = tuple(map(jax.export.DisabledSafetyCheck.custom_call, TARGETS))

_TAPS = ("tap", "print")
_JITTED = type(jax.jit(lambda: None))


class Exported:
    """A program with host calls, outside of the process. `hc.export` and `hc.load`
    make it.

    Attributes:
        manifest: what the program is and needs.
        exported: the jax.export.Exported.
        objects: the hc.Objects whose methods it calls, by name: to save, restore,
            renew and close them. The second of a name is "name#2", in the order of the
            program. Programs exported with one object share it here too.

    It can be copied and pickled, as `serialize` does it.
    """

    def __init__(
        self,
        exported: jax.export.Exported,
        vjp_order: int,
        own_version: str,
        jax_version: str,
    ) -> None:
        calls = Counter(calls_in(exported, vjp_order))
        self._unmarked = exported
        self.manifest = Manifest(
            function=exported.fun_name,
            hostcall=own_version,
            jax=jax_version,
            platforms=tuple(exported.platforms),
            vjp_order=vjp_order,
            calls=tuple(itertools.starmap(described, calls.items())),
        )
        self.objects = objects_of(call.params.callback.function for call in calls)
        # So that JAX takes no compiled program that calls other things, if equal bytes
        # were loaded before.
        called = []
        for name in self.manifest._names():
            target = registry.find(name.name, name.version)
            called.append(registry.held_of(target))
        called += [instance._group for instance in self.objects.values()]
        self.exported = _jax.marked(exported, called)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program, like the function that was exported.

        Under transformations:
            jit, scan, while_loop, cond: as the exported function.
            grad, vjp: up to `vjp_order`.
            vmap: not supported by JAX for exported programs. Export the vmapped
                function, with a symbolic size for the batch if it differs.
            jvp, linearize: not supported by JAX.
            sharded arguments: a program that was exported for one device runs on each
                device of the arguments, on the whole values. That is refused if it has
                taps, prints, feeds, or calls that are not pure: export the function
                with sharded arguments (any devices of the same number will do).

        Raises:
            ExportError: the program was exported for one device, its arguments are on
                several, and it has such calls.
        """
        if self.exported.nr_devices == 1:
            self._check_one_device((args, kwargs))
        return self.exported.call(*args, **kwargs)

    def _check_one_device(self, values: Any) -> None:
        # Inside jit the compiler chooses the devices, so only arrays are looked at.
        count = 1
        for leaf in jax.tree.leaves(values):
            if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
                count = max(count, len(leaf.sharding.device_set))
        if count == 1:
            return
        for call in self.manifest.calls:
            if call.order == "pure" and call.kind not in _TAPS:
                continue  # it may be made as often as there are devices
            raise ExportError(
                f"hostcall: the program {self.manifest.function} was exported for one"
                f" device, and got arguments on {count}. Each device would run it, and"
                f" `{call}` can only be made by one. Export the function with"
                " arguments that are sharded like these, or move them to one device"
                " (jax.device_put(x, jax.devices()[0]))"
            )

    def serialize(self) -> bytes:
        """The program as bytes, for `hc.load` in any process. `bytes(x)` does the same.

        Needs the package flatbuffers, as jax.export does.
        """
        manifest = self.manifest
        program = self._unmarked.serialize(vjp_order=manifest.vjp_order)
        header = container.Header(
            hostcall=manifest.hostcall,
            jax=manifest.jax,
            names=tuple(manifest._names()),
        )
        return container.pack(vars(header), bytes(program))

    __bytes__ = serialize

    def __reduce__(self) -> tuple[Callable[[bytes], Exported], tuple[bytes]]:
        return load, (self.serialize(),)

    def __repr__(self) -> str:
        return f"<hc.typing.Exported {self.manifest}>"


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
            buffer callbacks and JAX's own, on="shards", sharded feeds, functions
            that hc.host runs in a way of its own (timeout=, executor= and the like) if
            only the function in it is registered, file= of hc.print, attributes in
            its format.

    Only names and numbers go into the file: no code, no closure, no pickle. What the
    host code holds (weights, settings) must be there where the program is loaded.

    Under transformations: exporting traces `f` as jax.jit does, so vmap, grad and the
    like inside of `f` are in the program.

    Cost: a host call of a loaded program costs what it costs here. When the program is
    loaded, each call takes about 0.2 ms.
    """
    if isinstance(vjp_order, bool) or not isinstance(vjp_order, int) or vjp_order < 0:
        raise wrong("vjp_order", "hc.export", "0, 1, 2, ...", vjp_order)
    _jax.need(_jax.Part.EXPORT)
    # An argument that is not used must stay: see `of`.
    jitted: Any = f if isinstance(f, _JITTED) else jax.jit(f, keep_unused=True)
    make = jax.export.export(
        jitted, platforms=platforms, disabled_checks=(*disabled_checks, *_OURS)
    )

    def has_no_array(args: Any, kwargs: Any) -> bool:
        if not jax.tree.leaves((args, kwargs)):
            return True
        # A function that the user has jitted drops what it does not use.
        return jitted is f and _uses_none(f.trace(*args, **kwargs).jaxpr)

    def of(*args: Any, **kwargs: Any) -> Exported:
        try:
            exported = make(*args, **kwargs)
        except ValueError as error:
            # jax.export's own, of a missing argument, and not the function's own.
            if "safe_zip" not in str(error) or not has_no_array(args, kwargs):
                raise
            raise SpecError(
                "hostcall: hc.export got a function that uses no array among its"
                " arguments, and jax.export can't export ordered calls and feeds of"
                " such a function. Add an argument, such as a step number:"
                " hc.export(lambda step: ...)(0). To a jitted function that does not"
                " use it, also add jax.jit(f, keep_unused=True)",
                code="hc-export",
            ) from error
        return Exported(
            exported,
            vjp_order,
            own_version=hostcall.__version__,
            jax_version=jax.__version__,
        )

    return of


def _uses_none(program: jax.core.ClosedJaxpr) -> bool:
    """Whether a jaxpr uses none of its arguments."""
    used = set(map(id, program.jaxpr.outvars))
    for equation in program.eqns:
        used.update(map(id, equation.invars))
    return used.isdisjoint(map(id, program.jaxpr.invars))


def load(data: bytes | bytearray | memoryview) -> Exported:
    """Reads what `Exported.serialize` wrote, in this process or another.

    Everything is checked before anything runs: the bytes, the versions, that all names
    are registered here, and that each call gets the arrays that it describes. The
    manifest is read from the program. Nothing in the bytes is executed or unpickled.

    Args:
        data: the bytes. Like any compiled program they must come from somebody you
            trust: a program may also call other code that XLA knows by name.

    Raises:
        LoadError: the bytes are damaged, cut off, foreign, or of another version, or
            the program has calls that `hc.export` never writes; the text says which.
        RegistryError: names that this process has not registered.

    Functions that were registered again (hc.register) are called by what is loaded
    afterwards, and by what has not run so far. A process may fork after loading, if it
    has run no JAX so far.

    Cost: some ms; XLA compiles the program when it is first called.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise SpecError(
            f"hostcall: hc.load takes bytes, got {type(data).__name__}. For a file"
            " write hc.load(pathlib.Path(path).read_bytes())",
            code="hc-load",
        )
    _jax.need(_jax.Part.EXPORT)
    header, behind = container.unpack(bytes(data))
    # First, since the modules that register these also register pytrees, without which
    # jax.export can't read the program.
    names = [Name(name, version) for name, version in header.names]
    registry.require(names)
    try:
        exported = jax.export.deserialize(bytearray(behind))
    except (ImportError, HostcallError):
        raise
    except Exception as error:
        raise LoadError(
            "hostcall: jax.export can't read the program in the file, which jax"
            f" {header.jax} wrote (this is {jax.__version__}; JAX reads what it or an"
            f" older one wrote): {type(error).__name__}: {error}"
        ) from error
    loaded = Exported(
        exported,
        vjp_order=len(derivatives(exported)),
        own_version=header.hostcall,
        jax_version=header.jax,
    )
    # The manifest is read from the program itself. The names in the header only say
    # early which modules are missing.
    called = loaded.manifest._names()
    if set(called) != set(names):
        in_header = ", ".join(map(str, names)) or "none"
        in_program = ", ".join(map(str, called)) or "none"
        raise LoadError(
            "hostcall: the header of the exported program has the names"
            f" {in_header}, and the program in the file calls {in_program}. The file"
            " was changed, or something else wrote it"
        )
    return loaded

"""Calls that a program takes with it out of the process, as texts.

The text of a call of registered host code stands in the program, beside the name of its
slot (_primitives/lowering.py), or in an exported program in place of it. It says all
that the engine must know to make the call's plan: its `CallRecord`. XLA hands it back
when it loads the program, here or elsewhere:

    lowered here        the slot's plan is found, and its text is this one: no Python
    exported            there is no slot: `read_text`
    serialized          the slot, if there is one of that name, may be of another call,
                        and then has another text: `read_text`

`read_text` is called twice. When the program is loaded it checks the text, by making
the plan as far as the shapes are known, and dropping it: so a missing name or a wrong
item of a feed is an error before anything runs. When the program first runs it makes
the plan that is kept. Symbolic shapes are known then, and the shapes in the text are
compared with those of XLA's buffers.

What is read comes from a file, so nothing in it is trusted: names are looked up in the
registry, and everything else is numbers and texts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from hostcall import _jax, _native
from hostcall._core import codec
from hostcall._core.codec import Json, Malformed, NotPortable
from hostcall._core.errors import HostcallError, LoadError
from hostcall._engine import targets
from hostcall._engine.params.equation import Equation
from hostcall._engine.placement import Placement, Team
from hostcall._engine.plans import plan_in_program
from hostcall._export.records import CallRecord, equation_of, record_of
from hostcall._export.structures import CODEC, FORMAT, XLAS_DTYPES, sizes_in, with_sizes
from hostcall._jax.types import Aval, Client, Mesh
from hostcall._runtime import host_device, workers


@dataclass(frozen=True, eq=False)
class Call:
    """A call as its text describes it, checked as far as the text alone allows.

    Attributes:
        text: the text.
        json: what it says; sizes may be symbolic.
        sizes: the symbolic sizes in it.
        record: the same, with 1 in place of them.
        params: the equation.
    """

    text: str
    json: Json
    sizes: list[str]
    record: CallRecord
    params: Equation

    @classmethod
    def of(cls, text: str) -> Call:
        """Raises LoadError, or RegistryError if this process lacks its function."""
        json = parse(text)
        with reading():
            sizes = sizes_in(json)
            # Any size shows whether the rest is sound; XLA's buffers tell the real one.
            record, params = _read(json, dict.fromkeys(sizes, 1))
            return cls(text, json, sizes, record, params)

    def arrays(self) -> tuple[list[Json], list[Json]]:
        """[dtype, *sizes] of the operands and of the results."""
        operands = self.json["operands"]
        if self.params.through:  # it returns its arguments
            return operands, list(self.params.arguments(operands))
        # The avals are those of one row.
        grid = self.json["params"]["grid"]
        results = [[dtype, *grid, *sizes] for dtype, *sizes in self.json["avals"]]
        return operands, results

    def buffers(self) -> tuple[list[Json], list[Json]]:
        """The same of what the program passes."""
        operands, results = self.arrays()
        if self.record.linked:
            # A number stands for the token (_primitives/lowering.py).
            number = ["int32"]
            return [number, *operands], [number, *results]
        return operands, results

    def at(self, buffers: list[list[int]]) -> tuple[CallRecord, Equation]:
        """The call with the sizes that these buffers of XLA's have.

            described   [["float32", "b", 3], ["float32", "2*b"]]
            buffers     [[11, 4, 3], [11, 8]]       11 is XLA's number of float32
            values      {"b": 4, "2*b": 8}

        Raises LoadError if it describes more or less memory than XLA passes.
        """
        operands, results = self.buffers()
        described = [*operands, *results]
        # A size that is a name, such as "b", has the value that the buffer has. That of
        # "2*b" follows, and is compared below, as are all lengths.
        known: dict[str, int] = {}
        for (_, *symbolic), (_, *actual) in zip(described, buffers, strict=False):
            for size, value in zip(symbolic, actual, strict=False):
                known |= dict.fromkeys(sizes_in(size), value)
        values, unknown = _values(self.sizes, known)
        if unknown:
            raise Malformed(f"the sizes {unknown}, which its arrays don't have")
        wanted = []
        for dtype, *sizes in with_sizes(described, values):
            wanted.append([XLAS_DTYPES.get(dtype), *sizes])
        if wanted != buffers:
            raise LoadError(
                "hostcall: the program passes other arrays to a call than its"
                f" description says (XLA's dtypes and shapes: {buffers}, described:"
                f" {wanted}). It was changed after hostcall made it"
            )
        if not self.sizes:
            return self.record, self.params
        return _read(self.json, values)


def _read(json: Json, sizes: Mapping[str, int]) -> tuple[CallRecord, Equation]:
    record = CODEC.decode(with_sizes(json, sizes), CallRecord, "a call")
    return record, equation_of(record)


def _values(
    sizes: Sequence[str], known: Mapping[str, int]
) -> tuple[dict[str, int], list[str]]:
    """(the values of symbolic sizes, those that don't follow from the known ones)."""
    values = {}
    unknown = []
    for name in sizes:
        value = _jax.size_from(name, known)
        if value is None:
            unknown.append(name)
        else:
            values[name] = value
    return values, unknown


# --- Writing ------------------------------------------------------------------------


def written(
    program: _jax.Program,
    equation: Equation,
    placement: Placement,
    avals: Sequence[Aval],
) -> tuple[str, str]:
    """(the text of a call or tap, why it has none); one of the two is ""."""
    try:
        record = _in_program(program, equation, placement, avals)
        return _text(record, equation), ""
    except NotPortable as error:
        return "", str(error)


def why_here(params: Equation, operands: Sequence[Aval]) -> str:
    """Why an equation can't leave the process; "" if it can."""
    try:
        _text(record_of(params, operands, exported=False), params)
    except NotPortable as error:
        return str(error)
    return ""


def _in_program(
    program: _jax.Program,
    params: Equation,
    placement: Placement,
    avals: Sequence[Aval],
) -> CallRecord:
    """The record of a call with what its program says. Raises NotPortable."""
    record = record_of(params, avals, program.is_exported)
    if program.across:
        raise NotPortable("its program runs over several processes")
    if program.automatic:
        raise NotPortable("it is in a shard_map that is manual over some axes only")
    if program.is_exported and params.options.sharding is not None:
        raise NotPortable(
            "it has on=, which names a device, and the program may run on other"
            " devices. Leave out on=: the first device that comes then calls"
        )
    # XLA can't put a token beside results of symbolic shapes.
    linked = params.effect is not None and _jax.has_symbolic(params.out_avals)
    return replace(
        record,
        team=placement.team,
        only=placement.only,
        linked=linked,
        mesh=_mesh_of(program.mesh),
    )


def _text(record: CallRecord, params: Equation) -> str:
    """The record as text. Raises NotPortable if a size could not be known later."""
    json = CODEC.encode(record, "a call")
    call = Call("", json, sizes_in(json), record, params)
    known = sizes_in(list(call.arrays()))  # what XLA's buffers will tell
    # What can be computed does not depend on the values, so any will do.
    values = dict(zip(known, itertools.count(1009, 10), strict=False))
    _, unknown = _values(call.sizes, values)
    if unknown:  # its plan could not be made
        raise NotPortable(
            f"the sizes {', '.join(unknown)} don't follow from the shapes of its arrays"
            f" ({', '.join(known) or 'all constant'}). Pass the call an array that has"
            " the missing size as a dimension (to a rule for derivatives, among the"
            " residuals), or export with a constant size"
        )
    return codec.write(json)


def _mesh_of(
    mesh: Mesh | jax.sharding.AbstractMesh | None,
) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]] | None:
    """(names of axes, their sizes, ids of devices); None without devices."""
    if mesh is None or isinstance(mesh, jax.sharding.AbstractMesh):
        return None
    if not all(isinstance(name, str) for name in mesh.axis_names):
        return None
    ids = tuple(int(device.id) for device in mesh.devices.flat)
    return mesh.axis_names, mesh.devices.shape, ids


# --- Reading ------------------------------------------------------------------------


def parse(text: str) -> Json:
    """What a text says; of that, only the version and the sizes are checked.

    Raises LoadError.
    """
    try:
        json = codec.read(text)
        if not isinstance(json, dict) or "hostcall" not in json:
            raise Malformed("it names no version")
        for size in sizes_in(json):
            if not _SIZE.fullmatch(size):
                raise Malformed(f"the size {size!r}")
    except Malformed as error:
        raise LoadError(
            "hostcall: the program has a call whose description can't be read"
            f" ({error}). It was damaged, or not made by hostcall"
        ) from error
    if json["hostcall"] != FORMAT:
        raise LoadError(
            f"hostcall: the program has a call in version {json['hostcall']} of"
            f" hostcall's format, and this hostcall reads version {FORMAT}. Export it"
            " with this version, or load it with the one that exported it"
        )
    return json


# A size with names, such as "2*b + floordiv(n^2, 4)". JAX multiplies powers out.
_SIZE = re.compile(r"(?:[\w\s+*/,()-]|\^[0-9](?![0-9])){1,1000}")


def read_text(
    text: str, on_cuda: bool, buffers: list[list[int]] | None
) -> _native.Plan | None:
    """Checks a text, and makes the plan of its call. Called by the engine.

    Args:
        text: what `written` made.
        on_cuda: whether the program runs on CUDA, else on the CPU.
        buffers: XLA's types and shapes of the operands and results; None when the
            program is loaded.

    Returns:
        The plan; None when the program is loaded.
    """
    platform = "cuda" if on_cuda else "cpu"
    client = _client(platform)
    targets.start()
    if on_cuda:
        targets.prepare_for_cuda()
    call = Call.of(text)
    record = call.record
    params = call.params
    if buffers is None and call.sizes:
        return None
    with reading():
        if buffers is not None:
            record, params = call.at(buffers)
        mesh = _read_mesh(record, client)
    by_ordinal = {_jax.ordinal(device): device for device in client.local_devices()}
    team = None
    if record.team is not None:
        mode, size, leader = record.team
        is_exported = record.place is not None
        # An exported program may run on any devices, so none of those of its export can
        # lead.
        team = Team(mode, size, None if is_exported else leader)
    operands = record.operands
    nested = host_device.nesting_level(client) > 0
    placement = Placement(
        devices=by_ordinal,
        mesh=mesh,
        program_devices=None if team is None else (),
        team=team,
        only=tuple(record.only),
        nested=nested,
        blocks=params.blocks_of_whole(by_ordinal, mesh, operands),
        text=text,
    )
    plan = plan_in_program(params, placement, operands, client, (platform,))
    return None if buffers is None else plan


# What reading raises if a text is not what `written` made. All else has another cause,
# and is passed on as it is.
_SAY_DAMAGED = (
    Malformed,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    ArithmeticError,
)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Turns what a wrong text leads to into LoadErrors."""
    try:
        yield
    except HostcallError:
        raise
    except _SAY_DAMAGED as error:
        fault = f"leads to {error!r}"
        if isinstance(error, Malformed):
            fault = f"names {error}"
        elif isinstance(error, KeyError):
            fault = f"lacks {error}"
        raise LoadError(
            f"hostcall: the program has a call whose description {fault}. It was"
            " damaged, or another version of hostcall made it"
        ) from error


def _client(platform: str) -> Client:
    """The client on which this thread loads a program: host code's own inside it.

    A default device of another platform says nothing: JAX loads a program for the
    platform of its arguments too. Nor does host code's device outside of host code:
    XLA's threads keep the settings of the calls that they have made.
    """
    default = getattr(_jax.default_device.value, "client", None)
    # A GPU's client calls its platform "gpu" or "cuda".
    wants_cpu = platform == "cpu"
    fits = default is not None and (default.platform == "cpu") == wants_cpu
    if fits and (workers.in_call() or host_device.nesting_level(default) == 0):
        return default
    return _jax.client_of(platform)


def _read_mesh(record: CallRecord, client: Client) -> Mesh | None:
    """The mesh of a record, made of this process's devices."""
    if record.mesh is None:
        return None
    names, sizes, ids = record.mesh
    number = math.prod(sizes)
    all_devices = client.devices()
    by_id = {device.id: device for device in all_devices}
    # The mesh only tells functions where their block is (`hc.current()`). A program may
    # run on other devices than those that it was exported on, and nothing says which.
    program_devices = [by_id[i] for i in ids if i in by_id]
    if len(program_devices) < number:
        program_devices = list(all_devices)
    if len(program_devices) < number:
        raise LoadError(
            f"hostcall: the program runs over {number} devices, and this process has"
            f" {len(all_devices)}. Start it with more devices (on CPUs by"
            " jax.config.update('jax_num_cpu_devices', n), before JAX is used), or"
            " export the program for fewer"
        )
    devices = np.array(program_devices[:number], dtype=object).reshape(sizes)
    return jax.sharding.Mesh(devices, names)

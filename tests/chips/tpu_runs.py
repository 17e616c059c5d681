"""Runs programs that are lowered for a TPU on the CPU: `tpu_runs.py` prints JSON lines.

JAX makes of each host call sends and receives, which libtpu serves by PjRt's host
callbacks: the last send of a call runs its function, and each receive takes one result.
Here custom calls of the CPU do the same, so that all of hostcall and of JAX that a TPU's
program uses runs, up to libtpu itself. Each case compares with the program on the CPU.
"""

from __future__ import annotations

import collections
import json
import os
import re

import variables

# Before JAX is imported, and not in tests, which import this file.
if __name__ == "__main__":
    variables.start_no_chip()
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import chip_faces
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import callback, compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hostcall as hc

TARGET = "xla_ffi_python_cpu_callback"
TOKEN = "!stablehlo.token"


class Host:
    """The host's side of one program: what its sends and receives do."""

    def __init__(self, devices):
        self.devices = devices
        self.functions = []  # by the index that a custom call has
        self.calls = {}  # channel -> (function, its sends, its receives)
        self.sent = collections.defaultdict(dict)  # (first send, device) -> values
        self.results = collections.defaultdict(collections.deque)

    def make_python_callback_from_host_send_and_recv(
        self, function, operands, results, sends, receives, pickler
    ):
        del operands, results, pickler
        call = function, list(sends), list(receives)
        self.calls |= dict.fromkeys(sends, call)
        return call

    def send(self, channel, token, device, value):
        function, sends, receives = self.calls[channel]
        values = self.sent[sends[0], int(device)]
        values[channel] = np.array(value)
        if len(values) == len(sends):
            arguments = [values[number] for number in sends]
            values.clear()
            for number, result in zip(receives, function(*arguments), strict=True):
                self.results[number, int(device)].append(np.asarray(result))
        return (token,)

    def receive(self, channel, token, device):
        return token, self.results[channel, int(device)].popleft()

    def emit(self, function, operands, types):
        index = ir.IntegerAttr.get(ir.IntegerType.get_unsigned(64), len(self.functions))
        self.functions.append(function)
        device = hlo.partition_id()
        token, *values = operands
        op = hlo.CustomCallOp(
            types,
            [token, device, *values],
            call_target_name=ir.StringAttr.get(TARGET),
            has_side_effect=ir.BoolAttr.get(True),
            api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4),
            backend_config=ir.DictAttr.get({"index": index}),
        )
        if self.devices > 1:
            op.attributes["sdy.sharding"] = on_each_device(types)
        return op.results


def on_each_device(types):
    """The sharding of values that each device has for itself, in a shard_map."""
    ranks = [ir.RankedTensorType(t).rank if "tensor" in str(t) else 0 for t in types]
    values = (f"<mesh<[]>, [{', '.join(['{}'] * rank)}]>" for rank in ranks)
    return ir.Attribute.parse(f"#sdy.sharding_per_value<[{', '.join(values)}]>")


def behind_the_module(arguments):
    """The channel and what follows it: an older JAX passes no module context before."""
    return arguments if isinstance(arguments[0], int) else arguments[1:]


class Lowering:
    """While it is open, JAX's TPU lowering emits a host's custom calls."""

    def __init__(self, host):
        self.host = host

    def send(self, *arguments, name=None, sharding=None):
        del name, sharding
        channel, token, operand, *_ = behind_the_module(arguments)

        def function(token, device, value):
            return self.host.send(channel, token, device, value)

        types = [hlo.TokenType.get()]
        return self.host.emit(function, [token, operand], types)[0]

    def receive(self, *arguments, name=None, sharding=None):
        del name, sharding
        channel, token, aval, *_ = behind_the_module(arguments)

        def function(token, device):
            return self.host.receive(channel, token, device)

        kind = ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype))
        types = [hlo.TokenType.get(), kind]
        return self.host.emit(function, [token], types)

    def __enter__(self):
        self.saved = {
            name: getattr(callback, name)
            for name in (
                "send_to_host",
                "receive_from_host",
                "_emit_tpu_python_callback",
            )
        }
        emit = self.saved["_emit_tpu_python_callback"]
        callback.send_to_host = self.send
        callback.receive_from_host = self.receive
        callback._emit_tpu_python_callback = lambda backend, *args, **how: emit(
            self.host, *args, **how
        )

    def __exit__(self, *_):
        for name, function in self.saved.items():
            setattr(callback, name, function)


def without_tokens(text):
    """The module with a main function that makes the tokens of the inner one."""
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        found = [
            op
            for op in module.body.operations
            if op.operation.name == "func.func"
            and ir.StringAttr(op.attributes["sym_name"]).value == "main"
        ]
        kind = ir.FunctionType(ir.TypeAttr(found[0].attributes["function_type"]).value)
        ins, outs = map(str, kind.inputs), map(str, kind.results)
        ins, outs = list(ins), list(outs)
    names = [f"%a{k}" if t != TOKEN else "%t" for k, t in enumerate(ins)]
    pairs = zip(names, ins, strict=True)
    given = ", ".join(f"{name}: {t}" for name, t in pairs if name != "%t")
    kept = [k for k, t in enumerate(outs) if t != TOKEN]
    types = ", ".join(outs[k] for k in kept)
    taken = f"%r:{len(outs)} = " if outs else ""
    text = text.replace("func.func public @main", "func.func private @inner")
    end = text.rindex("}")
    return f"""{text[:end]}
  func.func public @main({given}) -> ({types}) {{
    %t = stablehlo.create_token : {TOKEN}
    {taken}func.call @inner({", ".join(names)}) : ({", ".join(ins)}) -> ({", ".join(outs)})
    return {", ".join(f"%r#{k}" for k in kept)} {": " + types if kept else ""}
  }}
}}"""


class Compiled:
    """A program for TPUs that runs on as many devices of the CPU.

    Args:
        function: takes one array and returns one.
        x: a float32 array of shape [8, 128], an example.
        mesh: the TPUs; None for one.
    """

    def __init__(self, function, x, mesh=None):
        self.count = 1 if mesh is None else mesh.size
        host = Host(self.count)
        if mesh is None:
            mesh = Mesh(np.array(chip_faces.devices("tpu", 1)), "d")
        where = NamedSharding(mesh, P())
        like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        with Lowering(host):
            traced = jax.jit(function, keep_unused=True).trace(like)
            lowered = traced.lower(lowering_platforms=("tpu",))
            self.text = lowered.as_text()
        assert not re.search(r"stablehlo\.(send|recv)\b", self.text)
        self.devices = tuple(jax.devices("cpu")[: self.count])
        options = compiler.get_compile_options(1, self.count)
        options.executable_build_options.use_spmd_partitioning = True
        options.executable_build_options.use_shardy_partitioner = True
        with mlir.make_ir_context():
            module = ir.Module.parse(without_tokens(self.text))
            self.program = self.devices[0].client.compile_and_load(
                module,
                xla_client.DeviceList(self.devices),
                options,
                host.functions,
            )

    def __call__(self, x):
        mesh = Mesh(np.array(self.devices), "d")
        x = jax.device_put(x, NamedSharding(mesh, P("d")))  # as over_devices splits it
        done = self.program.execute_sharded([x])
        outs = jax.block_until_ready(done.disassemble_into_single_device_arrays())
        return np.asarray(outs[0][0])


# --- The cases ------------------------------------------------------------------------

X = np.arange(1024, dtype=np.float32).reshape(8, 128) / 64


def same(function, x=X):
    """A case: the program returns what it returns on the CPU, bit for bit."""

    def case():
        expected = jax.jit(function)(x)
        got = Compiled(function, x)(x)
        np.testing.assert_array_equal(got, np.asarray(expected), strict=True)

    return case


def seen_in_order(order):
    """A case: taps in a loop come with their values; ordered ones in their order."""

    def case():
        seen = []

        def program(x):
            def step(c, i):
                hc.tap(lambda i: seen.append(int(i)), i, order=order)
                return hc.call(chip_faces.double, chip_faces.like(c), c), None

            return jax.lax.scan(step, x, jnp.arange(5))[0]

        np.testing.assert_array_equal(Compiled(program, X)(X), X * 32)
        hc.barrier()
        assert (seen if order == "ordered" else sorted(seen)) == [*range(5)], seen

    return case


def calls_in_order():
    seen = []

    def program(x):
        for number in range(4):
            call = lambda number=number: seen.append(number)
            hc.call(call, None, order="ordered")
        return x

    Compiled(program, X)(X)
    assert seen == [*range(4)], seen


def rows_see_their_row():
    seen = []

    def row(x):
        seen.append(hc.current().row)
        return x * 2

    def one(r):
        return hc.call(row, chip_faces.like(r), r)

    np.testing.assert_array_equal(Compiled(jax.vmap(one), X)(X), X * 2)
    assert seen == [(i,) for i in range(len(X))], seen


def masked(x):
    """Rows that are left out are zeros."""

    def one(r):
        mask = r[0] >= 4
        return hc.call(chip_faces.double, chip_faces.like(r), r, where=mask)

    return jax.vmap(one)(x)


def masked_taps():
    seen = []

    def program(x):
        def one(r):
            hc.tap(lambda v: seen.extend(v), r[0], where=r[0] >= 8)
            return r

        return jax.vmap(one)(x)

    Compiled(program, X)(X)
    hc.barrier()
    assert seen == [*X[4:, 0]], seen


def thinned_taps():
    seen = []

    def program(x):
        def step(c, i):
            hc.tap(lambda i: seen.append(int(i)), i, every=4)
            return c, None

        return jax.lax.scan(step, x, jnp.arange(12))[0]

    Compiled(program, X)(X)
    hc.barrier()
    assert seen == [0, 4, 8], seen


def feeds_in_order():
    def items():
        for number in range(6):
            yield np.float32(number)

    spec = jax.ShapeDtypeStruct((), jnp.float32)
    feed = hc.feed(items, spec=spec)

    def program(x):
        def step(c, _):
            item, *_ = feed()
            return c * 10 + item, None

        return jax.lax.scan(step, x * 0, length=5)[0]

    np.testing.assert_array_equal(Compiled(program, X)(X), X * 0 + 1234)


def a_failure_is_told():
    def fails(x):
        raise KeyError("what it said")

    program = Compiled(lambda x: hc.call(fails, chip_faces.like(x), x), X)
    with pytest.raises(jax.errors.JaxRuntimeError) as failed:
        program(X)
    text = str(failed.value)
    assert "what it said" in text, text
    assert "fails" in text, text
    assert __file__ in text, text


def a_wrong_shape_is_told():
    program = Compiled(lambda x: hc.call(np.sum, chip_faces.like(x), x), X)
    with pytest.raises(jax.errors.JaxRuntimeError) as failed:
        program(X)
    assert "should be float32[8,128], got float32[]" in str(failed.value), failed


def an_export_is_refused():
    function = jax.jit(chip_faces.FACES["call"])
    with pytest.raises(hc.errors.ExportError) as failed:
        hc.export(function, platforms=("tpu",))(X)
    assert "`double`" in str(failed.value), failed
    assert 'platforms=("cpu", "cuda")' in str(failed.value), failed


def one_device_is_known():
    found = []

    def look(x):
        found.append(hc.current())
        return x

    Compiled(lambda x: hc.call(look, chip_faces.like(x), x), X)(X)
    (here,) = found
    assert (here.device.platform, here.device.id, here.run) == ("tpu", 0, -1), here


def over_devices(function):
    mesh = Mesh(np.array(chip_faces.devices("tpu", 4)).reshape(2, 2), ("a", "b"))
    where = {"in_specs": P(("a", "b")), "out_specs": P(("a", "b"))}
    Compiled(jax.shard_map(function, mesh=mesh, **where, check_vma=False), X, mesh)(X)
    hc.barrier()
    return mesh


def calls_know_their_device(order):
    def case():
        found = []

        def look(x):
            here = hc.current()
            coords = tuple(here.mesh_coords.values())
            found.append((float(x[0, 0]), here.device, coords, len(here.devices)))
            return x

        def program(x):
            return hc.call(look, chip_faces.like(x), x, order=order)

        mesh = over_devices(program)
        places = [(a, b) for a in range(2) for b in range(2)]
        assert sorted(found, key=lambda one: one[0]) == [
            (float(X[2 * i, 0]), mesh.devices[place], place, 4)
            for i, place in enumerate(places)
        ], found

    return case


def taps_count_for_each_device():
    found = collections.defaultdict(list)

    def look(i):
        here = hc.current()
        found[here.device, tuple(here.mesh_coords.values())].append(int(i))

    def program(x):
        def step(c, i):
            hc.tap(look, i, every=4)
            return c, None

        return jax.lax.scan(step, x, jnp.arange(12))[0]

    mesh = over_devices(program)
    places = [(a, b) for a in range(2) for b in range(2)]
    assert found == {(mesh.devices[at], at): [0, 4, 8] for at in places}, found


def of_dtype(dtype):
    def program(x):
        y = (x > 4) if dtype == "bool" else x.astype(dtype)
        return hc.call(lambda a: a, chip_faces.like(y), y)

    return same(program)


DTYPES = "bool", "int8", "uint32", "bfloat16", "float16", "float32"
COMPARED = (
    "call",
    "call unordered",
    "call ordered",
    "call no arguments",
    "call rows",
    "call where",
    "call in a loop",
    "call in a branch",
    "host",
    "host gradient",
    "pure_callback",
    "io_callback",
    "io_callback ordered",
)
CASES = {name: same(chip_faces.FACES[name]) for name in COMPARED}
CASES |= {f"call of {dtype}": of_dtype(dtype) for dtype in DTYPES}
CASES |= {f"taps {order}": seen_in_order(order) for order in ("unordered", "ordered")}
CASES |= {
    f"{order} calls over devices": calls_know_their_device(order)
    for order in ("pure", "unordered")
}
CASES |= {
    "calls in order": calls_in_order,
    "rows": rows_see_their_row,
    "rows masked": same(masked),
    "taps masked": masked_taps,
    "taps thinned": thinned_taps,
    "feed": feeds_in_order,
    "a failure": a_failure_is_told,
    "a wrong shape": a_wrong_shape_is_told,
    "current on one device": one_device_is_known,
    "taps over devices": taps_count_for_each_device,
    "export": an_export_is_refused,
}


def main():
    for name, case in CASES.items():
        try:
            case()
            said = ""
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps([name, said]), flush=True)


if __name__ == "__main__":
    main()

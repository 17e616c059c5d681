"""What a host function gives back for an array: DLPack tensors, buffers of any kind."""

from __future__ import annotations

import ctypes
import types

import jax
import jax.numpy as jnp
import numpy as np

import hostcall as hc
from fuzz.draw import Draw

MEMORY = (ctypes.c_byte * 4096)()
DTYPES = ["float32", "int32", "bool", "uint8", "complex64", "bfloat16", "float8_e4m3fn"]
NAMES = [b"dltensor", b"dltensor", b"used_dltensor", b"x", None]


class Tensor(ctypes.Structure):
    """DLManagedTensor, as in dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


capsule_of = ctypes.pythonapi.PyCapsule_New
capsule_of.restype = ctypes.py_object
capsule_of.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Given:
    """Says of DLPack what it was told to say."""

    def __init__(self, capsule, device):
        self._capsule, self._device = capsule, device

    def __dlpack__(self, **options):
        if isinstance(self._capsule, Exception):
            raise self._capsule
        return self._capsule

    def __dlpack_device__(self):
        return self._device


def tensor(draw: Draw, kept: list) -> Given:
    """A tensor over MEMORY: each of its elements lies inside."""
    dims = [draw.int(0, 3) for _ in range(draw.choice([0, 1, 1, 2, 3]))]
    dims = [1] * 70 if draw.int(0, 99) == 99 else dims  # NumPy has 64 at most
    strides = [draw.int(-8, 8) for _ in dims]
    sizes = ctypes.c_int64 * len(dims)
    shape, steps = sizes(*dims), sizes(*strides)
    made = Tensor(ctypes.addressof(MEMORY) + 2048, draw.choice([1, 1, 1, 2, 10, 99]))
    made.device_id, made.ndim = draw.choice([0, 0, 3]), len(dims)
    made.code, made.bits = draw.int(0, 18), draw.choice([8, 16, 32, 64, 4, 1, 128, 0])
    made.lanes, made.shape = draw.choice([1, 1, 1, 2, 0]), shape
    made.strides = draw.choice([None, steps])
    kept += [shape, steps, made, name := draw.choice(NAMES)]
    own = (made.device_type, made.device_id)
    device = draw.choice([own, (1, 0), None, (99, 1), "x"])
    if draw.int(0, 9) == 0:
        return Given(draw.choice([None, 3, ValueError("no")]), device)
    return Given(capsule_of(ctypes.addressof(made), name, None), device)


def buffer(draw: Draw):
    memory = bytearray(draw.bytes(draw.choice([0, 1, 4, 8, 12, 16])))
    kind = draw.int(0, 7)
    if kind == 0:
        return memory
    if kind == 1:
        return np.frombuffer(memory, draw.choice(["u1", "S1", "V1", "?"]))
    if kind == 2:
        try:
            return memoryview(memory).cast(draw.choice("fiB?cdN"))
        except TypeError:
            return memory[::2]
    if kind == 3:
        return memoryview(memory)[:: draw.choice([1, 2, -1])]
    if kind == 4:
        return (draw.choice([ctypes.c_float, ctypes.c_int32, ctypes.c_char]) * 3)()
    if kind == 5:
        shape = draw.choice([(3,), (-1,), (), "x", (3.5,), (2, 2)])
        kinds = draw.choice(["<f4", ">i4", "|V4", "<U2", "nonsense", 4])
        data = draw.choice([None, memory, (ctypes.addressof(MEMORY), True), "x"])
        told = {"shape": shape, "typestr": kinds, "data": data, "version": 3}
        return types.SimpleNamespace(__array_interface__=told)
    if kind == 6:
        return np.ones(3, draw.choice([">f4", "f8", "O", "M8[s]", "f4,i4", "g", "i8"]))
    return np.broadcast_to(np.float32(1), (3,))


def seeds() -> list[bytes]:
    return [bytes([n % 2, n % 7, *range(n, n + 40)]) for n in range(0, 210, 5)]


def one(data: bytes) -> None:
    draw, kept = Draw(data), []
    value = tensor(draw, kept) if draw.bool() else buffer(draw)
    dtype = jnp.dtype(draw.choice(DTYPES))
    spec = jax.ShapeDtypeStruct(draw.choice([(3,), (), (2, 2), (0,), (12,)]), dtype)
    try:
        got = hc.call(lambda: value, spec)
    except hc.errors.ResultError:
        return
    assert (got.shape, got.dtype) == (spec.shape, spec.dtype), (got, spec)

"""The driver's virtual memory (VMM): its ranges, its pieces, and what kernels may use."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from test_kernels import STORES, Array, launched

SUCCESS, INVALID, OUT_OF_MEMORY = 0, 1, 2
BYTES = 512
READ_AND_WRITE = 3


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("type", "handles", "kind", "device")),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_char * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("kind", "device", "flags"))


class Memory:
    """The driver's functions, with the arguments of these tests."""

    def __init__(self, driver):
        self.driver = driver

    def reserved(self, size=BYTES, alignment=0):
        address = ctypes.c_uint64()
        code = self.driver.cuMemAddressReserve(
            ctypes.byref(address),
            ctypes.c_size_t(size),
            ctypes.c_size_t(alignment),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        assert code == SUCCESS
        return address

    def create(self, size=BYTES):
        handle = ctypes.c_uint64()
        code = self.driver.cuMemCreate(
            ctypes.byref(handle),
            ctypes.c_size_t(size),
            ctypes.byref(Properties(type=1, kind=1, device=0)),
            ctypes.c_uint64(0),
        )
        return code, handle

    def piece(self, size=BYTES):
        code, handle = self.create(size)
        assert code == SUCCESS
        return handle

    def map(self, address, handle, size=BYTES):
        return self.driver.cuMemMap(
            address,
            ctypes.c_size_t(size),
            ctypes.c_size_t(0),
            handle,
            ctypes.c_uint64(0),
        )

    def allow(self, address, size=BYTES):
        access = Access(1, 0, READ_AND_WRITE)
        return self.driver.cuMemSetAccess(
            address, ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1)
        )

    def unmap(self, address, size=BYTES):
        return self.driver.cuMemUnmap(address, ctypes.c_size_t(size))

    def release(self, handle):
        return self.driver.cuMemRelease(handle)

    def free(self, address, size=BYTES):
        return self.driver.cuMemAddressFree(address, ctypes.c_size_t(size))


@pytest.fixture
def memory(driver):
    context = ctypes.c_void_p()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == SUCCESS
    assert driver.cuCtxPushCurrent_v2(context) == SUCCESS
    yield Memory(driver)
    assert driver.cuCtxPopCurrent_v2(ctypes.byref(context)) == SUCCESS


def viewed(memory, address, size):
    """What kernels of `launched` take, at an address that is there already."""
    array = Array.__new__(Array)
    array.driver, array.address = memory.driver, address
    buffer = (ctypes.c_char * size).from_address(address.value)
    array.values = np.frombuffer(buffer, np.uint32)
    return array


def test_one_piece_at_two_addresses_has_one_content(memory):
    handle = memory.piece()
    ranges = [memory.reserved(), memory.reserved(alignment=1 << 21)]
    assert ranges[1].value % (1 << 21) == 0
    for address in ranges:
        assert memory.map(address, handle) == SUCCESS
        assert memory.allow(address) == SUCCESS
    assert memory.release(handle) == SUCCESS  # what is mapped stays
    first, second = (viewed(memory, address, BYTES) for address in ranges)
    assert (first.values == 0xCDCDCDCD).all()
    assert launched(memory.driver, STORES, first, threads=BYTES // 4) == SUCCESS
    assert (second.values == 1).all()
    for address in ranges:
        assert memory.unmap(address) == SUCCESS
        assert memory.free(address) == SUCCESS


@pytest.mark.parametrize("threads", [BYTES // 4, BYTES // 4 + 1])
@pytest.mark.parametrize("allowed", [True, False])
def test_kernels_use_what_is_mapped_and_accessible(memory, threads, allowed):
    handle, address = memory.piece(), memory.reserved(2 * BYTES)
    assert memory.map(address, handle) == SUCCESS
    if allowed:
        assert memory.allow(address) == SUCCESS
    launched(memory.driver, STORES, viewed(memory, address, BYTES), threads=threads)
    faults = memory.driver.fakeTakeFaults().decode()
    is_right = allowed and threads == BYTES // 4
    assert ("kernel tried: writes memory that no block has" in faults) != is_right
    assert memory.unmap(address) == SUCCESS
    launched(memory.driver, STORES, viewed(memory, address, BYTES), threads=1)
    faults = memory.driver.fakeTakeFaults().decode()
    assert "kernel tried: writes memory that no block has" in faults
    assert memory.release(handle) == SUCCESS
    assert memory.free(address, 2 * BYTES) == SUCCESS


def test_what_is_done_twice_or_too_early_is_refused(memory):
    handle, address = memory.piece(), memory.reserved()
    steps = [
        (lambda: memory.allow(address), "access to memory that is not mapped"),
        (lambda: memory.unmap(address), "memory is unmapped that is not mapped"),
        (lambda: memory.map(address, handle), ""),
        (lambda: memory.map(address, handle), "mapped to addresses that are not free"),
        (lambda: memory.free(address), "are freed that memory is mapped to"),
        (lambda: memory.allow(address), ""),
        (lambda: memory.driver.cuMemFree_v2(address), "mapped memory is freed"),
        (lambda: memory.release(handle), ""),
        (lambda: memory.release(handle), "memory is released that is not there"),
        (lambda: memory.map(address, handle), "memory is mapped that is not there"),
        (lambda: memory.unmap(address), ""),
        (lambda: memory.free(address), ""),
        (lambda: memory.free(address), "are freed that were not reserved"),
    ]
    for step, fault in steps:
        assert step() == (INVALID if fault else SUCCESS), fault
        faults = memory.driver.fakeTakeFaults().decode()
        assert fault in faults if fault else not faults


def test_a_device_has_as_much_memory_as_its_limit(memory):
    free = 1 << 12
    memory.driver.fakeSetMemoryLimit(
        ctypes.c_size_t(memory.driver.fakeDeviceBytes(0) + free)
    )
    assert memory.create(2 * free)[0] == OUT_OF_MEMORY
    code, handle = memory.create(free)
    assert code == SUCCESS
    assert memory.release(handle) == SUCCESS

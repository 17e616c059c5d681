"""The driver's interpreter of kernels: their text (PTX) is written here, and run.

What XLA's kernels compute is compared with its results on the CPU in functions.py; this is
about what these seldom do, and about what no kernel may do.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

CODES = {"success": 0, "not supported": 801}
HEADER = ".version 8.7\n.target sm_90a\n.address_size 64\n"


@pytest.fixture
def driver(driver):
    """The driver, with a context that is current."""
    context = ctypes.c_void_p()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxPushCurrent_v2(context) == 0
    yield driver
    assert driver.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0


class Array:
    """A block of the device's memory, which is the host's here."""

    def __init__(self, driver, values):
        self.driver = driver
        self.address = ctypes.c_uint64()
        assert driver.cuMemAlloc_v2(
            ctypes.byref(self.address), ctypes.c_size_t(values.nbytes)
        ) == (0)
        buffer = (ctypes.c_char * values.nbytes).from_address(self.address.value)
        self.values = np.frombuffer(buffer, values.dtype)
        self.values[:] = values

    def free(self):
        assert self.driver.cuMemFree_v2(self.address) == 0


@pytest.fixture
def on_device(driver):
    made = []

    def make(values):
        made.append(Array(driver, np.asarray(values)))
        return made[-1]

    yield make
    for array in made:
        if array.address is not None:
            array.free()


def launched(driver, body, *arrays, threads=32, blocks=1, stream=None, before=""):
    """Runs a kernel whose arguments are pointers. Returns the driver's code."""
    params = ", ".join(f".param .u64 p{i}" for i in range(len(arrays)))
    loads = "".join(
        f"ld.param.u64 %a{i}, [p{i}]; cvta.to.global.u64 %a{i}, %a{i};\n"
        for i in range(len(arrays))
    )
    registers = (
        ".reg .b64 %a<9>, %rd<9>; .reg .b32 %r<30>; .reg .f32 %f<9>; .reg .b16 %h<9>;"
        ".reg .pred %p<9>; .reg .f64 %d<9>;\n"
    )
    text = f"{HEADER}{before}.visible .entry tried({params})\n{{\n{registers}{loads}{body}\nret;\n}}\n"
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.cuModuleLoadData(ctypes.byref(module), text.encode()) == 0
    assert driver.cuModuleGetFunction(ctypes.byref(function), module, b"tried") == 0
    values = [ctypes.c_uint64(array.address.value) for array in arrays]
    pointers = [ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values]
    args = (ctypes.c_void_p * len(arrays))(*[p.value for p in pointers])
    code = driver.cuLaunchKernel(
        function, blocks, 1, 1, threads, 1, 1, 0, stream, args, None
    )
    if stream is None:
        assert driver.cuStreamSynchronize(None) == 0
    assert driver.cuModuleUnload(module) == 0
    return code


# Each thread's address: of 4 bytes in the first array.
MINE = """
mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x;
mad.lo.u32 %r4, %r2, %r3, %r1;
mul.wide.u32 %rd1, %r4, 4; add.u64 %rd2, %a0, %rd1;
"""


def test_lanes_that_part_meet_again(driver, on_device):
    """Each lane loops as often as its number says, then all shuffle."""
    out = on_device(np.zeros(64, np.uint32))
    body = (
        MINE
        + """
    mov.u32 %r5, 0; mov.u32 %r6, 0;
    LOOP: setp.ge.u32 %p1, %r6, %r1;
    @%p1 bra OUT;
    add.u32 %r5, %r5, %r6; add.u32 %r6, %r6, 1;
    bra LOOP;
    OUT: shfl.sync.bfly.b32 %r7|%p2, %r5, 1, 31, -1;
    st.global.u32 [%rd2], %r7;
    """
    )
    assert launched(driver, body, out, threads=32, blocks=2) == 0
    sums = np.array([i * (i - 1) // 2 for i in range(32)], np.uint32)
    want = sums[np.arange(32) ^ 1]
    np.testing.assert_array_equal(out.values, np.concatenate([want, want]))


@pytest.mark.parametrize("threads", [1, 31, 33, 1000])
def test_a_barrier_orders_shared_memory(driver, on_device, threads):
    out = on_device(np.zeros(threads, np.uint32))
    body = (
        MINE
        + f"""
    mov.u64 %rd3, buffer; mul.wide.u32 %rd4, %r1, 4; add.u64 %rd4, %rd3, %rd4;
    mul.lo.u32 %r5, %r1, 3; st.shared.u32 [%rd4], %r5;
    bar.sync 0;
    add.u32 %r6, %r1, 7; rem.u32 %r6, %r6, {threads};
    mul.wide.u32 %rd5, %r6, 4; add.u64 %rd5, %rd3, %rd5;
    ld.shared.u32 %r7, [%rd5]; st.global.u32 [%rd2], %r7;
    """
    )
    shared = f".shared .align 4 .b8 buffer[{4 * threads}];\n"
    assert launched(driver, body, out, threads=threads, before=shared) == 0
    want = (np.arange(threads) + 7) % threads * 3
    np.testing.assert_array_equal(out.values, want)


def test_lanes_that_have_ended_are_not_waited_for(driver, on_device):
    out = on_device(np.zeros(64, np.uint32))
    body = (
        MINE
        + """
    setp.gt.u32 %p1, %r1, 40;
    @%p1 ret;
    bar.sync 0;
    st.global.u32 [%rd2], 1;
    """
    )
    assert launched(driver, body, out, threads=64) == 0
    np.testing.assert_array_equal(out.values, np.arange(64) <= 40)


def test_functions_return_to_where_they_were_called(driver, on_device):
    out = on_device(np.zeros(32, np.uint32))
    function = """
    .func (.param .b32 result) twice(.param .b32 value)
    { .reg .b32 %r<3>; .reg .pred %p<2>;
      ld.param.b32 %r1, [value];
      setp.lt.u32 %p1, %r1, 10;
      @%p1 bra SMALL;
      add.u32 %r1, %r1, %r1;
      SMALL: st.param.b32 [result], %r1; ret; }
    """
    call = """
    { .param .b32 in; .param .b32 out;
      st.param.b32 [in], %r1; call.uni (out), twice, (in); ld.param.b32 %r1, [out]; }
    """
    odd = """
    and.b32 %r9, %r1, 1; setp.eq.u32 %p1, %r9, 1;
    @%p1 bra ODD;
    """
    body = MINE + call + odd + call + "ODD:\n" + call + "st.global.u32 [%rd2], %r1;"
    assert launched(driver, body, out, before=function) == 0

    def twice(x):
        return 2 * x if x >= 10 else x

    want = [twice(v if v % 2 else twice(v)) for v in map(twice, range(32))]
    np.testing.assert_array_equal(out.values, want)


def test_atomic_operations_and_votes(driver, on_device):
    out = on_device(np.zeros(4, np.uint32))
    body = """
    mov.u32 %r1, %tid.x;
    atom.global.add.u32 %r2, [%a0], 1;
    red.global.max.u32 [%a0+4], %r1;
    and.b32 %r3, %r1, 3; setp.eq.u32 %p1, %r3, 0;
    vote.sync.ballot.b32 %r4, %p1, -1;
    st.global.u32 [%a0+8], %r4;
    match.any.sync.b32 %r5, %r3, -1;
    setp.eq.u32 %p2, %r1, 1;
    @%p2 st.global.u32 [%a0+12], %r5;
    """
    assert launched(driver, body, out, blocks=3) == 0
    assert out.values.tolist() == [96, 31, 0x11111111, 0x22222222]


def test_products_of_128_bits_by_carries(driver, on_device):
    a, b = 0xFEDC_BA98_7654_3210, 0x0123_4567_89AB_CDEF
    out = on_device(np.array([a, b, 0, 0], np.uint64))
    body = """
    ld.global.v2.u32 {%r1, %r2}, [%a0]; ld.global.v2.u32 {%r3, %r4}, [%a0+8];
    mul.lo.u32 %r10, %r1, %r3; mul.hi.u32 %r11, %r1, %r3;
    mad.lo.cc.u32 %r11, %r1, %r4, %r11; madc.hi.u32 %r12, %r1, %r4, 0;
    mad.lo.cc.u32 %r11, %r2, %r3, %r11; madc.hi.cc.u32 %r12, %r2, %r3, %r12;
    madc.hi.u32 %r13, %r2, %r4, 0;
    mad.lo.cc.u32 %r12, %r2, %r4, %r12; addc.u32 %r13, %r13, 0;
    st.global.v4.u32 [%a0+16], {%r10, %r11, %r12, %r13};
    """
    assert launched(driver, body, out, threads=1) == 0
    assert int(out.values[2]) | int(out.values[3]) << 64 == a * b


@pytest.mark.parametrize(
    ("opcode", "value", "want"),
    [
        ("cvt.rzi.s32.f32", 3e9, 2**31 - 1),
        ("cvt.rzi.s32.f32", float("nan"), 0),
        ("cvt.rni.s32.f32", 2.5, 2),
        ("cvt.rpi.s32.f32", 2.1, 3),
        ("cvt.rmi.s32.f32", -2.1, -3),
        ("cvt.rzi.u32.f32", -1.0, 0),
    ],
)
def test_floats_become_integers(driver, on_device, opcode, value, want):
    out = on_device(np.array([value], np.float32))
    body = f"ld.global.f32 %f1, [%a0]; {opcode} %r1, %f1; st.global.u32 [%a0], %r1;"
    assert launched(driver, body, out, threads=1) == 0
    assert int(out.values.view(np.int32)[0]) == want


# --- What no kernel may do ---------------------------------------------------------

STORES = MINE + "st.global.u32 [%rd2], 1;"


@pytest.mark.parametrize(
    ("body", "size", "fault"),
    [
        (STORES, 31, "writes memory that no block has"),
        ("st.global.u64 [%a0+120], %rd1;", 31, "writes past the end of a block"),
        (MINE + "ld.global.u32 %r9, [%rd2+400];", 32, "reads memory that no block has"),
        ("st.global.u32 [%a0+1], 1;", 32, "an address that is not a multiple of 4"),
        ("st.shared.u32 [8], 1;", 32, "shared or local memory past its end"),
        ("trap;", 32, "stops itself (trap)"),
    ],
    ids=["behind", "across the end", "no block", "odd address", "shared", "trap"],
)
def test_a_kernel_that_breaks_a_rule_is_named(driver, on_device, body, size, fault):
    out = on_device(np.zeros(size, np.uint32))
    launched(driver, body, out)
    faults = driver.fakeTakeFaults().decode()
    assert faults.startswith("kernel tried: ")
    assert fault in faults


def test_memory_that_was_freed_is_no_ones(driver, on_device):
    out = on_device(np.zeros(32, np.uint32))
    out.free()
    launched(driver, STORES, out)
    out.address = None
    assert "kernel tried: writes memory that no block has" in (
        driver.fakeTakeFaults().decode()
    )


@pytest.mark.parametrize("waits", [False, True])
def test_streams_have_to_wait_for_each_other(driver, on_device, waits):
    """Whichever runs first, and whatever the values are."""
    out = on_device(np.zeros(32, np.uint32))
    streams = [ctypes.c_void_p(driver.fakeStreamCreateOn(0)) for _ in range(2)]
    event = ctypes.c_void_p()
    assert driver.cuEventCreate(ctypes.byref(event), 0) == 0
    launched(driver, STORES, out, stream=streams[0])
    if waits:
        assert driver.cuEventRecord(event, streams[0]) == 0
        assert driver.cuStreamWaitEvent(streams[1], event, 0) == 0
    launched(driver, STORES, out, stream=streams[1])
    for stream in streams:
        assert driver.cuStreamSynchronize(stream) == 0
        driver.fakeStreamDestroy(stream)
    assert driver.cuEventDestroy_v2(event) == 0
    faults = driver.fakeTakeFaults().decode()
    assert ("that another stream writes, without waiting for it" in faults) != waits


@pytest.mark.parametrize(
    "body",
    [
        "wgmma.fence.sync.aligned;",
        "add.rn.f32.strange %f1, %f1, %f1;",
        "mov.b32 %r1, %rd1;",
    ],
)
def test_what_is_not_known_is_refused_and_counted(driver, on_device, body):
    """Where the whole opcode is not understood, it is not run."""
    out = on_device(np.zeros(32, np.uint32))
    before = driver.fakeMissing()
    assert launched(driver, STORES + body, out) == CODES["not supported"]
    assert driver.fakeMissing() != before
    assert not out.values.any()
    driver.fakeForgetMissing()  # else this test would not be judged

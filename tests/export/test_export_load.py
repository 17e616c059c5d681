"""Files: what is in them, and what loading and calling them needs."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registered as r
from registered import tapped, travelled

import hostcall as hc

pytest.importorskip("flatbuffers")
from fuzz.stablehlo import packed, unpacked

X = jnp.linspace(0.1, 1.0, 4)
SCALAR = jax.ShapeDtypeStruct((), np.float32)
ONE = jnp.float32(1)


def sine(x):
    return hc.call(r.sine, x, x)


def test_a_process_may_fork_after_loading(run_python, tmp_path):
    """As a web server does that loads first and then starts its workers."""
    path = tmp_path / "program"
    path.write_bytes(bytes(hc.export(lambda x: r.walk.step(x) + r.effect(x))(ONE)))
    r.walk.renew()
    source = f"""
import os, pathlib, sys
sys.path.insert(0, {str(r.__file__.rpartition("/")[0])!r})
import numpy as np
import hostcall as hc
import registered
loaded = hc.load(pathlib.Path(sys.argv[1]).read_bytes())
child = os.fork()
got = float(loaded.call(np.float32(3)))
if child == 0:
    os._exit(int(got))
_, status = os.waitpid(child, 0)
print(got, os.waitstatus_to_exitcode(status))
"""
    assert run_python(source, str(path)).stdout == "5.0 5\n"


def test_a_program_that_does_not_go_with_what_is_registered_here(run_python, tmp_path):
    path, name = tmp_path / "program", "tests.lent"
    f = hc.register(name)(lambda x: x.copy())
    data = bytes(hc.export(lambda x: hc.call(f, x, x, lend=True))(X))
    assert hc.load(data).call(X).tolist() == X.tolist()
    path.write_bytes(data)
    source = f"""
import pathlib, sys
import hostcall as hc
hc.register({name!r})(hc.host(lambda x: x.copy(), timeout=60))
try:
    hc.load(pathlib.Path(sys.argv[1]).read_bytes())
except hc.errors.LoadError as error:
    assert "registered here: it has lend=True and timeout=" in str(error), error
    print("refused")
"""
    assert run_python(source, str(path)).stdout == "refused\n"


# --- Objects ------------------------------------------------------------------------


def test_objects_that_only_a_derivative_calls():
    @jax.custom_vjp
    def f(x):
        return 2 * x

    f.defvjp(lambda x: (2 * x, None), lambda _, ct: (ct + r.walk.step(ct),))
    r.walk.renew()
    exported = hc.export(f, vjp_order=1)(ONE)
    loaded = hc.load(bytes(exported))
    assert list(exported.objects) == list(loaded.objects) == ["Walk"]
    assert float(jax.grad(loaded.call)(ONE)) == 2
    assert loaded.objects["Walk"].save()["objects"].keys() == {()}
    r.walk.renew()


def test_two_objects_of_one_class():
    methods = {"step": SCALAR}
    one, two = (hc.Object(r.Walk, methods=methods) for _ in range(2))
    exported = hc.export(lambda x: one.step(x) + 10 * two.step(10 * one.step(x)))(ONE)
    loaded = hc.load(bytes(exported))
    assert list(exported.objects) == list(loaded.objects) == ["Walk", "Walk#2"]
    assert float(loaded.call(ONE)) == 201
    state = [pickle.loads(o.save()["objects"][()]) for o in loaded.objects.values()]
    assert [walk.at for walk in state] == [2, 20]
    one.close(), two.close()


def test_objects_that_were_closed_are_made_again_by_loading():
    env = hc.Object(r.Walk, methods={"step": SCALAR})
    data = bytes(hc.export(lambda x: env.step(x))(ONE))
    for _ in range(3):
        loaded = hc.load(data)
        assert [float(loaded.call(ONE)) for _ in range(2)] == [1, 2]
        loaded.objects["Walk"].close()
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"after close\(\)"):
            jax.block_until_ready(loaded.call(ONE))
    with pytest.raises(hc.errors.HostcallError, match=r"after close\(\)"):
        hc.export(lambda x: env.step(x))(ONE)  # it was the object of the first load


# --- What is exported ----------------------------------------------------------------


def test_a_call_of_another_library_with_a_text():
    def f(x):
        other = jax.ffi.ffi_call("another_library", x)(x, text="hello")
        return sine(x) + other

    check = jax.export.DisabledSafetyCheck.custom_call("another_library")
    exported = hc.export(f, disabled_checks=[check])(X)
    assert [call.name for call in exported.manifest.calls] == ["tests.sine"]


@pytest.mark.parametrize("used", [False, True])
def test_a_jitted_function_that_uses_no_argument(used):
    f = lambda step: r.feed()[0]
    r.feed.reset()
    if not used:
        with pytest.raises(hc.errors.SpecError, match="keep_unused=True"):
            hc.export(jax.jit(f))(0)
    exported = hc.export(jax.jit(f, keep_unused=True) if used else f)(0)
    assert float(hc.load(bytes(exported)).call(0)) == 0
    assert np.allclose(hc.export(jax.jit(lambda x: jnp.ones(2)))(0).call(0), 1)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_function_whose_own_error_is_like_that_of_a_missing_argument(wrap):
    def f(x):
        raise ValueError("safe_zip() argument 2 is shorter than argument 1")

    with pytest.raises(ValueError, match=r"^safe_zip\(\) argument 2"):
        hc.export(wrap(f))(0)


class Net:
    trace = 3

    def __call__(self, x):
        return sine(x)


def test_an_object_with_an_attribute_named_like_jits():
    np.testing.assert_allclose(travelled(Net(), X).call(X), np.sin(X), rtol=1e-6)


def test_pickle_and_copy():
    exported = hc.export(sine, vjp_order=0)(X)
    for other in (pickle.loads(pickle.dumps(exported)), copy.deepcopy(exported)):
        assert bytes(other) == bytes(exported)
        np.testing.assert_allclose(other.call(X), np.sin(X), rtol=1e-6)


def watched(x):
    hc.watch(x)
    return x


def progressing(x):
    jax.lax.fori_loop(0, 3, lambda i, c: (hc.progress(i, 3), c)[1], 0)
    return x


STAYING = {"hc.watch": watched, "hc.progress": progressing}


@pytest.mark.parametrize("tool", STAYING)
def test_tools_that_stay(tool):
    with pytest.raises(hc.errors.ExportError) as error:
        hc.export(STAYING[tool])(X)
    assert "Leave it out" in str(error.value)
    assert tool in str(error.value)
    assert "hc.register(" not in str(error.value)


def test_recorders_stay(tmp_path):
    pytest.importorskip("pyarrow")
    with hc.Recorder(tmp_path / "run") as recorder:
        for where in (None, X[0] > 0):  # in batches, and one by one
            with pytest.raises(hc.errors.ExportError, match="a hc.Recorder writes to"):
                hc.export(lambda x, w=where: (recorder(a=x[0], where=w), x)[1])(X)


def test_bridges():
    """Their values travel if they are hc.host functions. Derivatives are not named."""
    squared = lambda x: (np.sum(x**2), 2 * x)
    f = hc.register("tests.squared")(hc.bridge.value_and_grad(squared))
    assert float(travelled(f, ONE).call(ONE)) == 1
    sine = hc.register("tests.jax_sine")(hc.bridge.jax(jnp.sin))
    for staying in (jax.grad(f), sine):
        with pytest.raises(hc.errors.ExportError, match="a bridge makes it .* no name"):
            hc.export(staying)(ONE)


# --- Calling ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "f", [tapped, lambda x: r.feed()[0] + x, lambda x: (hc.print("{}", x), x)[1]]
)
def test_one_device_called_with_several(f):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("x")))
    loaded = travelled(f, X)
    with pytest.raises(hc.errors.ExportError, match="for one device, and got .* on 4"):
        loaded.call(x)
    np.testing.assert_allclose(travelled(sine, X).call(x), np.sin(X), rtol=1e-6)
    np.testing.assert_allclose(
        jax.jit(travelled(jax.jit(sine), x).call)(x), np.sin(X), rtol=1e-6
    )


# --- Headers -------------------------------------------------------------------------

HEADER, PROGRAM = unpacked(bytes(hc.export(lambda x: r.walk.step(x))(ONE)))


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"names": None}, "header of the exported program can't be read"),
        ({"names": [["tests.Walk", "x"]]}, "header of the exported program can't"),
        ({"names": [3]}, "header of the exported program can't be read"),
    ],
)
def test_headers_that_no_export_wrote(changed, what):
    with pytest.raises(hc.errors.LoadError, match=what):
        hc.load(packed({**HEADER, **changed}, PROGRAM))


def test_what_a_header_says_of_names_is_not_relied_on():
    """The names are read from the program; the header only says them earlier."""
    with pytest.raises(
        hc.errors.LoadError, match=r"the names none.* calls 'tests\.Walk'"
    ):
        hc.load(packed({**HEADER, "names": []}, PROGRAM))
    with pytest.raises(hc.errors.RegistryError, match=r"tests\.other"):
        hc.load(packed({**HEADER, "names": [["tests.other", 1]]}, PROGRAM))


LOADS = {
    "a hc.host function": (
        "hc.host(lambda x: x.copy(), result=hc.results.like(0), lend=True)",
        "f(x)",
        "hc.host(lambda x: x.copy(), result=hc.results.like(0), timeout=60)",
    ),
    "a coroutine function": (
        "lambda x: x.copy()",
        "hc.call(f, x, x, lend=True)",
        "later",
    ),
}


def test_how_a_function_is_run_here_must_go_with_the_file(run_python, tmp_path):
    head = """
import sys
import numpy as np, hostcall as hc
X = np.arange(3, dtype=np.float32)
async def later(x):
    return x.copy()
"""
    writes = loads = head
    for number, (there, use, here) in enumerate(LOADS.values()):
        name = f"tests.lent{number}"
        writes += f"""
f = hc.register({name!r})({there})
open(sys.argv[1] + {name!r}, "wb").write(bytes(hc.export(lambda x: {use})(X)))
print(hc.load(open(sys.argv[1] + {name!r}, "rb").read()).call(X).tolist())
"""
        loads += f"""
hc.register({name!r})({here})
try:
    hc.load(open(sys.argv[1] + {name!r}, "rb").read())
except hc.errors.LoadError as error:
    print("lend=True and" in str(error))
"""
    folder = f"{tmp_path}/"
    assert run_python(writes, folder).stdout == "[0.0, 1.0, 2.0]\n" * 2
    assert run_python(loads, folder).stdout == "True\n" * 2


def test_a_tap_of_a_registered_host_function_travels():
    seen = []
    for n, how in enumerate(({"float64": True}, {"timeout": 60})):
        f = hc.host(lambda x: seen.append(x) or x, result=hc.results.like(0), **how)
        f = hc.register(f"tests.tapped{n}")(f)
        loaded = travelled(lambda x, f=f: (hc.tap(f, x), x)[1], ONE)
        loaded.call(ONE)
    hc.barrier()
    assert len(seen) == 2


def test_the_name_of_the_host_function_itself_goes_into_the_file():
    f = hc.register("tests.inner")(lambda x: x + 1)
    outer = hc.register("tests.outer")(hc.host(f, timeout=60))
    exported = hc.export(lambda x: hc.call(outer, x, x))(X)
    assert [call.name for call in exported.manifest.calls] == ["tests.outer"]
    assert hc.load(bytes(exported)).call(X).tolist() == (X + 1).tolist()

"""What `make demo` computes, piece by piece: derivatives, plot, report."""

import runpy
import struct
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import hostcall as hc

pytest.importorskip("scipy")

import bessel
import lynx as demo
import text

from hostcall._cli import machine

DEMO = Path(demo.__file__).parent
BEST = np.log([0.5401590, 0.0271654, 0.7963860, 0.0236946, 34.602437, 5.844507])
SHORT = demo.YEARS[:6]


@pytest.fixture(autouse=True)
def in_64_bits(x64):
    pass


@pytest.fixture
def solves(monkeypatch):
    """The number of states of each solve."""
    sizes = []
    integrate = demo.integrate

    def counted(slope, first, years):
        sizes.append(len(first))
        return integrate(slope, first, years)

    monkeypatch.setattr(demo, "integrate", counted)
    return sizes


# --- Lynx and hares ----------------------------------------------------------------


def test_jit_of_the_solver_against_numpy_and_a_solver_in_jax():
    got = jax.jit(demo.trajectories)(BEST, demo.YEARS)
    np.testing.assert_array_equal(got, demo.trajectories.fn(BEST, demo.YEARS))
    other = demo.trajectories_in_jax(BEST, demo.YEARS)
    np.testing.assert_allclose(got, other, rtol=0, atol=1e-8)


def test_vmap_of_grad_and_jacfwd_against_a_solver_in_jax():
    points = np.stack([BEST, demo.starts(2)[1]])

    def of(model):
        grad = jax.grad(lambda p: demo.misfit(p, model))
        jacobian = jax.jacfwd(lambda p: demo.residuals(p, model))
        return jax.jit(jax.vmap(lambda p: (grad(p), jacobian(p))))(points)

    (grads, jacobians), want = of(demo.trajectories), of(demo.trajectories_in_jax)
    np.testing.assert_allclose(grads, want[0], atol=1e-6)
    np.testing.assert_allclose(jacobians, want[1], atol=1e-7)
    np.testing.assert_allclose(
        demo.covariance(BEST),
        2 * demo.misfit(BEST) / 36 * np.linalg.inv(jacobians[0].T @ jacobians[0]),
        rtol=1e-6,
    )


def test_check_grads_of_the_solver():
    check_grads(lambda p: demo.trajectories(p, SHORT), (BEST,), 1, rtol=1e-5)
    assert hc.testing.check(demo.trajectories, (BEST, SHORT))


def test_a_derivative_is_one_solve(solves):
    jax.block_until_ready(jax.jit(jax.value_and_grad(demo.misfit))(BEST))
    assert solves == [14]
    solves.clear()
    jax.block_until_ready(jax.jit(jax.jacfwd(demo.residuals))(BEST))
    assert solves == [14]
    solves.clear()
    _, pullback = jax.vjp(demo.residuals, BEST)
    rows = jax.vmap(pullback)(np.eye(42))[0]
    assert solves == [14]
    np.testing.assert_allclose(rows, jax.jacfwd(demo.residuals)(BEST), atol=1e-12)


def test_a_solver_that_gives_up_is_an_error(monkeypatch):
    gave_up = types.SimpleNamespace(success=False, message="Too much work.")
    monkeypatch.setattr(demo.scipy.integrate, "solve_ivp", lambda *_, **__: gave_up)
    with (
        pytest.raises(RuntimeError, match=r"LSODA failed: Too much work\."),
        hc.reraise(),
    ):
        jax.block_until_ready(jax.jit(demo.misfit)(BEST))


def test_the_periods_derivative_by_differences():
    length, slope = jax.jit(jax.value_and_grad(demo.period))(BEST)
    hares = demo.trajectories.fn(BEST, np.linspace(1900, 1920, 20001))[:, 0]
    first, second = np.flatnonzero(np.diff(np.sign(np.diff(hares))) < 0) / 1000
    np.testing.assert_allclose(length, second - first, atol=2e-3)
    # Twice the rates, half the period. The unit in which lynx are counted, which is in
    # beta too, does not matter.
    np.testing.assert_allclose(slope[:4].sum(), -length, rtol=1e-5)
    np.testing.assert_allclose(slope[5], slope[1], rtol=1e-5)
    errors = demo.deviations(np.eye(6), np.diag([4.0, 9, 16, 25, 36, 49]))
    np.testing.assert_allclose(errors, [2, 3, 4, 5, 6, 7])


def test_close_refuses_what_differs():
    assert text.close([1.0, 2.0], [1.0, 2.5], 0.5) == 0.5
    with pytest.raises(
        AssertionError, match=r"differ by 1\.0, which is more than 0\.5"
    ):
        text.close(jnp.ones(2), np.zeros(2), 0.5)


# --- Bessel functions --------------------------------------------------------------


def test_vmap_of_hessian_of_bessel_functions():
    points = np.random.default_rng(0).uniform(0.1, 0.6, (5, 2))
    hessians = jax.jit(jax.vmap(jax.hessian(bessel.drum)))(points)
    np.testing.assert_allclose(hessians, bessel.bends(points), atol=1e-10)
    traces = np.trace(hessians, axis1=1, axis2=2)
    np.testing.assert_allclose(traces, bessel.waves(points), atol=1e-10)


def test_check_grads_of_bessel_functions():
    check_grads(lambda z: bessel.jv(np.arange(3), z), (0.7,), 3, rtol=1e-4)


# --- The plot and the report -------------------------------------------------------


def test_the_plot_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "fit"
    demo.plot(path, BEST, demo.covariance(BEST))
    written = path.read_bytes()
    assert written.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", written[16:24]) == (1080, 600)


def test_without_matplotlib_the_plot_is_left_out(tmp_path, monkeypatch):
    pytest.importorskip("statsmodels")
    import fits

    monkeypatch.setattr(fits.importlib.util, "find_spec", lambda name: None)
    said = fits.plotted(tmp_path / "fit.png", BEST, np.eye(6))
    assert said == "not drawn without matplotlib: pip install matplotlib"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["", "no/folder/fit.png"], ids=["folder", "nowhere"])
def test_a_plot_that_cannot_be_written_is_refused_first(
    where, tmp_path, monkeypatch, capsys
):
    path = tmp_path / where
    monkeypatch.setattr("sys.argv", ["demo", "--plot", str(path)])
    with pytest.raises(SystemExit):
        runpy.run_path(str(DEMO), run_name="__main__")
    said = capsys.readouterr().err
    assert f"the plot can't be written to {path}: it is a folder, or is not" in said
    assert "Name a file: --plot lynx_hare.png" in said


def test_the_report_on_gpus(monkeypatch):
    cpu = jax.devices("cpu")[0]
    assert machine.engine_on("gpu", [cpu]) == "not tried: JAX sees no GPU here"
    gpu = types.SimpleNamespace(platform="gpu")
    tried = []
    monkeypatch.setattr(machine, "engine_answers", lambda d: tried.append(d) or "works")
    assert machine.engine_on("gpu", [cpu, gpu]) == "works"
    assert tried == [gpu]

    def fails(device):
        raise hc.errors.HostcallError("hostcall: no driver\nand more")

    monkeypatch.setattr(machine, "engine_answers", fails)
    said = machine.engine_on("gpu", [gpu])
    assert said == "BROKEN: HostcallError: hostcall: no driver"


def test_the_report_tells_the_engine_from_jaxs_callback(monkeypatch):
    cpu = jax.devices("cpu")[0]
    tried = "works (tried: ordered calls in a compiled loop)"
    assert machine.engine_answers(cpu) == tried

    def by_jax(fn, result, x, order):
        return jax.experimental.io_callback(fn, result, x, ordered=order == "ordered")

    monkeypatch.setattr(hc, "call", by_jax)
    said = machine.engine_answers(cpu)
    assert said == "not used: calls run through JAX's own callback"
    monkeypatch.setattr(hc, "call", lambda fn, result, x, order: x + 1)
    assert (
        machine.engine_answers(cpu)
        == "BROKEN: the program returned 3.0, and its calls got []"
    )

"""Small programs of libraries that call Python from JAX, one function each.

Each returns a tree of arrays and texts, which must be the same with and without
`hostcall.patch_jax()` (clients/compare.py). The tree includes what a library writes to
the terminal, if that is the same in every run.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Compiled(NamedTuple):
    """A program's results, and a function to time that repeats its compiled part."""

    results: Any
    again: Callable[[], Any]


# name -> (program, the `arrays` that it needs in `patch_jax(arrays=)`)
PROGRAMS: dict[str, tuple[Callable[[], Any], str]] = {}


def program(
    name: str, arrays: str = "jax"
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(f: Callable[[], Any]) -> Callable[[], Any]:
        PROGRAMS[name] = f, arrays
        return f

    return register


@contextlib.contextmanager
def captured() -> Any:
    """Captures stdout and stderr, and waits for callbacks that still write to them."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield out
        jax.effects_barrier()


def without_times(text: str) -> str:
    """The last state of each progress bar, without times and speeds."""
    lines = re.split(r"[\r\n]+", text)
    lines = [re.sub(r"\[.*?\]|\d+:\d\d|[\d.?]+(it/s|s/it)", "", line) for line in lines]
    return "\n".join(line.rstrip() for line in lines[-2:])


# --- equinox, diffrax, optimistix --------------------------------------------------


@program("equinox: error_if")
def equinox_error_if() -> Any:
    import equinox as eqx

    @eqx.filter_jit
    def f(x: Any) -> Any:
        y = eqx.error_if(x, x < 0, "x must not be negative")
        return jnp.sqrt(y) + eqx.error_if(x, jnp.isnan(x), "x must not be NaN")

    seen = [f(jnp.float32(4))]
    for bad in (-1.0, jnp.nan):
        try:
            f(jnp.float32(bad)).block_until_ready()
        except Exception as error:
            seen.append([type(error).__name__, str(error).splitlines()[0]])
    seen.append(f(jnp.float32(9)))
    return Compiled((seen, jax.vmap(f)(jnp.arange(4.0))), lambda: f(jnp.float32(9)))


@program("equinox: filter_pure_callback")
def equinox_filter_pure_callback() -> Any:
    import equinox as eqx

    def host(x: Any, name: str, *, scale: Any) -> Any:
        assert name == "sine"
        return np.sin(np.asarray(x)) * np.asarray(scale), "done"

    @eqx.filter_jit
    def f(x: Any) -> Any:
        spec = (jax.ShapeDtypeStruct(x.shape, x.dtype), "done")
        y, said = eqx.filter_pure_callback(
            host,
            x,
            "sine",
            scale=2.0,
            result_shape_dtypes=spec,
            vmap_method="sequential",
        )
        return y, said

    x = jnp.arange(4.0)
    batched = eqx.filter_jit(eqx.filter_vmap(lambda v: f(v)[0]))
    return Compiled((f(x), batched(x)), lambda: (f(x), batched(x)))


def _pendulum() -> Any:
    import diffrax

    def field(t: Any, y: Any, args: Any) -> Any:
        return jnp.stack([y[1], -jnp.sin(y[0])])

    return diffrax.ODETerm(field)


@program("diffrax: TqdmProgressMeter")
def diffrax_progress() -> Any:
    import diffrax

    with captured() as out:
        solution = diffrax.diffeqsolve(
            _pendulum(),
            diffrax.Tsit5(),
            0.0,
            20.0,
            0.01,
            jnp.array([1.0, 0.0]),
            max_steps=4000,
            progress_meter=diffrax.TqdmProgressMeter(refresh_steps=50),
        )
        solution.ys.block_until_ready()
    return solution.ys, "100.00%" in out.getvalue()


@program("diffrax: TextProgressMeter under vmap")
def diffrax_text() -> Any:
    import diffrax

    def solve(y0: Any) -> Any:
        return diffrax.diffeqsolve(
            _pendulum(),
            diffrax.Tsit5(),
            0.0,
            5.0,
            0.01,
            y0,
            progress_meter=diffrax.TextProgressMeter(),
        ).ys

    with captured() as out:
        ys = jax.vmap(solve)(jnp.array([[1.0, 0.0], [0.5, 0.0]]))
        ys.block_until_ready()
    return ys, sorted(set(out.getvalue().split()))


@program("optimistix: verbose")
def optimistix_verbose() -> Any:
    import optimistix

    def residual(x: Any, args: Any) -> Any:
        return x - jnp.cos(x)

    solver = optimistix.Newton(rtol=1e-5, atol=1e-5)
    minimiser = optimistix.BFGS(rtol=1e-5, atol=1e-5, verbose=True)
    with captured() as out:
        root = optimistix.root_find(residual, solver, jnp.float32(1)).value
        least = optimistix.minimise(
            lambda x, args: jnp.sum((x - 2.0) ** 4), minimiser, jnp.zeros(3)
        ).value
        least.block_until_ready()
    return root, least, out.getvalue()


# --- Sampling ----------------------------------------------------------------------


def _numpyro(method: str) -> Any:
    import numpyro
    import numpyro.distributions as dist

    def model(y: Any = None) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    mcmc = numpyro.infer.MCMC(
        numpyro.infer.NUTS(model),
        num_warmup=60,
        num_samples=60,
        num_chains=2,
        chain_method=method,
        progress_bar=True,
    )
    with captured() as out:
        mcmc.run(jax.random.key(0), y=jnp.array([1.0, 2.0, 1.5]))
        samples = mcmc.get_samples()["mu"]
        samples.block_until_ready()
    return samples, out.getvalue().count("100%") > 0


@program("numpyro: progress bars, parallel chains")
def numpyro_parallel() -> Any:
    return _numpyro("parallel")


@program("numpyro: progress bar, chains one after another")
def numpyro_sequential() -> Any:
    return _numpyro("sequential")


def _log_density(x: Any) -> Any:
    return -0.5 * jnp.sum(x**2)


@program("blackjax: progress bar")
def blackjax_progress() -> Any:
    import blackjax

    sampler = blackjax.hmc(_log_density, 0.1, jnp.ones(2), 5)
    with captured(), blackjax.progress_bar():
        _, positions = blackjax.util.run_inference_algorithm(
            rng_key=jax.random.key(1),
            initial_position=jnp.zeros(2),
            inference_algorithm=sampler,
            num_steps=100,
            transform=lambda state, info: state.position,
        )
        jax.block_until_ready(positions)
    return positions


@program("blackjax with jax-tap")
def blackjax_jaxtap() -> Any:
    import blackjax
    import jaxtap

    sampler = blackjax.hmc(_log_density, 0.1, jnp.ones(2), 5)
    seen: list[Any] = []

    def step(state: Any, key: Any) -> Any:
        state, _ = sampler.step(key, state)
        return state, state.position

    def run(state: Any, keys: Any) -> Any:
        return jax.lax.scan(step, state, keys)

    tapped = jaxtap.verbose(run, on_step=lambda event: seen.append(event.step))
    keys = jax.random.split(jax.random.key(2), 30)
    _, positions = jax.jit(tapped)(sampler.init(jnp.zeros(2)), keys)
    jax.block_until_ready(positions)
    jax.effects_barrier()
    return positions, sorted(seen)


@program("jax-tqdm: scan_tqdm")
def jax_tqdm_scan() -> Any:
    from jax_tqdm import loop_tqdm, scan_tqdm

    n = 10_000

    @scan_tqdm(n, print_rate=1000)
    def step(carry: Any, i: Any) -> Any:
        return carry * 0.999 + i, None

    @loop_tqdm(n, print_rate=1000)
    def body(i: Any, carry: Any) -> Any:
        return carry + i

    @jax.jit
    def loops() -> Any:
        return (
            jax.lax.scan(step, 0.0, jnp.arange(n))[0],
            jax.lax.fori_loop(0, n, body, 0),
        )

    def run() -> Any:
        with captured() as out:
            result = jax.block_until_ready(loops())
        return result, "10000/10000" in out.getvalue()

    return Compiled(run(), run)


# --- Host functions behind array libraries -------------------------------------------


@program("array-api-extra: lazy_apply")
def lazy_apply() -> Any:
    import array_api_extra as xpx

    def f(x: Any) -> Any:
        return xpx.lazy_apply(
            lambda a: np.sort(a) * 2, x, shape=x.shape, dtype=x.dtype, as_numpy=True
        )

    compiled, x = jax.jit(f), jnp.array([3.0, 1.0, 2.0])
    return Compiled(compiled(x), lambda: compiled(x))


@program("SciPy: linkage with SCIPY_ARRAY_API=1")
def scipy_linkage() -> Any:
    from scipy.cluster.hierarchy import fcluster, linkage

    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(20, 3)))
        compiled = jax.jit(lambda x: linkage(x, "average"))
        z = compiled(x)
        clusters = fcluster(z, 1.5)

    def again() -> Any:
        with jax.enable_x64(True):
            return compiled(x)

    return Compiled((z, clusters), again)


@program("agjax: an autograd function")
def agjax_wrap() -> Any:
    import agjax
    import autograd.numpy as npa

    f = agjax.experimental.wrap_for_jax(
        lambda x, y: npa.sum(x**2 * npa.sin(y)),
        result_shape_dtypes=jax.ShapeDtypeStruct((), jnp.float32),
    )
    x, y = jnp.arange(1.0, 4.0), jnp.ones(3)
    grad = jax.jit(jax.grad(f, 1))
    return Compiled((f(x, y), jax.grad(f)(x, y), grad(x, y)), lambda: grad(x, y))


@program("tesseract-jax: a tesseract in the process")
def tesseract() -> Any:
    from tesseract_core import Tesseract
    from tesseract_jax import apply_tesseract

    source = """
        from pydantic import BaseModel
        from tesseract_core.runtime import Array, Differentiable, Float32
        import numpy as np

        class InputSchema(BaseModel):
            x: Differentiable[Array[(None,), Float32]]

        class OutputSchema(BaseModel):
            y: Differentiable[Array[(None,), Float32]]

        def apply(inputs: InputSchema) -> OutputSchema:
            return OutputSchema(y=np.sin(inputs.x).astype("float32"))

        def vector_jacobian_product(inputs, vjp_inputs, vjp_outputs, cotangent_vector):
            dx = np.cos(inputs.x) * cotangent_vector["y"]
            return {"x": dx.astype("float32")}

        def abstract_eval(abstract_inputs):
            x = abstract_inputs.model_dump()["x"]
            return {"y": {"shape": x["shape"], "dtype": x["dtype"]}}
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "tesseract_api.py")
        with open(path, "w") as file:
            file.write(textwrap.dedent(source))
        served = Tesseract.from_tesseract_api(path)

        def f(x: Any) -> Any:
            return jnp.sum(apply_tesseract(served, {"x": x})["y"] ** 2)

        x, compiled, grad = jnp.arange(4.0), jax.jit(f), jax.jit(jax.grad(f))
        return Compiled((compiled(x), grad(x)), lambda: (compiled(x), grad(x)))


@program("jaxopt: isotonic regression with numba", arrays="numpy")
def jaxopt_isotonic() -> Any:
    from jaxopt.isotonic import isotonic_l2_pav

    y = jnp.asarray(
        np.random.default_rng(0).normal(size=50).cumsum().astype(np.float32)
    )
    compiled = jax.jit(isotonic_l2_pav)
    return Compiled(compiled(y), lambda: compiled(y))


@program("netket: a constraint in Python")
def netket_constraint() -> Any:
    import netket as nk

    class Even(nk.hilbert.constraint.DiscreteHilbertConstraint):  # type: ignore[misc]
        def __call__(self, x: Any) -> Any:
            return jax.pure_callback(
                lambda v: np.asarray(v).sum(axis=-1) % 4 == 0,
                jax.ShapeDtypeStruct(x.shape[:-1], bool),
                x,
                vmap_method="expand_dims",
            )

        def __hash__(self) -> int:
            return hash("Even")

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Even)

    space = nk.hilbert.Spin(0.5, 4, constraint=Even())
    return space.n_states, space.random_state(jax.random.key(0), 8)


# --- Solvers that report progress ----------------------------------------------------


@program("ott-jax: Sinkhorn with progress_fn")
def ott_sinkhorn() -> Any:
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    seen: list[Any] = []

    def progress(status: Any) -> None:
        iteration, inner, total, state = status
        seen.append((int(iteration), int(inner), int(total), state.errors.shape))

    rng = np.random.default_rng(0)
    geometry = pointcloud.PointCloud(
        jnp.asarray(rng.normal(size=(20, 2)).astype(np.float32)),
        jnp.asarray(rng.normal(size=(25, 2)).astype(np.float32)),
    )
    solver = sinkhorn.Sinkhorn(progress_fn=progress)
    compiled, problem = jax.jit(solver), linear_problem.LinearProblem(geometry)
    cost = compiled(problem).reg_ot_cost.block_until_ready()
    jax.effects_barrier()
    return Compiled((cost, list(seen)), lambda: compiled(problem).reg_ot_cost)


@program("ott-jax: geodesic geometry")
def ott_geodesic() -> Any:
    from ott.geometry import geodesic

    graph = jnp.asarray(np.eye(6, k=1) + np.eye(6, k=-1), dtype=jnp.float32)
    geometry = geodesic.Geodesic.from_graph(graph, t=1e-1, directed=False)
    return geometry.apply_kernel(jnp.ones(6))


@program("jaxopt: verbose L-BFGS")
def jaxopt_verbose() -> Any:
    import jaxopt

    solver = jaxopt.LBFGS(
        fun=lambda x: jnp.sum((x - 3.0) ** 4), maxiter=5, verbose=True
    )
    with captured() as out:
        params = solver.run(jnp.zeros(2)).params.block_until_ready()
    return params, out.getvalue()


@program("brainstate: progress bar and error checks")
def brainstate_loops() -> Any:
    import brainstate

    with captured() as out:
        total = brainstate.transform.for_loop(
            lambda i: i * 2.0,
            jnp.arange(100.0),
            pbar=brainstate.transform.ProgressBar(10),
        ).block_until_ready()

    @jax.jit
    def checked(x: Any) -> Any:
        brainstate.transform.jit_error_if(x > 3, "x is {x}", x=x)
        return x

    failed = None
    checked(jnp.float32(1)).block_until_ready()
    try:
        checked(jnp.float32(5)).block_until_ready()
        jax.effects_barrier()
    except Exception as error:
        failed = type(error).__name__
    return total, "100" in out.getvalue(), failed


# --- JAX's own -----------------------------------------------------------------------


@program("JAX: Pallas in the TPU interpret mode")
def pallas_interpret() -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * 2 + pl.program_id(0)

    f = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((16, 128), jnp.float32),
        grid=(2,),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
        interpret=pltpu.InterpretParams(),
    )
    x = jnp.arange(16 * 128, dtype=jnp.float32).reshape(16, 128)
    compiled = jax.jit(f)
    return Compiled(compiled(x), lambda: compiled(x))


@program("JAX: debug.print inside a Pallas kernel")
def pallas_print() -> Any:
    from jax.experimental import pallas as pl

    def kernel(x_ref: Any, o_ref: Any) -> None:
        jax.debug.print("first is {}", x_ref[0])
        o_ref[...] = x_ref[...] + 1

    f = pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((8,), jnp.float32), interpret=True
    )
    with captured() as out:
        y = jax.jit(f)(jnp.arange(8.0)).block_until_ready()
    return y, out.getvalue()


@program("JAX: checkify with run-time errors")
def checkify_errors() -> Any:
    from jax._src import config
    from jax.experimental import checkify

    seen = []
    with config.xla_runtime_errors(True):

        @jax.jit
        def f(x: Any) -> Any:
            checkify.check(x > 0, "x is {x}", x=x)
            return jnp.log(x)

        seen.append(f(jnp.float32(2)))
        try:
            f(jnp.float32(-2)).block_until_ready()
            jax.effects_barrier()
        except Exception as error:
            seen.append([type(error).__name__, "x is -2" in str(error)])
    return seen


warnings.filterwarnings("ignore")

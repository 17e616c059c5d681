"""Host functions with derivatives: a Bessel function with jax.hessian, and a solver.

`hc.host` declares once what a Python function returns, how it batches, and what its
derivatives are; after that JAX treats it like any of its own functions.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import scipy.special

import hostcall as hc

jax.config.update("jax_enable_x64", True)

Array = jax.Array | np.ndarray  # JAX's in the program, NumPy's on the host

# --- A special function: a rule in JAX code gives every order and both modes ---------

jv = hc.host(
    scipy.special.jv,
    result=hc.results.elementwise,
    vmap_method="expand_dims",
    nondiff=0,
)


@jv.defjvp(where="jax")
def _(primals: tuple[int, Array], tangents: tuple[None, Array]) -> Array:
    n, z = primals
    slope: Array = 0.5 * (jv(n - 1, z) - jv(n + 1, z))
    return slope * tangents[1]


def energy(z: Array) -> jax.Array:
    return jnp.sum(jv(0, z) * jv(1, z) ** 2)


def check_bessel() -> None:
    z = np.array([0.5, 1.5, 4.0])
    hessian = jax.jit(jax.hessian(energy))(z)
    (a, da, dda), (b, db, ddb) = (
        [scipy.special.jvp(n, z, k) for k in range(3)] for n in (0, 1)
    )
    expected = np.diag(dda * b**2 + 4 * da * b * db + 2 * a * (db**2 + b * ddb))
    error = np.abs(hessian - expected).max()
    print(f"Hessian of Bessel functions: differs from SciPy by {error:.1e}")
    assert error < 1e-13


# --- A solver: its factorisation stays on the host for the backward pass --------------


Residuals = tuple[tuple[np.ndarray, np.ndarray], np.ndarray]


@hc.host(result=hc.results.like(1))
def solve(a: Array, b: Array) -> Array:
    return np.asarray(scipy.linalg.lu_solve(scipy.linalg.lu_factor(a), b))


def forward(a: Array, b: Array) -> tuple[Array, Residuals]:
    factors = scipy.linalg.lu_factor(a)
    x = scipy.linalg.lu_solve(factors, b)
    return x, (factors, x)  # any Python objects; the program carries only a handle


def backward(residuals: Residuals, ct: Array) -> tuple[Array, Array]:
    factors, x = residuals
    b_bar = scipy.linalg.lu_solve(factors, ct, trans=1)
    return -np.outer(b_bar, x), b_bar


solve.defvjp(forward, backward)


def check_solver() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(4, 4)) + 4 * np.eye(4), rng.normal(size=4)

    def loss(a: Array, b: Array, solver: Callable[[Array, Array], Array]) -> jax.Array:
        return jnp.sum(solver(a, b) ** 2)

    got = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(a, b, solve)
    want = jax.grad(loss, (0, 1))(a, b, jnp.linalg.solve)
    error = max(np.abs(g - w).max() for g, w in zip(got, want, strict=True))
    print(f"gradient of a solver: differs from jnp.linalg.solve by {error:.1e}")
    assert error < 1e-12


def main() -> None:
    check_bessel()
    check_solver()


if __name__ == "__main__":
    main()

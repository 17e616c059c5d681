"""A SciPy function with derivatives: Bessel functions of the first kind.

JAX can't look into a host function, so `jax.custom_jvp` declares its derivative. The
rule calls the function itself, so it gives derivatives of every order.
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax.typing import ArrayLike

import hostcall as hc

jax.config.update("jax_enable_x64", True)

Pair = tuple[jax.Array, jax.Array]


@jax.custom_jvp
def jv(order: ArrayLike, z: ArrayLike) -> jax.Array:
    order, z = jnp.broadcast_arrays(order, z)
    result = jax.ShapeDtypeStruct(z.shape, z.dtype)
    # Elementwise, so a batch is one call with one more axis.
    return hc.call(scipy.special.jv, result, order, z, vmap_method="expand_dims")


@jv.defjvp
def _(primals: Pair, tangents: Pair) -> Pair:
    (order, z), (_, z_dot) = primals, tangents
    return jv(order, z), 0.5 * (jv(order - 1, z) - jv(order + 1, z)) * z_dot


def energy(weights: jax.Array, z: jax.Array) -> jax.Array:
    """A scalar function with jv in it."""
    return jnp.sum((weights * jv(jnp.arange(3), z)) ** 2)


def main() -> None:
    z = np.linspace(0.0, 20.0, 101)
    slope = jax.jit(jax.vmap(jax.grad(jv, 1), (None, 0)))(1, z)
    error = np.abs(slope - scipy.special.jvp(1, z)).max()
    print(f"J1' at {z.size} places: differs from SciPy by {error:.1e}")
    assert error < 1e-14

    weights, x = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, 1.0, 1.5])
    hessian = jax.jit(jax.hessian(energy, 1))(weights, x)
    j, dj, ddj = (scipy.special.jvp(np.arange(3), np.array(x), n) for n in range(3))
    expected = np.diag(2 * np.array(weights) ** 2 * (dj**2 + j * ddj))
    error = np.abs(hessian - expected).max()
    print(f"a Hessian: differs from SciPy by {error:.1e}")
    assert error < 1e-13


if __name__ == "__main__":
    main()

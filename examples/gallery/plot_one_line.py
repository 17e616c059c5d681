"""
One line each: ten functions of SciPy and Numba
===============================================

NumPy's world says what its functions return: ufuncs by themselves, other functions by a
signature. hostcall reads both, so that each of ten functions needs one line in a JAX
program. Beside each stands the result that ``jax.pure_callback`` needs to be told.

Besides hostcall it needs ``pip install matplotlib numba scipy``.
"""

# %%
# The functions
# -------------

# sphinx_gallery_tags = ["plots", "simulator"]

from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numba
import numpy as np
import scipy.linalg
import scipy.special

import hostcall as hc

# %%
# **Ufuncs** need nothing. They broadcast, and a batch of ``vmap`` reaches them whole.


@numba.vectorize(["float32(float32)", "float64(float64)"])
def sawtooth(x: float) -> float:
    return x - np.floor(x)


bessel = hc.host(scipy.special.jv)
lambert = hc.host(scipy.special.wrightomega)
elliptic = hc.host(scipy.special.ellipj)
split = hc.host(np.frexp)
tooth = hc.host(sawtooth)

# %%
# **Signatures**, as in ``numpy.vectorize``, say which axes one item has. Axes in front
# of those are more items: the functions below never see them.

invert = hc.host(scipy.linalg.inv, result="(n,n)->(n,n)")
solve = hc.host(scipy.linalg.solve_toeplitz, result="(n),(n)->(n)")
spectrum = hc.host(scipy.linalg.eigvalsh, result="(n,n)->(n)")
largest = hc.host(lambda x: np.sort(x)[-2:], result="(n)->(k)", sizes={"k": 2})
double = hc.host(
    lambda x: np.repeat(x, 2), result="(n)->(m)", sizes={"m": lambda n: 2 * n}
)

# %%
# What pure_callback needs
# ------------------------
# The shape and dtype of each result, for each call. Here is one of them, for an order
# and a series. It is right for float32 alone, and a wrong shape is an error at run
# time. The order needs an axis: a batch of numbers would not line up with the series.


def bessel_by_hand(n: jax.Array, x: jax.Array) -> jax.Array:
    found: jax.Array = jax.pure_callback(
        lambda n, x: scipy.special.jv(n, x).astype(np.float32),
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        n[None],
        x,
        vmap_method="expand_dims",
    )
    return found


# %%
# One program with all of them
# ----------------------------

x = jnp.linspace(0.1, 12.0, 200)
orders = jnp.arange(4)
matrices = jnp.eye(3) * 2 + jnp.linspace(0, 1, 5)[:, None, None]


@jax.jit
def program(x: jax.Array, orders: jax.Array, matrices: jax.Array) -> dict[str, Any]:
    return {
        "jv": jax.vmap(bessel, (0, None))(orders, x),
        "wrightomega": lambert(x),
        "ellipj": elliptic(x, 0.8),
        "frexp": split(x),
        "sawtooth": tooth(x),
        "inv": invert(matrices),
        "solve_toeplitz": solve(jnp.array([2.0, 1.0, 0.0]), jnp.ones((4, 3))),
        "eigvalsh": spectrum(matrices),
        "largest two": largest(x.reshape(50, 4)),
        "doubled": double(x),
    }


got = program(x, orders, matrices)
print(f"{'function':15} {'shapes':32} dtypes")
for name, value in sorted(got.items()):
    leaves = jax.tree.leaves(value)
    shapes = ", ".join(str(leaf.shape) for leaf in leaves)
    dtypes = ", ".join(sorted({str(leaf.dtype) for leaf in leaves}))
    print(f"{name:15} {shapes:32} {dtypes}")

# %%
# The pictures
# ------------

figure, (left, middle, right) = plt.subplots(1, 3, figsize=(10, 3), layout="tight")
left.plot(x, got["jv"].T, label=[f"$J_{n}$" for n in range(len(orders))])
left.set(title="scipy.special.jv", xlabel="x")
left.legend()
for values, label in zip(got["ellipj"][:3], ("sn", "cn", "dn"), strict=True):
    middle.plot(x, values, label=label)
middle.set(title="scipy.special.ellipj, m = 0.8", xlabel="x")
middle.legend()
right.plot(x, got["sawtooth"])
right.set(title="a ufunc of Numba", xlabel="x")
plt.show()

# %%
# They agree with NumPy
# ---------------------
# A float32 array goes in, and a float32 array comes out, as in JAX.

rows = np.asarray(orders)[:, None]
wanted = scipy.special.jv(rows, np.asarray(x)).astype(np.float32)
assert got["jv"].dtype == jnp.float32
assert np.array_equal(got["jv"], wanted)
assert np.allclose(jax.vmap(bessel_by_hand, (0, None))(orders, x), wanted)
assert np.allclose(got["inv"], np.linalg.inv(matrices), atol=1e-5)
assert got["solve_toeplitz"].shape == (4, 3)
assert got["doubled"].shape == (2 * len(x),)

"""Which functions of JAX are right on the driver of this folder: `make test-gpu-functions`.

Each is compiled for the GPU, whose kernels the driver runs, and compared with XLA's results
on the CPU: numbers of integers and truths exactly, others within the last digits. Writes the
table of README.md. Programs run in processes of their own, since some libraries that are not
there end the process.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "build" / "gpu-functions.jsonl"
DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "int32",
    "uint8",
    "int64",
    "bool",
)
DTYPES += ("complex64",)
SIZES = (0, 1, 33, 1025)
# Not functions of arrays, or of no single result: files, types, printing, settings.
_LEFT_OUT = re.compile(
    r"save|load|from|print|dtype|type|shape|repr|string|iscomplexobj|isrealobj|isscalar"
    r"|issubdtype|get_|set_|array_|empty|einsum_path|vectorize|frompyfunc|mask_indices"
    r"|infeed|outfeed|rng|axis_index|p(?:sum|max|min|mean|broadcast|shuffle|swapaxes)"
    r"|all_gather|all_to_all|ragged|create_token|after_all|optimization_barrier|composite"
    r"|linalg|conv|fft"
)


def _modules() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    return {
        "jax.numpy": jnp,
        "jax.lax": jax.lax,
        "jax.nn": jax.nn,
        "jax.scipy.special": jax.scipy.special,
    }


def functions() -> Iterator[tuple[str, str, Callable[..., Any], int]]:
    """The module, name, function, and number of arrays of each function."""
    import numpy as np

    for module, contents in _modules().items():
        for name in sorted(dir(contents)):
            function = getattr(contents, name)
            if (
                name.startswith("_")
                or inspect.isclass(function)
                or not callable(function)
            ):
                continue
            if _LEFT_OUT.search(name) or name.endswith("_p"):
                continue
            for count in (1, 2, 3):
                if _works(function, count, np.float32) or _works(
                    function, count, np.int32
                ):
                    yield module, name, function, count
                    break
    for name, function in _random().items():
        yield "jax.random", name, function, 0


def _works(function: Callable[..., Any], count: int, dtype: Any) -> bool:
    import jax

    x = jax.ShapeDtypeStruct((3,), dtype)
    try:
        out = jax.eval_shape(lambda *xs: function(*xs), *[x] * count)
    except Exception:
        return False
    leaves = jax.tree.leaves(out)
    return bool(leaves) and all(hasattr(leaf, "dtype") for leaf in leaves)


def _random() -> dict[str, Callable[..., Any]]:
    """Functions of a key and the number of values."""
    from jax import random as r

    return {
        "bits": lambda k, n: r.bits(k, (n,)),
        "uniform": lambda k, n: r.uniform(k, (n,)),
        "normal": lambda k, n: r.normal(k, (n,)),
        "randint": lambda k, n: r.randint(k, (n,), -5, 1000),
        "bernoulli": lambda k, n: r.bernoulli(k, 0.3, (n,)),
        "permutation": lambda k, n: r.permutation(k, n),
        "choice": lambda k, n: r.choice(k, 7, (n,)),
        "categorical": lambda k, n: r.categorical(k, r.normal(k, (5,)), shape=(n,)),
        "gamma": lambda k, n: r.gamma(k, 2.5, (n,)),
        "beta": lambda k, n: r.beta(k, 2.0, 3.0, (n,)),
        "poisson": lambda k, n: r.poisson(k, 4.0, (n,)),
        "binomial": lambda k, n: r.binomial(k, 9.0, 0.4, (n,)),
        "exponential": lambda k, n: r.exponential(k, (n,)),
        "gumbel": lambda k, n: r.gumbel(k, (n,)),
        "laplace": lambda k, n: r.laplace(k, (n,)),
        "logistic": lambda k, n: r.logistic(k, (n,)),
        "truncated_normal": lambda k, n: r.truncated_normal(k, -1.0, 2.0, (n,)),
        "dirichlet": lambda k, n: r.dirichlet(k, r.uniform(k, (3,)) + 1, (n,)),
        "cauchy": lambda k, n: r.cauchy(k, (n,)),
        "pareto": lambda k, n: r.pareto(k, 2.0, (n,)),
        "rademacher": lambda k, n: r.rademacher(k, (n,)),
        "geometric": lambda k, n: r.geometric(k, 0.3, (n,)),
        "triangular": lambda k, n: r.triangular(k, 0.0, 0.4, 1.0, (n,)),
        "weibull_min": lambda k, n: r.weibull_min(k, 1.0, 2.0, (n,)),
        "split": lambda k, n: r.key_data(r.split(k, n)),
        "fold_in": lambda k, n: r.key_data(r.fold_in(k, n)),
    }


def _values(dtype: str, size: int, number: int) -> Any:
    import jax.numpy as jnp
    import numpy as np

    random = np.random.RandomState(size + 7 * number)
    if dtype == "bool":
        return random.rand(size) < 0.5
    if dtype == "complex64":
        parts = random.randn(2, size)
        return (parts[0] + 1j * parts[1]).astype(np.complex64)
    if dtype.startswith(("int", "uint")):
        return random.randint(0, 100, size).astype(dtype)
    # Between 0 and 1 most functions have a value; some are only right elsewhere.
    values = random.rand(size) + (random.rand(size) < 0.3) * random.randn(size) * 3
    return values.astype(jnp.dtype(dtype))


def _differs(got: Any, want: Any) -> str | None:
    import jax.numpy as jnp
    import numpy as np

    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype}{got.shape} instead of {want.dtype}{want.shape}"
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        equal = np.array_equal(got, want)
        return None if equal else f"{int((got != want).sum())} of {want.size} differ"
    eps = float(jnp.finfo(want.dtype).eps)
    wide = (
        np.complex128 if jnp.issubdtype(want.dtype, jnp.complexfloating) else np.float64
    )
    got, want = got.astype(wide), want.astype(wide)
    finite = np.abs(want[np.isfinite(want)])
    size = float(finite.max()) if finite.size else 0.0
    close = np.isclose(got, want, rtol=256 * eps, atol=64 * eps * size, equal_nan=True)
    if close.all():
        return None
    where = np.flatnonzero(~close.ravel())[0]
    return f"{got.ravel()[where]} instead of {want.ravel()[where]}"


def _judge(driver: Any, function: Callable[..., Any], count: int, dtype: str) -> str:
    import jax
    import numpy as np

    cpu, gpu = jax.devices("cpu")[0], jax.devices("gpu")[0]
    if count == 0:
        operands: Any = np.array([3, 5], np.uint32)
        sizes = tuple(size for size in SIZES if size)

        def program(key: Any) -> Any:
            wrapped = jax.random.wrap_key_data(key)
            return [function(wrapped, size) for size in sizes]
    else:
        operands = [[_values(dtype, size, i) for i in range(count)] for size in SIZES]

        def program(operands: Any) -> Any:
            results = []
            for xs in operands:
                try:
                    results.append(function(*xs))
                except Exception:  # not of empty arrays, or of this dtype
                    results.append(None)
            return results

    try:
        want = jax.tree.map(np.asarray, jax.jit(program)(jax.device_put(operands, cpu)))
    except Exception as error:
        return f"no: {type(error).__name__}"
    leaves = jax.tree.leaves(want)
    if not leaves or any(not isinstance(leaf, np.ndarray) for leaf in leaves):
        return "no: no arrays"
    before = set(driver.fakeMissing().decode().splitlines())
    try:
        got = jax.tree.map(np.asarray, jax.jit(program)(jax.device_put(operands, gpu)))
    except Exception as error:
        after = set(driver.fakeMissing().decode().splitlines()) - before
        names = sorted(line.split(" ", 1)[1] for line in after)
        text = " ".join(str(error).split())
        return "not judged: " + (", ".join(names) or text[:90])
    if faults := driver.fakeTakeFaults().decode():
        return f"wrong: {faults.strip()}"
    for one, other in zip(jax.tree.leaves(got), leaves, strict=True):
        if why := _differs(one, other):
            return f"wrong: {why}"
    return "right"


def work() -> None:
    """Judges what the file of results has not, until a library ends the process."""
    sys.path.insert(0, str(FOLDER.parent))
    import fakegpus

    driver = fakegpus.start()
    import jax

    jax.config.update("jax_enable_x64", True)
    done = {tuple(json.loads(line)[:3]) for line in RESULTS.read_text().splitlines()}
    for module, name, function, count in functions():
        for dtype in DTYPES if count else ("uint32",):
            if (module, name, dtype) in done:
                continue
            with RESULTS.open("a") as file:
                ended = "not judged: the process ended"
                file.write(json.dumps([module, name, dtype, ended]) + "\n")
                file.flush()
                result = _judge(driver, function, count, dtype)
                file.write(json.dumps([module, name, dtype, result]) + "\n")
        jax.clear_caches()


def table() -> str:
    """The table, from the file of results."""
    results: dict[tuple[str, str, str], str] = {}
    for line in RESULTS.read_text().splitlines():
        module, name, dtype, result = json.loads(line)
        results[module, name, dtype] = result
    by_function: dict[str, dict[str, dict[str, str]]] = {}
    for (module, name, dtype), result in results.items():
        if not result.startswith("no:"):
            by_function.setdefault(module, {}).setdefault(name, {})[dtype] = result
    rows = [
        "| | functions | programs | right | not judged | wrong |",
        "|---|---|---|---|---|---|",
    ]
    not_right = []
    for module, names in by_function.items():
        all_results = [
            result for dtypes in names.values() for result in dtypes.values()
        ]
        counts = [
            sum(r.startswith(k) for r in all_results) for k in ("right", "not", "wrong")
        ]
        cells = [f"`{module}`", len(names), len(all_results), *counts]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
        for name, dtypes in names.items():
            bad: dict[str, list[str]] = {}
            for dtype, result in dtypes.items():
                if result != "right":
                    bad.setdefault(result.split(" instead")[0][:80], []).append(dtype)
            for result, of in bad.items():
                not_right.append(f"- `{module}.{name}` ({', '.join(of)}): {result}")
    return "\n".join([*rows, "", "What is not right:", "", *not_right])


def main() -> None:
    if sys.argv[1:] == ["--work"]:
        return work()
    RESULTS.parent.mkdir(exist_ok=True)
    if "--continue" not in sys.argv:
        RESULTS.write_text("")
    for _ in range(200):  # a process that ends leaves its function as not judged
        ended = subprocess.run([sys.executable, __file__, "--work"], env=os.environ)
        if ended.returncode == 0:
            break
    readme = FOLDER / "README.md"
    begin, end = "<!-- functions -->\n", "<!-- end of functions -->"
    before, rest = readme.read_text().split(begin)
    readme.write_text(
        before + begin + "\n" + table() + "\n\n" + end + rest.split(end)[1]
    )


if __name__ == "__main__":
    main()

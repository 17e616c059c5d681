"""hc.bridge.torch: torch code in JAX programs, compared with torch and JAX."""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import threading
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from limits import holds_in_time

import hostcall as hc

torch = pytest.importorskip("torch")
pytestmark = [
    # A warning of torch's own, when torch.func.jvp loads its decompositions.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]

bridge = hc.bridge.torch
X = np.float32([0.3, 0.6, 0.9, 1.2])
F32 = jax.ShapeDtypeStruct((), np.float32)
MODES = {"eager": lambda f: f, "jit": jax.jit}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
# Ways to find derivatives: a graph, JAX code over other functions, and batches.
WAYS = {
    "graph": {"derivatives": 1},
    "code": {"derivatives": 2},
    "torch vmap": {"derivatives": 1, "vmap_method": "torch"},
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def close(got, want, tol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, tol, tol), got, want)


def wave(x):
    return x * torch.sin(x)


def wave_jax(x):
    return x * jnp.sin(x)


def mix(x, y):
    """Two arguments, two results in a dict, one of them integers."""
    return {"a": torch.tanh(x * y), "b": ((x**2).sum() * y.sum(), (x > 0.5).int())}


def mix_jax(x, y):
    flags = (x > 0.5).astype(jnp.int32)
    return {"a": jnp.tanh(x * y), "b": ((x**2).sum() * y.sum(), flags)}


# --- Values --------------------------------------------------------------------------


@modes
def test_values_in_trees_are_those_of_torch(mode):
    close(mode(bridge(mix))(X, 2 * X), mix_jax(X, 2 * X))
    f = bridge(lambda tree, how: {how: getattr(torch, how)(tree["x"])})
    assert list(mode(lambda x: f({"x": x}, "sin"))(X)) == ["sin"]


def test_dtypes():
    names = (
        "float32 float16 bfloat16 int8 int32 uint8 uint16 bool complex64 float8_e5m2"
    )
    f = jax.jit(bridge(lambda t: (t, t[1:].clone())))
    for name in names.split():
        x = jnp.arange(4).astype(name)
        for one in f(x):
            assert one.dtype == x.dtype
            assert (one == x[4 - one.size :]).all()


def test_64_bits(x64):
    for dtype in (np.float64, np.int64, np.complex128):
        assert bridge(lambda t: t * 2)(np.ones(2, dtype)).dtype == dtype


def test_64_bit_results_without_x64():
    f = bridge(lambda t: (t.double() ** 2, t.argmax()))
    value, at = jax.jit(f)(X)
    assert (value.dtype, at.dtype) == (np.float32, np.int32)
    close(jax.grad(lambda x: f(x)[0].sum())(X), 2 * X)
    twice = bridge(lambda t: (t.double() ** 2).sum(), derivatives=2)
    close(jax.hessian(twice)(X), 2 * np.eye(4))


RESULTS = {
    "the argument": lambda t: t,
    "a view": lambda t: t[::2],
    "transposed": lambda t: t.reshape(2, 2).T,
    "expanded": lambda t: t[:1].expand(3),
    "requires grad": lambda t: t * torch.ones(1, requires_grad=True),
    "conjugated": lambda t: (t * 1j).conj(),
    "negated": lambda t: (t * 1j).conj().imag,
    "none in it": lambda t: (t, None),
    "a number": lambda t: (t.sum(), 3.0, 2, True),
    "no dimension": lambda t: t[0],
    "empty": lambda t: t[:0],
}


def test_results():
    def numpy(v):
        if isinstance(v, torch.Tensor):
            return v.detach().resolve_conj().resolve_neg().numpy()
        return v

    for fn in RESULTS.values():
        want = jax.tree.map(numpy, fn(torch.tensor(X)))
        close(jax.jit(bridge(fn))(X), want)


@modes
def test_empty_and_scalar_arguments(mode):
    f = bridge(lambda t: t * t)
    empty = np.zeros((0, 3), np.float32)
    assert mode(f)(empty).shape == (0, 3)
    assert mode(jax.grad(lambda e: f(e).sum()))(empty).shape == (0, 3)
    assert mode(jax.grad(f))(3.0) == 6
    assert mode(jax.vmap(bridge(wave, vmap_method="torch")))(empty).shape == (0, 3)


def test_arguments_are_the_programs_memory():
    seen = []

    def fn(t):
        if type(t) is torch.Tensor:  # a fake tensor has no memory
            seen.append(t.data_ptr())
        return t.sum()

    f, x = bridge(fn), jnp.asarray(X)
    f(x)
    seen.clear()
    jax.jit(f)(x)
    assert seen == [x.unsafe_buffer_pointer()]


# --- Writing, keeping ----------------------------------------------------------------


def by_view(t):
    t.view(2, 2)[0] = 9
    return t.sum()


def by_numpy(t):
    t.numpy()[:2] = 9
    return t.sum()


def by_data(t):
    t.data[:2].fill_(9)
    return t.sum()


def by_out(t):
    torch.add(t, 0, out=t)
    t[:2] = 9
    return t.sum()


def in_inference_mode(t):
    with torch.inference_mode():
        t[:2] = 9
    return t.sum()


WRITERS = [by_view, by_numpy, by_data, by_out, in_inference_mode]


@pytest.mark.parametrize("result", ["infer", jax.ShapeDtypeStruct((), np.float32)])
def test_a_function_that_writes_gets_copies(result):
    x = jnp.asarray(X)
    for fn in WRITERS:
        f = jax.jit(bridge(fn, result=result))
        assert np.isclose(f(x), 18 + X[2:].sum())
        assert np.isclose(f(x), 18 + X[2:].sum())
        assert (x == X).all()


@ways
def test_derivatives_of_a_function_that_writes(way):
    x, f = jnp.asarray(X), bridge(by_view, **way)
    want = np.float32([0, 0, 1, 1])
    close(jax.grad(f)(x), want)
    close(jax.jvp(f, (x,), (x,))[1], X[2:].sum())
    close(jax.vmap(f)(jnp.stack([x, x])), np.full(2, 18 + X[2:].sum(), np.float32))
    assert (x == X).all()


def test_a_write_that_was_not_seen_is_an_error():
    writes = []
    f = jax.jit(bridge(lambda t: t.add_(1) if writes else t + 1, name="moody"))
    f(jnp.asarray(X))
    writes.append(True)
    text = "`moody` wrote to its array argument 0 in place.*write x = x.clone()"
    with pytest.raises(hc.errors.ResultError, match=text), hc.reraise():
        jax.block_until_ready(f(jnp.asarray(X)))


def test_a_kept_tensor():
    kept = []
    keep = lambda t: (kept.append(t), t + 1)[1]
    with pytest.raises(hc.errors.EscapeError, match="kept a view of args"):
        bridge(keep)(X)
    close(bridge(keep, lend=False)(X), X + 1)
    kept.clear()


# --- Derivatives ---------------------------------------------------------------------


@ways
def test_gradients_are_those_of_jax(way):
    def loss(f):
        def of(x, y):
            out = f(x, y)
            return out["a"].sum() * out["b"][0]

        return of

    f, args = bridge(mix, **way), (X, X[::-1].copy())
    for derivative in (
        lambda g: jax.value_and_grad(g, (0, 1)),
        lambda g: lambda x, y: jax.jvp(g, (x, y), (y, x)),
        lambda g: lambda x, y: jax.jvp(lambda x: g(x, y), (x,), (x,)),
        lambda g: jax.jacfwd(g),
        lambda g: jax.grad(jax.checkpoint(g)),
    ):
        got = jax.jit(derivative(loss(f)))(*args)
        close(got, derivative(loss(mix_jax))(*args), 1e-4)


@ways
def test_batches_of_derivatives_and_derivatives_of_batches(way):
    f = bridge(wave, **way)
    x = np.stack([X, 2 * X])
    of_rows = lambda f: lambda x: jax.vmap(jax.grad(lambda v: f(v).sum()))(x)
    of_batch = lambda f: jax.grad(lambda x: (jax.vmap(f)(x) ** 2).sum())
    both = lambda f: lambda x: jax.vmap(jax.jacfwd(f))(x)
    nested = lambda f: jax.grad(lambda x: jax.vmap(jax.vmap(f))(x).sum())
    for of in (of_rows, of_batch, both, nested, lambda f: jax.vmap(jax.jacrev(f))):
        close(jax.jit(of(f))(x), of(wave_jax)(x))


def test_a_batch_by_torch_is_one_call():
    calls = []
    f = bridge(lambda t, k: (calls.append(1), wave(t) * k)[1], vmap_method="torch")
    x = np.stack([X] * 5)
    for program in (
        jax.vmap(f, (0, None)),
        jax.vmap(jax.grad(lambda v, k: f(v, k).sum()), (0, None)),
        jax.vmap(lambda v, k: jax.jvp(lambda v: f(v, k), (v,), (v,)), (0, None)),
    ):
        program = jax.jit(program)
        program(x, 2.0)
        calls.clear()
        jax.block_until_ready(program(x, 2.0))
        assert len(calls) == 1


@pytest.mark.parametrize("vmap_method", [None, "torch"])
def test_order_3(x64, vmap_method):
    f = bridge(
        lambda x, y: (x * torch.sin(x * y)).sum() * y,
        derivatives=3,
        vmap_method=vmap_method,
    )
    x, y = np.array([0.3, 0.7]), np.array(0.5)
    if vmap_method is None:
        check_grads(f, (x, y), 2)
    third = lambda f: jax.jacrev(jax.jacfwd(jax.jacrev(f)))
    want = lambda x, y: (x * jnp.sin(x * y)).sum() * y
    close(jax.jit(third(f))(x, y), third(want)(x, y))


def test_order_2_of_batches(x64):
    f = bridge(lambda x, y: (x**3 * y).sum(), derivatives=2, vmap_method="torch")
    x, y = np.arange(1.0, 7).reshape(3, 2), 2.0
    got = jax.jit(jax.vmap(jax.hessian(f), (0, None)))(x, y)
    close(got, np.stack([np.diag(6 * row * y) for row in x]))
    check_grads(lambda x: jax.vmap(f, (0, None))(x, y), (x,), 2, modes=["rev"])


COMPLEX = {
    "holomorphic": (lambda t: torch.exp(1j * t) * t, lambda t: jnp.exp(1j * t) * t),
    "conjugate": (lambda t: t.conj() * t * 2j, lambda t: t.conj() * t * 2j),
    "to real": (lambda t: (t * t.conj()).real, lambda t: (t * t.conj()).real),
}


@ways
@pytest.mark.parametrize("pair", COMPLEX.values(), ids=COMPLEX)
def test_complex_derivatives_are_in_jaxs_convention(way, pair):
    theirs, want = pair
    f, z = bridge(theirs, **way), np.complex64([1 + 2j, 0.5 - 1j])
    ct = want(z) * (2 if jnp.isrealobj(want(z)) else 2 + 1j)
    close(jax.vjp(f, z)[1](ct), jax.vjp(want, z)[1](ct), 1e-4)
    close(jax.jvp(f, (z,), (z * 1j,)), jax.jvp(want, (z,), (z * 1j,)), 1e-4)


def test_from_real_to_complex():
    z = np.complex64([1 + 2j, 3 - 1j, 0, 1])
    pull = lambda f: jax.vjp(f, X)[1](z)
    close(pull(bridge(lambda t: t * 1j)), pull(lambda t: t * 1j))


CONSTANT = {
    "detached": lambda t: wave(t.detach()).sum(),
    "nothing of it": lambda t: torch.ones(()),
    "a number": lambda t: 2.0,
}


@ways
def test_results_without_a_derivative(way):
    for fn in CONSTANT.values():
        f = bridge(fn, **way)
        assert not jax.grad(lambda x, y: f(x) * y)(X, 2.0).any()
        assert jax.jvp(f, (X,), (X,))[1] == 0


@ways
def test_an_integer_tensor_that_is_declared_as_a_float(way):
    f = bridge(lambda t: (t.sum(), (t > 1).sum()), result=(F32, F32), **way)
    total = lambda x: sum(f(x))
    close(jax.grad(total)(X), np.ones_like(X))
    close(jax.jvp(total, (X,), (X,))[1], X.sum())
    assert not jax.grad(lambda x: f(x)[1])(X).any()


def test_no_grad_is_for_reverse_mode():
    """As in torch, forward mode goes through it, but not through detach()."""
    fn = torch.no_grad()(lambda t: (t**2).sum())
    f = bridge(fn)
    assert not jax.grad(lambda x, y: f(x) * y)(X, 2.0).any()
    _, dot = torch.func.jvp(fn, (torch.tensor(X),), (torch.tensor(X),))
    close(jax.jvp(f, (X,), (X,))[1], dot.numpy())


@ways
def test_unused_and_integer_arguments(way):
    f = bridge(lambda t, unused, n: (t**2 * n).sum(), **way)
    n = np.int32(3)
    got = jax.jit(jax.grad(f, (0, 1)))(X, X, n)
    close(got, (6 * X, 0 * X))


class Seen:
    """A torch function that notes its tensors, which a graph would keep."""

    def __init__(self, fn):
        self.fn, self.tensors = fn, []

    def __call__(self, *tensors):
        self.tensors += map(weakref.ref, tensors)
        return self.fn(*tensors)

    def are_gone(self):
        return not any(tensor() is not None for tensor in self.tensors)


def test_scan_of_gradients():
    seen = Seen(lambda a, c: (torch.tanh(a * c), a.sum()))
    f = bridge(seen)
    f_jax = lambda a, c: (jnp.tanh(a * c), a.sum())

    def through(f):
        def loss(a):
            return jax.lax.scan(lambda c, _: f(c, a), a, None, length=4)[1].sum()

        return loss

    def descent(f):
        grad = jax.grad(lambda z, a: f(z, a)[0].sum())
        step = lambda c, _: (c - 0.1 * grad(c, c), None)
        return lambda a: jax.lax.scan(step, a, None, length=3)[0]

    close(jax.jit(jax.grad(through(f)))(X), jax.grad(through(f_jax))(X))
    rows = np.stack([X, -X])
    want = jax.vmap(jax.grad(through(f_jax)))(rows)
    close(jax.vmap(jax.grad(through(f)))(rows), want)
    close(jax.jit(descent(f))(X), descent(f_jax)(X))
    assert seen.tensors
    assert holds_in_time(seen.are_gone)


def test_a_pullback_may_be_called_again():
    seen = Seen(wave)
    _, pull = jax.vjp(bridge(seen), X)
    assert (pull(X)[0] == pull(X)[0]).all()
    assert not seen.are_gone()
    del pull
    assert holds_in_time(seen.are_gone)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_threads_grad_mode_does_not_matter(mode):
    with mode():
        close(bridge(wave)(X), wave_jax(X))
        close(jax.grad(lambda x: bridge(wave)(x).sum())(X), np.sin(X) + X * np.cos(X))
        close(
            jax.hessian(bridge(lambda t: (t**2).sum(), derivatives=2))(X), 2 * np.eye(4)
        )


@pytest.mark.parametrize("derivative", [False, True], ids=["value", "gradient"])
def test_threads_take_over_torchs_number_of_threads(derivative):
    maps = Path("/proc/self/maps")
    libraries = maps.read_text().split() if maps.exists() else []
    found = [name for name in libraries if re.search(r"/lib(gomp|iomp5|omp)[-.]", name)]
    if not found:
        pytest.skip("torch has another OpenMP")
    teams = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            teams.append(ctypes.CDLL(found[0]).omp_get_max_threads())
            return 2 * x

        @staticmethod
        def backward(ctx, ct):
            teams.append(ctypes.CDLL(found[0]).omp_get_max_threads())
            return 2 * ct

    f = bridge(Double.apply, result=hc.results.like(0))
    if derivative:
        f = jax.grad(f)
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() + 1)  # no thread has it by itself
    try:
        thread = threading.Thread(target=f, args=(jnp.float32(3),))
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert set(teams) == {os.cpu_count() + 1}
    assert len(teams) == 1 + derivative


def test_threads_at_once():
    module = bridge(torch.nn.Linear(4, 2))
    params, f = module.parameters(), bridge(wave)
    programs = [
        jax.jit(lambda x: jax.jvp(f, (x,), (x,))[1]),
        jax.jit(jax.grad(lambda x: f(x).sum())),
        jax.jit(lambda x: module(params, x)),
    ]
    want, wrong = [np.asarray(p(X)) for p in programs], []

    def work():
        try:
            for _ in range(20):
                for p, w in zip(programs, want):
                    close(p(X), w)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- Modules -------------------------------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3, bias=False)
        self.b = torch.nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x, k=1.0):
        return self.b(torch.tanh(self.a(x))) * k


MODULES = {
    "layers": lambda: torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)
    ),
    "batch norm": lambda: torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)
    ),
    "rnn": lambda: torch.nn.LSTM(3, 2),
    "tied": Tied,
}


@pytest.mark.parametrize("way", [WAYS["graph"], WAYS["code"]], ids=["graph", "code"])
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_gradients_in_parameters_are_torchs_own(way, make):
    torch.manual_seed(0)
    module = make()
    before = {k: v.clone() for k, v in module.named_buffers()}
    f = bridge(module, **way)
    params, buffers = f.parameters(), f.buffers()
    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)

    def loss(params, rest):
        return (jax.tree.leaves(f({**params, **rest}, x))[0] ** 2).sum()

    for rest in ({}, buffers):
        value, grads = jax.jit(jax.value_and_grad(loss))(params, rest)
        for name, held in module.named_buffers():
            assert torch.equal(held, before[name])  # not written to
        half = jax.tree.map(lambda v: v / 2, params)
        assert loss(half, rest) != value
        jax.block_until_ready(jax.jit(loss)(half, rest))
    out = module(torch.tensor(x))
    out = out[0] if isinstance(out, tuple) else out
    (out**2).sum().backward()
    want = {k: v.grad.numpy() for k, v in module.named_parameters()}
    close(grads, want, 1e-4)


def test_a_module_trains_by_a_jitted_loop():
    torch.manual_seed(0)
    f = bridge(torch.nn.Linear(2, 1))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 2)).astype(np.float32)
    y = x @ np.float32([[2.0], [-1.0]]) + 0.5

    @jax.jit
    def train(params):
        def step(params, _):
            grads = jax.grad(lambda p: ((f(p, x) - y) ** 2).mean())(params)
            return jax.tree.map(lambda p, g: p - 0.2 * g, params, grads), None

        return jax.lax.scan(step, params, length=100)[0]

    params = train(f.parameters())
    close(params["weight"], np.float32([[2.0, -1.0]]), 1e-3)
    close(params["bias"], np.float32([0.5]), 1e-3)


def test_an_ensemble_of_modules():
    f = bridge(Tied(), vmap_method="torch", name="tied")
    params = jax.tree.map(lambda v: jnp.stack([v, 2 * v]), f.parameters())
    x = np.eye(3, dtype=np.float32)
    got = jax.vmap(f, (0, None))(params, x)
    row = lambda i: jax.tree.map(lambda v: v[i], params)
    close(got, np.stack([f(row(i), x) for i in range(2)]))
    close(f(f.parameters(), x, k=2.0), 2 * f({}, x))


def test_a_module_that_is_called_wrong():
    f = bridge(torch.nn.BatchNorm1d(4))
    x = np.ones((2, 4), np.float32)
    for args, text in (
        ((x,), r"should be a dict of its parameters .*, got ndarray. Write f\(f.param"),
        ((), "got NoneType"),
        (({"no": x}, x), r"parameters and buffers \['weight', .*, got \['no'\]"),
    ):
        with pytest.raises(hc.errors.SpecError, match=text):
            f(*args)
    loss = lambda b: f({**f.parameters(), **b}, x).sum()
    floats = {k: v for k, v in f.buffers().items() if v.dtype == np.float32}
    with (
        pytest.raises(hc.errors.DerivativeError, match="one of its buffers"),
        hc.reraise(),
    ):
        jax.grad(loss)(floats)


def test_a_module_that_cannot_be_copied():
    module = torch.nn.Linear(2, 2)
    module.lock = threading.Lock()
    with pytest.raises(
        hc.errors.SpecError, match="`Linear` can't be copied.*functional_call"
    ):
        bridge(module)


# --- Shapes and error texts ----------------------------------------------------------


def test_infer_computes_nothing():
    seen = []

    def fn(t):
        seen.append(type(t).__name__)
        return t[: t.shape[0] // 2] * 2

    jax.eval_shape(bridge(fn), X)
    assert seen == ["FakeTensor"]


def test_where_values_are_asked_for():
    close(jax.jit(bridge(lambda t: t if t.sum().item() < 0 else 2 * t))(X), 2 * X)
    close(jax.jit(bridge(lambda t: t[t > 0.5].sum()))(X), X[1:].sum())
    close(jax.jit(bridge(lambda t: torch.from_numpy(np.sin(t.numpy()))))(X), np.sin(X))


@pytest.mark.parametrize(
    "fn", [lambda t: t[t > 1], lambda t: torch.from_numpy(t.numpy()[t.numpy() > 1])]
)
def test_shapes_that_depend_on_values(fn):
    with pytest.raises(
        hc.errors.SpecError, match="seem to depend on values.*a mask, or pad"
    ):
        jax.jit(bridge(fn))(X)


WRONG = {
    "no tensor": (lambda t: (t, "no"), {}, "builtins.str, which is neither a tensor"),
    "a named tuple": (lambda t: t.max(0), {}, r"return_types.max.*tuple\(x.max\(0\)\)"),
    "fails": (lambda t: t @ torch.ones(3), {}, "failed on zeros: RuntimeError"),
    "derivatives=": (
        wave,
        {"derivatives": -1},
        "order of derivatives, 0 for none, got -1",
    ),
    "lend=": (wave, {"lend": "out"}, "lend= of `wave` should be True or False"),
    "result=": (wave, {"result": "guess"}, "A text is 'infer', or a signature"),
    "vmap_method=": (wave, {"vmap_method": "x"}, "should be one of 'sequential'"),
    "no function": (3, {}, r"Write hc.bridge.torch\(fn\)"),
}


@pytest.mark.parametrize(("fn", "options", "text"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(fn, options, text):
    with pytest.raises(hc.errors.SpecError, match=text):
        bridge(fn, **options)(X)


def test_arguments_that_torch_has_not():
    for value, text in (
        (torch.ones(2), r"called with a torch.Tensor. .* pass jnp.asarray\(tensor"),
        (jax.random.key(0), "a jax.random key.*Draw the numbers in JAX"),
        (jnp.ones(2, jnp.int4), r"torch has no tensors of int4.*x.astype\('int8'\)"),
    ):
        with pytest.raises(hc.errors.SpecError, match=text):
            bridge(wave)(value)


def test_results_against_their_spec():
    like = jax.ShapeDtypeStruct((4,), np.float32)
    close(jax.jit(bridge(wave, result=like))(X), wave_jax(X))
    close(
        jax.grad(lambda x: bridge(wave, result=like)(x).sum())(X),
        np.sin(X) + X * np.cos(X),
    )
    for fn, spec, text in (
        (lambda t: t[:2], like, r"should be float32\[4\], got float32\[2\]"),
        (
            wave,
            jax.ShapeDtypeStruct((4,), np.int32),
            "hostcall does not convert float to integer",
        ),
        (lambda t: (t, t), like, "structure that differs|not an array|should be"),
    ):
        with pytest.raises(hc.errors.ResultError, match=text), hc.reraise():
            jax.block_until_ready(bridge(fn, result=spec)(X))


def test_derivatives_that_are_not_there():
    square = lambda t: (t**2).sum()
    for order, of in (
        (0, jax.grad),
        (1, jax.hessian),
        (2, lambda f: jax.jacfwd(jax.hessian(f))),
    ):
        text = f"made with derivatives={order}. .* derivatives={order + 1}\\)"
        with pytest.raises(hc.errors.DerivativeError, match=text) as caught:
            of(bridge(square, derivatives=order))(X)
        assert "LibraryFunction" not in str(caught.value)  # an internal name
    for way in WAYS.values():
        f = bridge(lambda a, t: (a * t).sum(), nondiff=0, **way)
        close(jax.grad(f, 1)(X, X), X)
        rows = lambda a, t, f=f: jax.vmap(f)(a[None], t[None]).sum()
        for g in (f, rows):
            with pytest.raises(
                hc.errors.DerivativeError, match="argument 0, which is in nondiff="
            ):
                jax.grad(g)(X, X)


def test_an_exception_is_itself():
    class Mine(Exception): ...

    def fail(t):
        raise Mine

    f = jax.jit(bridge(fail, result=hc.results.like(0)))
    with pytest.raises(Mine), hc.reraise():
        jax.block_until_ready(f(X))


def test_a_bridged_function_is_a_host_function():
    @bridge(derivatives=2, name="twice")
    def double(t, k=2.0):
        return t * k

    assert isinstance(double, hc.typing.HostFunction)
    assert repr(double) == "<hostcall.typing.HostFunction twice with defjvp, defvjp>"
    close(double(X, k=3.0), 3 * X)
    for f in (double, bridge(wave), bridge(by_view, vmap_method="torch")):
        report = hc.testing.check(f, X)
        assert report, report


def test_pickled():
    for f in (bridge(torch.sin, derivatives=2), bridge(torch.nn.Linear(4, 4))):
        again = pickle.loads(pickle.dumps(f))
        args = (X,) if not hasattr(f, "parameters") else (f.parameters(), X)
        close(again(*args), f(*args))
        close(jax.jacrev(again)(*args), jax.jacrev(f)(*args))


def test_other_options():
    rows = np.stack([X, X])
    for options in ({"timeout": 5.0}, {"vmap_method": "parallel"}, {"lend": False}):
        f = bridge(wave, **options)
        got = jax.jit(jax.vmap(jax.grad(lambda x: f(x).sum())))(rows)
        close(got, np.stack([np.sin(X) + X * np.cos(X)] * 2))
    f = bridge(lambda a, b: (a * b).sum(-1), vmap_method="expand_dims", derivatives=2)
    close(jax.vmap(jax.grad(f), (0, None))(rows, 2 * X), 2 * rows)


@pytest.mark.parametrize("kind", ["jvp", "torch vmap", "jvp of grad"])
def test_errors_within_torch_func_are_raised_unchanged(kind):
    """The closures of a failed call must not count as keeping its lent arrays."""

    broken = False  # while shapes are found

    def fails(x):
        if broken:
            raise LookupError("its own")
        return (x * x).sum()

    f = hc.bridge.torch(fails, derivatives=2, vmap_method="torch")
    x = jnp.ones(3)
    program = {
        "jvp": lambda x: jax.jvp(f, (x,), (x,)),
        "torch vmap": lambda x: jax.vmap(f)(jnp.stack([x, x])),
        "jvp of grad": lambda x: jax.jvp(jax.grad(f), (x,), (x,)),
    }[kind]
    compiled = jax.jit(program).lower(x).compile()
    broken = True
    with pytest.raises(LookupError, match="its own"), hc.reraise():
        jax.block_until_ready(compiled(x))

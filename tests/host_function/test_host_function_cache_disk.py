"""cache= on a disk, with the real packages; executors; and the texts of mistakes."""

import functools
import os
import types
from concurrent import futures

import forked
import jax
import ml_dtypes
import numpy as np
import pytest

import hostcall as hc

X = np.array([0.5, -1.0, 0.5, 2.0], np.float32)
ran, rule_ran = [], []


def sine(x):
    ran.append(x)
    return np.sin(x)


def both(x, scale):
    """Results of several dtypes, one of them empty."""
    ran.append(x)
    return {"a": ml_dtypes.bfloat16(scale["by"]), "b": x > 0, "c": x[:0]}


def both_result(x, scale):
    empty = jax.ShapeDtypeStruct((0,), np.float32)
    flags = jax.ShapeDtypeStruct(x.shape, bool)
    return {"a": jax.ShapeDtypeStruct((), ml_dtypes.bfloat16), "b": flags, "c": empty}


def pid(x):
    return np.int32(os.getpid())


def cosine(primals, tangents):
    rule_ran.append(primals)
    return np.cos(primals[0]) * tangents[0]


def of_diskcache(folder):
    return pytest.importorskip("diskcache").Cache(folder)


def of_joblib(folder):
    return pytest.importorskip("joblib").Memory(folder, verbose=0)


@pytest.fixture(params=[of_diskcache, of_joblib])
def disk(request, tmp_path):
    """Opens the cache anew, as another process would."""
    opened = []

    def open_again():
        opened.append(request.param(tmp_path))
        return opened[-1]

    ran.clear()
    rule_ran.clear()
    yield open_again
    for each in opened:
        if hasattr(each, "close"):
            each.close()


def host(fn, cache, version=1, result=hc.results.like(0), **options):
    return hc.host(fn, result=result, cache=cache, version=version, **options)


@pytest.mark.parametrize("method", ["sequential", "parallel", "expand_dims"])
def test_another_process_finds_the_results(disk, method):
    runs = {"sequential": 3, "parallel": 3, "expand_dims": 1}[method]
    for _ in range(2):
        f = host(sine, disk(), vmap_method=method)
        f.defjvp(cosine)
        program = jax.jit(jax.vmap(lambda x, f=f: f(x)))
        np.testing.assert_array_equal(program(X), np.sin(X))
        assert len(ran) == runs
    slopes = jax.jvp(jax.vmap(f), (X,), (np.ones_like(X),))[1]
    again = jax.jvp(jax.vmap(host_again(disk, method)), (X,), (np.ones_like(X),))[1]
    np.testing.assert_array_equal(again, slopes)
    assert len(rule_ran) == runs


def host_again(disk, method):
    f = host(sine, disk(), vmap_method=method)
    f.defjvp(cosine)
    return f


def test_another_version_or_result_is_another_function(disk):
    for version, runs in [(1, 1), (2, 2), ("1", 3), (1, 3)]:
        host(sine, disk(), version)(X)
        assert len(ran) == runs
    host(sine, disk(), result=jax.ShapeDtypeStruct((4,), np.float16))(X)
    assert len(ran) == 4
    host(sine, disk(), float64=True)(X)
    assert len(ran) == 5


def test_trees_statics_and_dtypes(disk):
    for by, runs in [(1.5, 1), (2.5, 2), (1.5, 2)]:
        f = host(both, disk(), result=both_result)
        out = jax.jit(lambda x, f=f, by=by: f(x, frozen(by)))(X)
        assert (float(out["a"]), out["b"].tolist()) == (by, (X > 0).tolist())
        assert len(ran) == runs


class frozen(dict):
    def __init__(self, by):
        super().__init__(by=by)

    def __hash__(self):
        return hash(self["by"])


def test_the_file_of_a_cache_is_emptied_for_one_function(disk):
    f, other = host(sine, disk(), 1), host(sine, disk(), 2)
    for each in (f, other):
        each(X)
    if type(disk()).__module__.startswith("joblib"):
        with pytest.raises(hc.errors.SpecError, match=r"joblib.Memory can't drop the"):
            f.cache_clear()
        return
    f.cache_clear()
    for each in (f, other):
        each(X)
    assert len(ran) == 3


def test_an_entry_that_something_else_wrote():
    diskcache = types.SimpleNamespace(get=lambda key: (b"1234",), set=None)
    with pytest.raises(hc.errors.SpecError, match="an entry that is not one of its"):
        host(sine, diskcache)(X)


def test_rows_that_are_found_are_not_sent():
    """The function is decorated, so that it is sent by the name of its HostFunction."""
    with futures.ProcessPoolExecutor(1, mp_context=forked.CONTEXT) as pool:
        f = hc.host(
            pid,
            result=jax.ShapeDtypeStruct((), np.int32),
            vmap_method="parallel",
            executor=pool,
            cache="memory",
        )
        there = jax.vmap(f)(X)
        assert set(there.tolist()) & {os.getpid()} == set()
    np.testing.assert_array_equal(jax.vmap(f)(X), there)  # the pool has ended


# --- Mistakes ------------------------------------------------------------------------

DISK = types.SimpleNamespace(get=lambda key: None, set=lambda key, value: None)


class Model:
    def predict(self, x):
        return x


def captures(x):
    return lambda y: x + y


def decorated(fn):
    @functools.wraps(fn)
    def wrapper(x):
        return fn(x)

    return wrapper


def wrapped_sine(x):
    return sine(x)


WRONG = {
    "no cache": (sine, {"version": 2}, "has version= and no cache="),
    "a word": (sine, {"cache": "disk"}, r"should be 'memory', a diskcache.Cache or"),
    "a dict": (sine, {"cache": {}}, r"should be 'memory', a diskcache.Cache or"),
    "a class": (sine, {"cache": DISK.__class__}, r"should be 'memory'"),
    "effects": (sine, {"cache": "memory", "order": "ordered"}, "effects would be miss"),
    "lend": (sine, {"cache": "memory", "lend": "out"}, "Results are kept as copies"),
    "cuda": (sine, {"cache": "memory", "arrays": "cuda"}, "bytes on the host"),
    "version": (sine, {"cache": DISK, "version": 1.5}, "should be a string or an int"),
    "none": (sine, {"cache": DISK}, "outlives the process, and no version="),
    "lambda": (
        lambda x: x,
        {"cache": DISK, "version": 1},
        "define it at the top level",
    ),
    "closure": (captures(1), {"cache": DISK, "version": 1}, "define it at the top"),
    "wrapper": (
        decorated(wrapped_sine),
        {"cache": DISK, "version": 1},
        "a decorator's wrapper",
    ),
    "ufunc": (
        np.frompyfunc(sine, 1, 1),
        {"cache": DISK, "version": 1},
        "a ufunc of np.frompyfunc",
    ),
    "method": (Model().predict, {"cache": DISK, "version": 1}, "define it at the top"),
    "partial": (
        functools.partial(captures, 1),
        {"cache": DISK, "version": 1},
        r"`partial\(captures\)` may be one of several functions",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_options(mistake):
    fn, options, text = WRONG[mistake]
    with pytest.raises(hc.errors.SpecError, match=text):
        hc.host(fn, result=hc.results.like(0), **options)


def test_a_static_argument_without_a_key():
    f = hc.host(lambda x, g: g(x), result=hc.results.like(0), cache="memory")
    with pytest.raises(hc.errors.SpecError, match="One of them can't be pickled"):
        jax.jit(lambda x: f(x, lambda y: y))(X)


def test_nothing_to_clear():
    with pytest.raises(hc.errors.SpecError, match="no cache= that could be cleared"):
        hc.host(sine, result=hc.results.like(0)).cache_clear()


def test_the_limit_should_be_a_number_of_bytes():
    with pytest.raises(
        hc.errors.SpecError, match="cache_bytes= of hc.configure should be a number of"
    ):
        hc.configure(cache_bytes=0)


OPEN = {
    "for all users": (0o777, None, "all users can write to"),
    "for its group": (0o775, 12345, "the group of .* can write to it"),
    "inside one for all users": (0o755, None, "all users can write to"),
    "of another user": (0o755, None, "belongs to another user"),
}


@pytest.mark.parametrize("package", [of_diskcache, of_joblib])
@pytest.mark.parametrize("case", OPEN)
def test_a_folder_that_others_can_write_to(case, package, tmp_path, monkeypatch):
    """Their entries are pickles."""
    mode, group, text = OPEN[case]
    folder = tmp_path / "folder" / "cache"
    folder.mkdir(parents=True)
    cache = package(folder)
    if "inside" in case:
        folder.parent.chmod(0o777)
    owner = 12345 if "another user" in case else None
    if owner or group:
        if os.geteuid():
            pytest.skip("only root can give a folder to others")
        os.chown(folder, owner or -1, group or -1)
    if owner:  # root itself trusts every owner
        monkeypatch.setattr(os, "geteuid", lambda: 1)
    folder.chmod(mode)
    for path in folder.iterdir():
        path.chmod(mode)
    with pytest.raises(hc.errors.SpecError, match=text) as caught:
        host(sine, cache)
    assert caught.value.code == "hc-option"
    assert "chmod go-w" in str(caught.value)
    monkeypatch.undo()
    folder.chmod(0o700)
    folder.parent.chmod(0o1777)  # as /tmp: others can't replace what is there
    for path in folder.iterdir():
        path.chmod(0o700)
    assert host(sine, cache)(0.5) == np.sin(np.float32(0.5))


class Server:
    """What a cache of a server's may return."""

    def __init__(self, entry):
        self.entry = entry

    def get(self, key):
        return self.entry

    def set(self, key, value):
        raise AssertionError


@pytest.mark.parametrize(
    "entry", [b"1234", "text", 7, ["abcd"], (b"12345678",), ("a",)]
)
def test_an_entry_of_another_kind(entry):
    f = host(sine, Server(entry))
    with pytest.raises(
        hc.errors.SpecError, match="has an entry that is not one of its"
    ):
        f(0.5)

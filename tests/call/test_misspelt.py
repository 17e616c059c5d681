"""A misspelt option is refused by each public function, and the error names it."""

from __future__ import annotations

import inspect
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc
from hostcall.errors import WatchError

X = jnp.float32(2)


class Counter:
    def add(self, k):
        return np.float32(k)


# These pass keywords on, or take values by any name. hostcall finds the right word.
HOSTCALLS = {
    "call": (lambda: hc.call(np.cos, X, X, timout=3), "hc.host(fn, timeout=...)"),
    "tap": (lambda: hc.tap(lambda x: None, X, evry=3), "Did you mean every=?"),
    "tap_tangent": (
        lambda: hc.derivatives.tap_tangent(print, X, evry=3),
        "hc.derivatives.tap_tangent has no option evry=. Did you mean every=?",
    ),
    "tap_cotangent": (
        lambda: hc.derivatives.tap_cotangent(print, X, zzz=3),
        "has no option zzz=. Its options are those of hc.tap: always, arrays,",
    ),
    "print": (lambda: hc.print("{}", X, evry=3), "Did you mean every=?"),
    "a host function": (
        lambda: hc.host(lambda x: x, result=X)(X, wher=True),
        "got an unexpected keyword argument 'wher'",
    ),
    "a method of an object": (
        lambda: hc.Object(Counter, methods={"add": X}).add(X, wher=True),
        "Did you mean where=?",
    ),
    "configure": (lambda: hc.configure(flihgt="off"), "Did you mean flight=?"),
    "progress": (lambda: hc.progress(0, 5, evry=3), "Did you mean every=?"),
    "progress.scan": (
        lambda: hc.progress.scan(lambda c, x: (c, x), 5, descr="fit")(0, 0),
        "hc.progress has no option descr=. Did you mean desc=? If 'fit' is a value with"
        " this name, use another name",
    ),
    "progress, a bar": (lambda: hc.progress(0, 5, baar=len), "Did you mean bar=?"),
}
# JAX's functions pass keywords on to the callback, and so do the functions in their
# places. HostFunctions are what `hc.host` makes.
ANY = {"HostFunction", "callback", "io_callback", "pure_callback"}


@pytest.mark.parametrize("name", HOSTCALLS)
def test_hostcall_names_the_right_word(name):
    call, text = HOSTCALLS[name]
    with pytest.raises(hc.errors.SpecError) as caught:
        call()
    assert text in str(caught.value)


def test_a_recorder_names_the_right_word(tmp_path):
    pytest.importorskip("pyarrow")
    with hc.Recorder(tmp_path / "run") as rec:
        with pytest.raises(
            hc.errors.SpecError, match=r"a recorder has no option evry="
        ):
            rec(loss=X, evry=10)
        rec(loss=X, steps=X)  # what a program computes may have any name


def faces():
    """(name, function, option) of each public function that takes no other keywords."""
    modules = [hc, hc.monitor, hc.testing, hc.debug, hc.derivatives, hc.buffers]
    modules += [hc.bridge, hc.tools.sinks, hc.tools.reading, hc.tools.watch]
    for module in modules:
        for name in (*getattr(module, "__all__", ()), "print"):
            face = getattr(module, name, None)
            if not callable(face) or name in (*HOSTCALLS, *ANY):
                continue
            try:
                parameters = inspect.signature(face).parameters.values()
            except ValueError:  # a class of C++
                continue
            kinds = {p.kind for p in parameters}
            assert inspect.Parameter.VAR_KEYWORD not in kinds, name
            named = [p for p in parameters if p.kind is not p.POSITIONAL_ONLY]
            options = [p.name for p in named if p.default is not p.empty]
            yield from ((f"{module.__name__}.{name}", face, o) for o in options)


FACES = list(faces())


def test_the_sweep_is_wide():
    assert len({name for name, *_ in FACES}) > 15


@pytest.mark.parametrize(
    ("face", "option"),
    [(face, option) for _, face, option in FACES],
    ids=[f"{name}({option}=)" for name, _, option in FACES],
)
def test_python_names_the_wrong_word(face, option):
    # Not a letter less: of `rows` and `row`, both of Current, `ros` could mean either.
    wrong = option + option[-1]
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{wrong}'") as e:
        face(**{wrong: None})
    if sys.version_info >= (3, 13) and len(option) > 3:
        assert f"Did you mean '{option}'?" in str(e.value)


SUGGESTED = {
    "observe": (lambda: hc.observe(nan=True), "Did you mean 'nans'?"),
    "watch": (lambda: hc.watch(X, chek=None), "Did you mean 'check'?"),
    "patch_jax": (lambda: hc.patch_jax(array="numpy"), "Did you mean 'arrays'?"),
    "host": (lambda: hc.host(np.cos, reslt=X), "Did you mean 'result'?"),
    "Recorder": (lambda: hc.Recorder("never made", sink=()), "Did you mean 'sinks'?"),
    "root": (lambda: hc.bridge.scipy.root(np.cos, tole=1), "Did you mean 'tol'?"),
    "least_squares": (
        lambda: hc.bridge.scipy.least_squares(np.cos, jac=np.sin),
        "JAX derives it from fun: leave it out",
    ),
    "minimize": (
        lambda: hc.bridge.scipy.minimize(np.cos, constraints=()),
        "Bounds are: bounds=(low, high). For other constraints add a penalty to fun",
    ),
    "nothing like it": (lambda: hc.observe(zzz=True), "keyword argument 'zzz'"),
}


@pytest.mark.parametrize("name", SUGGESTED)
def test_the_right_word_is_suggested_by_any_python(name):
    use, said = SUGGESTED[name]
    with pytest.raises(TypeError, match="got an unexpected keyword argument") as caught:
        use()
    assert said in str(caught.value)


# Options that are gone -> (a call that gives one, what to write instead).
GONE = {
    "cache": (
        lambda: hc.host(np.cos, cache="memory"),
        "joblib.Memory(folder).cache(fn)",
    ),
    "version": (lambda: hc.host(np.cos, version=1), "functools.lru_cache"),
    "cache of a call": (
        lambda: hc.call(np.cos, X, X, cache="memory"),
        "joblib.Memory(folder).cache(fn)",
    ),
    "coalesce": (lambda: hc.host(np.cos, coalesce=4), 'vmap_method="expand_dims"'),
    "wait": (lambda: hc.host(np.cos, wait=0.1), 'vmap_method="expand_dims"'),
    "processes of save": (
        lambda: hc.Object(Counter, methods={"add": X}).save(processes="all"),
        "each process saves its own objects",
    ),
    "limit of restore": (
        lambda: hc.Object(Counter, methods={"add": X}).restore({}, limit=3),
        "each process saves its own objects",
    ),
    "stats": (lambda: hc.observe(stats=True), "NumPy makes the statistics"),
    "keep": (lambda: hc.watch(X, keep=3), "hc.Recorder beside the watch"),
    "keep of a call": (lambda: hc.call(np.cos, X, X, keep=3), "hc.Recorder beside"),
    "cache_bytes": (
        lambda: hc.configure(cache_bytes=9),
        "functools.lru_cache(maxsize)",
    ),
}


@pytest.mark.parametrize("name", GONE)
def test_options_that_have_gone_say_what_to_write(name):
    call, instead = GONE[name]
    with pytest.raises(
        hc.errors.SpecError, match=f"has no .*{name.split()[0]}="
    ) as caught:
        call()
    assert instead in str(caught.value)
    assert caught.value.code == "hc-arguments"


@pytest.mark.parametrize(
    "call",
    [
        lambda: hc.tap(print, X, on="process"),
        lambda: hc.print("{}", X, on="process"),
        lambda: hc.derivatives.tap_tangent(print, X, on="process"),
    ],
)
def test_a_value_that_has_gone_says_what_to_write(call):
    with pytest.raises(hc.errors.SpecError, match="on= of .* write on='shards'"):
        call()


# Names that are gone -> (what had them, what to write instead).
GONE_NAMES = {
    "difference_error": (
        lambda: hc.host(np.cos, result=X),
        "hc.testing.check(f, args)",
    ),
    "table": (lambda: hc.observe(nans=True), "NumPy makes the statistics"),
    "sympy": (lambda: hc.bridge, "sympy.lambdify"),
    "autograd": (lambda: hc.bridge, "hc.bridge.value_and_grad(autograd.value_and_grad"),
    "events": (lambda: hc.monitor, "jax.profiler.trace(folder)"),
    "read_trace": (lambda: hc.tools, "jax.profiler.trace(folder)"),
    "breakpoint": (lambda: hc.tools, "jax.debug.breakpoint()"),
    "history": (lambda: WatchError("text", values=None), "hc.Recorder"),
    "cache_clear": (lambda: hc.host(np.cos, result=X), "joblib.Memory"),
}


@pytest.mark.parametrize("name", GONE_NAMES)
def test_names_that_have_gone_say_what_to_write(name):
    had, instead = GONE_NAMES[name]
    with pytest.raises(AttributeError, match=f"has no {name} any more") as caught:
        getattr(had(), name)
    assert instead in str(caught.value)
    assert not hasattr(had(), "no_such_name")


def any_keyword(x, **options):
    return np.float32(len(options))


SWALLOWED = {
    "misspelt": (lambda f: hc.call(f, X, X, ordr="ordered"), "Did you mean order=?"),
    "swapped": (lambda f: hc.tap(f, X, odrer="ordered"), "Did you mean order=?"),
}


@pytest.mark.parametrize("name", SWALLOWED)
def test_functions_that_take_any_keyword_do_not_swallow_options(name):
    use, hint = SWALLOWED[name]
    with pytest.raises(hc.errors.SpecError, match="has no option") as caught:
        use(any_keyword)
    assert hint in str(caught.value)
    assert "functools.partial(any_keyword, " in str(caught.value)


def test_functions_that_take_any_keyword_get_their_own():
    assert hc.call(any_keyword, X, X, depth=2, speed=3) == 2
    assert hc.call(lambda x, ordr: np.float32(ordr), X, X, ordr=4) == 4

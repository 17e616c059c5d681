"""Objects with state, compared with the same objects in a plain Python loop."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import re
import threading
import time
from concurrent import futures

import forked
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import grid, line, over
from stepping import STEPPING

import hostcall as hc

F32 = jax.ShapeDtypeStruct((), jnp.float32)
I32 = jax.ShapeDtypeStruct((), jnp.int32)
METHODS = {"reset": F32, "step": (F32, I32)}
ORDERS = pytest.mark.parametrize("order", ["ordered", "unordered"])
EAGER_AND_JIT = pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit], ids=["eager", "jit"]
)


class Walk:
    """A position that actions and random numbers move; each index has its own
    generator.
    """

    alive = 0

    def __init__(self, index=()):
        self.index = index
        self.chance = random.Random(repr(index))
        self.place, self.steps = np.float32(0), 0
        self.open = True
        Walk.alive += 1

    def reset(self, place=0.0):
        self.place = np.float32(place) + np.float32(self.chance.random())
        return self.place

    def step(self, action):
        assert self.open
        self.place += np.float32(action) + np.float32(self.chance.gauss(0, 1))
        self.steps += 1
        return self.place, np.int32(self.steps)

    def get(self):
        return {"chance": self.chance.getstate(), "now": [self.place, self.steps]}

    def set(self, state):
        self.chance.setstate(state["chance"])
        self.place, self.steps = state["now"]

    def __setstate__(self, state):
        self.__dict__.update(state)
        Walk.alive += 1

    def close(self):
        assert self.open, "closed twice"
        self.open = False
        Walk.alive -= 1


@pytest.fixture(autouse=True)
def all_closed():
    Walk.alive = 0
    yield
    gc.collect()
    assert Walk.alive == 0, "an object was not closed"


def walk(index):
    return Walk(index)


def walks(factory=walk, methods=METHODS, **options):
    return hc.Object(factory, methods=methods, **options)


def driven(index, actions):
    """The oracle: (positions, steps) of one object in a Python loop."""
    host = Walk(index)
    places, steps = zip(*(host.step(a) for a in actions), strict=True)
    host.close()
    return np.array(places), np.array(steps)


def rollout(env, actions):
    return lax.scan(lambda c, a: (c, env.step(a)), 0, actions)[1]


def actions(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def assert_same(got, want):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


# --- One object ------------------------------------------------------------------------


@ORDERS
@EAGER_AND_JIT
def test_calls_in_straight_line_code(wrap, order):
    with walks(order=order) as env:
        f = wrap(lambda a, b: (env.reset(a), env.step(b), env.step(a), env.step(b)))
        got = f(np.float32(1), np.float32(2))
        host = Walk()
        want = host.reset(1.0), host.step(2.0), host.step(1.0), host.step(2.0)
        host.close()
        assert jax.tree.map(float, got) == jax.tree.map(float, want)


@ORDERS
@pytest.mark.parametrize("loop", ["scan", "fori", "while", "map", "remat", "python"])
def test_a_loop_of_steps(loop, order):
    xs = actions(20)

    def program(xs):
        if loop in ("scan", "remat"):
            step = jax.checkpoint(env.step) if loop == "remat" else env.step
            return lax.scan(lambda c, a: (c, step(a)), 0, xs)[1][0]
        if loop == "map":
            return lax.map(lambda a: env.step(a)[0], xs)
        if loop == "python":
            return jnp.stack([env.step(a)[0] for a in xs])
        body = lambda i, out: out.at[i].set(env.step(xs[i])[0])
        if loop == "fori":
            return lax.fori_loop(0, 20, body, jnp.zeros(20))
        go = lambda carry: carry[0] < 20
        return lax.while_loop(go, lambda c: (c[0] + 1, body(*c)), (0, jnp.zeros(20)))[1]

    with walks(order=order) as env:
        f = jax.jit(program)
        got = np.concatenate([f(xs), f(xs)])
        np.testing.assert_array_equal(got, driven((), [*xs, *xs])[0])


def test_cond_calls_in_the_branch_that_is_taken():
    with walks() as env:
        step = lambda a: env.step(a)[1]
        f = jax.jit(lambda a: lax.cond(a > 0, step, lambda a: jnp.int32(-1), a))
        assert [int(f(np.float32(a))) for a in (1, -1, 1, -1, 1)] == [1, -1, 2, -1, 3]


def test_order_across_programs_that_nobody_waits_for():
    with walks() as env:
        f, g = jax.jit(lambda a: env.step(a)[0]), jax.jit(lambda a: env.step(a * 2)[0])
        got = [(f, g)[n % 2](np.float32(n)) for n in range(50)]
        want = driven((), [np.float32(n * (1 + n % 2)) for n in range(50)])[0]
        np.testing.assert_array_equal(np.array(got), want)


def test_equal_calls_are_neither_merged_nor_dropped():
    with walks() as env:
        jax.jit(lambda a: [env.step(a) for _ in range(3)][:0])(1.0)
        assert int(env.step(1.0)[1]) == 4


@pytest.mark.parametrize("derive", [jax.grad, jax.jacfwd], ids=["grad", "jvp"])
def test_a_derivative_is_refused_with_the_remedy(derive):
    env = walks()
    with pytest.raises(hc.errors.DerivativeError) as caught:
        derive(lambda x: env.step(x)[0])(1.0)
    text = str(caught.value)
    assert text.startswith("hostcall: the call of `walk.step` has no derivative (")
    assert "test_object.py" in text
    assert (
        "It is a method of the hc.Object `walk`, made by `walk`, and objects' methods"
        " have no derivatives, since a call may change the object. Write what needs one"
        " as a function: hc.host(f, result=...), with a rule. Or put jax.custom_jvp"
    ) in text
    assert "stop_gradient" in text


def test_arguments_reach_the_method_as_they_are():
    seen = []

    class Table:
        def query(self, *args, **kwargs):
            seen.append((args, kwargs))
            return len(args)

    with hc.Object(Table, methods={"query": I32}) as table:
        # Keywords that hc.call takes too.
        f = jax.jit(lambda x: table.query("a", {"x": x}, timeout=x, fn="f", order=None))
        assert f(2) == 2
        (((name, tree), kwargs),) = seen
        assert (name, kwargs["fn"], kwargs["order"]) == ("a", "f", None)
        assert type(tree["x"]) is type(kwargs["timeout"]) is np.ndarray
        assert jax.jit(lambda: table.query())() == 0


def test_static_and_class_methods():
    class Kinds:
        @staticmethod
        def double(x):
            return 2 * x

        @classmethod
        def name(cls, x):
            return x + len(cls.__name__)

    with hc.Object(Kinds, methods={"double": F32, "name": F32}) as env:
        assert (float(env.double(1.5)), float(env.name(1.5))) == (3.0, 6.5)
        with pytest.raises(hc.errors.SpecError, match=r"`.*Kinds.double` takes \(x\)"):
            env.double(1.0, 2.0)


def test_a_method_whose_decorator_gives_the_function_of_the_class():
    class Decorated:
        def __init__(self, f):
            self.f = f

        def __get__(self, instance, owner):
            return self.f if instance is None else self.f.__get__(instance)

    class Adds:
        @Decorated
        def step(self, x):
            return np.float32(x + 1)

    with hc.Object(Adds, methods={"step": F32}) as env:
        assert float(env.step(jnp.float32(2))) == 3
        with pytest.raises(hc.errors.SpecError, match=r"`.*step` takes \(x\)"):
            env.step(1.0, 2.0)


def test_a_method_named_like_one_of_classes():
    class Classes:
        def mro(self):
            return np.int32(5)

    with hc.Object(Classes, methods={"mro": I32}) as env:
        assert int(env.mro()) == 5


def test_hooks_that_are_false_as_bools():
    class Hook(list):
        def __init__(self, f):
            self.f = f

        def __call__(self, *args):
            said.append(args)
            return self.f(*args)

    said = []
    hooks = {"save": lambda w: 3, "restore": lambda w, s: None, "close": Walk.close}
    env = hc.Object(Walk, methods=METHODS, **{k: Hook(f) for k, f in hooks.items()})
    env.step(1.0)
    env.restore(env.save())
    env.close()
    walk = said[0][0]
    assert isinstance(walk, Walk)
    assert said == [(walk,), (walk, 3), (walk,)]


def test_the_object_is_made_at_the_first_call():
    made = []

    def factory():
        made.append(hc.current().name)
        return Walk()

    with walks(factory) as env:
        f = jax.jit(env.step).lower(1.0).compile()
        assert made == []
        assert repr(env) == "<hc.Object factory (reset, step): 0 objects>"
        f(1.0), f(1.0)
        assert made == ["factory.step"]
        assert repr(env) == "<hc.Object factory (reset, step): 1 object>"
    assert repr(env) == "<hc.Object factory (reset, step): closed>"


def test_calling_again_compiles_nothing(compiled_during):
    with walks() as env:
        f = jax.jit(jax.vmap(env.step))
        f(actions(3))
        assert compiled_during(lambda: f(actions(3))) == 0


# --- vmap: an object for each row ----------------------------------------------------------


@ORDERS
@pytest.mark.parametrize("method", ["sequential", "parallel"])
@pytest.mark.parametrize("way", ["vmap of scan", "scan of vmap"])
def test_rows_have_objects_of_their_own(way, method, order):
    xs = actions(5, 12)
    with walks(order=order, vmap_method=method) as env:
        if way == "vmap of scan":
            f = jax.jit(jax.vmap(lambda xs: rollout(env, xs)))
        else:
            step = jax.vmap(env.step)
            scan = lambda xs: lax.scan(lambda c, a: (c, step(a)), 0, xs.T)[1]
            f = jax.jit(lambda xs: jax.tree.map(jnp.transpose, scan(xs)))
        halves = f(xs[:, :6]), f(xs[:, 6:])
        got = jax.tree.map(lambda a, b: np.concatenate([a, b], 1), *halves)
        for row in range(5):
            assert_same([g[row] for g in got], driven((row,), xs[row]))


def test_row_i_is_row_i_in_every_program():
    xs = actions(4)
    with walks() as env:
        first = jax.vmap(env.step)(xs)
        second = jax.jit(jax.vmap(lambda a: env.step(a * 2)))(xs)
        third = jax.vmap(env.step, in_axes=0, out_axes=0)(jnp.asarray(xs))
        for row, x in enumerate(xs):
            got = [part[0][row] for part in (first, second, third)]
            np.testing.assert_array_equal(got, driven((row,), [x, x * 2, x])[0])


def test_nested_vmap_has_an_object_for_each_tuple():
    xs = actions(2, 3, 7)
    with walks() as env:
        f = jax.jit(jax.vmap(jax.vmap(lambda xs: rollout(env, xs))))
        got = f(xs)
        for i, j in np.ndindex(2, 3):
            assert_same([g[i, j] for g in got], driven((i, j), xs[i, j]))


def test_where_leaves_rows_out():
    xs = actions(6, 10)
    keep = xs > 0
    with walks() as env:

        def row(xs, keep):
            step = lambda c, a: (c, env.step(a[0], where=a[1], fill=-1))
            return lax.scan(step, 0, (xs, keep))[1]

        places, steps = jax.jit(jax.vmap(row))(xs, keep)
        for i in range(6):
            want, numbers = driven((i,), xs[i][keep[i]])
            np.testing.assert_array_equal(places[i][keep[i]], want)
            np.testing.assert_array_equal(steps[i][keep[i]], numbers)
        assert (np.asarray(places)[~keep] == -1).all()


def test_rows_run_in_row_order():
    seen = []

    class Host:
        def note(self, x):
            seen.append((hc.current().row, hc.current().grid, int(x)))

    with hc.Object(Host, methods={"note": None}) as host:
        jax.jit(jax.vmap(host.note))(np.arange(3)), jax.effects_barrier()
        assert seen == [((n,), (3,), n) for n in range(3)]


def test_parallel_rows_are_in_their_objects_at_once():
    meeting = threading.Barrier(4, timeout=60)

    class Host:
        def meet(self, x):
            meeting.wait()
            return x

    options = {"methods": {"meet": I32}, "vmap_method": "parallel"}
    with (
        futures.ThreadPoolExecutor(4) as pool,
        hc.Object(Host, **options, executor=pool) as host,
    ):
        xs = np.arange(4, dtype=np.int32)
        np.testing.assert_array_equal(jax.jit(jax.vmap(host.meet))(xs), xs)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (lambda seed=0: Counting(seed), "its first parameter, seed, has a default"),
        (lambda: Counting(0), ""),
        (lambda *, seed=0: Counting(seed), ""),
        (lambda index: Counting(sum(index)), ""),
    ],
)
@pytest.mark.parametrize("rows", [False, True])
def test_a_factory_with_a_default_for_its_index_is_told_so(factory, said, rows, caplog):
    counter = hc.Object(factory, methods={"get": jnp.int32(0)}, name="counter")

    def program(x):
        return counter.get(where=x >= 0)

    for _ in range(2):  # once for all objects
        jax.jit(jax.vmap(program) if rows else program)(
            jnp.arange(3) if rows else jnp.int32(0)
        ).block_until_ready()
    told = [r.getMessage() for r in caplog.records if r.name == "hostcall"]
    assert len(told) == bool(said and rows)
    assert all(said in text and "hc.Object(lambda index: ...)" in text for text in told)


class Counting:
    def __init__(self, start):
        self.start = start

    def get(self):
        return np.int32(self.start)


def test_a_factory_with_a_needed_argument_gets_the_index():
    given = []

    def make(index, *, more=1):
        given.append(index)
        return Walk(index)

    for factory in (make, lambda: make(None)):
        with walks(factory) as env:
            env.step(1.0)
            env.renew()
            jax.vmap(jax.vmap(env.step))(actions(2, 1))
    assert given == [(), (0, 0), (1, 0), None, None, None]


# --- Several devices -----------------------------------------------------------------------


@ORDERS
def test_shard_map_has_an_object_for_each_device(order):
    xs = actions(4, 6)
    with walks(order=order) as env:
        f = over(
            line(), lambda xs: rollout(env, xs[0])[0][None], P("x"), check_vma=False
        )
        for part in (xs[:, :3], xs[:, 3:]):
            got = f(part)
        for k in range(4):
            np.testing.assert_array_equal(got[k], driven((k,), xs[k])[0][3:])


@pytest.mark.parametrize("method", ["sequential", "parallel"])
def test_vmap_inside_shard_map_has_them_for_each_row(method):
    xs = actions(4, 3)
    with walks(vmap_method=method) as env:
        step = jax.vmap(jax.vmap(lambda a: env.step(a)[0]))
        f = over(grid(), step, P(("x", "y")), check_vma=False)
        f(xs)
        got = f(xs)
        for k, n in np.ndindex(4, 3):
            want = driven((k // 2, k % 2, 0, n), [xs[k, n]] * 2)[0]
            assert got[k, n] == want[1]


def test_pmap_has_an_object_for_each_device():
    xs = actions(4, 5)
    with walks() as env:
        places, _ = jax.pmap(lambda xs: rollout(env, xs))(xs)
        for k in range(4):
            np.testing.assert_array_equal(places[k], driven((k,), xs[k])[0])


@pytest.mark.parametrize("shape", [(6,), (4, 6)], ids=["one", "rows"])
def test_jit_over_sharded_arrays_has_them_as_without(shape):
    xs = actions(*shape)
    spec = P("x") if len(shape) > 1 else P()
    with walks() as env:
        f = lambda xs: rollout(env, xs)[0]
        f = jax.jit(jax.vmap(f) if len(shape) > 1 else f)
        got = f(jax.device_put(xs, NamedSharding(line(), spec)))
        for index in np.ndindex(shape[:-1]):
            np.testing.assert_array_equal(got[index], driven(index, xs[index])[0])


# --- Checkpoints -----------------------------------------------------------------------------

HOOKS = {
    "pickled": {},
    "methods": {"save": "get", "restore": "set"},
    "functions": {"save": lambda w: w.get(), "restore": lambda w, s: w.set(s)},
}
BY_HOOKS = pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS)


@BY_HOOKS
@pytest.mark.parametrize("rows", [None, 3])
def test_a_restored_rollout_goes_on_as_the_first_did(hooks, rows):
    xs = actions(rows, 10) if rows else actions(10)
    with walks(**hooks) as env, walks(**hooks) as other:

        def program(env):
            f = lambda xs: rollout(env, xs)
            return jax.jit(jax.vmap(f) if rows else f)

        f, half = program(env), lambda n: xs[..., 5 * n : 5 * n + 5]
        f(half(0))
        state = pickle.loads(pickle.dumps(env.save()))
        want = f(half(1))
        for _ in range(2):  # the snapshot can be used again
            env.restore(state)
            assert_same(f(half(1)), want)
        other.restore(state)
        assert_same(program(other)(half(1)), want)


@BY_HOOKS
def test_restoring_another_batch(hooks):
    with walks(**hooks) as env:
        nothing = env.save()
        jax.vmap(env.step)(actions(3))
        three = env.save()
        assert sorted(three["objects"]) == [(0,), (1,), (2,)]
        env.renew()
        env.step(1.0)
        env.restore(three)
        assert [int(n) for n in jax.vmap(env.step)(actions(3))[1]] == [2] * 3
        env.restore(nothing)
        assert int(env.step(1.0)[1]) == 1


def test_restoring_by_hooks_keeps_the_objects():
    made = []
    factory = lambda: made.append(1) or Walk()
    with walks(factory, save="get", restore="set") as env:
        env.step(1.0)
        state = env.save()
        env.step(1.0)
        env.restore(state)
        assert int(env.step(1.0)[1]) == 2
        assert made == [1]


def test_save_waits_for_what_is_under_way():
    class Slow(Walk):
        def step(self, action):
            time.sleep(2e-3)  # the programs run while the object is saved
            return super().step(action)

    with walks(Slow, save="get", restore="set") as env:
        f = jax.jit(lambda xs: rollout(env, xs)[0].sum() * 0)
        f(actions(30)), f(actions(30))
        (state,) = env.save()["objects"].values()
        assert pickle.loads(state)["now"][1] == 60


def test_a_snapshot_does_not_change_with_the_object():
    with walks(
        save=lambda w: w.__dict__, restore=lambda w, s: vars(w).update(s)
    ) as env:
        env.step(1.0)
        state = env.save()
        before = copy.deepcopy(state)
        env.step(1.0)
        assert state == before


def test_save_tells_of_a_program_that_failed(caplog):
    class Breaks(Walk):
        def step(self, action):
            raise KeyError("broken")

    with walks(Breaks, save="get", restore="set") as env:
        env.reset()
        gate = threading.Event()
        late = jax.jit(lambda m: hc.call(lambda x: (gate.wait(60), x)[1], m, m @ m))
        f = jax.jit(lambda m: env.step(m[0, 0])[0])
        # An input that is not ready, so the program fails after its dispatch.
        f(late(actions(800, 800)))
        gate.set()
        with pytest.raises(KeyError, match="broken"), hc.reraise():
            env.save()
        assert set(env.save()["objects"]) == {()}
        gate.clear()
        f(late(actions(800, 800)))
        gate.set()
        env.renew()
    assert "renew() of `Breaks` continues after a failed program: " in caplog.text


# --- The end of objects --------------------------------------------------------------


class Noted:
    """Records its life in `log`."""

    def __init__(self, log, fails=()):
        self.log, self.fails = log, fails

    def __call__(self, index):
        self.log.append(("made", index))
        return self.Member(self, index)

    class Member:
        def __init__(self, owner, index):
            self.owner, self.index = owner, index

        def step(self, x):
            self.owner.log.append(("step", self.index))
            return x

        def close(self):
            self.owner.log.append(("closed", self.index))
            if self.index in self.owner.fails:
                raise ValueError(f"close of {self.index}")

        def end(self):
            self.owner.log.append(("ended", self.index))


def noted(log, fails=(), **options):
    return hc.Object(Noted(log, fails), methods={"step": I32}, **options)


def closed(log):
    return [index for what, index in log if what == "closed"]


def test_close_closes_each_once_after_what_is_under_way():
    log = []
    env = noted(log)
    jax.jit(jax.vmap(lambda x: lax.fori_loop(0, 50, lambda _, c: env.step(c), x)))(
        np.arange(3, dtype=np.int32)
    )
    env.close()
    env.close()
    assert len(log) == 3 + 150 + 3
    assert log[-3:] == [("closed", (n,)) for n in range(3)]


@pytest.mark.parametrize("way", ["name", "function", "none", "lacking"])
def test_what_closes_an_object(way):
    log = []
    close = {"name": "end", "function": lambda o: o.end(), "none": None, "lacking": "x"}
    with noted(log, close=close[way]) as env:
        env.step(1)
    want = [("ended", ())] if way in ("name", "function") else []
    assert log[2:] == want


def test_renew_closes_and_makes_anew():
    log = []
    with noted(log) as env:
        env.step(1)
        env.renew()
        jax.vmap(env.step)(np.arange(2, dtype=np.int32))
    life = ["made", "step"]
    assert [what for what, _ in log] == [*life, "closed", *life * 2, "closed", "closed"]
    assert closed(log) == [(), (0,), (1,)]


def test_errors_of_closing_are_raised_after_all_are_closed():
    xs = np.arange(3, dtype=np.int32)
    for fails, kind in (({(1,)}, ValueError), ({(0,), (2,)}, ExceptionGroup)):
        log = []
        env = noted(log, fails)
        jax.vmap(env.step)(xs)
        with pytest.raises(kind, match=r"close of \(1,\)|closing 2 objects failed"):
            env.close()
        assert closed(log) == [(0,), (1,), (2,)]
        env.close()


def test_objects_live_as_long_as_a_program_that_calls_them(in_time):
    log = []
    env = noted(log)
    f = jax.jit(env.step).lower(np.int32(1)).compile()
    del env
    gc.collect()
    assert f(np.int32(1)) == 1
    assert closed(log) == []
    del f
    jax.clear_caches()
    # The watcher may be the one that destroys the dead.
    assert in_time(lambda: closed(log) == [()])


def test_objects_are_closed_with_the_last_that_could_call_them(caplog):
    log = []
    env = noted(log, fails={()})
    env.step(1)
    del env
    gc.collect()
    assert closed(log) == [()]
    assert "closing an object of `Noted` failed" in caplog.text
    assert "ValueError: close of ()" in caplog.text


@pytest.mark.parametrize("before", ["", "hc.call(lambda: 0, I32)"])
def test_objects_are_closed_at_exit_after_their_programs(run_python, before):
    done = run_python(STEPPING.replace("# engine", before) + "f(1), f(2)")
    assert done.stdout.split() == ["step"] * 20 + ["closed"]
    assert done.stderr == ""


# --- Threads -------------------------------------------------------------------------------------


def test_no_two_threads_are_in_an_object_at_once():
    class Alone:
        made = 0

        def __init__(self):
            time.sleep(0.02)  # the threads find an object that is being made
            Alone.made += 1
            self.inside = self.entered = 0

        def step(self, x):
            self.inside += 1
            time.sleep(1e-3)  # in which another thread might come
            self.entered += 1
            assert self.inside == 1
            self.inside -= 1
            return self.entered

    with hc.Object(Alone, methods={"step": I32}) as env:
        f = jax.jit(lambda x: lax.fori_loop(0, 10, lambda _, c: env.step(c), x))
        with futures.ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(lambda: int(f(1))) for _ in range(8)]:
                done.result()
        assert int(env.step(1)) == 81
        assert Alone.made == 1


def test_a_method_may_call_its_own_object():
    class Tree:
        calls = 0

        def grow(self, n):
            self.calls += 1
            return jax.jit(env.grow)(n - 1) if n > 0 else self.calls

    with hc.Object(Tree, methods={"grow": I32}) as env:
        assert jax.jit(env.grow)(3) == 4


def test_close_waits_for_another_threads_method():
    log, entered = [], threading.Event()

    class Slow(Noted.Member):
        def step(self, x):
            entered.set()
            time.sleep(0.1)  # `close` begins meanwhile, and can't say so: it waits
            return super().step(x)

    owner = Noted(log)
    env = hc.Object(lambda: Slow(owner, ()), methods={"step": I32})
    thread = threading.Thread(target=lambda: env.step(1))
    thread.start()
    entered.wait()
    env.close()
    thread.join()
    assert log == [("step", ()), ("closed", ())]


# --- Errors ------------------------------------------------------------------------------------------


def test_exceptions_of_methods_are_raised_unchanged():
    error = LookupError("no such place")

    class Fails:
        calls = 0

        def step(self, x):
            self.calls += 1
            if x == 2 and self.calls == 1:
                raise error
            return self.calls

    with hc.Object(Fails, methods={"step": I32}) as env:
        f = jax.jit(jax.vmap(env.step))
        with pytest.raises(LookupError) as caught, hc.reraise():
            f(np.arange(4))
        assert caught.value is error
        report = str(caught.value.__context__)
        assert "LookupError: no such place (in callback `Fails.step`, row 2," in report
        assert f(np.arange(4)).tolist() == [2, 2, 2, 1]  # row 3 was not reached
        error.__traceback__ = error.__context__ = None


def test_a_factory_that_failed_is_asked_again():
    tries = []

    def factory():
        tries.append(1)
        if len(tries) < 3:
            raise OSError("not yet")
        return Walk()

    with walks(factory) as env:
        for run in (env.step, jax.vmap(lambda a: env.step(a))):  # no batch is fixed
            with pytest.raises(OSError, match="not yet"):
                run(np.ones((1,) * (run is not env.step), np.float32))
        assert int(env.step(1.0)[1]) == 1
    assert len(tries) == 3


def declare(factory=Walk, **options):
    return lambda: walks(**{"factory": factory, **options})


class Fly:
    def fly(self):
        pass

    def land(self):
        pass

    @property
    def height(self):
        raise RuntimeError("no altimeter is there")


def used(use, factory=Walk, **options):
    def run():
        with walks(factory, **options) as env, hc.reraise():
            use(env)

    return run


def after_close(env):
    f = jax.jit(env.step).lower(1.0).compile()
    env.close()
    f(1.0)


def batch_then(then, first=lambda env: jax.vmap(env.step)(actions(3))):
    return used(lambda env: (first(env), then(env)))


MESSAGES = {
    "no function": (
        declare(3),
        hc.errors.SpecError,
        "the first argument should be a function, got 3. Write hc.Object(factory, methods={...}); for one that exists, lambda: it",
    ),
    "a factory of two": (
        declare(lambda a, b: Walk()),
        hc.errors.SpecError,
        "the factory of `object` should require no argument, or only the object's index, but it requires a, b. Write lambda: ... or lambda index: ...",
    ),
    "no methods": (
        declare(methods={}),
        hc.errors.SpecError,
        "methods= of `Walk` should be a dict from method names to result specs, got {}",
    ),
    "methods in a list": (
        declare(methods=["step"]),
        hc.errors.SpecError,
        "methods= of `Walk` should be a dict from method names to result specs, got ['step']",
    ),
    "a private method": (
        declare(methods={"_step": F32}),
        hc.errors.SpecError,
        "methods= of `Walk` has the key '_step', which is not the name of a public method",
    ),
    "its own name": (
        declare(methods={"save": F32}),
        hc.errors.SpecError,
        "`Walk` can't declare `save`, since hc.Object has its own method of that name. Add a method with another name that calls it, and declare that one",
    ),
    "a result that is none": (
        declare(methods={"step": (F32, "int")}),
        hc.errors.SpecError,
        "result[1] of `Walk.step` is 'int', which has no shape and dtype.",
    ),
    "pure": (
        declare(order="pure"),
        hc.errors.SpecError,
        "order= of `Walk` should be 'ordered' or 'unordered', since an object has state, so its calls can't be dropped or repeated, got 'pure'",
    ),
    "the batch as a whole": (
        declare(vmap_method="expand_dims"),
        hc.errors.SpecError,
        "vmap_method= of `Walk` should be 'sequential' or 'parallel', since each row has its own object, got 'expand_dims'",
    ),
    "save without restore": (
        declare(save="get"),
        hc.errors.SpecError,
        "`Walk` has only one of save= and restore=. Pass both, or neither",
    ),
    "a hook that is none": (
        declare(close=3),
        hc.errors.SpecError,
        "close= of `Walk` should be a method's name or a function, got 3",
    ),
    "not declared": (
        lambda: walks(Walk).render,
        AttributeError,
        "`Walk` has no declared method `render`. Its declared methods are reset, step. To add one, write hc.Object(..., methods={'render': result})",
    ),
    "not there": (
        used(lambda env: jax.jit(env.step)(1.0), Fly),
        hc.errors.HostcallError,
        "methods= of `Fly` declares 'reset', but its factory returned a Fly, which has no such method. Its methods are: fly, land",
    ),
    "pickled": (
        lambda: pickle.dumps(walks(Walk)),
        hc.errors.SpecError,
        "the hc.Object `Walk` can't be pickled or copied, since programs refer to it. Pickle what its save() returns",
    ),
    "traced after close": (
        used(lambda env: (env.close(), env.step(1.0))),
        hc.errors.HostcallError,
        "step() of `Walk` was called after close(). Make another hc.Object, or call renew() instead of close()",
    ),
    "run after close": (
        used(after_close),
        hc.errors.HostcallError,
        "step() of `Walk` was called after close(). Make another hc.Object, or call renew() instead of close()",
    ),
    "saved after close": (
        used(lambda env: (env.close(), env.save())),
        hc.errors.HostcallError,
        "save() of `Walk` was called after close(). Make another hc.Object, or call renew() instead of close()",
    ),
    "entered after close": (
        used(lambda env: (env.close(), env.__enter__())),
        hc.errors.HostcallError,
        "__enter__() of `Walk` was called after close(). Make another hc.Object, or call renew() instead of close()",
    ),
    "another batch": (
        batch_then(lambda env: jax.jit(jax.vmap(env.step))(actions(4))),
        hc.errors.HostcallError,
        "step() of `Walk` was called for 4 rows, but its objects were made for 3 rows. Each object belongs to one row, so the batch can't change: make another hc.Object, or start again with renew()",
    ),
    "nothing depends on the row": (
        batch_then(lambda env: jax.jit(jax.vmap(lambda a: env.step(1.0)))(actions(3))),
        hc.errors.HostcallError,
        "step() of `Walk` was called without vmap, but its objects were made for 3 rows. Each object belongs to one row, so the batch can't change: make another hc.Object, or start again with renew(). Under vmap, JAX makes a call only once for all rows if no argument depends on the row: pass one that does (where=mask is enough)",
    ),
    "another mesh": (
        batch_then(
            lambda env: jax.jit(jax.vmap(jax.vmap(env.step)))(actions(2, 3)),
            lambda env: over(
                line(), jax.vmap(lambda a: env.step(a)[0]), P("x"), check_vma=False
            )(actions(4)),
        ),
        hc.errors.HostcallError,
        "step() of `Walk` was called for 2 x 3 rows, but its objects were made for 1 rows on each device of a mesh x=4. Each object",
    ),
    "restored from something else": (
        used(lambda env: env.restore([1])),
        hc.errors.SpecError,
        "restore() of `Walk` takes what save() returned, got list",
    ),
    "does not pickle": (
        used(
            lambda env: (jax.vmap(env.step)(actions(2)), env.save()),
            lambda: type("Local", (Walk,), {})(),
        ),
        hc.errors.HostcallError,
        "object (0,) of `object` can't be saved, since it can't be pickled (PicklingError:",
    ),
    "saved inside": (
        used(lambda env: hc.call(lambda: env.save(), None, order="ordered")),
        hc.errors.HostcallError,
        "save() of `Walk` inside a callback would wait for the program that made the call. Call it where the program is called",
    ),
    "closed inside": (
        used(lambda env: hc.call(env.close, None, order="ordered")),
        hc.errors.HostcallError,
        "close() of `Walk` inside a callback would wait for the program that made the call. Call it where the program is called",
    ),
}


@pytest.mark.parametrize(("run", "kind", "text"), MESSAGES.values(), ids=MESSAGES)
def test_messages(run, kind, text):
    with pytest.raises(kind, match="^hostcall: " + re.escape(text)):
        run()


def test_rows_can_not_go_to_another_process():
    with (
        futures.ProcessPoolExecutor(1, forked.CONTEXT) as pool,
        walks(vmap_method="parallel", executor=pool) as env,
        pytest.raises(
            hc.errors.SpecError, match="are in this process, but its executor="
        ),
    ):
        jax.vmap(env.step)(actions(2))


class Inline(futures.Executor):
    def submit(self, fn, *args):
        done = futures.Future()
        try:
            done.set_result(fn(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def test_rows_on_the_thread_that_waits_are_refused():
    with (
        walks(vmap_method="parallel", executor=Inline()) as env,
        pytest.raises(
            hc.errors.HostcallError, match="can't tell which object is meant"
        ),
    ):
        jax.vmap(env.step)(actions(2))


def test_an_error_has_the_users_line_where_jax_calls_the_method():
    env = walks(lambda: 1 / 0)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jax.jit(env.step)(1.0))
    line = test_an_error_has_the_users_line_where_jax_calls_the_method
    number = line.__code__.co_firstlineno + 3
    assert f"called at {__file__}:{number} in {line.__name__})" in str(caught.value)

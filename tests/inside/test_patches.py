"""What hostcall replaces in JAX: the table, when it is installed, and how it ends."""

import importlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc
from hostcall import _jax
from hostcall._jax import installing
from hostcall._jax.patches import PATCHES, When

_EVERYTHING = """
    import importlib, sys, types
    import jax, jax.numpy as jnp, numpy as np

    def everything():
        '''(module, class, name) -> what stands there, of all that JAX has imported.'''
        found = {}
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] not in ("jax", "jaxlib") or module is None:
                continue
            for key, thing in list(vars(module).items()):
                found[name, "", key] = thing
                if isinstance(thing, type) and thing.__module__ == name:
                    for inner, value in list(vars(thing).items()):
                        found[name, key, inner] = value
                elif isinstance(thing, dict):
                    for inner, value in list(thing.items()):
                        found[name, key, id(inner)] = value
        return found

    def changed(before, after):
        '''The places where something else stands: all but caches and states, which are
        no functions, classes or modules.'''
        kinds = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, staticmethod)
        return {
            key
            for key in before.keys() & after.keys()
            if after[key] is not before[key]
            and (isinstance(before[key], kinds) or callable(before[key]) or "LoweringRuleEntry" in str(type(before[key])))
            and not isinstance(before[key], (dict, list))
        }
"""


def test_importing_replaces_nothing(run_python):
    run_python(
        _EVERYTHING
        + """
    jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 3, lambda x: x + 1, x))(jnp.float32(0))
    jax.effects_barrier()
    before = everything()
    import hostcall as hc
    for name in hc.__all__:
        getattr(hc, name)
    after = everything()
    assert changed(before, after) == set(), changed(before, after)

    jax.jit(lambda x: hc.call(np.sin, x, x, order="ordered"))(1.0)
    now = changed(before, everything())
    assert ("jax._src.interpreters.pxla", "", "_cached_lowering_to_hlo") in now, now
    assert len(now) >= 10, now
    hc.testing.restore_jax()
    assert changed(before, everything()) == set(), changed(before, everything())
    """
    )


def test_a_program_without_host_calls_replaces_nothing(run_python):
    run_python("""
        import jax, jax.numpy as jnp, hostcall as hc
        from hostcall import _jax
        jax.jit(jnp.sin)(1.0)
        hc.barrier()
        hc.monitor.status()
        assert {state for _, state in _jax.states()} == {"not installed"}
    """)


def test_programs_that_were_compiled_before_are_found_again(run_python):
    run_python("""
        import jax, jax.numpy as jnp, numpy as np, hostcall as hc
        from jax._src import monitoring

        f, g, x = jax.jit(lambda x: jnp.sin(x).sum()), jax.jit(lambda x: x * 3), 1.0
        wanted = f(x), g(x)
        count = [0]
        def listen(event, *args, **kwargs):
            count[0] += "jaxpr_trace" in event or "backend_compile" in event
        jax.jit(lambda x: hc.call(np.sin, x, x, order="ordered"))(1.0)
        with hc.observe(nans=True):
            f(x)
        monitoring.register_event_duration_secs_listener(listen)
        found = f(x), g(x)
        assert count[0] == 0
        assert list(map(float, found)) == list(map(float, wanted))
    """)


@pytest.mark.parametrize("patch", PATCHES, ids=str)
def test_each_row_has_its_place_and_its_maker(patch):
    assert installing._why_not(patch) == ""
    for by in patch.by:
        file, _, function = by.partition(".")
        module = importlib.import_module(f"hostcall._jax.{file}")
        assert callable(getattr(module, function))
    assert patch.does
    assert not patch.does.endswith(".")


def test_all_rows_are_installed_by_what_they_say(run_python):
    run_python("""
        import os, jax, numpy as np, hostcall as hc
        from hostcall import _jax
        from hostcall._jax.patches import When

        def installed():
            return {p.when for p, state in _jax.states() if state != "not installed"}

        @jax.jit
        def program(x):
            return hc.call(np.sin, x, x)

        assert installed() == set()
        program(1.0)
        assert installed() == {When.CALLS}
        with hc.observe(nans=True):
            pass
        assert installed() == {When.CALLS, When.OBSERVE}
        def fails(x):
            raise ValueError("no")
        try:
            jax.jit(lambda x: hc.call(fails, x, x))(1.0)
        except Exception:
            pass
        assert installed() == {When.CALLS, When.OBSERVE, When.FAILURE}
        child = os.fork()
        if child == 0:
            os._exit(set(installed()) != set(When))
        assert os.waitpid(child, 0)[1] == 0
        assert When.FORK not in installed()
    """)


def test_observe_alone_installs_what_comes_before_it(run_python):
    """A program is put in order after a block has put something into it."""
    run_python("""
        import jax, numpy as np, hostcall as hc
        import jax.numpy as jnp
        try:
            with hc.observe(nans=True):
                jax.jit(lambda x: jnp.log(x) + 1)(-1.0)
            found = False
        except FloatingPointError:
            found = True
        assert found
        from hostcall import _jax
        states = [state for patch, state in _jax.states() if patch.name == "_cached_lowering_to_hlo"]
        assert states == ["installed"] * 2
    """)


def test_it_is_installed_once_from_many_threads(run_python):
    run_python("""
        import os, threading, jax, numpy as np, hostcall as hc
        from hostcall import _jax
        from jax._src.interpreters import pxla
        package = os.path.dirname(hc.__file__) + os.sep
        both = threading.Barrier(8, timeout=60)
        found = []
        def install():
            both.wait()
            _jax.install(_jax.When.CALLS)
            found.append(pxla._cached_lowering_to_hlo)
        threads = [threading.Thread(target=install) for _ in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert len(set(map(id, found))) == 1
        wrapped = pxla.ExecuteReplicated.__call__
        own = 0
        while wrapped is not None:
            own += wrapped.__code__.co_filename.startswith(package)
            wrapped = getattr(wrapped, "__wrapped__", None)
        assert own == 2, own
    """)


def test_restoring_and_using_it_again():
    seen = []

    def call(x):
        seen.append(float(x))

    @jax.jit
    def program(x):
        hc.call(call, None, x, order="ordered")
        return x + 1

    def loss(x):
        def body(carry, _):
            hc.call(lambda: seen.append("step"), None, order="ordered")
            return carry * x, None

        return jax.lax.scan(body, x, None, 3)[0]

    for _ in range(2):
        assert program(1.0) == 2.0
        assert jax.grad(loss)(1.0) == 4.0
        jax.effects_barrier()
        assert seen == [1.0, *["step"] * 3]
        seen.clear()
        hc.testing.restore_jax()
        assert {state for _, state in _jax.states()} <= {"not installed", "JAX's own"}
    program(1.0)  # installs all again, for the other tests
    jax.effects_barrier()


def test_a_loaded_program_installs_them(run_python, tmp_path):
    """The process that runs it has traced no host call."""
    file = tmp_path / "program"
    run_python(f"""
        import jax, jax.numpy as jnp, hostcall as hc
        def f(x):
            hc.print("{{}}", x)
            return x + 1
        open({str(file)!r}, "wb").write(hc.export(jax.jit(f))(jnp.float32(0)).serialize())
    """)
    done = run_python(f"""
        import jax.numpy as jnp, hostcall as hc
        from hostcall import _jax
        loaded = hc.load(open({str(file)!r}, "rb").read())
        assert float(loaded.call(jnp.float32(3))) == 4
        hc.barrier()
        states = {{patch.when: state for patch, state in _jax.states()}}
        assert states[_jax.When.CALLS] != "not installed"
    """)
    assert "3.0" in done.stdout


def test_an_executable_installs_them_where_it_is_loaded():
    from hostcall._jax import signs

    hc.testing.restore_jax()
    mark = pickle.loads(pickle.dumps(signs.FastProgram(hidden=True, asks_sign=False)))
    assert mark == signs.FastProgram(hidden=True, asks_sign=False)
    states = {patch.when: state for patch, state in _jax.states()}
    assert states[When.CALLS] in ("installed", "JAX's own")


def test_the_effects_of_an_exported_program_install_them():
    from hostcall._core.order import ORDERED, OrderedCallEffect

    hc.testing.restore_jax()
    assert OrderedCallEffect() is ORDERED  # as jax.export does where it loads one
    states = {patch.when: state for patch, state in _jax.states()}
    assert states[When.CALLS] in ("installed", "JAX's own")


def test_another_library_s_replacement_stays(monkeypatch):
    from jax._src import dispatch

    _jax.install(When.CALLS)
    theirs = dispatch.RuntimeTokenSet.block_until_ready

    def other(self):
        return theirs(self)

    dispatch.RuntimeTokenSet.block_until_ready = other
    try:
        hc.testing.restore_jax()
        assert dispatch.RuntimeTokenSet.block_until_ready is other
    finally:
        dispatch.RuntimeTokenSet.block_until_ready = theirs.__wrapped__
    _jax.install(When.CALLS)


def test_the_report_lists_them(run_python):
    done = run_python("""
        from hostcall._cli import machine
        machine.replaced()
    """)
    for patch in PATCHES:
        assert str(patch) in done.stdout


def test_a_jax_without_a_place_says_so_once(run_python):
    """The others of its part are left out, and the rest is installed."""
    run_python("""
        import logging, jax, numpy as np
        from jax._src.interpreters import pxla
        import hostcall as hc
        from hostcall import _jax

        del pxla.MeshExecutable.create_cpp_call
        pxla.MeshExecutable.create_cpp_call = lambda self, other, arguments: None
        said = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("hostcall").addHandler(handler)
        seen = []
        def note(x):
            seen.append(float(x))
        program = jax.jit(lambda x: hc.call(note, None, x, order="ordered"))
        for each in range(5):
            program(float(each))
        jax.effects_barrier()
        assert seen == [0, 1, 2, 3, 4]
        (line,) = said
        assert "fast dispatch" in line and "takes other arguments" in line, line
        lost = [state for p, state in _jax.states() if p.part is _jax.Part.FAST]
        assert all("left out" in state for state in lost), lost
        assert all(s == "installed" or "own" in s for p, s in _jax.states() if p.part is _jax.Part.LOOPS)
    """)


def test_values_are_the_same():
    x = jnp.arange(3.0)
    f = jax.jit(lambda x: jnp.sin(x) * hc.call(np.cos, x, x))
    np.testing.assert_allclose(f(x), np.sin(x) * np.cos(x), rtol=1e-6)

"""How processes end: exit, fork, spawn, sub-interpreters, Ctrl-C."""

from __future__ import annotations

import importlib.util
import re

import pytest

HEAD = """
import os, signal, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
import hostcall as hc
x = jnp.float32(1)
"""


def test_import_starts_no_back_end(run_python):
    done = run_python(
        """
        import hostcall
        from jax._src import xla_bridge
        print(xla_bridge._backends)
        """
    )
    assert done.stdout.strip() == "{}"


def test_what_was_dispatched_with_effects_runs_before_the_end(run_python):
    done = run_python(
        HEAD
        + """
def say(a):
    time.sleep(0.02)  # so that the last have not begun when the script ends
    print(int(a), flush=True)
m = jnp.ones((500, 500))
f = jax.jit(lambda i, m: hc.call(say, None, i + 0 * (m @ m)[0, 0], order="ordered"))
for i in range(10):
    f(float(i), m)
"""
    )
    assert done.stdout.split() == [str(i) for i in range(10)]
    assert done.stderr == ""


def test_exit_with_a_call_under_way(run_python):
    done = run_python(
        HEAD
        + """
entered = threading.Event()
def slow(a):
    entered.set()
    time.sleep(0.5)  # the script ends meanwhile: no event can say so
    print("ended", flush=True)
    return a
m = jnp.ones((800, 800))  # large enough for XLA to run it on a thread of its own
y = jax.jit(lambda m: hc.call(slow, m, m @ m) @ m)(m)
entered.wait()
print("leaving", flush=True)
"""
    )
    assert done.stdout.split() == ["leaving", "ended"]


def test_exit_with_a_stuck_call_names_and_interrupts_it(run_python):
    done = run_python(
        HEAD
        + """
entered = threading.Event()
def stuck(a):
    entered.set()
    while True:
        time.sleep(0.01)
m = jnp.ones((800, 800))
f = jax.jit(lambda m: hc.call(stuck, m, m @ m) @ m)
y = f(m)
entered.wait()
""",
        env={"HOSTCALL_EXIT_TIMEOUT": "0.3"},
    )
    assert "stuck" in done.stderr
    assert "interrupted" in done.stderr


def test_a_forked_child_ends_and_is_refused_politely(run_python):
    done = run_python(
        HEAD
        + """
import warnings
warnings.simplefilter("ignore")
jax.jit(lambda v: hc.call(lambda a: a, v, v))(x).block_until_ready()
child = os.fork()
if child == 0:
    try:
        hc.call(lambda a: a, jax.ShapeDtypeStruct((), np.float32), np.float32(1))
    except hc.errors.HostcallError as error:
        print("refused" if "spawn" in str(error) else error, flush=True)
    sys.exit(0)
print(os.waitpid(child, 0)[1], flush=True)
"""
    )
    assert done.stdout.split() == ["refused", "0"]


FORKED = """
import warnings
warnings.simplefilter("ignore")
def in_a_child(use):
    child = os.fork()
    if child == 0:
        try:
            print("gave", use(), flush=True)
        except hc.errors.HostcallError as error:
            assert "multiprocessing's 'spawn' or 'forkserver'" in str(error), error
            print("refused", flush=True)
        finally:
            os._exit(0)  # JAX's own end may hang there
    return os.waitpid(child, 0)
"""


def test_jax_in_a_forked_child_is_refused(run_python):
    """Whatever needs one of JAX's threads would wait for ever, so it is refused."""
    done = run_python(
        HEAD
        + FORKED
        + """
small = jax.jit(lambda v: v + 1)
large = jax.jit(lambda m: m @ m)
m = jnp.ones((500, 500))
jax.block_until_ready((small(x), large(m), jnp.sin(x)))
compiled, lowered = small.lower(x).compile(), jax.jit(lambda v: v * 7).lower(x)
hc.call(lambda a: a, x, x)  # hostcall is in use
def tapped(v):
    hc.tap(print, v)
    return v
for use in (
    lambda: small(x), lambda: large(m), lambda: small(np.ones(3)), lambda: jnp.sin(x),
    lambda: jnp.cos(x), lambda: jax.jit(lambda v: v * 3)(x), lambda: compiled(x),
    lambda: lowered.compile(), lambda: small.lower(np.ones(5)), lambda: jax.jit(tapped)(x),
    lambda: jax.vmap(lambda v: v * 2)(np.ones((1, 3))), lambda: jax.grad(jnp.sin)(x),
):
    in_a_child(use)
def fork_inside(a):
    in_a_child(lambda: small(np.float32(1)))
    return a
jax.jit(lambda v: hc.call(fork_inside, v, v))(x).block_until_ready()
in_a_child(lambda: (float(x), jax.eval_shape(small, x).shape))
print(small(x), float(jnp.cos(x * 0)), hc.call(lambda a: a + 1, x, x))  # the parent
"""
    )
    refused, rest = done.stdout.splitlines()[:13], done.stdout.splitlines()[13:]
    assert refused == ["refused"] * 13
    assert rest == ["gave (1.0, ())", "2.0 1.0 2.0"]


def test_a_fork_says_nothing(run_python):
    done = run_python(
        """
        import os, warnings
        warnings.simplefilter("ignore")
        import jax
        import hostcall as hc
        if (child := os.fork()) == 0:
            os._exit(0)
        hc.tap(print, 1.0)
        hc.barrier()
        if (other := os.fork()) == 0:
            os._exit(0)
        print(os.waitpid(child, 0)[1], os.waitpid(other, 0)[1])
        """
    )
    assert done.stdout.splitlines() == ["1.0", "0 0"]
    assert done.stderr == ""


def test_forked_children_that_do_without_jax(run_python):
    done = run_python(
        HEAD
        + """
import multiprocessing, subprocess, warnings
warnings.simplefilter("ignore")
jax.jit(lambda v: hc.call(lambda a: a, v, v))(x).block_until_ready()
def work(n):
    return int(np.arange(n).sum())
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(work, [3, 4]))
print(subprocess.run(["echo", "a", "b"], capture_output=True, preexec_fn=os.getpid).stdout)
source = "import jax, hostcall as hc; print(jax.jit(lambda v: hc.call(abs, v, v))(-2.0))"
child = os.fork()
if child == 0:
    os.execv(sys.executable, [sys.executable, "-c", source])
print(os.waitpid(child, 0)[1])
"""
    )
    assert done.stdout.splitlines() == ["[3, 6]", "b'a b\\n'", "2.0", "0"]


def test_a_spawned_child_has_an_engine_of_its_own(run_python, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        HEAD
        + """
import multiprocessing
def work(n):
    return float(jax.jit(lambda v: hc.call(lambda a: a + n, v, v))(x))
if __name__ == "__main__":
    print(work(1))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(work, (2,)))
"""
    )
    done = run_python(
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')",
        str(program),
    )
    assert done.stdout.split() == ["2.0", "3.0"]


needs_interpreters = pytest.mark.skipif(
    importlib.util.find_spec("_xxsubinterpreters") is None
    and importlib.util.find_spec("_interpreters") is None,
    reason="this Python has no module for sub-interpreters",
)


@needs_interpreters
def test_calls_and_taps_go_on_beside_sub_interpreters(run_python):
    """After the first one, PyGILState_Check returns true on every thread."""
    done = run_python(
        HEAD
        + """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
m = jnp.ones((600, 600))  # large enough for XLA to run it on a thread of its own
seen = []
def host(a):
    seen.append(threading.current_thread() is threading.main_thread())
    return a + len([str(k) for k in range(1000)]) - 1000
large = jax.jit(lambda m: hc.call(host, m, m @ m / 600) @ m)
small = jax.jit(lambda v: (hc.tap(lambda v: None, v), hc.call(host, v, v))[1])
for create, destroy in ((True, False), (False, True)):
    if create:
        other = interpreters.create()
        interpreters.run_string(other, "x = [str(k) for k in range(1000)]")
    if destroy:
        interpreters.destroy(other)
    for _ in range(10):
        assert large(m)[0, 0] == 600
        assert small(x) == 1
hc.barrier()
print(sorted(set(seen)))
"""
    )
    assert done.stdout.strip() == "[False, True]"


@needs_interpreters
def test_a_sub_interpreter_is_refused_politely(run_python):
    done = run_python(
        """
        try:
            import _interpreters as interpreters
        except ImportError:
            import _xxsubinterpreters as interpreters
        import sys
        program = f'''
        import sys
        sys.path[:] = {sys.path!r}
        try:
            import hostcall
        except ImportError as error:
            print(error, flush=True)
        '''
        import textwrap
        interpreters.run_string(interpreters.create(), textwrap.dedent(program))
        """
    )
    assert "sub-interpreter" in done.stdout


def test_ctrl_c_in_a_callback(run_python):
    """One process shows them all: each also begins after Ctrl-C in another."""
    done = run_python(
        HEAD
        + """
def loops(a):
    entered.set()
    while True: pass
def sleeps(a):
    entered.set()
    time.sleep(30)  # until the interrupt
def interrupt():
    entered.wait()
    time.sleep(0.3)  # the callback is in its sleep: before, the kernel would not end it
    os.kill(os.getpid(), signal.SIGINT)
for host in (loops, sleeps):
    for order in ("pure", "unordered", "ordered"):
        entered = threading.Event()
        f = jax.jit(lambda v: hc.call(host, v, v, order=order))
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            f(x).block_until_ready()
        except KeyboardInterrupt:
            print("interrupted", host.__name__, order)
        thread.join()
        print(jax.jit(lambda v: hc.call(lambda a: a + 1, v, v))(x))
""",
    )
    wanted = []
    for host in ("loops", "sleeps"):
        for order in ("pure", "unordered", "ordered"):
            wanted += [f"interrupted {host} {order}", "2.0"]
    assert done.stdout.splitlines() == wanted


def test_system_exit_in_a_callback_ends_the_process(run_python):
    done = run_python(
        HEAD
        + """
def leave(a):
    sys.exit(7)
jax.jit(lambda v: hc.call(leave, v, v))(x).block_until_ready()
""",
        check=False,
    )
    assert done.returncode == 7


# Run at the end of the process.
AT_THE_END = {
    "a callback of JAX's": """
f = jax.jit(lambda v: jax.pure_callback(lambda a: np.asarray(a) + 1, v, v))
print(f(x), end=" ")
jax.debug.print("saved {}", f(x))
jax.effects_barrier()
""",
    "calls, also of programs on XLA's threads": """
def add(a): return a + 1
m = jnp.ones((800, 800))
print(jax.jit(lambda v: hc.call(add, v, v))(x), end=" ")
print(jax.jit(lambda m: hc.call(add, m, m @ m / 800) @ m / 800)(m)[0, 0], end=" ")
print("saved", hc.call(add, x, x))
""",
    "calls on several devices": """
mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
a = jax.device_put(np.ones(2, np.float32), jax.NamedSharding(mesh, jax.P("a")))
f = jax.shard_map(lambda v: hc.call(lambda a: a + 1, v, v), mesh=mesh,
                  in_specs=jax.P("a"), out_specs=jax.P("a"))
print(*jax.device_get(jax.jit(f)(a)), end=" ")
print("saved", 2.0)
""",
    "taps": """
def of(i, c):
    hc.tap(lambda v: print(int(v), end=" "), i)
    return c
jax.jit(lambda v: jax.lax.fori_loop(2, 3, of, v))(x)
hc.barrier()
hc.tap(lambda: print("saved", end=" "))
hc.print("{}", 2.0)
hc.barrier()
""",
}
# Where the handler is registered; whether hostcall was used before the end.
REGISTERED = {
    "before JAX": "REGISTER IMPORT HOSTCALL USE",
    "before hostcall": "IMPORT REGISTER HOSTCALL USE",
    "before the first use": "IMPORT HOSTCALL REGISTER USE",
    "after it": "IMPORT HOSTCALL USE REGISTER",
    "and is the first use": "IMPORT HOSTCALL REGISTER",
    "before JAX, and is the first use": "REGISTER IMPORT HOSTCALL",
}
PIECES = {
    "REGISTER": "atexit.register(lambda: exec(sys.argv[1], globals()))\n",
    "IMPORT": "import jax, jax.numpy as jnp, numpy as np\n",
    "HOSTCALL": "import hostcall as hc; hc.patch_jax(); x = np.float32(1)\n",
    "USE": "jax.jit(lambda v: hc.call(lambda a: a, v, v))(x); hc.tap(lambda: 0)\n",
}


def cases_of_atexit():
    """(order, bodies): a process for each body that is hostcall's first use, else one
    for all of them.
    """
    for name, order in REGISTERED.items():
        if "USE" in order.split():
            yield pytest.param(order, [*AT_THE_END.values()], id=name)
            continue
        for kind, body in AT_THE_END.items():
            yield pytest.param(order, [body], id=f"{name}-{kind}")


@pytest.mark.parametrize(("order", "bodies"), [*cases_of_atexit()])
def test_a_handler_of_atexit_runs_programs(run_python, order, bodies):
    source = "import atexit, sys\n" + "".join(PIECES[piece] for piece in order.split())
    done = run_python(source, "".join(bodies))
    assert done.stderr == ""
    ended = rf"((2\.?0? )+saved 2\.0\n){{{len(bodies)}}}"
    assert re.fullmatch(ended, done.stdout), done.stdout


def test_taps_are_delivered_before_an_older_handler_closes_their_file(run_python):
    done = run_python(
        "import atexit"
        + HEAD
        + """
lines = []
atexit.register(lambda: print(*lines))
def slow(v):
    time.sleep(0.1)  # so that the last are still queued when the script ends
    lines.append(int(v))
jax.jit(lambda n: jax.lax.fori_loop(0, n, lambda i, c: (hc.tap(slow, i), c)[1], n))(5)
"""
    )
    assert done.stdout == "0 1 2 3 4\n"


def test_a_late_handler_drops_a_program_with_a_long_call(run_python):
    """The process ends all the same, and does not crash."""
    done = run_python(
        "import atexit, sys\natexit.register(lambda: late())\n"
        + HEAD
        + """
jax.jit(lambda v: hc.call(lambda a: a, v, v))(x)
m = jnp.ones((800, 800))
entered = threading.Event()
def long(a):
    entered.set()
    time.sleep(1)  # the process goes on ending meanwhile
    return a
def late():
    jax.jit(lambda m: hc.call(long, m, m @ m))(m)
    entered.wait()
    print("left")
"""
    )
    assert (done.stdout, done.stderr) == ("left\n", "")


# Waits of calls that have a long limit of their own; `stuck` never returns.
LONG_WAITS = {
    "a time limit": "hc.call(hc.host(stuck, timeout=1e6), v, v)",
    "a time limit on rows": (
        "jax.vmap(lambda r: hc.call("
        "hc.host(stuck, timeout=1e6), r, r, vmap_method='parallel'))(v[None])[0]"
    ),
    "a time limit on a coroutine": "hc.call(hc.host(stuck_coroutine, timeout=1e6), v, v)",
}


STUCK = """
import asyncio
def stuck(a):
    called.set()
    while True:
        time.sleep(0.01)
async def stuck_coroutine(a):
    called.set()
    while True:
        await asyncio.sleep(0.01)
m = jnp.ones((800, 800))
def start(call):
    def program(m):
        v = m @ m
        v = hc.call(lambda a: (called.set(), a)[1], v, v)
        return call(v) @ m
    y = jax.jit(program)(m)
    called.wait()
    print("called")
    return y
"""
SHORT_END = {"HOSTCALL_EXIT_TIMEOUT": "0.3"}


@pytest.mark.parametrize("call", LONG_WAITS.values(), ids=LONG_WAITS)
def test_no_wait_outlasts_the_end(run_python, call):
    source = f"called = threading.Event()\ny = start(lambda v: {call})\n"
    done = run_python(HEAD + STUCK + source, env=SHORT_END)
    assert done.stdout.split() == ["called"]


def test_no_wait_outlasts_ctrl_c(run_python):
    calls = "".join(f"lambda v: {call},\n" for call in LONG_WAITS.values())
    done = run_python(
        HEAD
        + STUCK
        + f"""
def interrupt():
    catches.wait()
    os.kill(os.getpid(), signal.SIGINT)
for call in [{calls}]:
    called, catches = threading.Event(), threading.Event()
    y = start(call)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        catches.set()
        np.asarray(y)
    except KeyboardInterrupt:
        print("interrupted")
    thread.join()
""",
        env=SHORT_END,
    )
    assert done.stdout.split() == ["called", "interrupted"] * len(LONG_WAITS)


THREADS = """
import atexit, threading
atexit.register(  # before the engine's: it runs after it
    lambda: print(sorted(t.name for t in threading.enumerate()), flush=True))
"""


def test_no_thread_is_left_when_the_interpreter_ends(run_python):
    """Python ends daemon threads wherever they are; ending one inside C++ would abort."""
    done = run_python(
        THREADS
        + HEAD
        + """
def host(a):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)  # the interrupt comes in it
    return a
hc.tap(lambda v: None, x)
try:
    jax.jit(lambda v: hc.call(host, v, v))(x).block_until_ready()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    )
    assert done.stdout.splitlines() == ["interrupted", "['MainThread']"]
    assert done.stderr == ""


@pytest.mark.parametrize("order", ["pure", "ordered", "eager"])
def test_daemon_threads_in_callbacks_are_left_behind(run_python, order):
    """One thread waits for ever, one runs for ever, one goes on while the process ends."""
    done = run_python(
        """
import atexit, threading
go, went = threading.Event(), threading.Event()
def late():  # before the engine's: it runs after it
    go.set()
    went.wait()
    print("late", flush=True)
atexit.register(late)
"""
        + HEAD
        + f"""
order = {order!r}
entered = [threading.Event() for _ in range(3)]
lock = threading.Lock()
lock.acquire()
def waits(a):
    entered[0].set()
    lock.acquire()
def runs(a):
    entered[1].set()
    while True: pass
def goes_on(a):
    entered[2].set()
    go.wait()
    went.set()
    return a
def call(host):
    if order == "eager":
        hc.call(host, x, x)
    else:
        jax.jit(lambda v: hc.call(host, v, v, order=order))(x)
for host in (waits, runs, goes_on):
    threading.Thread(target=call, args=(host,), daemon=True).start()
for event in entered:
    event.wait()
print("leaving", flush=True)
""",
        env={"HOSTCALL_EXIT_TIMEOUT": "1e6"},
    )
    assert done.stdout.split() == ["leaving", "late"]
    assert done.stderr == ""


CHILDREN = """
import multiprocessing, pathlib, sys
import jax
import hostcall as hc

def work(path):
    file = open(path, "w", buffering=1)
    def write(i):
        file.write(f"{int(i)}\\n")
    jax.jit(lambda n: jax.lax.fori_loop(
        0, n, lambda i, c: (hc.tap(write, i), c)[1], n))(200)
    hc.tap(lambda: print("the last", flush=True))

if __name__ == "__main__":
    folder, *methods = sys.argv[2:]
    for method in methods:
        path = pathlib.Path(folder, method)
        child = multiprocessing.get_context(method).Process(target=work, args=(path,))
        child.start()
        child.join()
        print(method, child.exitcode, path.read_text().split() == [
            str(i) for i in range(200)], flush=True)
"""


def test_children_of_multiprocessing_deliver_what_is_queued(run_python, tmp_path):
    """Children of fork and forkserver leave by os._exit, which runs no atexit."""
    program = tmp_path / "program.py"
    program.write_text(CHILDREN)
    done = run_python(
        "import runpy, sys, warnings; warnings.simplefilter('ignore')\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')\n",
        str(program),
        str(tmp_path),
        "fork",
        "forkserver",
        "spawn",
    )
    assert done.stdout.splitlines() == [
        line
        for method in ("fork", "forkserver", "spawn")
        for line in ("the last", f"{method} 0 True")
    ]


def test_a_barrier_with_a_limit_in_a_forked_child(run_python):
    run_python("""
        import os
        import hostcall as hc
        assert hc.barrier(timeout=60)
        child = os.fork()
        if child:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0 if hc.barrier(timeout=60) else 1)
    """)

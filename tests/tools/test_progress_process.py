"""`hc.progress` in processes: their ends, Ctrl-C, forks, jobs of several, notebooks."""

from __future__ import annotations

import json
import re

import bars
import jobs

# --- The end of the process, and forks ----------------------------------------------


def test_the_end_of_the_process_closes_bars(run_python):
    done = run_python("""
        import jax, hostcall as hc
        def body(i):
            hc.progress(i, desc="while")
            return i + 1
        jax.jit(lambda n: jax.lax.while_loop(lambda i: i < n, body, 0))(10)
        for i in range(5):
            hc.progress(i, 10, desc="python", every=1)
    """)
    *_, last = done.stderr.splitlines()
    assert last.startswith("python:  50%|")
    assert "while: " in done.stderr


def test_an_interrupted_loop_leaves_its_line(run_python):
    done = run_python(
        """
        import jax, hostcall as hc
        @jax.jit
        def step(i):
            hc.progress(i, 10, desc="step", every=1)
        for i in range(10):
            step(i)
            if i == 4:
                raise KeyboardInterrupt
        """,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("step:  50%|")


def test_a_forked_child_forgets_the_bars(run_python, tmp_path):
    run_python(
        """
        import functools, os, sys, tqdm, warnings
        warnings.simplefilter("ignore")
        import hostcall as hc
        file = open(sys.argv[1], "w")
        for i in range(3):
            bar = functools.partial(tqdm.tqdm, file=file)
            hc.progress(i, 10, desc="parent", every=1, bar=bar)
        hc.barrier(programs=False)
        file.flush()
        before = os.path.getsize(sys.argv[1])
        assert before
        child = os.fork()
        if child == 0:
            hc.barrier()
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
        assert os.path.getsize(sys.argv[1]) == before
        hc.progress.close()
        file.flush()
        assert os.path.getsize(sys.argv[1]) > before
        """,
        str(tmp_path / "bar.txt"),
    )


def test_barriers_call_what_they_are_given(run_python):
    out = run_python("""
        import hostcall as hc
        def fn(ending):
            print("called", ending, flush=True)
            if not ending:
                raise KeyError("no bars")
        hc.monitor.at_barrier(fn)
        hc.tap(print, "a tap", flush=True)
        hc.barrier(programs=False)
        try:
            hc.barrier()
        except KeyError as error:
            print(error, flush=True)
    """).stdout
    assert out.splitlines() == ["a tap", "called False", "'no bars'", "called True"]


# --- Ctrl-C ---------------------------------------------------------------------------


def test_ctrl_c_in_a_compiled_program_closes_its_bar(run_python, tmp_path):
    run_python(
        """
        import os, signal, sys, threading, time
        signal.signal(signal.SIGINT, signal.default_int_handler)

        class Terminal:
            file = open(sys.argv[1], "w")
            def __getattr__(self, name):
                return getattr(self.file, name)
            def isatty(self):
                return True
        sys.stderr = Terminal()

        import jax, jax.numpy as jnp, hostcall as hc

        # Kept: without the GIL, the thread that is interrupted may be freeing it at that
        # moment, and Python drops what is raised in a weak reference's callback.
        kill = lambda: os.kill(os.getpid(), signal.SIGINT)
        killer = threading.Thread(target=kill)

        def wait(i):
            if i == 5:
                killer.start()
                for _ in range(600):  # 60 s, unless interrupted
                    time.sleep(0.1)

        def body(i, x):
            hc.progress(i, 10, desc="fit", every=1)
            hc.call(wait, None, i, order="ordered")
            return x @ x / 1000

        x = jnp.ones((1000, 1000))  # so large that XLA runs it on its own thread
        try:
            jax.jit(lambda x: jax.lax.fori_loop(0, 10, body, x))(x).block_until_ready()
        except KeyboardInterrupt:
            hc.barrier()
            print("interrupted", file=sys.stderr, flush=True)
        os._exit(0)
        """,
        str(tmp_path / "terminal"),
    )
    terminal = bars.Terminal()
    terminal.write((tmp_path / "terminal").read_bytes().decode())
    # The compiler may show the step before its callback is called, or after.
    bar, text = terminal.lines()
    assert re.match(r"fit:  [56]0%\|", bar)
    assert text == "interrupted"


# --- Several processes ----------------------------------------------------------------


def test_one_process_of_a_job_draws(run_python):
    """Both run the same programs. The steps of the first come to its first device's
    process alone, those of the second to both, where a factory of the user's draws.
    """
    source = """
        import os, sys
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        import jax, jax.numpy as jnp, numpy as np
        me = int(sys.argv[1])
        jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, me)
        import hostcall as hc
        P = jax.sharding.PartitionSpec
        mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.NamedSharding(mesh, P("x"))
        x = jax.make_array_from_callback((8,), sharding, lambda i: np.arange(8.0)[i])

        class Mine:
            def __init__(self, **_): self.n = 0
            def update(self, n): self.n += n
            def set_postfix_str(self, text, refresh): pass
            def close(self): os.write(1, f"says: {self.n}\\n".encode())

        def loop(**options):
            def body(i, c):
                hc.progress(i, 6, **options)
                return c + 1
            return lambda x: jax.lax.fori_loop(0, 6, body, x)

        turned = jax.NamedSharding(
            jax.sharding.Mesh(np.array(jax.devices()[::-1]), "x"), P("x"))
        y = jax.make_array_from_callback((8,), turned, lambda i: np.arange(8.0)[i])
        jax.jit(loop(desc="turned"))(y).block_until_ready()
        hc.barrier()
        for options in ({"desc": "whole"}, {"bar": Mine}):
            f = loop(**options)
            jax.jit(f)(x).block_until_ready()
            shards = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
            jax.jit(shards)(x).block_until_ready()
            hc.barrier()
    """
    first, second = jobs.in_each(2, lambda me, port: run_python(source, str(me), port))
    assert len(re.findall(r"whole: 100%\|#+\| 6/6", first.stderr)) == 2
    assert "whole" not in second.stderr
    assert "turned" not in first.stderr
    assert len(re.findall(r"turned: 100%\|#+\| 6/6", second.stderr)) == 1
    assert jobs.said(first.stdout) == ["6", "6"]
    assert jobs.said(second.stdout) == ["6"]


# --- Notebooks ------------------------------------------------------------------------


def test_a_notebook_shows_a_widget(run_python, tmp_path):
    done = run_python(
        """
        import json, nbformat
        from nbclient import NotebookClient
        cell = (
            "import jax, jax.numpy as jnp, hostcall as hc\\n"
            "def body(c, i):\\n"
            "    hc.progress(i, 50, desc='fit', loss=c)\\n"
            "    return c + 1.0, None\\n"
            "jax.jit(lambda x: jax.lax.scan(body, x, jnp.arange(50))[0])(0.0)\\n"
            "hc.barrier()"
        )
        cells = [nbformat.v4.new_code_cell(cell)]
        book = nbformat.v4.new_notebook(cells=cells)
        client = NotebookClient(book, kernel_name="python3", store_widget_state=True)
        client.execute()
        widgets = book.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]
        states = [model["state"] for model in widgets["state"].values()]
        data = [list(output.get("data", {})) for output in book.cells[0].outputs]
        print("says:", json.dumps({"data": data, "states": states}))
        """,
        env={"IPYTHONDIR": str(tmp_path), "JUPYTER_PLATFORM_DIRS": "1"},
    )
    (text,) = re.findall("says: (.*)", done.stdout)
    told = json.loads(text)
    assert ["application/vnd.jupyter.widget-view+json"] in [
        [kind for kind in kinds if "widget" in kind] for kinds in told["data"]
    ]
    (bar,) = [s for s in told["states"] if s["_model_name"] == "FloatProgressModel"]
    assert (bar["value"], bar["max"], bar["bar_style"]) == (50, 50, "success")
    texts = [s["value"] for s in told["states"] if s["_model_name"] == "HTMLModel"]
    assert "fit:\u2007100%" in texts
    assert any("50/50" in text and "loss=49]" in text for text in texts)

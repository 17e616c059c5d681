"""What a failure in one process of a job does to all of them, as a table.

    python benchmarks/failures.py [processes ...]

Each scenario runs twice: with hostcall's calls and with JAX's own callbacks. A row
says, for process 0, for process 1 and for all others together, the exit codes and how
many seconds after the failure the last of them had ended; `wrong` counts values of
later steps that were not what they had to be. A process that still runs after LIMIT
seconds is killed.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time

LIMIT = float(os.environ.get("LIMIT", "130"))

# One device and one thread for each process.
FLAGS = "--xla_force_host_platform_device_count=1 --xla_cpu_multi_thread_eigen=false"

HEAD = """
import os, signal, sys, threading, time
import jax, numpy as np
me, size, port, who = map(int, sys.argv[1:5])
kind, plain = sys.argv[5], sys.argv[6] == "plain"
def say(*what):
    os.write(1, f"says {time.time():.3f} {' '.join(map(str, what))}\\n".encode())
jax.distributed.initialize(f"localhost:{port}", size, me)
from jax.sharding import NamedSharding, PartitionSpec as P
import logging
if plain:
    def call(fn, x):
        return jax.pure_callback(fn, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
else:
    import hostcall as hc
    if kind == "late":
        hc.configure(fail="together")
    how = {"timeout": 0.2} if kind in ("late", "timeout") else {}
    def call(fn, x, **where):
        return hc.call(hc.host(fn, **how) if how else fn, x, x, **where)
    class Heard(logging.Handler):
        def emit(self, record):
            say("heard", record.getMessage()[:60])
    logging.getLogger("hostcall").addHandler(Heard())
mesh = jax.make_mesh((size,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.make_array_from_callback(
    (size,), NamedSharding(mesh, P("x")), lambda i: np.arange(size, dtype="float32")[i]
)
fails = False
def host(v):
    if fails and me == who:
        say("fails")
        if kind in ("raise", "caught"): raise LookupError("no such row")
        if kind == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if kind == "term": os.kill(os.getpid(), signal.SIGTERM)
        if kind == "exit": sys.exit(3)
        if kind in ("hang", "timeout", "late"): time.sleep(1000)
    return np.asarray(v)
"""

PARTITIONS = {
    "shard_map": """
def body(v):
    v = call(host, v)
    return v + jax.lax.psum(v.sum(), "x")
step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
""",
    "jit": """
on = jax.devices()[who]
def call_on(x):
    if plain:
        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x,
                                 sharding=jax.sharding.SingleDeviceSharding(on))
    return call(host, x, on=on)
out = NamedSharding(mesh, P("x"))
step = jax.jit(lambda x: call_on(x) + x.sum(), out_shardings=out)
""",
}

RUN = """
def good(y):
    want = np.arange(size) + sum(range(size))
    return all((np.asarray(s.data) == want[s.index[0]]).all()
               for s in y.addressable_shards)
assert good(step(x)) and good(step(x))
fails = True
if kind == "outside" and me == who:
    say("fails")
    raise LookupError("outside of a program")
if kind == "leaves" and me == who:
    say("fails")
    sys.exit(3)
try:
    for _ in range(3):
        say("right" if good(step(x)) else "WRONG")
except Exception as error:
    say("raised", type(error).__name__, str(error).replace(chr(10), " ")[:60])
    if kind != "caught" or me != who:
        raise
    fails = False
    for _ in range(3):  # the danger: its next steps meet the others' failed one
        try:
            say("right" if good(step(x)) else "WRONG")
        except Exception as error:
            say("refused", type(error).__name__)
    time.sleep(1000)
"""

KINDS = {
    "raise": "the function raises",
    "timeout": "`timeout=` ends the call",
    "late": '`timeout=` and `fail="together"`',
    "caught": "it raises, the process catches it, tries more steps, and lives on",
    "outside": "an exception outside of programs",
    "leaves": "`sys.exit(3)` outside of programs",
    "exit": "`sys.exit(3)` in the function",
    "kill": "SIGKILL",
    "term": "SIGTERM",
    "hang": "the function hangs, no `timeout=`",
}


def run(size: int, who: int, kind: str, plain: bool, partition: str) -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    source = HEAD + PARTITIONS[partition] + RUN

    def args(me: int) -> list[str]:
        way = "plain" if plain else "hostcall"
        return [*map(str, (me, size, port, who)), kind, way]

    processes = [
        subprocess.Popen(
            [sys.executable, "-c", source, *args(me)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"XLA_FLAGS": FLAGS, "OMP_NUM_THREADS": "1"},
        )
        for me in range(size)
    ]
    limit = time.time() + LIMIT
    ended: dict[int, float] = {}
    while len(ended) < size and time.time() < limit:
        for number, process in enumerate(processes):
            if number not in ended and process.poll() is not None:
                ended[number] = time.time()
        time.sleep(0.02)
    outs = []
    for process in processes:
        process.kill()
        outs.append(process.communicate()[0].decode(errors="replace"))
    said = "".join(outs)
    failed = re.search(r"says ([\d.]+) fails", said)
    at = float(failed[1]) if failed else limit
    groups: list[list[int]] = [[0], [1], list(range(2, size))]
    cells = []
    for numbers in filter(None, groups):
        codes = sorted({str(processes[n].returncode) for n in numbers if n in ended})
        codes += ["still runs"] * any(n not in ended for n in numbers)
        times = [ended[n] - at for n in numbers if n in ended]
        last = f" after {max(times):.1f}" if times else ""
        heard = [
            float(known[0]) - at
            for n in numbers
            if (known := re.findall(r"says ([\d.]+) (?:heard|raised)", outs[n]))
        ]
        knows = f", knows after {max(heard):.2f}" if heard else ""
        cells.append(f"{' or '.join(codes)}{last}{knows}")
    return f"{'; '.join(cells)} | {said.count('WRONG')}"


def main() -> None:
    kinds = os.environ.get("KINDS", "").split() or list(KINDS)
    ways = os.environ.get("WAYS", "hostcall plain").split()
    print("| processes, fails, program | what fails | with | code after s | wrong |")
    print("|---|---|---|---|---|")
    for size in map(int, sys.argv[1:] or ["2"]):
        for partition in os.environ.get("PARTITIONS", "shard_map jit").split():
            for kind in kinds:
                # Process 0 has the coordination service, so its end is another case.
                whos = {1, 0} if kind in ("kill", "raise") else {1}
                for who in whos:
                    for way in ways:
                        if way == "plain" and kind in ("late", "timeout"):
                            continue
                        row = run(size, who, kind, way == "plain", partition)
                        what = KINDS[kind]
                        print(
                            f"| {size}, {who}, {partition} | {what} | {way} | {row} |",
                            flush=True,
                        )


if __name__ == "__main__":
    main()

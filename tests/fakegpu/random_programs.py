"""Programs drawn at random (drawn_programs.py), on the driver's GPUs and on the CPU.

    make test-gpu-programs FIRST=0 COUNT=10000 SECONDS=600

Program number N is always the same. Its results, its calls, their arguments and their order
have to be the CPU's, and no rule of CUDA may be broken.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # XLA reads its flags when JAX is used first
    sys.path[:0] = [str(Path(__file__).parents[at]) for at in (0, 1, 2)]
    import fakegpus

    if "--work" in sys.argv:
        DRIVER = fakegpus.start()

import drawn_programs as programs
import jax
import jax.numpy as jnp
import numpy as np
from drawn_programs import Called
from graphs import RECORDED
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from modes import MODES

import hostcall as hc
from fuzz.draw import Draw

WAYS = ("one", "one", "one", "one", "one", "one", "shards", "global")
RUNS = 3
# How lines of the processes that run many begin, and the result of a program that differs.
BEGINS, RESULT, DIFFERS = "program: ", "result: ", "differs"


@dataclasses.dataclass
class Outcome:
    """What a platform made of a program."""

    error: str | None = None
    results: list[bytes] = dataclasses.field(default_factory=list)
    calls: Any = None
    pure: Any = None
    taps: Any = None


@dataclasses.dataclass
class Program:
    block: programs.Block
    way: str
    devices: int
    device: int  # of a program over one
    dtype: str
    shape: tuple[int, ...]
    mode: str
    is_recorded: bool  # its kernels, into CUDA graphs
    failing: tuple[int, int] | None
    log: programs.Log = dataclasses.field(default_factory=programs.Log, repr=False)

    @classmethod
    def numbered(cls, number: int) -> Program:
        draw = Draw(random.Random(number).randbytes(256))
        block = programs.Drawn(draw).block(0)
        way = draw.choice(WAYS)
        sites = [s.site for s in block.whole if isinstance(s, programs.Call)]
        # In a program over several devices the others would wait in a collective.
        fails = way == "one" and bool(sites) and draw.int(0, 7) == 0
        return cls(
            block=block,
            way=way,
            devices=draw.choice([2, 4]) if way != "one" else 1,
            device=draw.int(0, 3),
            dtype=draw.choice(programs.DTYPES),
            shape=draw.choice(programs.SHAPES),
            mode=draw.choice(list(MODES)),
            is_recorded=draw.int(0, 3) == 0,
            failing=(draw.choice(sites), draw.int(15, 30)) if fails else None,
        )

    # --- Running it -----------------------------------------------------------------

    def on(self, platform: str) -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
        """The compiled program, and its arguments for each run."""
        if self.way == "one":
            place: Any = jax.devices(platform)[self.device]
            program = lambda x, n: self.block.run(self.log, x, n)
            shape, numbers = self.shape, place
        else:
            devices = jax.devices(platform)[: self.devices]
            kind = jax.sharding.AxisType.Auto
            mesh = jax.make_mesh(
                (self.devices,), ("x",), devices=devices, axis_types=(kind,)
            )
            shape = (self.devices, *self.shape)
            place, numbers = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
            program = lambda x, n: self.block.run(self.log, x, n)
            if self.way == "shards":
                program = jax.shard_map(
                    lambda x, n: self.block.run(self.log, x[0], n)[None],
                    mesh=mesh,
                    in_specs=(P("x"), P()),
                    out_specs=P("x"),
                    check_vma=False,
                )
        options = RECORDED if self.is_recorded and platform == "gpu" else None
        size = int(np.prod(shape))
        arguments = []
        for run in range(1 if self.failing else RUNS):
            values = (np.arange(size) * 5 + 3 * run + 1) % programs.MODULUS
            x = values.reshape(shape).astype(jnp.dtype(self.dtype))
            arguments.append(
                (jax.device_put(x, place), jax.device_put(np.int32(run), numbers))
            )
        return jax.jit(program, compiler_options=options), arguments

    def outcome(self, platform: str) -> Outcome:
        self.log.clear()
        self.log.failing = self.failing
        try:
            program, arguments = self.on(platform)
            with hc.reraise():
                results = [program(*args) for args in arguments]
                jax.block_until_ready(results)
        except Exception as error:
            hc.barrier()
            code = getattr(error, "code", "")
            return self.seen(f"{type(error).__name__} {code or str(error)[:200]}", [])
        hc.barrier()
        return self.seen(None, [np.asarray(result).tobytes() for result in results])

    def seen(self, error: str | None, results: list[bytes]) -> Outcome:
        log = self.log
        failed = error is not None
        by_device: dict[int | None, list[Called]] = {}
        for call in list(log.calls):
            device = call.device if self.way == "shards" else None
            by_device.setdefault(device, []).append(call._replace(device=None))
        taps = [call._replace(device=None) for call in log.taps]
        # Of a program that fails, XLA may have begun more or less of what is pure, and
        # a GPU's taps are on their way when it does.
        return Outcome(
            error=error,
            results=results,
            calls={key: in_order(calls, failed) for key, calls in by_device.items()},
            pure=None if failed else {call._replace(device=None) for call in log.pure},
            taps=None if failed else sorted(taps) if self.way == "shards" else taps,
        )


def in_order(calls: list[Called], failed: bool) -> list[Called]:
    """The calls without the order of rows that run in parallel, which is any.

    If one fails, those beside it may have been made or not.
    """
    result: list[Called] = []
    for (_, method), group in itertools.groupby(calls, key=lambda call: call[:2]):
        if method != "parallel":
            result += group
        elif not failed:
            result += sorted(group)
    return result


# --- Judging ------------------------------------------------------------------------


def judge(number: int, driver: Any) -> str:
    """ "same", "refused: ..." or "not judged: ..."; raises AssertionError if it differs."""
    program = Program.numbered(number)
    want = program.outcome("cpu")
    before = Counter(driver.fakeMissing().decode().splitlines())
    MODES[program.mode](driver)
    got = program.outcome("gpu")
    driver.fakeReset()
    missing = Counter(driver.fakeMissing().decode().splitlines()) - before
    faults = driver.fakeTakeFaults().decode()
    if missing:
        driver.fakeForgetMissing()
        return f"not judged: {', '.join(line.split(' ', 1)[1] for line in missing)}"
    assert not faults, f"rules of CUDA were broken:\n{faults}"
    for field in dataclasses.fields(Outcome):
        one, other = getattr(got, field.name), getattr(want, field.name)
        assert one == other, f"{field.name}: {one!r} instead of {other!r}"
    if want.error is None:
        return "same"
    return "same failure" if want.error.startswith("Bad") else f"refused: {want.error}"


# --- Many of them -------------------------------------------------------------------


def work(first: int, count: int, seconds: float) -> None:
    """Prints a line before each program, and its result."""
    end = time.monotonic() + seconds
    for number in range(first, first + count):
        if time.monotonic() > end:
            return
        print(f"{BEGINS}{number}", flush=True)
        try:
            result = judge(number, DRIVER)
        except AssertionError as error:
            result = f"{DIFFERS}: {' '.join(str(error)[:2000].split())}"
        print(f"{RESULT}{result}", flush=True)
        if number % 100 == 99:
            jax.clear_caches()


@dataclasses.dataclass
class Tally:
    """What processes say of their programs."""

    number: int  # of the last program that began
    results: Counter[str] = dataclasses.field(default_factory=Counter)
    different: list[int] = dataclasses.field(default_factory=list)

    def read(self, worker: subprocess.Popen[str]) -> None:
        """Reads until the process ends. XLA ends one for some programs."""
        is_running = False
        for line in worker.stdout or ():
            if line.startswith(BEGINS):
                self.number, is_running = int(line.removeprefix(BEGINS)), True
            elif line.startswith(RESULT):
                self.count(line.removeprefix(RESULT).strip())
                is_running = False
        code = worker.wait()
        if is_running:
            self.count(f"{DIFFERS}: the process ended with {code}")
        elif code != 0:
            sys.exit(f"a process ended with {code}, in no program")

    def count(self, result: str) -> None:
        if result.startswith(DIFFERS):
            self.different.append(self.number)
            program = Program.numbered(self.number)
            print(f"program {self.number} {result}\n{program}", flush=True)
            result = DIFFERS
        self.results[result] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--work", action="store_true")
    given = parser.parse_args()
    if given.work:
        return work(given.first, given.count, given.seconds)
    tally = Tally(given.first - 1)
    end = time.monotonic() + given.seconds
    last = given.first + given.count - 1
    while tally.number < last and time.monotonic() < end:
        command = [sys.executable, __file__, "--work"]
        command += ["--first", str(tally.number + 1)]
        command += ["--count", str(last - tally.number)]
        command += ["--seconds", str(end - time.monotonic())]
        tally.read(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    print(f"programs {given.first} to {tally.number}; these differ: {tally.different}")
    for result, times in tally.results.most_common():
        print(f"{times:6} {result}")
    sys.exit(bool(tally.different))


if __name__ == "__main__":
    main()

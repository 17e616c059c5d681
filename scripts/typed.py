"""mypy and pyright on what users write.

They read README's programs, examples/ and tests/repo/typed.py. Both are strict, and
check the installed package, so that a name which `hostcall/__init__.py` hides from
type checkers is an error here. Checks are off where other libraries fail them: JAX has
untyped functions, SciPy has no types, and some libraries of the examples are not
installed.

mypy also reads the programs of the gallery. Most of them have no annotations, so it
checks only what they pass to hostcall, and how they use what they get.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MYPY = (
    "--strict",
    "--untyped-calls-exclude=jax",
    "--ignore-missing-imports",
    # SciPy has no types, so what hc.host makes of its functions is Any, and what a
    # program returns of that.
    "--no-warn-return-any",
    "--config-file=",
    f"--cache-dir={ROOT / '.mypy_cache' / 'users'}",
)
GALLERY = (
    "--check-untyped-defs",
    "--disable-error-code=var-annotated",  # an empty list
    "--ignore-missing-imports",
    "--config-file=",
    f"--cache-dir={ROOT / '.mypy_cache' / 'gallery'}",
)
PYRIGHT = {
    "typeCheckingMode": "strict",
    "reportUnnecessaryTypeIgnoreComment": True,
    "reportMissingImports": False,
    "reportMissingTypeStubs": False,
    # Whatever jax.jit, jax.grad, SciPy and libraries that are not installed return, or
    # define as a type, is unknown to pyright.
    "reportUnknownParameterType": False,
    "reportUnknownArgumentType": False,
    "reportUnknownLambdaType": False,
    "reportUnknownMemberType": False,
    "reportUnknownVariableType": False,
}


def main() -> int:
    programs = re.findall(
        r"^```python[^\n]*\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = [ROOT / "tests" / "repo" / "typed.py", *ROOT.glob("examples/*.py")]
        for number, program in enumerate(programs):
            files.append(folder / f"readme_{number}.py")
            files[-1].write_text(program)
        config = folder / "pyrightconfig.json"
        config.write_text(json.dumps(PYRIGHT))
        pyright = (f"--project={config}", f"--pythonpath={sys.executable}")
        commands = (
            ("mypy", *MYPY, *files),
            ("pyright", *pyright, *files),
            ("mypy", *GALLERY, *ROOT.glob("examples/gallery/*.py")),
        )
        checkers = [  # at the same time; each reads its programs in one process
            subprocess.Popen([sys.executable, "-m", *command], cwd=folder)
            for command in commands
        ]
        statuses = [checker.wait() for checker in checkers]
        return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())

"""mypy and pyright on what users write.

They read README's programs, examples/ and tests/repo/typed.py. Both are strict, and
check the package as it is installed, so that a name which its front page does not show
to type checkers is an error here. What they leave out is the fault of other libraries:
JAX has untyped functions, SciPy has no types at all, and some libraries of the examples
are not installed.
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
    "--config-file=",
    f"--cache-dir={ROOT / '.mypy_cache' / 'users'}",
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
        checkers = [  # at the same time; each reads all programs in one process
            subprocess.Popen([sys.executable, "-m", *command, *files], cwd=folder)
            for command in (("mypy", *MYPY), ("pyright", *pyright))
        ]
        statuses = [checker.wait() for checker in checkers]
        return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())

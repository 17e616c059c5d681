"""mypy on what users write: README's programs, examples/ and tests/repo/typed.py.

The package is checked as it is installed, so that a name which its front page does not
show to type checkers is an error here. JAX's own untyped functions are no errors.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPTIONS = (
    "--strict",
    "--allow-untyped-defs",  # programs that show something else than annotations
    "--allow-untyped-calls",
    "--allow-untyped-decorators",
    "--ignore-missing-imports",
    "--config-file=",
)


def main() -> int:
    programs = re.findall(
        r"^```python[^\n]*\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S
    )
    with tempfile.TemporaryDirectory() as folder:
        files = [ROOT / "tests" / "repo" / "typed.py", *ROOT.glob("examples/*.py")]
        for number, program in enumerate(programs):
            files.append(Path(folder) / f"readme_{number}.py")
            files[-1].write_text(program)
        cache = f"--cache-dir={ROOT / '.mypy_cache' / 'users'}"
        command = [sys.executable, "-m", "mypy", cache, *OPTIONS, *map(str, files)]
        return subprocess.run(command, check=False, cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main())

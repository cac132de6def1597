"""Runs a compiler for its verdict alone."""

import shlex
import subprocess


def complaint(command: str, arguments: list[str], source: str) -> str | None:
    """What the compiler `command` says about `source` (given on its standard input), or None
    if it accepts it. `arguments` names the language and the standard."""
    run = subprocess.run(
        [*shlex.split(command), *arguments, "-"], input=source, capture_output=True, text=True
    )
    return None if run.returncode == 0 else f"{shlex.join(run.args)}\n{run.stderr}{run.stdout}"

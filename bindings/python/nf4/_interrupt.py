"""Ctrl-C while the command `nf4` is still being imported: exit code 130, and no traceback.

nf4/__init__.py imports this first, because `python -m nf4` and the script `nf4` both import the
package before any code of nf4.cli runs. Other programs keep their handlers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130


def _end(number: int, frame: FrameType | None) -> None:
    # Not an exception: in the middle of an import it may be printed and lost.
    with contextlib.suppress(OSError):
        os.write(2, b"nf4: interrupted\n")
    os._exit(INTERRUPTED)


def _is_command() -> bool:
    """Whether the process is `python -m nf4` or this package's script `nf4`."""
    if sys.argv[:1] == ["-m"]:  # while packages are imported to find the module to run
        return sys.orig_argv[-len(sys.argv)] in ("nf4", "-mnf4")
    script = sys.argv[0] if sys.argv else ""
    return os.path.basename(script) == "nf4" and _calls_main(script)


def _calls_main(script: str) -> bool:
    """Whether a script of this name is what installers write, and not the user's own program."""
    try:
        with open(script, "rb") as file:
            return b"from nf4.cli.main import main" in file.read(4096)
    except OSError:
        return False


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """KeyboardInterrupt is raised in the block, as it is in other programs."""
    before = signal.getsignal(signal.SIGINT)
    if before is not _end:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


if (
    _is_command()
    and threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, _end)

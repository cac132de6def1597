"""The exit codes of `nf4`."""

from __future__ import annotations

import enum

from nf4._interrupt import INTERRUPTED


class Exit(enum.IntEnum):
    OK = 0
    FAULT = 1
    USAGE = 2
    FORMAT = 3
    IO = 4
    STDOUT = 5
    INTERRUPTED = INTERRUPTED
    PIPE = 141


EPILOG = """exit codes:
  0    done; nothing is wrong
  1    verify: faults were found; doctor: the library cannot be used; tune: nothing
       was stored; bench: bits or errors are wrong, or times vary too much
  2    wrong usage, or an option that does not fit the checkpoint
  3    the input is not valid in its format, or has files that are not read (links
       that leave the model folder, devices, too much beside the weights)
  4    a file cannot be read or written, the destination exists, or the library
       failed; the destination is as it was, or complete if memory ran out after
       everything else
  5    stdout is closed or cannot be written; the destination of a conversion is
       complete
  129, 130, 143   ended by SIGHUP, SIGINT, SIGTERM; the destination is as it was, or
       complete if the signal came after everything else
  141  the reader of stdout closed it; the destination of a conversion is complete
"""

"""The command `nf4`: 4-bit checkpoints on the command line."""

from __future__ import annotations

from nf4.cli.main import main

__all__ = ["main"]

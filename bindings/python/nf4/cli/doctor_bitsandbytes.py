"""nf4 doctor on bitsandbytes: says if it runs on libnf4's kernels once it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from typing import Any

from nf4 import _bitsandbytes
from nf4._versions import OLDEST_BITSANDBYTES

_GROUP = "bitsandbytes.backends"
_SECONDS = 1200  # more than a slow machine takes to import torch
# This runs in another process, because bitsandbytes imports torch and chooses its kernels for good.
_PROBE = """
import json, sys, warnings
from importlib.util import find_spec
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import bitsandbytes
backend = sys.modules.get("nf4.torch.bitsandbytes")
served = backend and backend.served()
said = [str(each.message) for each in caught if "libnf4" in str(each.message)]
peft = None
if served and find_spec("peft"):
    try:
        import peft.tuners.lora.bnb
        peft = sys.modules["nf4.torch.peft"].served()._asdict()
    except Exception as error:
        said.append(f"PEFT cannot be imported: {error}")
print(json.dumps({"served": served and {**served._asdict(), "peft": peft}, "said": said}))
"""


def _is_found() -> bool:
    return any(each.name == "nf4" for each in metadata.entry_points(group=_GROUP))


def _asked() -> tuple[dict[str, Any] | None, str]:
    """Returns what libnf4 serves in a process that imports bitsandbytes, and that process's
    messages."""
    try:
        result = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        return None, f"it cannot be imported: {last}"
    answer = json.loads(result.stdout.strip().splitlines()[-1])
    return answer["served"], "; ".join(answer["said"])


def diagnose(version: str | None) -> dict[str, Any]:
    """Reports on the installed bitsandbytes: "active", and what libnf4 serves, or why nothing."""
    report: dict[str, Any] = {"active": False, "reason": None}
    if version is None:
        return {**report, "reason": "not installed"}
    if _bitsandbytes.switched_off():
        return {
            **report,
            "reason": f"{_bitsandbytes.SWITCH}={os.environ[_bitsandbytes.SWITCH]} is set",
        }
    if not _is_found():
        return {
            **report,
            "reason": "nf4 was not installed by pip, so bitsandbytes does not find its entry "
            "point; nf4.torch.register_bitsandbytes() does the same",
        }
    served, said = _asked()
    if served is None:
        too_old = f"{version} did not load libnf4; {OLDEST_BITSANDBYTES} and later do"
        return {**report, "reason": said or too_old}
    return {"active": bool(served["operators"]), "reason": said or None, **served}


def _of_peft(found: dict[str, list[str]] | None) -> list[str]:
    if found is None:
        return []
    names = {"replaced": found["functions"], "left alone": found["left_alone"]}
    parts = [
        f"{', '.join(each.removeprefix('peft.') for each in some)} {what}"
        for what, some in names.items()
        if some
    ]
    return [f"PEFT: {'; '.join(parts)}"]


def lines(report: dict[str, Any]) -> list[str]:
    """Returns the lines that `nf4 doctor` prints of the report."""
    if not report["active"]:
        return [f"bitsandbytes is not on libnf4's kernels: {report['reason']}"]
    by_devices: dict[str, list[str]] = {}
    for name, devices in report["operators"].items():
        by_devices.setdefault(" and ".join(devices), []).append(name)
    served = [f"on {devices}: {', '.join(names)}" for devices, names in by_devices.items()]
    more = [f"{', '.join(report['functions'])} replaced"] if report["functions"] else []
    alone = [f"{name} left alone: {why}" for name, why in report["left_alone"].items()]
    first, *rest = [*served, *more, *alone, *_of_peft(report.get("peft"))]
    return [f"bitsandbytes on libnf4's kernels {first}", *rest]

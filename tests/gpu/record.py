"""record.json: what the GPU tests found, and the hash of the code that they ran.

python tests/gpu/record.py --unverified WHY   the code has changed, and not all has passed on a
                                              GPU since: writes the new hash, the reason and the
                                              last record that a GPU has verified
python tests/gpu/record.py --warn             prints a warning if the record is unverified, or a
                                              step of it was left out (run.py --skip)
python tests/gpu/record.py --release          the same, and fails: run it before a release
python tests/gpu/record.py --add NAME FILE    figures that `./dev bench --json FILE` has measured
                                              become those of that name in figures.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "gpu"))

from sources import FIGURES, source_hash  # noqa: E402

RECORD = ROOT / "tests" / "gpu" / "record.json"
FIGURES_FILE = ROOT / "docs" / "bench" / "figures.json"
UNVERIFIED = """\
==================================== WARNING ====================================
Not all of ./dev gpu has passed on this code: {why}
The last code that passed it is of {date} ({device}). Run ./dev gpu.
================================================================================="""


PARTIAL = """\
==================================== WARNING ====================================
On {date} a GPU ({device}) ran this code, but not every step of ./dev gpu:
{skipped}
================================================================================="""


def load(path: Path = RECORD) -> dict:
    return json.loads(path.read_text())


def _text(value: object, levels: int, indent: str = "") -> str:
    """JSON with so many levels on lines of their own: a row of figures is a line."""
    if levels == 0 or not value or not isinstance(value, (dict, list)):
        return json.dumps(value)
    inner, (opened, closed) = indent + " ", "{}" if isinstance(value, dict) else "[]"
    if isinstance(value, dict):
        parts = [f"{json.dumps(k)}: {_text(v, levels - 1, inner)}" for k, v in value.items()]
    else:
        parts = [_text(each, levels - 1, inner) for each in value]
    return opened + ",".join(f"\n{inner}{part}" for part in parts) + f"\n{indent}{closed}"


def save(path: Path, content: dict) -> None:
    path.write_text(_text(content, 3) + "\n")


def verified(record: dict) -> dict:
    """The record itself, or the last one before it that a GPU has verified."""
    return record["verified"] if "unverified" in record else record


def skipped(record: dict) -> dict[str, str]:
    """The steps that did not run, as `run.py --skip` left them out, and why."""
    steps = {name: record.get(name, {}) for name in ("two GPUs", "examples")}
    steps |= record.get("tests", {}) | record.get("compute-sanitizer", {})
    for family, of_family in record.get("families", {}).items():
        steps |= {f"{family}: {name}": each for name, each in of_family.items()}
    # For tests that ran, "skipped" is a number.
    return {name: each["skipped"] for name, each in steps.items()
            if isinstance(each.get("skipped"), str)}  # fmt: skip


def warning(record: dict) -> str:
    """What every run prints last where no GPU has run the code, or not all of it; else nothing."""
    last, left_out = verified(record), skipped(record)
    about = {"date": last["date"], "device": last["device"]}
    if "unverified" in record:
        return UNVERIFIED.format(why=record["unverified"], **about)
    if left_out:
        lines = "\n".join(f"{name}: {why}" for name, why in left_out.items())
        return PARTIAL.format(skipped=lines, **about)
    return ""


def unverified(record: dict, why: str) -> dict:
    """The record of code of which not all has passed. ValueError without a reason."""
    if not why.strip():
        raise ValueError("--unverified: expected the reason, and what has passed")
    return {
        "sources": source_hash(),
        "unverified": why,
        "date": today(),
        "verified": verified(record),
    }


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")


def commit() -> str:
    """The commit of this checkout, "-dirty" where files have changed since; "unknown" without."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def stamped(name: str, figures: dict, of: str) -> dict:
    """Figures with their commit, date and the hash of the code that they depend on."""
    return {"commit": of, "date": today(), "sources": source_hash(patterns=FIGURES[name])} | figures


def figures_beside(path: Path) -> dict:
    """The figures in that file; if there is none yet, those of the repository."""
    place = path if path.exists() else FIGURES_FILE
    return load(place) if place.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--unverified", metavar="WHY", help="write a record without a GPU")
    action.add_argument("--warn", action="store_true", help="warn if the record is unverified")
    action.add_argument("--release", action="store_true", help="fail if the record is unverified")
    action.add_argument(
        "--add",
        nargs=2,
        metavar=("NAME", "FILE"),
        help="take figures that the code of this checkout gave",
    )
    parser.add_argument("--commit", default=commit(), help="what the added figures are of")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--figures", type=Path, default=FIGURES_FILE)
    arguments = parser.parse_args()
    if arguments.add:
        name, file = arguments.add
        if name not in FIGURES:
            parser.error(f"--add {name}: expected one of {', '.join(FIGURES)}")
        added = {name: stamped(name, load(Path(file)), arguments.commit)}
        save(arguments.figures, figures_beside(arguments.figures) | added)
        return 0
    record = load(arguments.record)
    if arguments.unverified is not None:
        try:
            record = unverified(record, arguments.unverified)
        except ValueError as error:
            parser.error(str(error))
        save(arguments.record, record)
    said = warning(record)
    if said:
        print(said, file=sys.stderr)
    if arguments.release and record["sources"] != source_hash():
        print("tests/gpu/record.json is of other code. Run ./dev gpu.", file=sys.stderr)
        return 1
    return int(arguments.release and bool(said))


if __name__ == "__main__":
    sys.exit(main())

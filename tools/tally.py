"""Counts the tests of one step of `./dev test`.

    tally.py NAME FOLDER STATUS

Reads JUnit files (*.xml) and cargo's output (*.cargo) in FOLDER, where the step that ended
with STATUS left them, and writes "PASSED FAILED SKIPPED" to FOLDER/counts. Prints what failed or
was skipped, and why. A step that leaves no files is one test itself; a step that ended badly, or
that ran no test, has at least one failure, whatever its files say.
"""

import collections
import re
import sys
import xml.etree.ElementTree
from pathlib import Path

SKIPPED_STATUS = 77
# Steps that only prepare: no test of ours when they pass.
SETUP = {"build", "packages"}
CARGO_RESULT = re.compile(
    r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", re.MULTILINE
)
# A Rust test that cannot run says so in one line and returns, which cargo counts as passed. The
# line may land in the middle of one of cargo's.
CARGO_SKIP = re.compile(r"skipped: (.+)$", re.MULTILINE)


def short_reason(text: str) -> str:
    """The last line of what a skipped test said."""
    last = (text.strip().splitlines() or ["no reason given"])[-1]
    return re.sub(r"^skip(ped)?: ", "", last, flags=re.IGNORECASE)


class Tally:
    def __init__(self) -> None:
        self.passed = 0
        self.failures: list[str] = []
        self.skips: list[str] = []

    def add_junit(self, path: Path) -> None:
        for case in xml.etree.ElementTree.parse(path).iter("testcase"):
            name = f"{case.get('classname', '')}: {case.get('name', '')}"
            bad = [*case.findall("failure"), *case.findall("error")]
            skipped = case.find("skipped")
            if bad:
                self.failures.append(f"{name} {bad[0].get('message') or bad[0].text or ''}".strip())
            elif skipped is not None:
                reason = skipped.get("message") or case.findtext("system-out", "")
                self.skips.append(short_reason(reason))
            else:
                self.passed += 1

    def add_cargo(self, path: Path) -> None:
        text = path.read_text(errors="replace")
        for passed, _, ignored in CARGO_RESULT.findall(text):
            self.passed += int(passed)
            self.skips += ["an ignored Rust test"] * int(ignored)
        said = CARGO_SKIP.findall(text)
        self.passed -= len(said)
        self.skips += said
        self.failures += re.findall(r"^test (.*) \.\.\. FAILED$", text, re.MULTILINE)


def tally(name: str, folder: Path, status: int) -> Tally:
    found = Tally()
    log = (folder / "log").read_text(errors="replace").strip()
    if status == SKIPPED_STATUS:
        found.skips.append(short_reason(log))
        return found
    files = [*folder.glob("*.xml"), *folder.glob("*.cargo")]
    for path in files:
        if path.suffix == ".xml":
            found.add_junit(path)
        else:
            found.add_cargo(path)
    if not files and status == 0 and name not in SETUP:
        found.passed = 1
    if status != 0 and not found.failures:
        found.failures.append(f"{name} ended with status {status}")
    if files and not (found.passed or found.failures or found.skips):
        found.failures.append(f"{name} ran no test")
    return found


def main() -> None:
    name, folder, status = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    found = tally(name, folder, status)
    for failure in found.failures:
        print(f"   failed: {failure}")
    for reason, count in collections.Counter(found.skips).items():
        print(f"   skipped {count}: {reason}")
    counts = f"{found.passed} {len(found.failures)} {len(found.skips)}\n"
    (folder / "counts").write_text(counts)


if __name__ == "__main__":
    main()

"""Test results as TAP lines (testanything.org), which Meson counts one by one."""

import sys


class Tap:
    """Collects results and prints each at once; `finish` prints the plan and exits."""

    def __init__(self) -> None:
        self.count = 0
        self.failed = 0

    def check(self, name: str, failure: str | None) -> None:
        """One result: `failure` says what is wrong, and is empty or None for a pass."""
        self.count += 1
        if failure:
            self.failed += 1
            for line in failure.rstrip().splitlines():
                print(f"# {line}")
        print(f"{'not ok' if failure else 'ok'} {self.count} - {name}", flush=True)

    def equal(self, name: str, got: object, wanted: object) -> None:
        self.check(name, None if got == wanted else f"got    {got!r}\nwanted {wanted!r}")

    def same_set(self, name: str, got: set[str], wanted: set[str]) -> None:
        lines = [f"missing: {item}" for item in sorted(wanted - got)]
        lines += [f"unexpected: {item}" for item in sorted(got - wanted)]
        self.check(name, "\n".join(lines))

    def skip(self, name: str, reason: str) -> None:
        self.count += 1
        print(f"ok {self.count} - {name} # SKIP {reason}", flush=True)

    def finish(self) -> None:
        print(f"1..{self.count}")
        sys.exit(1 if self.failed or not self.count else 0)

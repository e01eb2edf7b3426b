"""Test suites of libraries built on Equinox, run on Equinox and on Vernal: `make peers`.

The source of each library is downloaded as its registry carries it, in the version that is installed, and its tests
are run twice at the same time: once as they are, once with `-p vernal.compat.pytest`. Printed are the tests that
passed, and the processor time. Leaves with an error if a test that passes on Equinox does not on Vernal, unless
`suites.py` says why.

`python -m tests.peers --slice` runs the part that fits continuous integration, `python -m tests.peers NAME...` some
suites.
"""

import argparse
import sys
from pathlib import Path

from .run import both, download
from .suites import SUITES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SUITES)}; all by default")
    parser.add_argument("--slice", action="store_true", help="only a part of some")
    parser.add_argument("--folder", type=Path, default=Path(".peers"), help="for the downloads")
    asked = parser.parse_args()
    for name in asked.names:
        if name not in SUITES:
            parser.error(f"there is no suite `{name}`")
    print("| suite | tests | pass on Equinox | on Vernal | processor time, Equinox | Vernal |")
    print("|---|---|---|---|---|---|", flush=True)
    wrong = []
    for name in asked.names or SUITES:
        suite = SUITES[name]
        if asked.slice and suite.part is None:
            continue
        source = download(name, asked.folder)
        theirs, ours = both(
            source, (suite.part,) if asked.slice and suite.part else suite.runs, suite.environment
        )
        print(
            f"| {name} {source.name.rpartition('-')[2]} | {len(theirs.outcomes)} | {theirs.passed} | {ours.passed} "
            f"| {theirs.seconds:.0f} s | {ours.seconds:.0f} s |",
            flush=True,
        )
        for test, outcome in theirs.outcomes.items():
            here = ours.outcomes.get(test, "absent")
            if outcome == "passed" and here != "passed":
                reason = suite.differs.get(test)
                print(f"  {test}: {reason or here}", flush=True)
                if reason is None:
                    wrong.append(f"{name}: {test}: passed on Equinox, {here} on Vernal")
            elif test in suite.differs:
                wrong.append(f"{name}: {test}: is no longer different")
        if not theirs.passed:
            wrong.append(f"{name}: nothing passes on Equinox:\n{theirs.output[-2000:]}")
    print()
    print("\n".join(wrong) or "What passes on Equinox passes on Vernal, but for what is listed.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

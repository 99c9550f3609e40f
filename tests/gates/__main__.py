"""Run gates and print their tables: `python -m tests.gates [--long] [NAME …]`.

The exit code is 1 if a row does not hold. What was not tried is named in the last line: it is neither
a failure nor a success. docs/reliability.md has the last results.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "support")]

from gates.gates import GATES, run_gate  # noqa: E402  (found through the path above)
from gates.table import Row, show, summary  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gates", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(GATES)}")
    parser.add_argument("--long", action="store_true", help="the long form, minutes per gate")
    given = parser.parse_args()
    unknown = set(given.names) - set(GATES)
    if unknown:
        parser.error(f"there is no gate {', '.join(sorted(unknown))}; there are {', '.join(GATES)}")
    found: dict[str, list[Row]] = {}
    for name in given.names or GATES:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            rows = asyncio.run(run_gate(GATES[name], Path(folder), given.long))
        print(show(name, rows, time.monotonic() - begun), end="\n\n", flush=True)
        found[name] = rows
    print(summary(found))
    return 1 if any(row.holds is False for rows in found.values() for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

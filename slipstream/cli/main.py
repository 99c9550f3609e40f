"""The entry point of `slipstream` and `triton`.

It imports little, so that Ctrl-C ends the program with one line also while the rest is imported.
"""

from __future__ import annotations

import sys

from slipstream.cli.interrupts import end_at_interrupt


def main() -> None:
    """Run `slipstream`, or `triton`: the same program with Triton CLI's log lines."""
    name = "triton" if sys.argv[0].rpartition("/")[2] == "triton" else "slipstream"
    end_at_interrupt(name)
    from slipstream.cli.program import run

    sys.exit(run(sys.argv[1:], name))


if __name__ == "__main__":
    main()

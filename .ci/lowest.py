"""Print the lowest version of each dependency that pyproject.toml allows, as pip constraints.

    python .ci/lowest.py [EXTRA ...] > constraints.txt

torch and triton are left out: the lowest builds for CPUs are not on every package index.
"""

import re
import sys
import tomllib
from pathlib import Path

LEFT_OUT = {"torch", "triton"}
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)(\[[^\]]*\])?>=(?P<version>[0-9.]+)")


def lowest(lines: list[str]) -> list[str]:
    found = []
    for line in lines:
        match = REQUIREMENT.match(line)
        if line.startswith("slipstream["):
            continue
        if match is None:
            raise SystemExit(f"pyproject.toml: {line!r} declares no lowest version")
        if match["name"] not in LEFT_OUT:
            found.append(f"{match['name']}=={match['version']}")
    return found


def main() -> None:
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())
    lines = list(project["project"]["dependencies"])
    for extra in sys.argv[1:]:
        lines += project["project"]["optional-dependencies"][extra]
    print("\n".join(lowest(lines)))


if __name__ == "__main__":
    main()

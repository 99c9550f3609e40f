"""Print the section of CHANGELOG.md for a version, which must be that of the package.

python .ci/release_notes.py 0.1.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def package_version(text: str) -> str:
    """Return the version that the text of slipstream/version.py gives."""
    found = re.search(r'^VERSION = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise SystemExit('slipstream/version.py has no line VERSION = "…"')
    return found[1]


def notes(changelog: str, version: str) -> str:
    """Return the section of a version, without its heading."""
    parts = re.split(r"^## (\S+)[^\n]*\n", changelog, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    if version not in sections:
        raise SystemExit(f"CHANGELOG.md has no section '## {version}'")
    return sections[version].strip() + "\n"


def main(version: str) -> None:
    own = package_version((ROOT / "slipstream" / "version.py").read_text("utf-8"))
    if version != own:
        raise SystemExit(f"the tag is for {version}, but slipstream/version.py says {own}")
    print(notes((ROOT / "CHANGELOG.md").read_text("utf-8"), version), end="")


if __name__ == "__main__":
    main(sys.argv[1])

"""The package's source as syntax trees, for tests of its rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "slipstream"


@dataclass(frozen=True)
class SourceFile:
    path: Path
    text: str

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def package(self) -> list[str]:
        """Return the parts of the file's package, such as ["slipstream", "engine"]."""
        return list(self.path.relative_to(ROOT).parent.parts)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.name)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    def imports(self) -> Iterator[tuple[int, str]]:
        """Return (line, module) of every import, also those inside functions."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                yield from ((node.lineno, name) for name in self._imported_from(node))

    def _imported_from(self, node: ast.ImportFrom) -> list[str]:
        parent = self.package[: len(self.package) - node.level + 1] if node.level else []
        module = ".".join([*parent, *([node.module] if node.module else [])])
        if module in ("slipstream", "slipstream.server"):  # `from slipstream import server`
            return [f"{module}.{alias.name}" for alias in node.names]
        return [module]


def source(text: str, name: str = "slipstream/server/example.py") -> SourceFile:
    """Return a file with this text, which need not exist on disk."""
    return SourceFile(ROOT / name, text)


@cache
def source_files() -> list[SourceFile]:
    return [SourceFile(path, path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))]

"""The report of `slipstream doctor`: facts under headings, and findings. It holds no secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HIDDEN = "(hidden)"
_SECRET_NAME = re.compile(
    r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|PWD|PASSPHRASE|CREDENTIAL|AUTH|AUTHORIZATION|COOKIE|BEARER|PSK|SIGNATURE"
    r"|\bPASS|\bSAS|\bSIG)S?(\b|\d)"
)
_FOLDERS = ("PWD", "OLDPWD")  # folders of the shell, not passwords
# user:password up to the last @: a password may hold / and @. A proxy's may come without //.
_IN_ADDRESS = re.compile(r"(?<=//)\S+(?=@)")
_IN_PROXY = re.compile(r"^(\w+://)?(.+)(?=@)", re.DOTALL)
_IN_QUERY = re.compile(r"(?<=[?&;#])([\w-]+)=[^&;#\s]+")
# keys of the hub, code hosts and clouds, and other texts that are as long and as mixed
_LIKE_A_KEY = re.compile(
    r"\b(hf|sk|pk|ghp|gho|github_pat|glpat|nvapi|xox[a-z]|AKIA)[-_]?[A-Za-z0-9_-]{12,}"
    r"|\b[Bb]earer [\w.~+/=-]+"
    r"|\beyJ[\w-]+\.[\w-]+\.[\w-]*"
    r"|(?<![\w/.-])(?=[A-Za-z+/=]*\d)(?=[\d+/=]*[A-Za-z])[A-Za-z0-9+=]{24,}(?![\w/.-])"
)
_SHORTEST_SECRET = 4  # shorter values occur in ordinary words


@dataclass(frozen=True)
class Finding:
    what: str
    remedy: str
    blocks: bool = True  # the server cannot run; otherwise it runs with a limitation


@dataclass(frozen=True)
class Section:
    title: str
    facts: Mapping[str, str]
    findings: Sequence[Finding] = ()


@dataclass(frozen=True)
class Report:
    sections: Sequence[Section]
    hide: Callable[[str], str] = field(default=lambda text: text)

    @property
    def findings(self) -> list[Finding]:
        """Return the findings, those that block serving first."""
        found = [finding for section in self.sections for finding in section.findings]
        return sorted(found, key=lambda finding: not finding.blocks)

    @property
    def ready(self) -> bool:
        return not any(finding.blocks for finding in self.findings)

    def document(self) -> dict[str, Any]:
        """Return the report as an object for JSON."""
        return {
            "ready": self.ready,
            "sections": {section.title: self._facts(section) for section in self.sections},
            "findings": [
                {
                    "what": self._shown(found.what),
                    "remedy": self._shown(found.remedy),
                    "blocks": found.blocks,
                }
                for found in self.findings
            ],
        }

    def _facts(self, section: Section) -> dict[str, str]:
        return {_printable(name): self._shown(value) for name, value in section.facts.items()}

    def _shown(self, text: str) -> str:
        return _printable(self.hide(text))

    def text(self) -> str:
        document = self.document()
        lines = []
        for title, facts in document["sections"].items():
            width = max(map(len, facts), default=0)
            lines += [title, *(f"  {name:<{width}}  {value}" for name, value in facts.items()), ""]
        lines.append("findings")
        for found in document["findings"]:
            lines += [
                f"  {'error' if found['blocks'] else 'note'}: {found['what']}",
                f"    -> {found['remedy']}",
            ]
        verdict = "ready to serve" if self.ready else "fix the errors above before serving"
        return "\n".join([*lines, f"  {verdict}"])


def _printable(text: str) -> str:
    """Replace bytes that are not UTF-8, which variables and paths may hold."""
    return text.encode("utf-8", "replace").decode()


def is_secret(variable: str) -> bool:
    """Return whether a variable holds a secret, by its name."""
    return (
        variable not in _FOLDERS
        and _SECRET_NAME.search(re.sub("[_-]", " ", variable.upper())) is not None
    )


def hide_in(text: str) -> str:
    """Return the text with everything hidden that looks like a password, a token or a key."""
    text = _IN_ADDRESS.sub(HIDDEN, text)
    text = _IN_QUERY.sub(
        lambda found: f"{found[1]}={HIDDEN}" if is_secret(found[1]) else found[0], text
    )
    return _LIKE_A_KEY.sub(HIDDEN, text)


def is_proxy(variable: str) -> bool:
    return variable.upper().endswith("_PROXY")


def hide_in_variable(name: str, value: str) -> str:
    if is_secret(name):
        return HIDDEN
    return _IN_PROXY.sub(rf"\1{HIDDEN}", value) if is_proxy(name) else value


def hider(environment: Mapping[str, str] = os.environ) -> Callable[[str], str]:
    """Return a function that hides secrets: what looks like one, and those of the environment."""
    secrets = {value for name, value in environment.items() if is_secret(name)} | _passwords(
        environment
    )
    known = sorted(
        (value for value in secrets if len(value) >= _SHORTEST_SECRET), key=len, reverse=True
    )

    def hide(text: str) -> str:
        for secret in known:
            text = text.replace(secret, HIDDEN)
        return hide_in(text)

    return hide


def _passwords(environment: Mapping[str, str]) -> set[str]:
    addresses = [
        address for value in environment.values() for address in _IN_ADDRESS.findall(value)
    ]
    proxies = [_IN_PROXY.match(value) for name, value in environment.items() if is_proxy(name)]
    addresses += [proxy[2] for proxy in proxies if proxy is not None]
    ends = [address.partition(":")[2] for address in addresses]
    return {password for whole in ends for password in (whole, whole.partition("@")[0]) if password}

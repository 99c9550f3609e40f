"""Chat templates are programs that come with a model: here they run without reach and within a
budget.

Jinja's own sandbox keeps a template from Python's internals. What it does not bound is time and
memory, so every loop turn, call and piece of output is charged to a `Budget`, and an operation that
would make a huge value is refused before it runs. Every rendering has its own budget and context. A
thread uses the same sandbox for all of them, because a sandbox costs more than a short rendering.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from types import CodeType
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARS = 4_000_000  # of all output together, and of any one value
MAX_STEPS = 200_000  # loop turns and calls
MAX_PARTS = 200_000  # of one nested value that is written out
MAX_MADE = 128_000_000  # characters and parts of all values together, kept or not
_PART_CHARS = 16  # characters that a part of a list counts for
MAX_SEARCHED = 200_000_000  # characters of a text times those of what is searched in it
MAX_SECONDS = 5.0
# The same for a rendering on the event loop: about a millisecond.
BRIEF_CHARS = 8192
BRIEF_STEPS = 500
MAX_TEMPLATE_CHARS = 1_000_000
MAX_INTEGER_BITS = 4096

# Methods that make long text out of short and that no chat template needs.
_REFUSED_METHODS = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "translate", "format_map"}
)
_SPLITS = frozenset({"split", "rsplit", "splitlines"})
_SEARCHES = _SPLITS | {
    "count",
    "find",
    "index",
    "partition",
    "replace",
    "rfind",
    "rindex",
    "rpartition",
}
# Filters that write a whole nested value as text: its size is looked at first.
_WRITING_FILTERS = frozenset(
    {"tojson", "string", "pprint", "escape", "e", "urlencode", "xmlattr", "upper", "lower"}
)
_REFUSED_FILTERS = frozenset({"center", "wordwrap", "urlize", "format"})
# Filters whose other arguments are widths and counts.
_SIZED_FILTERS = {"indent": 64, "tojson": 64, "batch": 10_000, "slice": 10_000}
# In "%"-formats and str.format: a width of five digits, or one taken from an argument.
_HUGE_WIDTH = re.compile(r"\d{5,}|%[^%a-zA-Z]*\*|\{[^{}]*:[^{}]*\{")


class BudgetExceeded(SecurityError):
    pass


class RaisedByTemplate(TemplateError):
    """The template refused the conversation with `raise_exception`."""


class NotBrief(Exception):
    """A rendering takes longer than the event loop may be delayed."""


class Budget:
    def __init__(self) -> None:
        self._steps = 0
        self._chars = 0
        self._made = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise BudgetExceeded(f"more than {MAX_STEPS} steps")
        if time.monotonic() > self._deadline:
            raise BudgetExceeded(f"more than {MAX_SECONDS:g} seconds")

    def make(self, value: Any) -> Any:
        """Charge the size of a new value, and return the value."""
        if hasattr(value, "__len__"):
            size = len(value)
            check_size(size)
            if not isinstance(value, range):
                self._made += size if isinstance(value, str) else _PART_CHARS * size
            if self._made > MAX_MADE:
                raise BudgetExceeded(f"values of more than {MAX_MADE} characters together")
        return value

    def output(self, chars: int) -> None:
        self._chars += chars
        if self._chars > MAX_CHARS:
            raise BudgetExceeded(f"more than {MAX_CHARS} characters")


class BriefBudget(Budget):
    """The budget of a rendering that is done again in a thread where this one does not suffice."""

    def step(self) -> None:
        self._steps += 1
        if self._steps > BRIEF_STEPS:
            raise NotBrief

    def output(self, chars: int) -> None:
        self._chars += chars
        if self._chars > BRIEF_CHARS:
            raise NotBrief


def check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise BudgetExceeded(f"a value larger than {MAX_CHARS} characters")


def check_weight(value: Any) -> None:
    """Refuse a value whose text would be too long.

    A part is counted as often as it would be written: a list that contains another one twice, many
    times over, is small in memory and has an enormous text.
    """
    chars = 0
    parts = 0
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            chars += len(part)
        elif isinstance(part, dict):
            waiting += (*part.keys(), *part.values())
        elif isinstance(part, (list, tuple, set)):
            waiting += part
        parts += 1
        check_size(chars)
        if parts + len(waiting) > MAX_PARTS:
            raise BudgetExceeded(f"a value of more than {MAX_PARTS} parts")


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training and is ignored here."""

    tags = {"generation"}  # noqa: RUF012  (the name and shape are jinja's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Metering(NodeTransformer):
    """Rewrites a parsed template so that the sandbox sees its loops, slices, `~` and plain text."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _through("_counted", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _through("_joined", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _through("_made", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Expr:
        return _through("_plain", nodes.Const(node.data, lineno=node.lineno))


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # the optimizer would compute constant expressions before they can be refused
            optimized=False,
            extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
            finalize=self._written,
        )
        self.budget = Budget()
        self.filters = {
            name: self._guarded(name, f)
            for name, f in self.filters.items()
            if name not in _REFUSED_FILTERS
        }
        self.filters |= {
            "tojson": self._guarded("tojson", _to_json),
            "replace": _replace,
            "join": self._join,
        }
        self.filters |= {
            "_counted": self._counted,
            "_made": self._made,
            "_joined": self._joined,
            "_plain": lambda text: text,
        }
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        metered: nodes.Template = _Metering().visit(super()._parse(source, name, filename))
        return metered

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.budget.step()
            yield value

    @pass_context  # a finalizer that needs the context is never run, and charged, at compile time
    def _written(self, context: Context, value: Any) -> str:
        check_weight(value)
        text = str(value)
        self.budget.output(len(text))
        return text

    def _join(
        self, values: Iterable[Any], separator: str = "", attribute: str | int | None = None
    ) -> str:
        parts: list[str] = []
        size = 0
        for value in values:
            part = value if attribute is None else make_attrgetter(self, attribute)(value)
            check_weight(part)
            parts.append(str(part))
            size += len(parts[-1]) + len(str(separator))
            check_size(size)
        return str(self.budget.make(str(separator).join(parts)))

    def _made(self, value: Any) -> Any:
        return self.budget.make(value)

    def _joined(self, parts: list[Any]) -> str:
        check_weight(parts)
        return str(self.budget.make("".join(map(str, parts))))

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter whose numbers, text and result are checked."""

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            for value in (*args[1:], *kwargs.values()) if name in _SIZED_FILTERS else ():
                size = len(value) if isinstance(value, str) else value
                if isinstance(size, int) and size > _SIZED_FILTERS[name]:
                    raise BudgetExceeded(f"the filter '{name}' with {size}")
            if name in _WRITING_FILTERS:
                check_weight(args)
            return self.budget.make(function(*args, **kwargs))

        return guarded

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        refused = isinstance(obj, str) and attr in _REFUSED_METHODS
        return not refused and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            check_size(len(left) + len(right))
        elif operator == "*":
            check_size(_product_size(left, right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_size(
                0 if left.bit_length() * max(right, 0) <= MAX_INTEGER_BITS else MAX_CHARS + 1
            )
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right)
        return self.budget.make(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, (args, kwargs))
            return formatted(*args, **kwargs)

        return checked

    def call(__self, __context: Any, __callable: Any, *args: Any, **kwargs: Any) -> Any:
        """Check every call of a template. The parameter names leave keywords to the template."""
        __self.budget.step()
        owner = getattr(__callable, "__self__", None)
        if isinstance(owner, str):
            _check_text_method(owner, __callable.__name__, args)
        return __self.budget.make(super().call(__context, __callable, *args, **kwargs))


@functools.lru_cache(maxsize=256)
def compile_template(source: str) -> CodeType:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateError(f"the template is longer than {MAX_TEMPLATE_CHARS} characters")
    return Sandbox().compile(source)


def render(source: str, variables: dict[str, Any], brief: bool = False) -> str:
    """Return the output of a template. `brief`: raise NotBrief where it would take longer."""
    sandbox = _STATE.sandbox
    sandbox.budget = BriefBudget() if brief else Budget()
    template = Template.from_code(sandbox, compile_template(source), sandbox.make_globals(None))
    return template.render(variables)


def _check_parts(parts: int) -> None:
    if parts > MAX_PARTS:
        raise BudgetExceeded(f"a text of more than {MAX_PARTS} parts")


def _product_size(left: Any, right: Any) -> int:
    for value, count in ((left, right), (right, left)):
        if hasattr(value, "__len__") and isinstance(count, int):
            return len(value) * max(count, 0)
    if isinstance(left, int) and isinstance(right, int):
        return 0 if left.bit_length() + right.bit_length() <= MAX_INTEGER_BITS else MAX_CHARS + 1
    return 0


def _check_format(pattern: str, values: Any) -> None:
    if _HUGE_WIDTH.search(pattern):
        raise BudgetExceeded("a format with a huge or variable width")
    check_weight(values)


def _check_text_method(owner: str, name: str, args: tuple[Any, ...]) -> None:
    if name in _SEARCHES and args and isinstance(args[0], str):
        if len(owner) * len(args[0]) > MAX_SEARCHED:
            raise BudgetExceeded(f"'{name}' with {len(args[0])} characters in {len(owner)}")
        if name in _SPLITS and args[0]:
            _check_parts(owner.count(args[0]) + 1)
    elif name in _SPLITS:  # at white space
        _check_parts(len(owner) // 2)
    if (
        name == "replace"
        and len(args) >= 2
        and isinstance(args[0], str)
        and isinstance(args[1], str)
    ):
        check_size(len(owner) + owner.count(args[0]) * len(args[1]))
    elif name == "join" and args and hasattr(args[0], "__len__"):
        check_weight(args[0])
        check_size(len(owner) * len(args[0]))


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    check_weight(text)
    whole = str(text)
    old = str(old)
    new = str(new)
    check_size(len(whole) + whole.count(old) * len(new))
    return whole.replace(old, new, -1 if count is None else count)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise RaisedByTemplate(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _ThreadState(threading.local):
    """The sandbox of each thread. Its `budget` is that of the rendering under way."""

    def __init__(self) -> None:
        self.sandbox = Sandbox()


_STATE = _ThreadState()

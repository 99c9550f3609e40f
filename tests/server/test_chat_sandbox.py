"""Chat templates that access internals or exceed a limit are refused before they use memory."""

import threading
import tracemalloc

import pytest
from jinja2.exceptions import TemplateError

from slipstream.server.text import sandbox
from slipstream.server.text.sandbox import (
    BRIEF_CHARS,
    BRIEF_STEPS,
    BudgetExceeded,
    NotBrief,
    render,
)

GROW = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"


def grow(start: str, step: str) -> str:
    return GROW.replace("START", start).replace("STEP", step)


OVERSIZED = {
    "one long split": "{{ ('a ' * 1999999).split() | length }}",
    "one long split at a text": "{{ ('a ' * 1999999).split('a') | length }}",
    "many splits": "{% set ns = namespace(x=[]) %}{% for i in range(1000) %}"
    "{% set ns.x = ns.x + [('ab ' * 66000).split()] %}{% endfor %}",
    "many slices": "{% set ns = namespace(x=[]) %}{% set text = 'a' * 3999999 %}"
    "{% for i in range(1000) %}{% set ns.x = ns.x + [text[i:]] %}{% endfor %}",
    "long search": "{{ ('a' * 3999999).count('a' * 100) }}",
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(90000) %}" + "x" * 200 + "{% endfor %}",
    "captured output": "{% set z %}{% for a in range(90000) %}"
    + "x" * 200
    + "{% endfor %}{% endset %}",
    "output of a macro": "{% macro m() %}{% for a in range(90000) %}LONG{% endfor %}{% endmacro %}{{ m() }}".replace(
        "LONG", "x" * 200
    ),
    "multiplied string": "{{ 'a' * 10 ** 10 }}",
    "multiplied string, reversed": "{{ 10 ** 10 * 'a' }}",
    "multiplied list": "{{ ([0] * 10 ** 10) | length }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "squaring": grow("7", "ns.x * ns.x"),
    "doubling +": grow("'aaaa'", "ns.x + ns.x"),
    "doubling ~": grow("'aaaa'", "ns.x ~ ns.x"),
    "doubling lists": grow("['a']", "ns.x + ns.x"),
    "doubling by join": grow("'aaaa'", "[ns.x, ns.x] | join"),
    "doubling by join of a map": grow("'aaaa'", "[ns.x, ns.x] | map('upper') | join"),
    "doubling by format": grow("'aaaa'", "'%s%s' % (ns.x, ns.x)"),
    "doubling by str.format": grow("'aaaa'", "'{}{}'.format(ns.x, ns.x)"),
    "nesting": grow("['a']", "[ns.x, ns.x]"),
    "nesting as json": grow("['a']", "[ns.x, ns.x]").replace("{{ ns.x }}", "{{ ns.x | tojson }}"),
    "nesting joined": grow("['a']", "[ns.x, ns.x]").replace("{{ ns.x }}", "{{ ns.x ~ '' }}"),
    "replace": "{% set a = 'a' * 100000 %}{{ a.replace('a', a) }}",
    "replace filter": "{% set a = 'a' * 100000 %}{{ a | replace('a', a) }}",
    "join": "{% set a = 'a' * 100000 %}{{ a.join(a) }}",
    "join filter": "{% set a = 'a' * 100000 %}{{ a | join(a) }}",
    "width": "{{ '%999999999d' % 1 }}",
    "width from an argument": "{{ '%*d' % (999999999, 1) }}",
    "str.format width": "{{ '{:>999999999}'.format(1) }}",
    "str.format width from an argument": "{{ '{:>{}}'.format(1, 999999999) }}",
    "indent": "{{ 'a\nb' | indent(10 ** 9) }}",
    "json indent": "{{ [1] | tojson(indent=10 ** 9) }}",
    "batch": "{{ [1] | batch(10 ** 9, 1) | list }}",
}

FORBIDDEN = {
    "range": "{% for a in range(10 ** 9) %}x{% endfor %}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "center": "{{ 'a'.center(10 ** 9) }}",
    "center filter": "{{ 'a' | center(10 ** 9) }}",
    "ljust": "{{ 'a'.ljust(10 ** 9) }}",
    "lipsum": "{{ lipsum(n=10 ** 9) }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "the environment": "{{ self._TemplateReference__context.environment }}",
    "list mutation": "{{ messages.append(1) }}",
    "dict mutation": "{{ {}.update({'a': 1}) }}",
    "import": "{% import 'os' as os %}",
}


@pytest.mark.parametrize("name", OVERSIZED)
def test_oversized_values_are_refused_before_they_are_created(name):
    tracemalloc.start()
    try:
        with pytest.raises(BudgetExceeded):
            render(OVERSIZED[name], {"messages": []})
        assert tracemalloc.get_traced_memory()[1] < 400 * 2**20
    finally:
        tracemalloc.stop()


def test_recursion_without_output_is_refused():
    with pytest.raises(BudgetExceeded, match="steps"):
        render(
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            {},
        )


@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden_template_raises_an_error(name):
    with pytest.raises((TemplateError, OverflowError, RecursionError, TypeError)):
        render(FORBIDDEN[name], {"messages": [1]})


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__",
        "'' | attr('__class__')",
        "''['__class__']",
        "raise_exception.__globals__",
        "cycler.__init__",
        "messages.__class__",
        "range.__self__",
    ],
)
def test_python_internals_are_undefined(expression):
    assert render("{{ " + expression + " }}", {"messages": []}) == ""
    with pytest.raises(TemplateError):
        render("{{ (" + expression + ").anything }}{{ (" + expression + ")() }}", {"messages": []})


def test_rendering_time_is_bounded(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", -1.0)
    with pytest.raises(BudgetExceeded, match="more than -1 seconds"):
        render("{% for i in range(10000) %}{% endfor %}", {})


def test_each_rendering_has_a_budget_of_its_own():
    """A template that uses most of the budget can be rendered several times."""
    for _ in range(3):
        assert len(render("{% for i in range(90000) %}0123456789{% endfor %}", {})) == 900_000


@pytest.mark.parametrize(
    "source",
    [
        f"{{% for i in range({BRIEF_STEPS + 1}) %}}{{% endfor %}}",
        f"{{{{ 'a' * {BRIEF_CHARS} }}}}b",
    ],
)
def test_a_brief_rendering_ends_where_it_becomes_long(source):
    with pytest.raises(NotBrief):
        render(source, {}, brief=True)
    assert render(source, {}) == ("" if "for" in source else "a" * BRIEF_CHARS + "b")
    assert render("{{ 1 + 1 }}", {}, brief=True) == "2"


def test_a_rendering_leaves_nothing_for_the_next_one():
    render("{% set kept = 1 %}{% macro kept_too() %}{% endmacro %}", {"given": 1})
    assert render("[{{ kept }}{{ kept_too }}{{ given }}]", {}) == "[]"


def test_renderings_in_several_threads_have_budgets_of_their_own():
    rendered: list[str] = []

    def render_long() -> None:
        rendered.append(render("{% for i in range(90000) %}0123456789{% endfor %}", {}))

    threads = [threading.Thread(target=render_long) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rendered == ["0123456789" * 90_000] * 4


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{% for i in 'ab' %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}",
            "1/2,2/2",
        ),
        (
            "{% for i in [3, 1, 2] | sort %}{{ loop.revindex }}{{ loop.previtem | default('-') }}{% endfor %}",
            "3-2112",
        ),
        ("{% for i in [] %}{% else %}none{% endfor %}", "none"),
        ("{% for i in nothing %}{% else %}none{% endfor %}", "none"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        (
            "{% for i in [1, [2, [3]]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}",
            "123",
        ),
        (
            "{% for i in [0, 1, 2] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
            "02",
        ),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{{ '%05.1f|%s' % (3.14159, 'x') }} {{ '{:>4}{}'.format(1, 'a') }}", "003.1|x    1a"),
        ("{{ 20000 | tojson }} {{ 123456 | string }} {{ 99999 | int + 1 }}", "20000 123456 100000"),
        (
            "{{ ['a', 'b'] | join('-') }}{{ [{'n': 1}, {'n': 2}] | join('+', attribute='n') }}",
            "a-b1+2",
        ),
        ("{{ {'b': '<&>', 'a': 'é'} | tojson }}", '{"b": "<&>", "a": "é"}'),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("a\n{% if true %}\n  b\n{% endif %}\n", "a\n  b\n"),
        ("{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x | default('-') }}", "1-"),
    ],
)
def test_ordinary_templates_render_as_in_plain_jinja(source, expected):
    assert render(source, {}) == expected

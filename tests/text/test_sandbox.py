"""Templates that try to leave the sandbox, never end, or grow without bounds; and what they may."""

import re
import time
from typing import Any

import pytest

from purepost.text import render, sandbox

MESSAGES = [{"role": "user", "content": "hi", "items": [1, 2]}]
NAMES = "messages[0]"


def run(template: str, **variables: Any) -> str:
    return render(template, MESSAGES, add_generation_prompt=False, **variables)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'].__base__ }}",
        "{{ ('' | attr('__class__')).mro() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.x }}",
        "{{ '{0.__class__.__init__.__globals__[os]}'.format(messages) }}",
        "{{ ('{a.__class__.x}' | attr('format_map'))({'a': 1}) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(content='x') }}",
        "{{ messages[0]['items'].clear() }}",
        "{{ messages | map('attr', '__class__') | map('attr', '__mro__') | first | first + 1 }}",
        "{{ namespace(_Namespace__attrs=1) }}",
        "{% set n = namespace(a=1) %}{% set n.__class__ = 1 %}",
        "{{ namespace(a=1).__class__.__init__.__globals__ }}",
        "{% import 'os' as os %}",
        "{% include '/etc/passwd' %}",
        "{% extends 'a' %}",
        "{{ self._TemplateReference__context.environment.x }}",
        "{{ dict.__base__.__subclasses__() }}",
        "{{ lipsum() }}",
        "{{ open('/etc/passwd').read() }}",
    ],
)
def test_nothing_leaves_the_sandbox(template: str) -> None:
    with pytest.raises(ValueError, match="expected messages that the chat template accepts"):
        run(template)
    assert MESSAGES == [{"role": "user", "content": "hi", "items": [1, 2]}]


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) if false %}{% endfor %}{% endfor %}",
        "{% for x in messages recursive %}{{ loop(range(1000)) }}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_endless_templates_are_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(ValueError, match="not ended within 0.2 seconds|recursion"):
        run(template)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 9 * [1] }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{% set n.x = 3 %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% for i in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
        "{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{% for i in range(60) %}"
        "{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}{{ n.x | tojson }}",
        "{% for i in range(60) %}{% set n.x = [n.x, n.x] | join %}{% endfor %}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ ('a' * 9999).replace('', 'b' * 9999) }}",
        "{{ 'a' * 9999 | replace('', 'b' * 9999) }}",
        "{{ ('a' * 9999).join(range(9999)) }}",
        "{{ ('a' * 9999).join(['b'] * 9999) }}",
        "{{ ['b'] * 9999 | join('a' * 9999) }}",
        "{{ (['a' * 9999] * 9999) | join }}",
        "{{ ([{'x': 'a' * 9999}] * 9999) | join(',', attribute='x') }}",
        "{{ 'a'.ljust(999999999) }}",
        "{{ 'a'.center(width) }}",
        "{{ 'a' | center(width) }}",
        "{{ 'a' | center(width=width) }}",
        "{{ 'a' | center(*[width]) }}",
        "{{ [1] | batch(width, 1) | list }}",
        "{{ messages | tojson(indent=width) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% for i in range(90000) %}{{ messages[0].content * 900 }}{% endfor %}",
        "{% macro f() %}{% for i in range(9999) %}{{ 'a' * 900 }}{% endfor %}{% endmacro %}"
        "{{ f() }}",
    ],
)
def test_what_grows_is_bounded(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SIZE", 1_000_000)
    with pytest.raises(ValueError, match="expected messages that the chat template accepts"):
        run("{% set n = namespace(x='a') %}" + template, width=999_999_999)


def test_broken_templates_are_errors() -> None:
    nested = "{% for a in b %}" * 30 + "{% endfor %}" * 30
    for template in (
        "{% if %}",
        "{{ 1 / 0 }}",
        "{{ [][3].x }}",
        "{{ 'a' + 1 }}",
        "{{ x | no }}",
        nested,
    ):
        with pytest.raises(ValueError, match="expected messages that the chat template accepts"):
            run(template)


def test_values_that_are_not_json_do_not_reach_a_template() -> None:
    with pytest.raises(ValueError, match="of JSON's types, got Pattern"):
        run("{{ x }}", x=re.compile("a"))
    with pytest.raises(ValueError, match="of JSON's types, got bytes"):
        render("", [{"role": "user", "content": b"a"}], add_generation_prompt=False)
    deep: list[Any] = []
    deep.append(deep)
    with pytest.raises(ValueError, match="nested at most 64 deep"):
        run("{{ x }}", x=deep)


def test_what_templates_use_works() -> None:
    template = """
{%- set n = namespace(seen=0, **{'x': 1}) %}
{%- macro shout(text, mark='!') %}{{ text | upper ~ mark }}{% endmacro %}
{%- for m in messages * 3 if m.role == 'user' %}
    {%- set n.seen = n.seen + 1 %}
    {%- if loop.index == 3 %}{% break %}{% endif %}
    {%- if loop.first %}{% continue %}{% endif %}
    {{- shout(m.content) ~ loop.index ~ loop.length ~ loop.last }}
{%- endfor %}
{%- set block %}{{ n.seen }}{% endset %}
{{- [block, 2 ** 3, 7 % 4, '%02d' % 5, '{:>3}'.format('x'), 'a' * 2, dict(a=1).a] | join(',') }}
{%- for k, v in {'a': 1, 'b': none} | items %}{{ k }}{{ v }}{% else %}never{% endfor %}
{%- for x in nothing %}{% else %};{% endfor %}
{%- filter upper %}b{% endfilter %}
{{- messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}
{{- 'no' if missing is defined else none }}
{{- ['a', 1, none] | join('-') ~ messages | join('-', attribute='role') }}
{{- 'aXbX' | replace('X', 'y', 1) }}
{{- '-'.join(['a', 'b']) ~ 'aXb'.replace('X', 'y') ~ '%s' | format('f') }}"""
    assert run(template) == (
        "HI!23False3,8,3,05,  x,aa,1a1bNone;B['hi']Nonea-1-NoneuseraybXa-baybf"
    )

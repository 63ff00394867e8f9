"""Where chat templates run: they reach nothing of Python's, change no message, and come to an end.

jinja2's sandbox keeps a template, which is a program that came with a model, from the internals
and from changing what it is given. This adds bounds: loops and calls watch the clock, and what can
grow is measured, so that memory stays within a few times `MAX_SIZE`.
"""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from types import BuiltinMethodType
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes, pass_context, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format, make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

SECONDS = 10.0  # of one rendering, which takes milliseconds
MAX_SIZE = 50_000_000  # characters of a text, items of a list, bits of a number
MAX_COUNT = 100_000  # the widths, repeats and indents that functions are given

_BUDGET = "\x00budget"  # no template can write this name
_LONG_WIDTH = re.compile(r"%[^a-zA-Z%]*(\d{6}|\*)|\{[^{}]*\d{6}")


@dataclass
class _Budget:
    """What is left to one rendering: time, and characters to write."""

    until: float
    characters: int


def run_template(
    template: str, extensions: Sequence[type[Extension]], variables: Mapping[str, Any]
) -> str:
    """The text that a template writes.

    Raises: TemplateError beyond the bounds, where it leaves the sandbox, and when it refuses; any
    other exception that its operations raise.
    """
    budget = _Budget(time.monotonic() + SECONDS, MAX_SIZE)
    return _compile(template, tuple(extensions)).render({**variables, _BUDGET: budget})


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with operators and calls that are measured."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """What an operator gives, unless that is too large."""
        match operator, left, right:
            case "**", int(), int() if left.bit_length() * abs(right) > MAX_SIZE // 1000:
                raise SecurityError("a power is too large")
            case "*", int(), Sequence():
                _check_product(left, right)
            case "*", Sequence(), int():
                _check_product(right, left)
            case "%", str(), _ if _LONG_WIDTH.search(left):
                raise SecurityError("a width is too large")
        return _check_size(self.binop_table[operator](left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """What a function gives, unless that or a number it is given is too large."""
        _watch(context)
        _check_counts([*args, *kwargs.values()])
        if isinstance(function, BuiltinMethodType) and isinstance(function.__self__, str):
            match function.__name__, args:
                case "replace", (_, str() as new, *_):
                    _check_product(len(function.__self__) + 1, new)
                case "join", (values, *_):
                    args = (_check_joined(values, function.__self__),)
        result = ImmutableSandboxedEnvironment.call(self, context, function, *args, **kwargs)
        return _check_size(result)

    def wrap_str_format(self, value: Any) -> Any:
        """The safe form of `str.format`, None for anything else."""
        wrapped = ImmutableSandboxedEnvironment.wrap_str_format(self, value)
        if wrapped is not None and _LONG_WIDTH.search(value.__self__):
            raise SecurityError("a width is too large")
        return wrapped


class _Namespace(Namespace):
    """What a template keeps its variables in; Python's own names are not among them."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


class _Bound(NodeTransformer):
    """Put the filters below around what loops, grows and writes."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "\x00watched")
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [
            part if isinstance(part, nodes.TemplateData) else _filtered(part, "\x00written")
            for part in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        node.nodes = [_filtered(part, "\x00nested") for part in node.nodes]
        return _filtered(node, "\x00sized")

    def visit_Filter(self, node: nodes.Filter) -> nodes.Expr:
        self.generic_visit(node)
        node.args = [_filtered(value, "\x00count") for value in node.args]
        for pair in node.kwargs:
            pair.value = _filtered(pair.value, "\x00count")
        if node.dyn_args is not None:
            node.dyn_args = _filtered(node.dyn_args, "\x00counts")
        return _filtered(node, "\x00sized")

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:
        self.generic_visit(node)
        node.filter = _filtered(node.filter, "\x00sized")
        return node

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, "\x00nested")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, "\x00nested")


def _filtered(node: nodes.Node | None, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


@lru_cache(maxsize=64)
def _compile(template: str, extensions: tuple[type[Extension], ...]) -> Template:
    """The program of a template, with the bounds in it."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[*extensions, loopcontrols]
    )
    environment.filters |= {
        "tojson": _to_json,
        "format": _format,
        "join": _join,
        "replace": _replace,
        "\x00watched": _watched,
        "\x00written": _written,
        "\x00sized": _check_size,
        "\x00nested": _check_nested,
        "\x00count": _check_count,
        "\x00counts": _check_counts,
    }
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": _now,
        "dict": _new_dict,
        "namespace": _Namespace,
    }
    del environment.globals["lipsum"]  # writes text at random
    tree = _Bound().visit(environment.parse(template))
    tree.set_environment(environment)
    return Template.from_code(
        environment, environment.compile(tree), environment.make_globals(None)
    )


def _watch(context: Context) -> _Budget:
    """The budget of this rendering, which has time left."""
    budget = context.get(_BUDGET)
    if time.monotonic() > budget.until:
        raise SecurityError(f"it has not ended within {SECONDS} seconds")
    return budget


@pass_context
def _watched(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop."""
    for item in items:
        _watch(context)
        yield item


@pass_context
def _written(context: Context, value: Any) -> Any:
    """A value that is put out."""
    text = value if isinstance(value, str) else str(_check_nested(value))
    budget = _watch(context)
    budget.characters -= len(text)
    if budget.characters < 0:
        raise SecurityError(f"it writes more than {MAX_SIZE} characters")
    return text


def _check_size(value: Any) -> Any:
    """A value whose own size, not that of its parts, is within bounds."""
    match value:
        case str() | list() | tuple() | dict():
            size = len(value)
        case int():
            size = value.bit_length()
        case _:
            size = 0
    if size > MAX_SIZE:
        raise SecurityError(f"a value is larger than {MAX_SIZE}")
    return value


def _check_product(times: int, value: Sequence[Any]) -> None:
    if times * len(value) > MAX_SIZE:
        raise SecurityError(f"a value is to be repeated {times} times")


def _check_joined(values: Iterable[Any], separator: str) -> list[Any]:
    """The values, which together are a text within bounds."""
    items = list(values)
    size = sum(
        len(item) if isinstance(item, str) else len(str(_check_nested(item))) for item in items
    )
    if size + len(items) * len(separator) > MAX_SIZE:
        raise SecurityError("a joined text is too large")
    return items


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    if _LONG_WIDTH.search(value):
        raise SecurityError("a width is too large")
    return do_format(value, *args, **kwargs)


@pass_environment
def _join(
    environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    items = list(value)
    if attribute is not None:
        items = list(map(make_attrgetter(environment, attribute), items))
    return d.join(map(str, _check_joined(items, d)))


def _replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    text = str(value)
    _check_product(len(text) + 1, new)
    return text.replace(old, new, -1 if count is None else count)


def _check_nested(value: Any) -> Any:
    """A value that has a bounded number of parts: [x, x] of [x, x] of ... has 2ⁿ."""
    found, left = 0, [value]
    while left:
        match left.pop():
            case list() | tuple() as items:
                left.extend(items)
            case dict() as items:
                left.extend(items.values())
        found += 1
        if found + len(left) > MAX_SIZE // 10:
            raise SecurityError("a value has too many parts")
    return value


def _check_count(value: Any) -> Any:
    """An argument that is no huge number."""
    if isinstance(value, int) and abs(value) > MAX_COUNT:
        raise SecurityError(f"a number given to a function is larger than {MAX_COUNT}")
    return value


def _check_counts(values: Iterable[Any]) -> list[Any]:
    return [_check_count(value) for value in values]


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace holds no names like {name!r}")


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: not escaped for HTML, keys in their order."""
    return json.dumps(
        _check_nested(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)

"""The expression tool against Python's arithmetic on fractions, and its limits."""

import ast
import operator
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from purepost.tools import compute

expressions = st.recursive(
    st.integers(0, 99).map(str) | st.decimals(0, 99, places=2).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", " - ", "*", "/", "//", "%"]), inner).map("".join),
        inner.map(lambda x: f"({x})"),
        inner.map(lambda x: f"-{x}"),
        st.tuples(inner, st.sampled_from(["**2", "^3", "**-1", "^0"])).map("".join),
    ),
    max_leaves=6,
)


def value(node: ast.expr) -> Fraction:
    """The value of Python's own syntax tree, in fractions."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -value(inner)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = value(left), value(right)
            assume(abs(exponent) < 99)
            return Fraction(base ** int(exponent)) if exponent.denominator == 1 else base / 0
        case ast.BinOp(left=left, op=op, right=right):
            function = {
                ast.Add: operator.add,
                ast.Sub: operator.sub,
                ast.Mult: operator.mul,
                ast.Div: operator.truediv,
                ast.FloorDiv: operator.floordiv,
                ast.Mod: operator.mod,
            }[type(op)]
            return Fraction(function(value(left), value(right)))
    raise AssertionError(node)


@given(expressions)
def test_values_are_those_of_python(expression: str) -> None:
    try:
        expected = value(ast.parse(expression.replace("^", "**"), mode="eval").body)
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="divisor other than 0|whole exponent"):
            compute(expression)
        return
    if max(expected.numerator, -expected.numerator, expected.denominator) > 10**300:
        return  # beyond a float
    found = compute(expression)
    assert found == (int(expected) if expected.denominator == 1 else float(expected))
    assert isinstance(found, int) == (expected.denominator == 1)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", 14),
        ("-2 ** 2", -4),
        ("2 ** 3 ** 2", 512),
        ("2 ** -1", 0.5),
        ("7 // -2", -4),
        ("-7 % 3", 2),
        ("0.1 + 0.2", 0.3),
        ("1/3*3", 1),
        (" ( ( 5 ) ) ", 5),
        ("1. + .5", 1.5),
        ("--3", 3),
    ],
)
def test_worked_values(expression: str, value: float) -> None:
    assert compute(expression) == value


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("", "expected a number, got 'the end'"),
        ("1 +", "expected a number, got 'the end'"),
        ("(1", "expected '\\)', got 'the end'"),
        ("1)", "expected an operator or the end, got '\\)'"),
        ("1 2", "expected an operator or the end, got '2'"),
        ("__import__('os')", "expected a number or an operator, got .__import__"),
        ("٣", "expected a number or an operator"),
        ("1e9", "expected a number or an operator, got 'e9'"),
        ("1 / 0", "expected a divisor other than 0"),
        ("0 ** -1", "expected a divisor other than 0"),
        ("2 ** 0.5", "expected a whole exponent"),
        ("9 ** 9 ** 9", "at most 4096 bits"),
        ("2 ** 99999999999999999999", "at most 4096 bits"),
        ("99 ** 600 * 99 ** 600", "at most 4096 bits"),
        ("2 ** 4000 + 1 / 3", "within a float's range"),
        ("(" * 400, "nesting of at most 50"),
        ("-" * 400 + "1", "nesting of at most 50"),
        ("2" + "**1" * 300, "nesting of at most 50"),
        ("1" * 1001, "at most 1000 characters"),
    ],
)
def test_what_has_no_value_is_an_error(expression: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        compute(expression)

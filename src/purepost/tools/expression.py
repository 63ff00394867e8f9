"""Arithmetic in a text, read by a parser of its own: nothing in it is run as code, and neither
numbers nor nesting grow beyond limits.
"""

import re
from fractions import Fraction
from math import log2

_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]*)?|\.[0-9]+)|(\*\*|//|[-+*/%^()]))")
_LENGTH, _DEPTH, _BITS = 1000, 50, 4096  # characters; parentheses, signs and powers; of a number


def compute(expression: str) -> int | float:
    """The value of an expression of numbers, + - * / // % ^ (or **) and parentheses.

    Exact until the end: what is whole is an int, anything else the nearest float. Precedence is
    Python's. Error: ValueError saying what is wrong, division by zero and limits included.
    """
    if len(expression) > _LENGTH:
        raise ValueError(f"expected at most {_LENGTH} characters, got {len(expression)}")
    reader = _Reader(_split(expression))
    value = reader.sum(0)
    if reader.next:
        raise ValueError(f"expected an operator or the end, got {reader.next!r}")
    if value.denominator == 1:
        return int(value)
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError("expected a result within a float's range, got a larger one") from error


def _split(expression: str) -> list[str]:
    tokens, at, end = [], 0, len(expression.rstrip())
    while at < end:
        match = _TOKEN.match(expression, at)
        if match is None:
            raise ValueError(f"expected a number or an operator, got {expression[at : at + 20]!r}")
        tokens.append(match.group(1) or match.group(2))
        at = match.end()
    return tokens


class _Reader:
    """Recursive descent over the tokens, the next one first."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens[::-1]

    @property
    def next(self) -> str:
        """The next token, "" at the end."""
        return self.tokens[-1] if self.tokens else ""

    def sum(self, depth: int) -> Fraction:
        """Products added up."""
        value = self.product(depth)
        while self.next in ("+", "-"):
            sign = 1 if self.tokens.pop() == "+" else -1
            value = _bounded(value + sign * self.product(depth))
        return value

    def product(self, depth: int) -> Fraction:
        """Signed powers multiplied and divided."""
        value = self.signed(depth)
        while self.next in ("*", "/", "//", "%"):
            operator, other = self.tokens.pop(), self.signed(depth)
            if operator != "*" and other == 0:
                raise ValueError("expected a divisor other than 0, got 0")
            match operator:
                case "*":
                    value = value * other
                case "/":
                    value = value / other
                case "//":
                    value = Fraction(value // other)
                case "%":
                    value = value % other
            value = _bounded(value)
        return value

    def signed(self, depth: int) -> Fraction:
        """A power behind any number of signs."""
        if depth > _DEPTH:
            raise ValueError(f"expected nesting of at most {_DEPTH}, got more")
        if self.next in ("+", "-"):
            sign = 1 if self.tokens.pop() == "+" else -1
            return sign * self.signed(depth + 1)
        base = self.atom(depth)
        if self.next not in ("^", "**"):
            return base
        self.tokens.pop()
        return _power(base, self.signed(depth + 1))

    def atom(self, depth: int) -> Fraction:
        """A number, or an expression in parentheses."""
        token = self.tokens.pop() if self.tokens else ""
        if token == "(":
            value = self.sum(depth + 1)
            if self.next != ")":
                raise ValueError(f"expected ')', got {self.next or 'the end'!r}")
            self.tokens.pop()
            return value
        if not token or not (token[0].isdigit() or token[0] == "."):
            raise ValueError(f"expected a number, got {token or 'the end'!r}")
        return _bounded(Fraction(token))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("expected a whole exponent, got a fraction")
    if base == 0 and exponent < 0:
        raise ValueError("expected a divisor other than 0, got 0")
    size = max(abs(base.numerator), base.denominator)
    if abs(exponent) * log2(size) > _BITS:
        raise ValueError(f"expected numbers of at most {_BITS} bits, got a larger one")
    return Fraction(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _BITS:
        raise ValueError(f"expected numbers of at most {_BITS} bits, got a larger one")
    return value

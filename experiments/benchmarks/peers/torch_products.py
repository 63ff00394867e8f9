# pyright: basic, reportMissingImports=false
"""The matrix products that it is given on standard input, by torch: the seconds of each, as JSON.
See experiments.benchmarks.limits.
"""

import json
import statistics
import sys
import time

import torch

from ..measure import threads

ENOUGH = 0.2  # seconds to time a product for


def alone(equation: str, *sides: list[int]) -> float:
    """Seconds of a product by itself, written as einsum has it."""
    lhs, rhs = (torch.randn(side) for side in sides)
    torch.einsum(equation, lhs, rhs)
    found = []
    while sum(found) < ENOUGH or len(found) < 3:
        start = time.perf_counter()
        torch.einsum(equation, lhs, rhs)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def main() -> None:
    """Print the seconds."""
    torch.set_num_threads(threads())
    with torch.no_grad():
        print(json.dumps([alone(*product) for product in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()

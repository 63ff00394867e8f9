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


def letters(product: list[list[int]]) -> str:
    """The product as einsum writes it."""
    lhs, rhs, lhs_contracting, rhs_contracting, lhs_batch, rhs_batch = product
    left = [chr(ord("a") + i) for i in range(len(lhs))]
    right = [chr(ord("n") + i) for i in range(len(rhs))]
    for i, j in zip(lhs_contracting + lhs_batch, rhs_contracting + rhs_batch, strict=True):
        right[j] = left[i]
    shared = [left[i] for i in lhs_batch]
    rows = [x for i, x in enumerate(left) if i not in lhs_contracting + lhs_batch]
    columns = [x for i, x in enumerate(right) if i not in rhs_contracting + rhs_batch]
    return f"{''.join(left)},{''.join(right)}->{''.join(shared + rows + columns)}"


def alone(product: list[list[int]]) -> float:
    """Seconds of a product by itself."""
    equation = letters(product)
    lhs, rhs = (torch.randn(side) for side in product[:2])
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
        print(json.dumps([alone(product) for product in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()

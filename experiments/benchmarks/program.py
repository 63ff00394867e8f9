"""What a compiled training step costs: FLOPs of its matrix products, and memory."""

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import PyTree

from purepost import Algorithm, TrainState

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$")
_RESULT = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = \w+\[([\d,]*)\]")
_DOT = re.compile(r" dot\(%([\w.\-]+), %([\w.\-]+)\)")
_AXES = re.compile(r"([lr]hs_(?:contracting|batch)_dims)=\{([\d,]*)\}")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
Axes = tuple[int, ...]


def _numbers(text: str) -> Axes:
    return tuple(int(n) for n in text.split(",") if n)


class Product(NamedTuple):
    """A matrix product: its sides' shapes, and the axes that are summed over and shared."""

    lhs: Axes
    rhs: Axes
    lhs_contracting: Axes
    rhs_contracting: Axes
    lhs_batch: Axes
    rhs_batch: Axes

    @property
    def flops(self) -> float:
        """Two for each product of two numbers."""
        kept = [n for i, n in enumerate(self.rhs) if i not in self.rhs_contracting + self.rhs_batch]
        return 2.0 * math.prod(self.lhs) * math.prod(kept)

    @property
    def equation(self) -> str:
        """As einsum writes it."""
        left = [chr(ord("a") + i) for i in range(len(self.lhs))]
        right = [chr(ord("n") + i) for i in range(len(self.rhs))]
        lhs, rhs = self.lhs_contracting + self.lhs_batch, self.rhs_contracting + self.rhs_batch
        for i, j in zip(lhs, rhs, strict=True):
            right[j] = left[i]
        shared = [left[i] for i in self.lhs_batch]
        rows = [x for i, x in enumerate(left) if i not in lhs]
        columns = [x for i, x in enumerate(right) if i not in rhs]
        return f"{''.join(left)},{''.join(right)}->{''.join(shared + rows + columns)}"


def products(hlo: str) -> Counter[Product]:
    """The matrix products of a compiled program's text, and how often each runs. (XLA's own count
    takes a loop's once.)
    """
    own: dict[str, list[Product]] = defaultdict(list)
    called: dict[str, list[tuple[str, int]]] = defaultdict(list)
    name, entry, shapes = "", "", dict[str, Axes]()
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            name, shapes = header[1], {}
            entry = name if line.startswith("ENTRY") else entry
        if result := _RESULT.match(line):
            shapes[result[1]] = _numbers(result[2])
        if dot := _DOT.search(line):
            axes = defaultdict(tuple, {k: _numbers(v) for k, v in _AXES.findall(line)})
            contracting = axes["lhs_contracting_dims"], axes["rhs_contracting_dims"]
            batch = axes["lhs_batch_dims"], axes["rhs_batch_dims"]
            own[name].append(Product(shapes[dot[1]], shapes[dot[2]], *contracting, *batch))
        trips = int(found[1]) if (found := _TRIPS.search(line)) else 1
        called[name] += [(target, trips) for target in _CALLED.findall(line)]
        for branches in _BRANCHES.findall(line):
            called[name] += [(target.strip().lstrip("%"), 1) for target in branches.split(",")]

    def total(name: str, runs: int) -> Counter[Product]:
        found = Counter({p: n * runs for p, n in Counter(own[name]).items()})
        for target, trips in called[name]:
            found += total(target, runs * trips)
        return found

    return total(entry, 1)


def flops(hlo: str) -> float:
    """Of the matrix products of a compiled program's text, a loop's as often as it runs."""
    return sum(runs * product.flops for product, runs in products(hlo).items())


@dataclass(frozen=True)
class Program:
    """A training step, compiled for one batch. Sizes in bytes."""

    compiled: Any
    flops: float
    arguments: int  # weights, optimizer state, batch
    temporary: int
    results: int
    in_place: int  # of the results, those that take the place of arguments

    @property
    def peak(self) -> int:
        """Arguments and what is made beside them."""
        return self.arguments + self.temporary + self.results - self.in_place


def compile_step(
    algorithm: Algorithm[Any, Any, Any], state: TrainState[Any], batch: PyTree
) -> Program:
    """The algorithm's update: ((params, opt_state), frozen, batch) → (params, opt_state). Of state
    and batch, shapes will do.
    """
    extra = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state.extra)

    def step(trained: Any, frozen: Any, batch: Any) -> Any:
        params, opt_state = trained
        now = TrainState(params, frozen, opt_state, extra, jnp.zeros((), jnp.int32))
        new, _ = algorithm.update(algorithm.loss, jr.key(0), now, batch)
        return new.params, new.opt_state

    trained = (state.params, state.opt_state)
    compiled = jax.jit(step, donate_argnums=0).lower(trained, state.frozen, batch).compile()
    memory: Any = compiled.memory_analysis()
    return Program(
        compiled,
        flops(compiled.as_text() or ""),
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
    )

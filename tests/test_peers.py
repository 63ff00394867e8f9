"""Losses and gradients against the peers' own functions, whose results are stored beside their
makers in tests/golden/peers; `make peers` makes them anew and prints the table.
"""

import numpy as np
import pytest

from tests.golden.peers.table import CLOSE, DIFFERS, HERE, PEERS, differences

CASES = [(peer, name) for peer, cases in PEERS.items() for name in cases]
STORED = {peer: np.load(HERE / f"{peer}.npz") for peer in PEERS}


@pytest.mark.parametrize("case", CASES, ids=": ".join)
def test_a_loss_is_the_peers_or_differs_for_a_reason(case: tuple[str, str]) -> None:
    value, gradient = differences(*case, STORED[case[0]])
    if case in DIFFERS:
        assert max(value, gradient) > CLOSE
        assert gradient <= CLOSE or not DIFFERS[case].startswith("the value only")
    else:
        assert max(value, gradient) <= CLOSE


def test_every_result_of_a_peer_is_compared() -> None:
    for peer, results in STORED.items():
        assert {name.rpartition("/")[0] for name in results.files} == PEERS[peer].keys()
    assert DIFFERS.keys() <= set(CASES)

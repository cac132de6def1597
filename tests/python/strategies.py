"""Cases for hypothesis."""

from __future__ import annotations

from typing import Any

import oracle
from cases import Case
from hypothesis import strategies as st


def any_case(awkward: bool = True, least: int = 0, **fixed: Any) -> st.SearchStrategy[Case]:
    """Any case; `fixed` ties fields to a strategy of their own. `least` is the smallest
    dimension."""
    dimension = st.integers(least, 70)
    fields = {
        "seed": st.integers(0, 2**32),
        "shape": st.lists(dimension, min_size=0, max_size=3).map(tuple),
        "dtype": st.sampled_from(list(oracle.DTYPES)),
        "format": st.sampled_from(["nf4", "fp4"]),
        "blocksize": st.sampled_from(oracle.BLOCKSIZES),
        "nested_blocksize": st.sampled_from([0, 1, 2, 64, 256, 4096]),
        "custom": st.booleans(),
        "awkward": st.booleans() if awkward else st.just(False),
    }
    return st.builds(Case, **fields | fixed)

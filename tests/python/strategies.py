"""Cases for hypothesis."""

from __future__ import annotations

import struct
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


_INTERESTING = st.sampled_from(list(b'{}[]":,0129-.\\ \x00\xff\x80'))


@st.composite
def mutated_file(draw: st.DrawFn, content: bytes) -> bytes:
    """A safetensors file with a few bytes changed, put in, or cut out; mostly in the header."""
    mutated = bytearray(content)
    header_end = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(draw(st.integers(1, 4))):
        limit = draw(st.sampled_from([8, header_end, len(mutated)]))
        at = draw(st.integers(0, max(min(limit, len(mutated)) - 1, 0)))
        what = draw(st.sampled_from(["flip", "set", "insert", "delete", "cut"]))
        if what == "flip" and mutated:
            mutated[at] ^= 1 << draw(st.integers(0, 7))
        elif what == "set" and mutated:
            mutated[at] = draw(_INTERESTING)
        elif what == "insert":
            mutated.insert(at, draw(_INTERESTING))
        elif what == "delete":
            del mutated[at : at + draw(st.integers(1, 8))]
        else:
            del mutated[at:]
    return bytes(mutated)

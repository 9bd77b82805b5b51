"""The grammar of ``--input``."""

from __future__ import annotations

import pytest

from pediag.errors import UsageError
from pediag.targets import InputSpec, parse_input_spec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("input_ids=int64[B,N]", InputSpec("input_ids", "int64", ("B", "N"))),
        (" x = float32 [ B , N+1, 64 ] ", InputSpec("x", "float32", ("B", "N+1", 64))),
        ("position_ids=int64[B,N]:positions", InputSpec("position_ids", "int64", ("B", "N"), "positions")),
        ("position_ids=int64[B,N]", InputSpec("position_ids", "int64", ("B", "N"), "positions")),
        ("position_ids=int64[B,N]:content", InputSpec("position_ids", "int64", ("B", "N"), "content")),
        ("pos=float32[B,N,3]", InputSpec("pos", "float32", ("B", "N", 3), "content")),
        ("mask=bool[B,1,N,M]:mask", InputSpec("mask", "bool", ("B", 1, "N", "M"), "mask")),
        ("t=torch.bfloat16[2*N]", InputSpec("t", "bfloat16", ("2*N",))),
        ("scalar=float32[]", InputSpec("scalar", "float32", ())),
    ],
)
def test_specs(text: str, spec: InputSpec) -> None:
    assert parse_input_spec(text) == spec


def test_sizes_are_filled_in() -> None:
    spec = parse_input_spec("x=int64[B,2*N+1,N-1,M,5]")
    assert spec.shape({"B": 3, "N": 7, "M": 11}) == (3, 15, 6, 11, 5)
    with pytest.raises(UsageError, match="no size is known for M"):
        spec.shape({"B": 3, "N": 7})
    with pytest.raises(UsageError, match="cannot be negative"):
        spec.shape({"B": 3, "N": 0, "M": 1})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("input_ids", "write NAME=DTYPE"),
        ("", "write NAME=DTYPE"),
        ("x=int64", "write NAME=DTYPE"),
        ("x=int64[B,N", "write NAME=DTYPE"),
        ("2x=int64[B]", "'2x' is not an argument name"),
        ("x=int46[B]", "unknown dtype 'int46' (did you mean int64?); allowed: bool"),
        ("x=long[B]", "did you mean int64?"),
        ("x=fp16[B]", "did you mean float16?"),
        ("x=int64[B,T]", "unknown size 'T'; allowed letters: B, N, M"),
        ("x=int64[B,]", "'' is not a size"),
        ("x=int64[-1]", "'-1' is not a size"),
        ("x=int64[N**9]", "is not a size"),
        ("x=int64[N/2]", "is not a size"),
        ("x=int64[012]", "is not a size"),
        ("x=int64[" + "9" * 5000 + "]", "is not a size"),
        ("x=int64[B]:position", "unknown role 'position'; allowed: content, positions, mask"),
    ],
)
def test_errors_name_the_part_and_the_grammar(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_input_spec(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)

"""The ``--cache`` option: what each spelling stands for, and what is said of those that cannot be read."""

from __future__ import annotations

import pytest

from pediag.errors import UsageError
from pediag.targets.caches import CacheSpec, parse_cache_spec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("past=out[1]", CacheSpec("past", "output", (1,))),
        ("past=out[-1][0]", CacheSpec("past", "output", (-1, 0))),
        (" kv = out.past_key_values ", CacheSpec("kv", "output", ("past_key_values",))),
        ("kv=out['kv']", CacheSpec("kv", "output", ("kv",))),
        ("state={}", CacheSpec("state", "dict")),
        ("layers=[]", CacheSpec("layers", "list")),
        ("start=seen", CacheSpec("start", "seen")),
        ("pos=positions", CacheSpec("pos", "positions")),
        ("remember=True", CacheSpec("remember", "literal", value=True)),
        ("mask=None", CacheSpec("mask", "literal", value=None)),
    ],
)
def test_spellings(text, spec):
    assert parse_cache_spec(text) == spec


@pytest.mark.parametrize(
    "text",
    [
        "past",
        "past=",
        "=out[1]",
        "past=out[x]",
        "past=3",
        "a b=seen",
        "past=out[1",
        f"past=out[{'9' * 5000}]",
        "past=out[²]",
        7,
    ],
)
def test_what_cannot_be_read_is_told_with_the_grammar(text):
    with pytest.raises(UsageError, match="write NAME=VALUE"):
        parse_cache_spec(text)

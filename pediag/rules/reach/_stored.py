"""Tables, buffers of ids and masks that lie in a file or are declared, against the length asked about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pediag.rules.finding import Evidence, Finding, Fix, Severity, Where
from pediag.rules.rule import Facets

if TYPE_CHECKING:
    from pediag.encodings import Encoding

WORDS = {
    "learned": "table of positions",
    "sinusoidal": "sinusoidal table",
    "rotary": "table of cosines and sines",
    "position-ids": "buffer of position ids",
    "mask": "causal mask",
    "alibi": "ALiBi bias",
}


@dataclass(frozen=True, slots=True)
class Held:
    """A stored encoding with one row (of a bias, one key) a token: their number, and the row that position 0 reads."""

    encoding: Encoding
    rows: int
    first: int

    @property
    def limit(self) -> int:
        """Longest input in tokens."""
        return self.rows - self.first


def held(encodings: Iterable[Encoding]) -> list[Held]:
    """The encodings of stored tensors that have one row a token."""
    found = []
    for encoding in encodings:
        rows = encoding.parameters.get("rows")
        if encoding.origin == "tensors" and encoding.scheme in WORDS and isinstance(rows, int):
            first = encoding.parameters.get("first_row", 0)
            found.append(Held(encoding, rows, first if isinstance(first, int) else 0))
    return found


def declared(encodings: Iterable[Encoding]) -> list[Encoding]:
    """The learned tables that only a config tells of; ``rows`` are the tokens that each holds."""
    return [one for one in encodings if one.origin == "config" and one.scheme == "learned"]


def shortfalls(facets: Facets, said: Iterable[Encoding]) -> Iterator[Finding]:
    """One finding for each declared table that holds fewer tokens than ``seq_len``."""
    n = facets.seq_len
    for encoding in said:
        rows, key = encoding.parameters["rows"], encoding.parameters["declared_as"]
        if rows < n:
            yield Finding(
                message=f"{key} declares a learned table for {rows:,} tokens, and {n:,} are asked for.",
                effect=f"{n - rows:,} tokens have no row: IndexError on the CPU, a device-side assert on CUDA.",
                where=Where(key, encoding.id, encoding.source_file, encoding.source_line),
                evidence=Evidence(rows, n, rows, "tokens", n),
                fix=Fix(
                    f"Cut texts at {rows:,} tokens (max_length={rows} at the tokenizer), or resize the table by "
                    f"interpolation, fine-tune it and declare the new {key}."
                ),
                scheme=encoding.scheme,
            )


def findings(facets: Facets, stored: Iterable[Held]) -> Iterator[Finding]:
    """One finding for each that has fewer rows than ``seq_len`` tokens need."""
    known = list(stored)
    for one in known:
        if one.limit < facets.seq_len:
            found = _finding(facets.seq_len, one)
            table = _longer(one, known)
            yield found if table is None else _left_behind(found, table)


def _longer(ids: Held, known: list[Held]) -> Held | None:
    """The learned table beside a buffer of ids that has rows for more tokens than there are ids."""
    if ids.encoding.scheme != "position-ids":
        return None
    place = ids.encoding.leaves[0].rpartition(".")[0]
    for one in known:
        own = one.encoding.leaves[0].rpartition(".")[0].rpartition(".")[0]
        if severity_of(one.encoding) is None and own == place and one.limit > ids.rows:
            return one
    return None


def _left_behind(found: Finding, table: Held) -> Finding:
    """Ids fewer than rows of the table that they pick from: one was made longer, the other was not."""
    name = table.encoding.leaves[0]
    return replace(
        found,
        message=f"{found.message.removesuffix('.')}, though `{name}` beside it has {table.rows:,}.",
        severity="warning",
    )


def severity_of(encoding: Encoding) -> Severity | None:
    """The rule's own for a learned table beyond doubt; a note where code may extend it, or it may be something else."""
    return None if encoding.scheme == "learned" and not encoding.doubt else "note"


def _finding(n: int, one: Held) -> Finding:
    encoding = one.encoding
    name = encoding.leaves[0]
    skipped = f", of which the first {one.first:,} are for padding," if one.first else ""
    needed = n + one.first
    what = f"The stored {WORDS[encoding.scheme]} `{name}`"
    unit = "keys" if encoding.scheme == "alibi" else "rows"
    return Finding(
        message=f"{what} has {one.rows:,} {unit}{skipped} and {needed:,} are needed for {n:,} tokens.",
        effect=_effect(n, one),
        where=Where(name.rpartition(".")[0], encoding.id),
        evidence=Evidence(one.rows, needed, one.limit, unit, n),
        fix=Fix(_advice(needed, one)),
        severity=severity_of(encoding),
        scheme=encoding.scheme,
    )


def _effect(n: int, one: Held) -> str:
    beyond = n - one.limit
    stand = f"{beyond:,} token{'s stand' if beyond > 1 else ' stands'} beyond its last row"
    if one.encoding.scheme == "learned":
        if one.encoding.doubt:
            return f"If this is the table of positions, {stand}. Uncertain: {one.encoding.doubt}."
        return f"{stand[0].upper()}{stand[1:]}: IndexError on the CPU, a device-side assert on CUDA."
    if one.encoding.scheme == "alibi":
        stand = stand.replace("row", "key")
    return f"{stand[0].upper()}{stand[1:]}, unless the code that reads it makes it longer; the file does not tell."


def _advice(needed: int, one: Held) -> str:
    cut = f"ut texts at {one.limit:,} tokens (max_length={one.limit} at the tokenizer)"
    name = f"`{one.encoding.leaves[0]}`"
    if one.encoding.scheme == "learned":
        return f"C{cut}, or resize {name} once to {needed:,} rows by interpolation and fine-tune it."
    if one.encoding.scheme == "alibi":
        return f"Keep the slopes alone and compute the bias for the keys at hand. Or: c{cut}."
    return f"Write {name} with {needed:,} rows; a formula makes it. Or: c{cut}."

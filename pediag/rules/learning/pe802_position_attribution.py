"""The output owes nothing to positions: they enter, and neither gradients nor ablations find them in it.

## What it does

Attributes a number of the output, on the inputs that ``pediag attribute`` is given, to the values with which
positions enter and to the tokens. It speaks where the share of position is zero: the model computes positions, lets
them in, and makes nothing of them.

## Why it matters

A table behind a gate that stayed at zero, a rotation of channels that no query uses, a bias in a layer whose output
is closed: the code is right, every other rule passes, and the model does not know the order of its tokens.

## What is checked

For each side, integrated gradients (by Captum) along the way from its reference to what it is, the other side as it
is: ``a = (x - x') * integral of df/dx over the way``. Completeness says that they sum to ``f(x) - f(x')``; the
difference is shown as the *delta*, and steps are doubled until it is below 1 % of that, or up to ``--steps``.
**Above 5 % there is no verdict.** Share of position = sum of ``|a|`` of positions over that of both, each summed
over channels first.

| what enters | reference | way |
|---|---|---|
| tables and sinusoids that are added | the mean of their rows (``--baseline``) | straight |
| a rotation by cosines and sines, or complex | the angle of the first token | along the shortest arc |
| a bias, a term of distances | zero; what hides a key stays | straight |
| tokens | the mean row of their table | straight |

As a cross-check positions are taken away, shuffled, and taken away in each module alone. The finding needs all of it:
attributions and changes below 1e-6 of what taking the tokens away changes.

## Known limits

- It is about one number of the output on these inputs. A first token under a causal mask sees no order; a class may
  not need it. Give several texts, or another ``--target``.
- Where not all positions were seen to be used in the real pass, it says so and does not judge.
- Order that a causal mask or a recurrent layer tells is no position here, and is not counted.
- Shares depend on the reference: of added tables mean and zero answer different questions. docs/attribute.md
  says more.

## Fix

Look at what stands between the positions and the output: a gate or scale at zero, a projection with zero columns, a
frozen or unloaded weight.

## References

- Sundararajan et al. 2017, Axiomatic attribution for deep networks, arXiv 1703.01365: integrated gradients,
  completeness.
- Kokhlikyan et al. 2020, Captum, arXiv 2009.07896.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pediag.attributing.model import LARGE_DELTA, UNUSED
from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule

if TYPE_CHECKING:
    from pediag.attributing.model import TextAttribution
    from pediag.encodings import Encoding

GIVEN = "needs real inputs: pediag attribute TARGET --text ..."


@rule(
    code="PE802",
    name="position-attribution",
    severity="note",
    basis="measured here",
    needs=("trace",),
    references=("Sundararajan et al. 2017, arXiv 1703.01365", "Kokhlikyan et al. 2020, arXiv 2009.07896"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """At most one finding: the positions are unused on every input."""
    from pediag.encodings import encodes_position

    texts = facets.attributions
    if texts is None:
        raise NotApplicable(GIVEN)
    encodings = encodes_position(facets.encodings)
    if not encodings:
        raise NotApplicable("no position encoding enters")
    missed = sorted({module for text in texts for module in text.missed})
    if missed:
        raise CouldNotCheck(f"the real pass was not seen to use the positions of {', '.join(missed[:3])}")
    open_ones = [text for text in texts if not text.complete]
    if open_ones:
        worst = max(text.relative for text in open_ones)
        raise CouldNotCheck(
            f"a completeness delta of {100 * worst:.3g} % is above {100 * LARGE_DELTA:.0f} %: no verdict; give more "
            "--steps, and run the model in float32"
        )
    if texts and all(text.unused for text in texts):
        yield _finding(texts, encodings[0], facets.seq_len)


def _finding(texts: list[TextAttribution], encoding: Encoding, length: int) -> Finding:
    names = ", ".join(dict.fromkeys(layer.encoding for text in texts for layer in text.layers))
    inputs = "the input" if len(texts) == 1 else f"all {len(texts)} inputs"
    share = max(text.raw_share or 0.0 for text in texts)
    return Finding(
        message=f"The share of position is {share:.2g}: {names} enters, and the {texts[0].attributed} owes nothing "
        f"to it on {inputs}.",
        effect=f"At {length} tokens positions may be taken away or shuffled, and the output stays as it is: as to them "
        "the order of the tokens makes no difference.",
        where=Where(
            module=encoding.modules[0] if encoding.modules else "",
            encoding=encoding.id,
            file=encoding.source_file,
            line=encoding.source_line,
        ),
        evidence=Evidence(measured=round(share, 6), limit=UNUSED, unit="share of position", seq_len=length),
        fix=Fix(
            f"Look at what stands between {encoding.id} and the output: a gate or scale at zero, a projection whose "
            "columns or rows for it are zero, weights that were not loaded."
        ),
        scheme=encoding.scheme,
    )

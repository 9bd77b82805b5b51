"""Passes on other batches: what is given, which rows are read, how early they end, and that the model is left alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pediag.targets import InputSpec
from pediag.trace import Site
from pediag.trace.batches import Batches, alike, matching, shift
from tests.trace._sessions import session

WIDTH = 24


class Decoder(nn.Module):
    """Rows of a table by the ids that are given, else counted over the mask; ``depth`` layers."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(89, WIDTH), nn.Embedding(400, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(depth)])
        self.calls = 0

    def forward(
        self, ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        self.calls += 1
        kept = torch.ones_like(ids) if attention_mask is None else attention_mask
        if position_ids is None:
            position_ids = (kept.cumsum(-1) - 1).clamp(min=0)
        x = self.tokens(ids) + self.places(position_ids)
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, -1)
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x


def asked(model: nn.Module, *specs: InputSpec) -> tuple[Batches, list[Site]]:
    batches = Batches(session(model, *specs))
    return batches, [site for site in batches.plain.trace.graph.sites if site.op == "add"][:1]


def rows(batches: Batches, made: object, site: Site) -> Tensor:
    place = next(place for place, own in batches.plain.places.items() if own is site)
    there = matching(made, place, site)  # type: ignore[arg-type]
    assert there is not None
    found = made.rows(there)  # type: ignore[attr-defined]
    assert found is not None
    return found


def test_packed_ids_read_the_first_rows_twice() -> None:
    batches, (site,) = asked(Decoder())
    packed = batches.packed([site])
    assert packed is not None
    first, second = packed.documents
    assert first + second == batches.plain.trace.seq_len
    found, plain = rows(batches, packed, site), rows(batches, batches.plain, site)
    assert torch.equal(found[0, first:], plain[0, :second])
    assert torch.equal(found[0, :first], plain[0, :first])


def test_turned_ids_read_the_rows_backwards() -> None:
    batches, (site,) = asked(Decoder())
    found, plain = rows(batches, batches.turned([site]), site), rows(batches, batches.plain, site)
    assert torch.equal(found[0], plain[0].flip(0))


def test_padded_texts_read_row_zero_first() -> None:
    batches, (site,) = asked(Decoder())
    padded = batches.padded([site])
    assert padded is not None
    assert padded.given == ("attention_mask",)
    assert len(set(padded.pads)) == len(padded.pads) == batches.plain.trace.sizes.batch
    found, plain = rows(batches, padded, site), rows(batches, batches.plain, site)
    for text, pads in enumerate(padded.pads):
        assert torch.equal(found[text, pads:], plain[0, : found.shape[1] - pads])


def test_a_text_alone_is_the_start_of_a_longer_one() -> None:
    batches, (site,) = asked(Decoder())
    alone = batches.alone([site], 100)
    assert alone is not None
    assert torch.equal(rows(batches, alone, site)[0], rows(batches, batches.plain, site)[0, :100])


def test_a_pass_ends_at_the_last_join_asked_about() -> None:
    deep, shallow = asked(Decoder(12)), asked(Decoder(1))
    nodes = []
    for batches, sites in (deep, shallow):
        packed = batches.packed(sites)
        assert packed is not None and packed.trace.failure is None
        nodes.append(len(packed.trace.graph.nodes))
    assert nodes[0] == nodes[1]
    assert not deep[0].packed(deep[1]).trace.graph.attentions  # type: ignore[union-attr]


def test_each_pass_is_run_once_and_leaves_the_model_alone() -> None:
    model = Decoder()
    batches, sites = asked(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert batches.packed(sites) is batches.packed(sites)
    batches.padded(sites)
    assert model.calls == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


class Plain(nn.Module):
    """Takes ids alone; compares them with padding or not."""

    def __init__(self, compares: bool) -> None:
        super().__init__()
        self.compares = compares
        self.tokens, self.places = nn.Embedding(89, WIDTH, padding_idx=1), nn.Embedding(400, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        kept = ids.ne(1).long() if self.compares else torch.ones_like(ids)
        return self.tokens(ids) + self.places((kept.cumsum(1) - 1).clamp(min=0))


def test_padding_is_told_by_its_id() -> None:
    batches, (site,) = asked(Plain(True))
    padded = batches.padded([site])
    assert padded is not None and padded.told and padded.given == ()
    found, plain = rows(batches, padded, site), rows(batches, batches.plain, site)
    widest = padded.pads[-1]
    assert torch.equal(found[-1, widest:], plain[0, : found.shape[1] - widest])


def test_nothing_tells_of_padding() -> None:
    batches, sites = asked(Plain(False))
    padded = batches.padded(sites)
    assert padded is not None and not padded.told
    assert batches.packed(sites) is None
    assert (batches.ids_argument(), batches.mask_argument(), batches.document_argument()) == ("", "", "")


def test_what_forward_calls_its_arguments() -> None:
    batches, _ = asked(Decoder())
    assert (batches.ids_argument(), batches.mask_argument()) == ("position_ids", "attention_mask")
    given, _ = asked(
        Decoder(),
        InputSpec("ids", "int64", ("B", "N")),
        InputSpec("attention_mask", "int64", ("B", "N"), "mask"),
    )
    assert given.mask_argument() == "attention_mask"


def test_tensors_that_nothing_reads() -> None:
    model = Decoder()
    model.spare = nn.Embedding(400, WIDTH)
    batches, _ = asked(model)
    assert set(batches.unread()) == {"spare.weight"}
    assert {"tokens.weight", "spare.weight"} <= set(batches.stored())
    home = batches.home("spare.weight")
    assert home is not None and home.function == "Decoder"


def test_shift_and_alike() -> None:
    """Rows m, 2 m, 3 m of a text behind four pads, counted and not counted."""
    plain = torch.arange(1.0, 21.0)[:, None] * torch.tensor([1.0, 2.0, 3.0])
    assert shift(plain, 4, plain) == 4
    assert shift(torch.cat((plain[:1].expand(4, -1), plain[:16])), 4, plain) == 0
    assert shift(plain * 2, 4, plain) is None
    assert alike(plain, plain * (1 + 1e-7))
    assert not alike(plain, plain + 0.01)

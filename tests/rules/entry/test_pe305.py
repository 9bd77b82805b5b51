"""PE305: which models are permutation equivariant, shown by permuting, and which know order otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pediag
from tests.rules._fixtures import load
from tests.rules.entry._judge import cases, findings, outcome

FIXTURE = load("pe305_position_blind")
CODE = "PE305"


class Blind(nn.Module):
    """One attention layer; ``kind`` says what stands before, around or after it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(99, 64)
        self.mix = nn.MultiheadAttention(64, 4, batch_first=kind != "sequence first")
        self.wide, self.narrow = nn.Conv1d(64, 64, 3, padding=1), nn.Conv1d(64, 64, 1)
        self.lstm, self.gru = nn.LSTM(64, 64, batch_first=True), nn.GRU(64, 64, batch_first=True)
        self.first = nn.Parameter(torch.randn(1, 1, 64))

    def forward(self, ids: Tensor) -> Tensor:
        x, options = self._before(self.embed(ids)), {}
        if self.kind == "padding mask":
            options["key_padding_mask"] = ids.eq(0)
        if self.kind == "window":
            i = torch.arange(x.shape[1], device=x.device)
            options["attn_mask"] = (i - i[:, None]).abs() > 8
        x = x + self.mix(x, x, x, need_weights=False, **options)[0]
        if self.kind in ("class token", "first token"):
            return x[:, 0]
        return x.mean(1) if self.kind == "mean" else x

    def _before(self, x: Tensor) -> Tensor:
        if self.kind in ("convolution", "pointwise"):
            convolve = self.wide if self.kind == "convolution" else self.narrow
            return convolve(x.mT).mT
        if self.kind in ("lstm", "gru"):
            return getattr(self, self.kind)(x)[0]
        if self.kind == "shift":
            return x + F.pad(x[:, :-1], (0, 0, 1, 0))
        if self.kind == "class token":
            return torch.cat((self.first.expand(len(x), -1, -1), x), 1)
        return x.cumsum(1) if self.kind == "cumsum" else x


BLIND = ["plain", "pointwise", "class token", "padding mask", "first token", "mean", "sequence first"]
ORDERED = ["convolution", "lstm", "gru", "shift", "cumsum"]


def is_equivariant(model: nn.Module, axis: int = 1) -> bool:
    """Whether permuting all tokens but the first permutes the outputs, or leaves pooled ones as they are."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 90, (2, 12), generator=generator)
    order = torch.cat((torch.zeros(1, dtype=torch.long), 1 + torch.randperm(11, generator=generator)))
    with torch.no_grad():
        one, two = model(ids), model(ids[:, order])
    if one.dim() == 3 and one.shape[1] == 12:
        one = one[:, order]
    return bool(torch.allclose(one, two, atol=1e-5))


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory):
    (finding,) = findings(factory(), CODE, 512)
    assert finding.severity == "error"
    assert finding.where.file == FIXTURE.__file__
    assert (finding.evidence.measured, finding.evidence.unit) == (0, "sites")
    assert is_equivariant(factory())


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy(factory):
    assert findings(factory(), CODE, 512) == []
    assert not is_equivariant(factory())


@pytest.mark.parametrize("factory", cases(FIXTURE, "NOTED"))
def test_a_causal_decoder_without_positions_is_a_note(factory):
    (finding,) = findings(factory(), CODE, 512)
    assert finding.severity == "note"
    assert "computed" not in finding.message


@pytest.mark.parametrize("kind", BLIND)
def test_blind(kind):
    model = Blind(kind).eval()
    (finding,) = findings(model, CODE, 128)
    assert finding.severity == "error"
    assert "10^215 orders" in finding.effect
    if kind not in ("sequence first", "class token"):
        assert is_equivariant(model)


@pytest.mark.parametrize("kind", ORDERED)
def test_order_from_elsewhere(kind):
    model = Blind(kind).eval()
    result = outcome(model, CODE, 128)
    assert (result.status, result.findings) == ("not-applicable", [])
    assert "knows order" in result.reason
    assert not is_equivariant(model)


def test_a_window_is_a_mask_of_positions():
    model = Blind("window").eval()
    (finding,) = findings(model, CODE, 128)
    assert finding.severity == "note"


@pytest.mark.parametrize(
    ("name", "line"), [("faulty_zeroed", "self.rows(place)"), ("faulty_never_applied", "phi.cos()")]
)
def test_unused_positions_are_named_with_their_line(name, line):
    (finding,) = findings(getattr(FIXTURE, name)(), CODE, 512)
    assert "but never reach attention" in finding.message
    assert line in Path(FIXTURE.__file__).read_text().splitlines()[finding.where.line - 1]


def test_without_attention_there_is_nothing_to_judge():
    result = outcome(load("mlp", "healthy").model(), CODE, 64)
    assert (result.status, result.reason) == ("not-applicable", "the model has no attention")


@pytest.mark.parametrize("specs", [["x=float32[B,N,64]"], ["x=float32[B,N,64]", "where=float32[B,N,64]"]])
def test_positions_may_be_in_vectors_that_come_in(specs):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.MultiheadAttention(64, 4, batch_first=True)

        def forward(self, x, where=0.0):
            x = x + where
            return self.mix(x, x, x, need_weights=False)[0]

    (finding,) = findings(Block().eval(), CODE, 128, inputs=specs)
    assert finding.severity == "warning"
    assert "unless the inputs hold them" in finding.message


@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_a_convolution_along_the_tokens_knows_order(mode):
    """Token embeddings of Informer."""

    class Convolved(nn.Module):
        def __init__(self):
            super().__init__()
            self.near = nn.Conv1d(7, 64, 3, padding=1, padding_mode=mode)
            self.mix = nn.MultiheadAttention(64, 4, batch_first=True)

        def forward(self, x):
            x = self.near(x.mT).mT
            return self.mix(x, x, x, need_weights=False)[0]

    result = outcome(Convolved().eval(), CODE, 128, inputs=["x=float32[B,N,7]"])
    assert result.status == "not-applicable"
    assert "convolution along the tokens" in result.reason


def test_vectors_beside_ids_may_hold_places_and_are_a_note():
    """A graph: kinds of atoms, and for each eigenvectors of the Laplacian."""

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.atoms, self.vectors = nn.Embedding(28, 64), nn.Linear(8, 64)
            self.mix = nn.MultiheadAttention(64, 4, batch_first=True)

        def forward(self, atoms, vectors):
            x = self.atoms(atoms) + self.vectors(vectors)
            return self.mix(x, x, x, need_weights=False)[0]

    specs = ["atoms=int64[B,N]", "vectors=float32[B,N,8]"]
    (finding,) = findings(Graph().eval(), CODE, 128, inputs=specs)
    assert finding.severity == "note"
    assert "pediag.positions" in finding.fix.summary


def test_a_mask_that_attention_replaces_by_its_own_is_no_unused_position():
    (finding,) = findings(load("no_position_causal", "healthy").model(), CODE, 64)
    assert finding.severity == "note"
    assert "computed" not in finding.message


class Decoder(nn.Module):
    """A causal decoder whose rotation is lost in the way that ``how`` says, or that has none by design."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed, self.qkv = nn.Embedding(99, 64), nn.Linear(64, 192)
        self.omega = nn.Buffer(1e4 ** (-torch.arange(0, 16, 2) / 16))
        if how == "stored":
            angle = torch.outer(torch.arange(512.0), 1e4 ** (-torch.arange(0, 16, 2) / 16))
            self.cos, self.sin = nn.Buffer(angle.cos()), nn.Buffer(angle.sin())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        if self.how in ("zeros", "dropped"):
            place = torch.arange(ids.shape[1]).float() * (self.how == "dropped")
            cos, sin = (part(place[:, None] * self.omega) for part in (torch.cos, torch.sin))
            if self.how == "zeros":
                q, k = (
                    torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
                    for a, b in (q.chunk(2, -1), k.chunk(2, -1))
                )
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("how", "severity"), [("zeros", "error"), ("dropped", "error"), ("stored", "error"), ("off", "note")]
)
def test_lost_positions_are_an_error_under_a_causal_mask_too(how: str, severity: str) -> None:
    model = Decoder(how).eval()
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        prefix = model(ids[:, 4:])[0, 0]
        alone = model(ids[:, 4:5])[0, 0]
    torch.testing.assert_close(prefix, alone)  # the first of any text has no place of its own
    (finding,) = findings(model, CODE, 256)
    assert finding.severity == severity


class TwoSides(nn.Module):
    """An encoder and a causal decoder that looks at it; ``encoder`` and ``decoder`` say which adds rows."""

    def __init__(self, encoder: bool, decoder: bool, ids: bool = True) -> None:
        super().__init__()
        self.encoder, self.decoder, self.ids = encoder, decoder, ids
        self.embed, self.rows, self.into = nn.Embedding(99, 64), nn.Embedding(512, 64), nn.Linear(64, 64)
        self.sides = nn.ModuleList(nn.MultiheadAttention(64, 4, batch_first=True) for _ in range(3))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = self.embed(source) if self.ids else self.into(source), self.embed(target)
        x = x + self.rows(torch.arange(x.shape[1])) if self.encoder else x
        y = y + self.rows(torch.arange(y.shape[1])) if self.decoder else y
        ahead = torch.ones(y.shape[1], y.shape[1], dtype=torch.bool).triu(1)
        x = x + self.sides[0](x, x, x, need_weights=False)[0]
        y = y + self.sides[1](y, y, y, need_weights=False, attn_mask=ahead)[0]
        return y + self.sides[2](y, x, x, need_weights=False)[0]


SIDES = ["source=int64[B,N]", "target=int64[B,M]"]


@pytest.mark.parametrize("decoder", [False, True])
def test_a_mask_of_the_decoder_tells_the_encoder_nothing(decoder: bool) -> None:
    model = TwoSides(False, decoder).eval()
    source, target = torch.arange(1, 12)[None], torch.arange(20, 29)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(source, target), model(source.flip(1), target))
    (finding,) = pediag.check(model, inputs=SIDES, seq_len=128, select=[CODE]).findings
    assert finding.severity in ("warning", "error")
    assert finding.where.module == "sides.0"


@pytest.mark.parametrize(
    ("encoder", "decoder", "ids"), [(True, True, True), (True, False, True), (False, True, False)]
)
def test_sides_that_may_know_order(encoder: bool, decoder: bool, ids: bool) -> None:
    inputs = SIDES if ids else ["source=float32[B,N,64]", SIDES[1]]
    model = TwoSides(encoder, decoder, ids).eval()
    assert pediag.check(model, inputs=inputs, seq_len=128, select=[CODE]).findings == []


class Sinks(nn.Module):
    """A causal decoder whose softmax has a column of no token; all tokens are turned as position 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.sink = (
            nn.Embedding(99, 64),
            nn.Linear(64, 192),
            nn.Parameter(torch.zeros(4)),
        )
        self.omega = nn.Buffer(1e4 ** (-torch.arange(0, 16, 2) / 16))

    def forward(self, ids: Tensor) -> Tensor:
        b, n = ids.shape
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        turn = torch.polar(torch.ones(n, 8), torch.arange(n)[:, None] * 0 * self.omega)
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * turn).flatten(-2)
            for t in (q, k)
        )
        score = (q @ k.mT / 4).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
        weight = torch.cat((score, self.sink.view(1, 4, 1, 1).expand(b, 4, n, 1)), -1).softmax(-1)[..., :-1]
        return x + (weight @ v).transpose(1, 2).flatten(2)


def test_complex_positions_that_are_all_zero_beside_a_sink() -> None:
    (finding,) = findings(Sinks().eval(), CODE, 128)
    assert finding.severity == "error"
    assert "the same for every token" in finding.message

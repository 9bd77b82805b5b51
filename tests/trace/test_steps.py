"""The step probe: conventions that are told from a signature and confirmed by a trace, and rows by their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pediag.targets import InputSpec
from pediag.trace.conventions import NoCache
from pediag.trace.steps import Cached, Steps, Unrunnable
from tests.trace._sessions import session

D = 16


def attend(q, k, v, seen):
    """Attention over the keys that ``seen`` (n, M) shows."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)


class Base(nn.Module):
    """One layer of rotary attention by halves."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv = nn.Embedding(99, 2 * D), nn.Linear(2 * D, 6 * D)

    def parts(self, ids, place):
        q, k, v = self.qkv(self.tokens(ids)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        phi = place[:, None] * 1e4 ** (-torch.arange(0, D, 2) / D)
        return self.turn(q, phi), self.turn(k, phi), v

    @staticmethod
    def turn(x, phi):
        a, b = x.chunk(2, -1)
        return torch.cat((a * phi.cos() - b * phi.sin(), b * phi.cos() + a * phi.sin()), -1)


class Flagged(Base):
    """Keeps keys and its own count when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.count = None, 0

    def forward(self, ids, use_cache=False):
        start = self.count if use_cache else 0
        n = ids.shape[1]
        q, k, v = self.parts(ids, torch.arange(start, start + n))
        if use_cache:
            if self.kept is not None:
                k, v = torch.cat((self.kept[0], k), -2), torch.cat((self.kept[1], v), -2)
            self.kept, self.count = (k, v), start + n
        m = k.shape[-2]
        return attend(q, k, v, torch.ones(n, m, dtype=torch.bool).tril(m - n))


class Fixed(Base):
    """Buffers of a fixed number of slots, written at ``input_pos``; a causal mask over all slots."""

    def __init__(self, slots: int = 200) -> None:
        super().__init__()
        self.slots = slots
        self.register_buffer("keys", torch.zeros(8, 2, slots, D))
        self.register_buffer("values", torch.zeros(8, 2, slots, D))

    def forward(self, ids, input_pos: torch.Tensor):
        q, k, v = self.parts(ids, input_pos)
        b = ids.shape[0]
        self.keys[:b, :, input_pos], self.values[:b, :, input_pos] = k, v
        seen = torch.arange(self.slots)[None] <= input_pos[:, None]
        return attend(q, self.keys[:b], self.values[:b], seen)


class PerLayer(Base):
    """A list with a dictionary for each layer, brought by the caller."""

    def forward(self, ids, kv_caches: list | None = None):
        own = kv_caches[0] if kv_caches else {}
        start = own["k"].shape[-2] if own else 0
        q, k, v = self.parts(ids, torch.arange(start, start + ids.shape[1]))
        if own:
            k, v = torch.cat((own["k"], k), -2), torch.cat((own["v"], v), -2)
        own.update(k=k, v=v)
        n, m = q.shape[-2], k.shape[-2]
        return attend(q, k, v, torch.ones(n, m, dtype=torch.bool).tril(m - n))


PLACED = (InputSpec("ids", "int64", ("B", "N")), InputSpec("input_pos", "int64", ("N",), "positions"))


def steps_of(model: nn.Module) -> Steps:
    """The probe; a model that asks for positions gets one for each token."""
    return Steps(session(model.eval(), *(PLACED if isinstance(model, Fixed) else ())))


def cached(model: nn.Module) -> Cached:
    return steps_of(model).cached()


@pytest.mark.parametrize("make", [Flagged, Fixed, PerLayer])
def test_steps_are_the_rows_of_the_full_pass(make):
    found = cached(make())
    assert [done.tokens for done in found.passes][1:3] == [1, 1]
    assert not found.stopped
    for done in found.passes[1:]:
        ((full, here),) = found.rows.pairs(done)
        assert list(here.rows) == list(range(done.seen, done.seen + done.tokens))
        keys = here.columns[here.columns >= 0]
        assert list(keys) == list(range(done.seen + done.tokens))
        for row, token in enumerate(here.rows):
            shown = np.flatnonzero(here.visible[row])
            expected = full.scores[:, token][:, here.columns[shown]]
            assert np.allclose(here.scores[:, row][:, shown], expected, rtol=0, atol=1e-9)


def test_scores_are_the_rotation_of_equal_vectors():
    """With one vector q and one k at all places the score of n and j is sum of |q_i k_i| cos(a_i + (n - j) w_i)."""
    found = cached(Flagged())
    ((full, _),) = found.rows.pairs(found.passes[1])
    halves = D // 2
    q, k = full.queries[0, 0], full.keys[0, 0]
    a, b = q[:halves] + 1j * q[halves:], k[:halves] + 1j * k[halves:]
    w = 1e4 ** (-np.arange(0, D, 2) / D)
    n, j = np.arange(full.scores.shape[1])[:, None, None], np.arange(full.scores.shape[2])[None, :, None]
    expected = (a * b.conj() * np.exp(1j * (n - j) * w)).real.sum(-1) / D**0.5
    shown = full.visible
    assert np.allclose(full.scores[0][shown], expected[shown], rtol=0, atol=1e-5)


def test_a_model_without_memory_says_so():
    class Plain(Base):
        def forward(self, ids):
            q, k, v = self.parts(ids, torch.arange(ids.shape[1]))
            return attend(q, k, v, None)

    with pytest.raises(NoCache, match="takes no cache"):
        cached(Plain())


def test_positions_that_the_caller_gives_are_no_sign_of_memory():
    class Told(Base):
        def forward(self, ids, positions):
            q, k, v = self.parts(ids, positions)
            return attend(q, k, v, None)

    with pytest.raises(NoCache, match="takes no cache"):
        Steps(
            session(Told().eval(), PLACED[0], InputSpec("positions", "int64", ("N",), "positions"))
        ).cached()


def test_an_argument_that_is_named_like_a_cache_proves_nothing():
    class Named(Base):
        def forward(self, ids, past=None, use_cache=True):
            q, k, v = self.parts(ids, torch.arange(ids.shape[1]))
            return attend(q, k, v, None), (k, v)

    with pytest.raises(Unrunnable, match="sees earlier tokens"):
        cached(Named())


def test_keys_that_cannot_be_followed_are_told_as_such():
    """XLNet's memory: what entered the layer is kept, and projected again in each step, for one text by one product."""

    class Recurrent(Base):
        def forward(self, ids, mems=None):
            own = self.tokens(ids)
            x = own if mems is None else torch.cat((mems, own), 1)
            w = self.qkv.weight.T.unflatten(-1, (3, 2, -1)).permute(1, 2, 0, 3)
            q, k, v = (torch.einsum("bnh,xhd->bxnd", x, part) for part in w)
            phi = torch.arange(x.shape[1])[:, None] * 1e4 ** (-torch.arange(0, D, 2) / D)
            n = ids.shape[1]
            seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[-n:]
            return attend(self.turn(q, phi)[:, :, -n:], self.turn(k, phi), v, seen), x

    with pytest.raises(
        Unrunnable, match=r"ran \(mems\) with a key for each of \d+ tokens.*kept hidden states"
    ):
        cached(Recurrent())


def test_nothing_runs_before_it_is_asked_for_and_the_model_is_left_alone():
    model = Fixed().eval()
    steps = steps_of(model)
    assert steps.session._structural is None
    assert steps.cached() is steps.cached()
    assert not model.keys.any()
    flagged = Flagged().eval()
    Steps(session(flagged)).cached()
    assert (flagged.kept, flagged.count) == (None, 0)


def test_two_sequences_step_along_the_second():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    found = cached(transformers.T5ForConditionalGeneration(config))
    full, here = next(pair for pair in found.rows.pairs(found.passes[1]) if (pair[1].columns >= 0).any())
    assert here.attention.module.startswith("decoder")
    row = int(here.rows[0])
    apart = here.bias[:, 0] - full.bias[:, row, : row + 1]
    assert np.ptp(apart, axis=-1).max() < 1e-9
    assert np.ptp(here.bias[:, 0], axis=-1).min() > 1e-3

"""Which channels each published type of model pairs, and in which layout of its checkpoints."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pediag.trace import Node, Trace

HALF, INTERLEAVED = "half", "interleaved"

SEPARATE = ("self_attn.q_proj.weight",)
FUSED = ("self_attn.qkv_proj.weight",)
NEOX = ("attention.query_key_value.weight", "self_attn.query_key_value.weight")

PUBLISHED: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        "llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text phi stablelm starcoder2 olmo "
        "olmo2 granite smollm3".split(),
        (HALF, SEPARATE),
    ),
    "phi3": (HALF, FUSED),
    "persimmon": (HALF, NEOX),
    "gpt_neox": (HALF, NEOX),
    "falcon": (HALF, NEOX),
    **dict.fromkeys("cohere cohere2 glm glm4 ernie4_5 helium".split(), (INTERLEAVED, SEPARATE)),
    "gptj": (INTERLEAVED, ("attn.q_proj.weight",)),
    "codegen": (INTERLEAVED, ("attn.qkv_proj.weight",)),
}
"""Pairing and names of the weights, by type, of checkpoints in the layout of transformers.

Sources: Black et al. 2204.06745 (GPT-NeoX: halves); the documentation of Mesh Transformer JAX and of CodeGen (GPT-J:
neighbours); the conversion scripts of Llama and Mistral, which permute Meta's neighbours into halves; the code that is
published with Command R, GLM-4, ERNIE 4.5 and Helium, which turns neighbours.
"""

NEAR = 64
"""Values between an attention and its projection at most."""


def published(values: Mapping[str, Any], trace: Trace) -> tuple[str, str] | None:
    """(type, pairing) that a running model is known by, when its weights are in the layout that this is true of.

    None for a type that is not in the table, for a config that transformers did not write, and for weights of other
    names: Meta's own Llama files are made for neighbours.
    """
    kind = str(values.get("model_type"))
    if kind not in PUBLISHED or not ("transformers_version" in values or values.get("architectures")):
        return None
    pairing, names = PUBLISHED[kind]
    fed = {name for attention in trace.graph.attentions[:1] for name in _names(attention.query)}
    return (kind, pairing) if any(name.endswith(names) for name in fed) else None


def _names(operand: Node) -> set[str]:
    """Names of the weights near before an operand of an attention."""
    pending, known, names = deque([operand]), set[Any](), set[str]()
    while pending and len(known) < NEAR:
        node = pending.popleft()
        if node not in known:
            known.add(node)
            names.update(node.names)
            pending.extend(node.inputs())
    return names

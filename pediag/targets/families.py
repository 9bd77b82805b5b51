"""The rotary bases that published checkpoints of a type of model use. Imports nothing.

Read off the checkpoints' own configuration files and off ``litgpt/config.py`` of litgpt 0.5.13, which restates them.
What was found in neither is left out, so a type that is missing, or has one line, tells nothing of other bases.
"""

from __future__ import annotations

from collections.abc import Mapping

BASES: Mapping[str, Mapping[str, Mapping[float, str]]] = {
    "cohere": {"": {8e6: "Command R"}},
    "deepseek_v2": {"": {1e4: "DeepSeek V2 Lite"}},
    "deepseek_v3": {"": {1e4: "DeepSeek V3"}},
    "falcon": {"": {1e4: "Falcon 7B, 40B, 180B"}},
    "gemma": {"": {1e4: "Gemma 2B, 7B, CodeGemma 7B"}},
    "gemma2": {"": {1e4: "Gemma 2 2B, 9B, 27B"}},
    "gemma3_text": {
        "full_attention": {1e6: "Gemma 3 1B, 4B, 12B, 27B"},
        "sliding_attention": {1e4: "Gemma 3 1B, 4B, 12B, 27B"},
    },
    "glm_moe_dsa": {"": {8e6: "GLM 5"}},
    "gpt_neox": {"": {1e4: "GPT-NeoX 20B, Pythia 14M to 12B, StableLM alpha 3B, 7B"}},
    "llama": {
        "": {
            1e4: "Llama 1, 2, OpenLLaMA 3B, 7B, 13B, TinyLlama 1.1B, Salamandra 2B, 7B",
            1e5: "SmolLM2 135M, 360M",
            1.3e5: "SmolLM2 1.7B",
            5e5: "Llama 3, 3.1, 3.2, 3.3",
            1e6: "CodeLlama 7B, 13B, 34B, 70B",
            1000042.0: "Falcon 3 1B, 3B, 7B, 10B",
        }
    },
    "llama4_text": {"": {5e5: "Llama 4 Scout"}},
    "mistral": {
        "": {
            1e4: "Mistral 7B v0.1",
            1e6: "Mistral 7B v0.2, v0.3, Mathstral 7B, Mistral Large 2407, 2411",
            1e9: "Pixtral 12B",
        }
    },
    "mixtral": {"": {1e6: "Mixtral 8x7B, 8x22B"}},
    "nomic_bert": {"": {1e3: "nomic-embed-text v1"}},
    "olmo": {"": {1e4: "OLMo 1B, 7B"}},
    "olmo2": {"": {5e5: "OLMo 2 7B, 13B"}},
    "phi": {"": {1e4: "Phi 1.5, 2"}},
    "phi3": {"": {1e4: "Phi 3 mini, 3.5 mini, 4 mini", 2.5e5: "Phi 4", 5e5: "Phi 4 reasoning"}},
    "qwen2": {
        "": {
            1e4: "Qwen2.5 Math 1.5B, 7B, 72B",
            1e6: "Qwen2.5 0.5B to 72B, Qwen2.5 Coder, QwQ 32B",
            1e7: "Qwen2.5 1M 7B, 14B",
        }
    },
    "qwen3": {"": {1e6: "Qwen3 0.6B to 32B", 5e6: "Qwen3 4B 2507"}},
    "qwen3_moe": {
        "": {
            1e6: "Qwen3 30B-A3B, 235B-A22B",
            5e6: "Qwen3 235B-A22B 2507",
            1e7: "Qwen3 30B-A3B 2507",
        }
    },
    "qwen3_vl_text": {"": {5e6: "Qwen3 VL 4B"}},
    "smollm3": {"": {5e6: "SmolLM3 3B"}},
    "stablelm": {"": {1e4: "StableLM 3B 4E1T, Zephyr 3B, Stable Code 3B"}},
    "starcoder2": {"": {999999.4420358813: "StarCoder2 3B"}},
}
"""Type of model -> type of layers, ``""`` for all -> base -> whose it is, checkpoints set apart by commas."""


def published(model_type: str, layer_type: str = "") -> Mapping[float, str]:
    """Base -> the checkpoints that use it; empty where none is known."""
    return BASES.get(model_type, {}).get(layer_type, {})


def count(bases: Mapping[float, str]) -> int:
    """How many checkpoints stand behind ``bases``."""
    return sum(names.count(",") + 1 for names in bases.values())

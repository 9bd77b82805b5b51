"""What is published of each way to a longer text, and where. No number here is pediag's own."""

from __future__ import annotations

from pediag.report.plan import Option

CHEN, PENG, DING = "Chen et al. 2306.15595", "Peng et al. 2309.00071", "Ding et al. 2402.13753"
MEN, LIU, PRESS = "Men et al. 2405.14591", "Liu et al. 2310.05209", "Press et al. 2108.12409"
VIT = "Dosovitskiy et al. 2010.11929"

PUBLISHED: dict[str, tuple[str, tuple[str, ...]]] = {
    "keep": ("Unscaled rotary models break down past their trained length.", (CHEN, LIU)),
    "linear": (
        "LLaMA 7B to 65B reach 32,768 within 1,000 steps of tuning; Gemma 3 ships it with factor 8. Neighbours move "
        "together by the factor.",
        (CHEN, "Gemma 3 config"),
    ),
    "ntk": (
        "Proposed for use without tuning; only the slowest pair is divided by the whole factor.",
        ("bloc97 2023", f"{PENG}, section 3.1"),
    ),
    "dynamic-ntk": (
        "Made for use without tuning; InternLM3 ships factor 6. The table changes with every token: keys cached after "
        "rotation disagree (PE507).",
        ("emozilla 2023", f"{PENG}, section 3.3", "InternLM3 config"),
    ),
    "yarn": (
        "10 times fewer tokens and 2.5 times fewer steps of tuning than methods before it; models to 128k. Qwen2.5 "
        "has its users declare factor 4, DeepSeek-V3 ships 40.",
        (PENG, "Qwen2.5 README", "DeepSeek-V3 config"),
    ),
    "llama3": (
        "Llama 3.1 was trained on with factor 8 from 8,192 to 131,072, Llama 3.2 with 32.",
        ("Meta 2024, model code",),
    ),
    "longrope": (
        "2,048k tokens within 1,000 steps of tuning at up to 256k; 8 times without tuning. Phi-3 ships it. The table "
        "switches at the original length (PE507).",
        (DING, "Phi-3 config"),
    ),
    "larger-base": (
        "The base that suits tuning at this length. Code Llama tuned with base 1e6, 100 times Llama 2's. A base that "
        "is too small keeps perplexity and loses retrieval.",
        (LIU, MEN, "Code Llama config"),
    ),
    "sliding-window": (
        "Mistral 7B v0.1 ships a window of 4,096; it was trained with it.",
        ("Mistral 7B config",),
    ),
    "alibi": (
        "1.3B trained at 1,024 matches a sinusoidal model trained at 2,048, at 2,048, with 11 % less memory. That is "
        "perplexity, which is not retrieval; the gain peaks near twice the trained length.",
        (PRESS,),
    ),
    "nope": (
        "Llama 4 and SmolLM3 ship every fourth layer without rotation.",
        ("Llama 4 and SmolLM3 configs",),
    ),
}
"""Option -> what is published of it, and where. No number here is pediag's own."""

INTERPOLATE = Option(
    "interpolate-and-tune",
    "needed",
    "Usual for vision models at a higher resolution.",
    (VIT,),
    "The table is resized once to the wanted rows; every position moves, so the model is tuned with it.",
)

WINDOWS = Option(
    "windows",
    "none",
    "A convention of BERT-like models on long documents.",
    ("transformers documentation, stride",),
    "Cut the text into overlapping pieces of the trained length; nothing is seen across two pieces.",
)

RELATIVE = Option(
    "retrain-with-rope-or-alibi",
    "retrain",
    "Both serve lengths that a table can not; rotary models can be extended later.",
    (PRESS, PENG),
    "The scheme is part of what was trained.",
)

OTHERS: dict[str, tuple[Option, ...]] = {
    "learned": (
        Option(
            "keep",
            "retrain",
            "",
            ("torch.nn.Embedding",),
            "There are no rows past the table: IndexError on the CPU, a device-side assert on CUDA.",
        ),
        INTERPOLATE,
        Option(
            "tile-and-tune",
            "needed",
            "Longformer starts from copies of RoBERTa's rows, without the two that are kept aside.",
            ("Beltagy et al. 2004.05150",),
            "The table is repeated; copies are told apart by tuning.",
        ),
        WINDOWS,
        RELATIVE,
    ),
    "sinusoidal": (
        Option(
            "keep",
            "advised",
            "Quality degrades a few dozen tokens past the trained length.",
            (PRESS,),
            "The formula gives all rows; never resample a stored table (PE505).",
        ),
        Option("tune", "needed", "", (PRESS,), "Compute the missing rows and tune at the wanted length."),
        WINDOWS,
        RELATIVE,
    ),
    "t5-buckets": (
        Option(
            "keep",
            "advised",
            "Decays more slowly than sinusoids past the trained length.",
            (PRESS,),
            "All farther distances share the last bucket (PE504): no error, no distinction.",
        ),
        Option(
            "tune", "needed", "", ("Raffel et al. 1910.10683",), "Tune at the wanted length; buckets stay."
        ),
        WINDOWS,
        Option(
            "more-buckets",
            "retrain",
            "",
            ("Raffel et al. 1910.10683",),
            "A larger maximum distance changes what every far bucket means.",
        ),
    ),
    "alibi": (
        Option(
            "keep",
            "none",
            "Perplexity holds, and the gain peaks near twice the trained length; retrieval from "
            "afar does not follow.",
            (PRESS,),
            "Far keys weigh next to nothing in heads of steep slopes.",
        ),
        Option(
            "interpolate-slopes",
            "none",
            "Reported to improve language modelling, summaries and retrieval without tuning.",
            ("Al-Khateeb et al. 2310.13017",),
            "Slopes are divided by the factor, so that the farthest "
            "key is biased as the farthest trained one was.",
        ),
        WINDOWS,
    ),
}
"""Scheme -> its options; first the present state."""

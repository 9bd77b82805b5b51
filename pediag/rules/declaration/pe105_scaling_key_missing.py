"""A declared rotary scaling lacks a key that its type needs.

## What it does

Looks up, for the type of every rotary scaling, the keys that a reader cannot do without, and names those
that are absent or null. A key that is there under a misspelt or foreign name (``scaling_factor``) is named
with it, and PE106 then leaves it to this finding.

## Why it matters

The public readers stop with KeyError, for a null list with TypeError; a reader that uses ``get`` with a
default goes on with another scaling than the model was made for.

## What is checked

| type | needs |
|---|---|
| linear, dynamic | factor (vLLM's dynamic takes alpha instead) |
| yarn | factor, original_max_position_embeddings |
| longrope (su) | short_factor, long_factor, original_max_position_embeddings |
| llama3 | factor, low_freq_factor, high_freq_factor, original_max_position_embeddings |
| proportional | partial_rotary_factor, without which transformers turns every pair (warning) |
| mrope | mrope_section, without which vLLM stops and transformers takes [16, 24, 24] (warning) |
| ntk | factor |
| xdrope | alpha, xdrope_section |
| openpangu | mrope_section, mrope_interleaved |

The length before scaling is not missing where it stands beside the scaling (Phi-3). Where it stands nowhere,
transformers takes max_position_embeddings for it while vLLM stops: that is a note, since the numbers are
right only if that is the length before scaling. For yarn a null factor is a warning where both lengths are
declared, because transformers then takes their ratio.

## Known limits

Keys of an unknown type are not judged (PE104), nor a base that is absent (PE103). A GGUF file is not judged:
llama.cpp has a default for each of its keys. Values are PE107's.

## Fix

Write the key with the value of the model's training; the finding names one where the config implies it. For
the length before scaling write the length of pre-training, never the extended one.

## References

- transformers 5.24, modeling_rope_utils.py: required_keys of each type.
- vLLM, rotary_embedding/__init__.py: get_rope.
- meta-llama/llama3 issue 299: llama3 scaling cut down to type and factor.
- NVIDIA-NeMo/Automodel issue 2652 and hiyouga/LlamaFactory issue 8101: YaRN without its original length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pediag.rules.declaration._values import (
    Fault,
    findings,
    given,
    length,
    misspelt,
    renaming,
    scaling_path,
    shown,
    type_of,
)
from pediag.rules.finding import Applicability, Edit, Finding, Severity
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.targets.declaration import RopeDeclaration, declarations
from pediag.targets.rope_keys import ORIGINAL, nearest_key, needed, readers

LLAMA3_BANDS = {"low_freq_factor": "1.0", "high_freq_factor": "4.0"}
"""What Llama 3.1 to 3.3 ship."""


@rule(
    code="PE105",
    name="scaling-key-missing",
    severity="error",
    basis="published result",
    needs=("config",),
    references=(
        "transformers 5.24 modeling_rope_utils.py",
        "vLLM rotary_embedding/__init__.py",
        "meta-llama/llama3 issue 299",
        "NVIDIA-NeMo/Automodel issue 2652",
        "hiyouga/LlamaFactory issue 8101",
    ),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each scaling that lacks keys, and one for a length that is taken from elsewhere."""
    scaled = [one for one in declarations(facets.config) if one.type is not None]
    if not scaled:
        raise NotApplicable("the config declares no type of rotary scaling")
    if facets.config.typed:
        raise NotApplicable("the reader of this format has a default for every key")
    yield from findings(facets, (fault for one in scaled for fault in _faults(one)))


def _faults(declared: RopeDeclaration) -> Iterator[Fault]:
    kind = type_of(declared)
    if not kind or declared.type is None:
        return
    lacking = [key for key in needed(kind) if _lacks(declared, kind, key)]
    if lacking == ["factor"] and (mild := _otherwise(declared, kind)) is not None:
        yield mild
    elif lacking:
        yield _missing(declared, kind, lacking)
    elif ORIGINAL in needed(kind) and declared.get(ORIGINAL) is None:
        yield from _filled(declared, kind)
    yield from _wanted(declared, kind)


def _lacks(declared: RopeDeclaration, kind: str, key: str) -> bool:
    if key == ORIGINAL:
        return declared.get(key) is None and declared.get("max_position_embeddings") is None
    return given(declared, key) is None


def _otherwise(declared: RopeDeclaration, kind: str) -> Fault | None:
    """A factor that is absent where one reader does without it."""
    if kind == "dynamic" and (alpha := given(declared, "alpha")) is not None:
        told = f"vLLM takes alpha ({shown(alpha.value)}) in its place; transformers raises KeyError."
        return _fault(
            declared, ["factor"], told, "Write factor too, or serve this config with vLLM alone.", "warning"
        )
    original, longest = length(declared, ORIGINAL), length(declared, "max_position_embeddings")
    if kind == "yarn" and "factor" in declared.scaling and original and longest:
        told = (
            f"transformers takes {longest:,} / {original:,} = {longest / original:g}; vLLM raises TypeError."
        )
        fault = _fault(declared, ["factor"], told, f"Write factor as {longest / original:g}.", "warning")
        return replace(fault, applicability="safe", edits=(Edit(fault.path, longest / original),))
    return None


def _missing(declared: RopeDeclaration, kind: str, lacking: list[str]) -> Fault:
    ending = "TypeError" if any(key in declared.scaling for key in lacking) else "KeyError"
    loaders = " and ".join(readers(_name(declared))) or "transformers"
    effect = f"Loading it with {loaders} ends in {ending}; a reader with defaults builds another scaling."
    near = [
        f"{said.path} looks like {key}" for key, said in misspelt(declared, kind).items() if key in lacking
    ]
    fault = _fault(declared, lacking, effect, _advice(declared, lacking, near), near=near)
    edits, kind = _edits(declared, lacking)
    return replace(fault, applicability=kind, edits=edits)


def _edits(declared: RopeDeclaration, lacking: list[str]) -> tuple[tuple[Edit, ...], Applicability]:
    """Misspelt keys renamed, which is safe since no model could be built; else what lengths and Llama 3.1 imply."""
    place, kind = scaling_path(declared), type_of(declared)
    near = {key: said for key, said in misspelt(declared, kind).items() if key in lacking}
    if near:
        whole = set(near) == set(lacking) and not any(key in declared.scaling for key in lacking)
        renamed = tuple(edit for key, said in near.items() for edit in renaming(said, key))
        return (renamed, "safe") if whole else ((), "manual")
    known = {**LLAMA3_BANDS, "factor": _ratio(declared)}
    if ORIGINAL in needed(kind) and declared.get(ORIGINAL) is None:
        return (), "manual"
    values = [known.get(key, "") for key in lacking]
    if not place or not all(values):
        return (), "manual"
    return tuple(
        Edit(f"{place}.{key}", float(value)) for key, value in zip(lacking, values, strict=True)
    ), "unsafe"


def _advice(declared: RopeDeclaration, lacking: list[str], near: list[str]) -> str:
    """What to write for each key; the values that the config or the published models imply."""
    if near:
        return f"Rename the key: {'; '.join(near)}."
    known = {**LLAMA3_BANDS, "factor": _ratio(declared)}
    named = [f"{key} (Llama 3.1 has {known[key]})" if key in LLAMA3_BANDS else key for key in lacking]
    told = f"Write {_listed(named)} as the model was trained with"
    implied = known["factor"] if "factor" in lacking else ""
    told = f"{told}; the declared lengths imply factor {implied}" if implied else told
    filled = ORIGINAL in needed(type_of(declared)) and declared.get(ORIGINAL) is None
    return f"{told}, and {ORIGINAL} with them." if filled and ORIGINAL not in lacking else f"{told}."


def _ratio(declared: RopeDeclaration) -> str:
    original, longest = length(declared, ORIGINAL), length(declared, "max_position_embeddings")
    return f"{longest / original:g}" if original and longest > original else ""


def _filled(declared: RopeDeclaration, kind: str) -> Iterator[Fault]:
    longest = declared.model["max_position_embeddings"]
    if ORIGINAL in misspelt(declared, kind) or any(nearest_key(key, (ORIGINAL,)) for key in declared.scaling):
        return
    told = (
        f"transformers takes {longest.path} ({shown(longest.value)}) for the length before scaling, which is right "
        "only if the model was trained at it; vLLM raises KeyError."
    )
    advice = f"Write {ORIGINAL} into {scaling_path(declared)} as the length of pre-training."
    yield _fault(declared, [ORIGINAL], told, advice, "note")


def _wanted(declared: RopeDeclaration, kind: str) -> Iterator[Fault]:
    """Keys without which a reader goes on with a value that is hardly meant."""
    if kind == "proportional" and declared.get("partial_rotary_factor") is None:
        told = "transformers takes 1 and turns every pair, as linear does; proportional exists to turn a part of them."
        advice = "Write partial_rotary_factor as the share of pairs that turn; Gemma 4 has 0.25."
        yield _fault(declared, ["partial_rotary_factor"], told, advice, "warning")
    if _name(declared) == "mrope" and given(declared, "mrope_section") is None:
        told = (
            "vLLM stops with AssertionError; transformers takes [16, 24, 24], which fits a head of 128 alone."
        )
        advice = (
            "Write mrope_section as the pairs for time, height and width; they sum to half the rotary width."
        )
        yield _fault(declared, ["mrope_section"], told, advice, "warning")


def _fault(
    declared: RopeDeclaration,
    lacking: list[str],
    effect: str,
    advice: str,
    severity: Severity | None = None,
    near: Sequence[str] = (),
) -> Fault:
    place = scaling_path(declared)
    null = [key for key in lacking if key in declared.scaling]
    what = f"{_listed(null)} null" if null == lacking else f"no {_listed(lacking, 'or')}"
    told = f"; {'; '.join(near)}" if near else ""
    return Fault(
        f"{place}.{lacking[0]}" if place else lacking[0],
        f'{place} is of type "{_name(declared)}" and has {what}{told}.',
        effect,
        advice,
        measured="null" if null == lacking else "absent",
        expected=", ".join(lacking),
        severity=severity,
        at=declared.type.path if declared.type is not None else place,
    )


def _name(declared: RopeDeclaration) -> str:
    """The type as it is written."""
    return str(declared.type.value) if declared.type is not None else "default"


def _listed(names: Sequence[str], word: str = "and") -> str:
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1])))

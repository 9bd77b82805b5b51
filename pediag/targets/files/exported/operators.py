"""Which operations of an exported program are run: those that compute, and none that reach outside.

Names in a program are looked up here, never as attributes of Python modules: a hostile one could name
``torch.hub.load`` or ``aten::from_file``, which creates a file.
"""

from __future__ import annotations

import importlib
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from pediag.errors import LoadError
from pediag.targets._trust import Trust

PREFIX = "torch.ops."
OWN = ("aten", "prims")
"""Namespaces of PyTorch's own operations."""

# Operations of aten with a leading underscore that exporters write; the others may skip checks of memory.
PRIVATE = frozenset(
    (
        "_adaptive_avg_pool2d _adaptive_avg_pool3d _assert_async _assert_scalar _assert_tensor_metadata "
        "_cdist_forward _conj _convolution _convolution_mode _convert_weight_to_int4pack _fft_c2c _fft_c2r "
        "_fft_r2c _functional_assert_scalar _fused_rms_norm _grouped_mm _linalg_eigh _linalg_svd "
        "_local_scalar_dense _log_softmax _native_batch_norm_legit _native_batch_norm_legit_no_training "
        "_native_multi_head_attention _pdist_forward _safe_softmax _scaled_mm "
        "_scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _softmax _stack "
        "_to_copy _transformer_encoder_layer_fwd _trilinear _unique _unique2 _unsafe_index _unsafe_view "
        "_upsample_bicubic2d_aa _upsample_bilinear2d_aa _weight_int4pack_mm _weight_int8pack_mm _weight_norm "
        "_weight_norm_interface"
    ).split()
)
# Public operations that change what a tensor's memory is, or where it lies.
REFUSED = frozenset(
    "from_file set set_ resize resize_ resize_as_ resize_as_sparse_ record_stream pin_memory is_pinned to_mkldnn "
    "empty_strided as_strided_scatter".split()
)
# Arguments of text that choose a way of computing; another, such as a file's name, is not passed on.
TEXTS = frozenset(
    "UPLO activation algorithm api_name approximate assert_msg driver equation indexing interpolation mode norm ord p "
    "pad_mode padding padding_side reduce rounding_mode side".split()
)

# What checks the export itself, or hands a tensor on as it is: without effect on numbers.
CHECKS = frozenset(
    (
        "aten._assert_tensor_metadata.default",
        "aten._assert_async.default",
        "aten._assert_async.msg",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
    )
)
SAME = frozenset(("aten.lift_fresh_copy.default", "aten.lift_fresh.default", "aten.detach_.default"))

# Public functions under which a trace knows these operations.
PUBLIC: dict[str, Callable[..., Any]] = {
    "aten.scaled_dot_product_attention.default": F.scaled_dot_product_attention,
    "aten.dropout.default": torch.dropout,
    "aten.dropout_.default": torch.dropout_,
    "aten.alpha_dropout.default": torch.alpha_dropout,
    "aten.feature_dropout.default": torch.feature_dropout,
    "aten.lstm.input": torch.lstm,
    "aten.gru.input": torch.gru,
    "aten.rnn_tanh.input": torch.rnn_tanh,
    "aten.rnn_relu.input": torch.rnn_relu,
}

_ARITHMETIC = (
    "abs add and_ eq floordiv ge gt index invert le lshift lt mod mul ne neg not_ or_ pos pow rshift sub truediv xor"
).split()
_MATHS = (
    "acos asin atan atan2 ceil cos cosh exp floor isinf isnan log log10 log2 sin sinh sqrt tan tanh trunc"
).split()
_SYMBOLIC = (
    "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum _sym_acos _sym_asin _sym_atan _sym_cos "
    "_sym_cosh _sym_exp _sym_log2 _sym_sin _sym_sinh _sym_sqrt _sym_tan _sym_tanh"
).split()
_NAME = re.compile(r"[A-Za-z_]\w*")
_BITS = 128
_EXPONENT = 64


class NotRunnable(Exception):
    """An operation that is harmless, but has no form that can be run here; the message says which."""


def overload(spec: str, target: str, *, trust: Trust) -> Any:
    """The operation that ``torch.ops.aten.add.Tensor`` names.

    Raises LoadError for one that a program may not ask for, NotRunnable for one whose library is not here.
    """
    parts = target.removeprefix(PREFIX).split(".")
    if len(parts) not in (2, 3) or not all(map(_NAME.fullmatch, parts)):
        raise LoadError(f"{spec}: calls {_short(target)}, which is no operation of PyTorch")
    namespace, name, kind = (*parts, "default")[:3]
    if namespace in OWN:
        _refuse_reaching_out(spec, namespace, name, kind)
    found = _registered(namespace, name, kind)
    if found is None:
        raise NotRunnable(_missing(namespace, name, kind))
    if namespace not in OWN and not trust:
        raise LoadError(
            f"{spec}: calls {namespace}::{name}, none of PyTorch's plain operations: add --trust if you trust the file"
        )
    return found


def _refuse_reaching_out(spec: str, namespace: str, name: str, kind: str) -> None:
    plain = not name.startswith("_") or (name.startswith("__") and name.endswith("__"))
    known = (plain and name not in REFUSED) or name in PRIVATE
    qualified = f"{namespace}::{name}" + ("" if kind == "default" else f".{kind}")
    # What only TorchScript has, such as aten::save, has no kernel that the dispatcher knows.
    if not known or (_registered(namespace, name, kind) is not None and not _has_kernel(qualified)):
        raise LoadError(f"{spec}: calls {namespace}::{name}, which does more than compute: not opened")


def _has_kernel(qualified: str) -> bool:
    try:
        return bool(torch._C._dispatch_has_kernel(qualified))
    except RuntimeError:
        return False


def _registered(namespace: str, name: str, kind: str) -> Any:
    """The overload object; None where nothing of that name is registered in this process."""
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
        found = getattr(packet, kind)
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, torch._ops.OpOverload) else None


def _missing(namespace: str, name: str, kind: str) -> str:
    if namespace in OWN:
        return f"it calls {namespace}::{name}.{kind}, which PyTorch {torch.__version__} does not have"
    return (
        f"it calls {namespace}::{name}, and no library here registers {namespace}: import the one that does, "
        "or name the Python model"
    )


def function(spec: str, target: str) -> Callable[..., Any]:
    """The arithmetic on sizes that ``_operator.add`` or ``math.floor`` names. Raises LoadError for any other."""
    home, _, name = target.partition(".")
    listed = {"_operator": _ARITHMETIC, "math": _MATHS, "torch": _SYMBOLIC}.get(home, [])
    if name not in listed:
        raise LoadError(f"{spec}: asks to call {_short(target)}, which no exported program needs: not opened")
    module = {"_operator": operator, "math": math}.get(home) or importlib.import_module("torch")
    found: Callable[..., Any] = getattr(module, name)
    return _bounded(name, found)


def _bounded(name: str, found: Callable[..., Any]) -> Callable[..., Any]:
    """``found`` on numbers only, and none so large that computing it would take long."""

    def compute(*args: Any) -> Any:
        numbers = [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        if not all(isinstance(item, (int, float)) for item in numbers):
            raise TypeError(f"{name} is given something that is no number")
        if name in ("pow", "lshift") and len(args) > 1 and abs(args[1]) > _EXPONENT:
            raise ValueError(f"{name} by {args[1]} is no size")
        result = found(*args)
        if isinstance(result, int) and result.bit_length() > _BITS:
            raise ValueError(f"{name} makes a number that is no size")
        return result

    return compute


def _short(text: str) -> str:
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."

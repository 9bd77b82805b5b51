"""What stands for the functions that torch.save's pickles apply: tables of where a tensor lies, and plain values.

All of them are written out here; none is PyTorch's, NumPy's or the standard library's own. ``CALLS`` maps a dotted
name to a function of the reader and the arguments; names that may be mentioned but not applied are told by
``is_plain_name``.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pediag.errors import LoadError
from pediag.targets.files.torchsave.unpickle import BadPickle, Call, Named, Opaque, Reader, Record, _pairs

if TYPE_CHECKING:
    import torch

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}
"""Class of a storage -> dtype of its elements."""

ITEM_SIZES = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32", "qint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "qint8", "quint8", "quint4x2", "quint2x4"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    "complex128": 16,
}
"""dtype -> bytes of one element."""

NUMPY = {
    "b1": "bool",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "c8": "complex64",
    "c16": "complex128",
    **{
        f"{kind}{size}": f"{name}{8 * size}"
        for kind, name in (("i", "int"), ("u", "uint"))
        for size in (1, 2, 4, 8)
    },
}
"""NumPy's code of a dtype -> PyTorch's name."""

REPEATED_LIMIT = 2**24
"""Elements that a tensor may have beyond those that are stored, by a stride of 0."""

_STRUCT = {"bool": "?", "float16": "e", "float32": "f", "float64": "d"}
_STRUCT |= {"int8": "b", "int16": "h", "int32": "i", "int64": "q"}
_STRUCT |= {"uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q"}


@dataclass(slots=True)
class Storage:
    """One block of elements. ``extent`` are its bytes in the file, None until known or where it has none."""

    path: Path
    spec: str
    key: str
    dtype: str
    extent: tuple[int, int] | None = None
    swapped: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """Elements ``first`` to ``first + count`` of a storage, read as ``dtype``."""

    storage: Storage
    dtype: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor by its place: ``offset`` and ``stride`` in elements from the start of its part.

    ``conjugated`` and ``negated``: the numbers mean the conjugate or the negative of what is stored.
    """

    part: Part
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conjugated: bool = False
    negated: bool = False

    def checked(self, name: str) -> StoredTensor:
        """Itself. Raises LoadError where it would lie outside its storage, or its storage outside the file."""
        part, storage, size = self.part, self.part.storage, ITEM_SIZES[self.dtype]
        where = f"{storage.spec}: damaged or cut short: tensor {name!r}"
        if storage.extent is None:
            raise LoadError(f"{where} has no data in the file (storage {storage.key})")
        begin, end = storage.extent
        if (part.first + part.count) * ITEM_SIZES[part.dtype] > end - begin:
            raise LoadError(f"{where} would need more than the {end - begin} bytes of storage {storage.key}")
        held = part.count * ITEM_SIZES[part.dtype] // size
        elements = math.prod(self.shape)
        if elements and self._last() >= held:
            raise LoadError(f"{where} would reach element {self._last()} of {held} in storage {storage.key}")
        if elements > held + REPEATED_LIMIT:
            raise LoadError(f"{where} repeats {held} stored numbers to {elements}, which no model needs")
        return self

    @property
    def copied(self) -> bool:
        """Whether its numbers do not lie in the file as they are used."""
        storage = self.part.storage
        begin = 0 if storage.extent is None else storage.extent[0]
        first = begin + self.part.first * ITEM_SIZES[self.part.dtype]
        return storage.swapped or first % ITEM_SIZES[self.dtype] != 0

    def load(self) -> torch.Tensor:
        """The numbers, mapped from the file. Raises LoadError when it changed since it was opened."""
        import torch

        from pediag.targets.files.mapped import mapped_bytes

        kind, storage = getattr(torch, self.dtype), self.part.storage
        if not math.prod(self.shape) or storage.extent is None:
            return torch.empty(self.shape, dtype=kind)
        first = storage.extent[0] + self.part.first * ITEM_SIZES[self.part.dtype]
        begin = first + self.offset * ITEM_SIZES[self.dtype]
        flat = mapped_bytes(storage.path, begin, first + (self._last() + 1) * ITEM_SIZES[self.dtype], kind)
        if storage.swapped:
            flat = flat.clone()
            storage_of: Any = flat.untyped_storage()
            storage_of.byteswap(kind)
        made = torch.as_strided(flat, self.shape, self.stride, flat.storage_offset())
        made = made.conj() if self.conjugated else made
        return -made if self.negated else made

    def _last(self) -> int:
        """The last element of its part that it reads."""
        return self.offset + sum(
            (size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Numberless:
    """A tensor that is not plain numbers in the file; ``kind`` says in what way."""

    kind: str


@dataclass(slots=True)
class NumpyType:
    """NumPy's dtype by its code, such as ``f4``."""

    code: str
    order: str = "<"

    def build(self, state: object) -> None:
        """Take the byte order."""
        if isinstance(state, tuple) and len(state) > 1 and isinstance(state[1], str):
            self.order = state[1]

    @property
    def name(self) -> str | None:
        """PyTorch's name of it; None for text, objects and foreign byte orders."""
        return NUMPY.get(self.code) if self.order in "<|=" else None


@dataclass(slots=True)
class NumpyArray:
    """An array whose bytes are in the pickle itself."""

    shape: tuple[int, ...] = ()
    dtype: str | None = None
    data: bytes = b""
    by_columns: bool = False

    def build(self, state: object) -> None:
        """Take version, shape, dtype, order and bytes; what is no array of plain numbers stays without dtype."""
        if not isinstance(state, tuple) or len(state) != 5:
            return
        _, shape, kind, by_columns, data = state
        name = kind.name if isinstance(kind, NumpyType) else None
        fits = name is not None and _naturals(shape) and isinstance(data, bytes)
        if fits and math.prod(shape) * ITEM_SIZES[str(name)] == len(data):
            self.shape, self.dtype, self.data, self.by_columns = shape, name, data, bool(by_columns)

    def load(self) -> torch.Tensor:
        """The numbers as a tensor."""
        import torch

        if not self.data:
            return torch.empty(self.shape, dtype=getattr(torch, str(self.dtype)))
        flat = torch.frombuffer(bytearray(self.data), dtype=getattr(torch, str(self.dtype)))
        if not self.by_columns:
            return flat.reshape(self.shape)
        return flat.reshape(self.shape[::-1]).permute(*reversed(range(len(self.shape))))


def is_plain_name(name: str) -> bool:
    """Whether a name may be mentioned: dtypes, storages and layouts of PyTorch, and types of plain values."""
    head, _, last = name.rpartition(".")
    if head in ("torch", "torch.cuda", "torch.storage"):
        known = last in ITEM_SIZES or last in STORAGES or last in _TORCH_NAMES
        return known or last.endswith(("Tensor", "TypedStorage"))
    return name in _PLAIN_NAMES or (head == "builtins" and last in _BUILTINS)


_BUILTINS = ("int", "float", "str", "bool", "tuple", "list", "dict", "object")
_PLAIN_NAMES = ("numpy.ndarray", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
_TORCH_NAMES = (
    "per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric per_channel_affine_float_qparams "
    "bits8 bits16 bits1x8 bits2x4 bits4x2 int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7"
).split()


def _natural(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _naturals(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) <= 64 and all(map(_natural, value))


def _tensor(reader: Reader, given: tuple[Any, ...]) -> object:
    """``_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks, metadata)`` and its forerunner."""
    dtype = given[0].dtype if isinstance(given[0], Part) else ""
    return _placed(given, dtype, given[6] if len(given) > 6 else None)


def _tensor_of_dtype(reader: Reader, given: tuple[Any, ...]) -> object:
    """``_rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype, metadata)``."""
    dtype = given[6].name.removeprefix("torch.") if isinstance(given[6], Named) else ""
    return _placed(given, dtype, given[7] if len(given) > 7 else None)


def _placed(given: tuple[Any, ...], dtype: str, facts: object) -> object:
    part, offset, shape, stride, *_ = given
    fits = _natural(offset) and _naturals(shape) and _naturals(stride) and len(shape) == len(stride)
    if not isinstance(part, Part) or not fits:
        raise BadPickle("a tensor in it has a malformed storage, shape or stride")
    if dtype not in ITEM_SIZES or dtype in _QUANTISED:
        return Numberless(f"{dtype or 'untyped'} tensors")
    conjugated, negated = (isinstance(facts, dict) and facts.get(bit) is True for bit in ("conj", "neg"))
    return StoredTensor(part, dtype, offset, tuple(shape), tuple(stride), conjugated, negated)


_QUANTISED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")


def _of_type(reader: Reader, given: tuple[Any, ...]) -> object:
    """``_rebuild_from_type_v2(function, type, arguments, state)``: the type is one that may be named."""
    function, _, arguments, *_ = given
    return reader.call(function, arguments)


def _first(reader: Reader, given: tuple[Any, ...]) -> object:
    return given[0]


def _without_numbers(kind: str) -> Call:
    return lambda reader, given: Numberless(kind)


def _opaque(kind: str) -> Call:
    return lambda reader, given: Opaque(kind)


def _items(reader: Reader, given: tuple[Any, ...]) -> Any:
    """The items that a container is made of, counted as work."""
    items = given[0] if given else ()
    if not isinstance(items, (list, tuple, set, frozenset, dict)):
        raise BadPickle("a container in it is made of something that is none")
    return reader.copied(items)


def _mapping(reader: Reader, given: tuple[Any, ...]) -> dict[Any, Any]:
    """``OrderedDict`` of nothing or of pairs, ``Counter`` of a mapping."""
    items = _items(reader, given)
    if isinstance(items, dict):
        return dict(items)
    flat = [part for pair in items if isinstance(pair, (list, tuple)) and len(pair) == 2 for part in pair]
    return _pairs(flat)


def _set(reader: Reader, given: tuple[Any, ...]) -> set[Any]:
    items = _items(reader, given)
    return set(_pairs([part for item in items for part in (item, None)]))


def _encoded(reader: Reader, given: tuple[Any, ...]) -> bytes:
    """``codecs.encode(text, "latin1")`` and ``bytearray(text, "latin-1")``: how protocol 2 keeps bytes."""
    text = given[0] if given else b""
    if not isinstance(text, (str, bytes, bytearray)):
        raise BadPickle("bytes in it are made of something else")
    reader.copied(text)
    return text.encode("latin-1") if isinstance(text, str) else bytes(text)


def _path(reader: Reader, given: tuple[Any, ...]) -> str:
    return "/".join(reader.copied(part) for part in given if isinstance(part, str)).replace("//", "/")


def _text(reader: Reader, given: tuple[Any, ...]) -> str:
    return given[0] if given and isinstance(given[0], str) else ""


def _complex(reader: Reader, given: tuple[Any, ...]) -> complex:
    real, imaginary = given
    return complex(float(real), float(imaginary))


def _reconstructed(reader: Reader, given: tuple[Any, ...]) -> object:
    """``copyreg._reconstructor(class, base, state)``: how protocols 0 and 1 make an object."""
    return reader.call(given[0], ())


def _numpy_type(reader: Reader, given: tuple[Any, ...]) -> NumpyType:
    return NumpyType(given[0] if isinstance(given[0], str) else "")


def _numpy_scalar(reader: Reader, given: tuple[Any, ...]) -> object:
    """A number of NumPy as a plain one."""
    kind, data = given
    code = _STRUCT.get(kind.name or "") if isinstance(kind, NumpyType) else None
    if code is None or not isinstance(data, bytes) or struct.calcsize(code) != len(data):
        return Opaque("numpy scalar")
    return struct.unpack(f"<{code}", data)[0]


def _from_buffer(reader: Reader, given: tuple[Any, ...]) -> NumpyArray:
    """``_frombuffer(bytes, dtype, shape, order)``: how protocol 5 keeps an array."""
    data, kind, shape, order = given
    made = NumpyArray()
    made.build((1, shape, kind, order == "F", bytes(reader.copied(data))))
    return made


_REBUILD = "torch._utils._rebuild_"
_NUMPY_CORES = ("numpy.core", "numpy._core")

CALLS: dict[str, Call] = {
    f"{_REBUILD}tensor": _tensor,
    f"{_REBUILD}tensor_v2": _tensor,
    f"{_REBUILD}tensor_v3": _tensor_of_dtype,
    f"{_REBUILD}parameter": _first,
    f"{_REBUILD}parameter_with_state": _first,
    f"{_REBUILD}device_tensor_from_numpy": _first,
    f"{_REBUILD}device_tensor_from_cpu_tensor": _first,
    f"{_REBUILD}sparse_tensor": _without_numbers("sparse tensors"),
    f"{_REBUILD}nested_tensor": _without_numbers("nested tensors"),
    f"{_REBUILD}qtensor": _without_numbers("quantised tensors"),
    f"{_REBUILD}meta_tensor_no_storage": _without_numbers("tensors on the meta device"),
    f"{_REBUILD}wrapper_subclass": _without_numbers("tensors of a wrapper class"),
    "torch._tensor._rebuild_from_type": _of_type,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.serialization._get_layout": _opaque("layout"),
    "torch.Size": lambda reader, given: tuple(_items(reader, given)),
    "torch.device": _opaque("device"),
    "torch.torch_version.TorchVersion": _text,
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "collections.defaultdict": lambda reader, given: _mapping(reader, given[1:]),
    "collections.deque": lambda reader, given: list(_items(reader, given)),
    "builtins.set": _set,
    "builtins.frozenset": _set,
    "builtins.bytes": _encoded,
    "builtins.bytearray": _encoded,
    "builtins.complex": _complex,
    "builtins.range": _opaque("range"),
    "builtins.slice": _opaque("slice"),
    "_codecs.encode": _encoded,
    "copyreg._reconstructor": _reconstructed,
    "argparse.Namespace": lambda reader, given: Record(),
    "types.SimpleNamespace": lambda reader, given: Record(),
    "numpy.dtype": _numpy_type,
    **{f"{core}.multiarray.scalar": _numpy_scalar for core in _NUMPY_CORES},
    **{f"{core}.multiarray._reconstruct": lambda reader, given: NumpyArray() for core in _NUMPY_CORES},
    **{f"{core}.numeric._frombuffer": _from_buffer for core in _NUMPY_CORES},
    **{f"datetime.{kind}": _opaque(kind) for kind in ("datetime", "date", "time", "timedelta", "timezone")},
    **{f"pathlib.{kind}": _path for kind in ("Path", "PosixPath", "PurePath", "PurePosixPath")},
    **{f"pathlib.{kind}": _path for kind in ("WindowsPath", "PureWindowsPath")},
    **{f"pathlib._local.{kind}": _path for kind in ("Path", "PosixPath", "PurePosixPath", "WindowsPath")},
}
"""Dotted name -> what is done in its place."""

"""Reads a pickle without running it: opcodes build plain values, and whatever else is named stays a name.

Nothing is imported and nothing of the pickle is called. Every function that a pickle may apply is one of the
reader's own (``calls``); a name that is not among them is kept in ``asked`` and stands for a value of no content.
Work and memory are bounded by ``STEPS_LIMIT``, whatever the pickle claims.
"""

from __future__ import annotations

import _compat_pickle
import pickletools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

STEPS_LIMIT = 8_000_000
"""Operations that one pickle may take; a checkpoint of 100,000 parameters takes about 5 million."""

LINE_LIMIT = 2**20
"""Bytes of one line of a text opcode (a name, a number) that are read."""

COPIED_AT_ONCE = 64
"""Bytes of a copied string that count as one operation."""

Call = Callable[["Reader", tuple[Any, ...]], Any]
_SCALARS = (str, float, bool, bytes, type(None))
_HASH_BITS = 60  # above it the hashes of whole numbers can be made to collide


class BadPickle(Exception):
    """A pickle that cannot be read; the message has the pickle as its subject."""


class TooMuch(BadPickle):
    """A pickle that is out of all proportion."""


class Named:
    """A class or function that a pickle names; it is not imported."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


class Opaque:
    """A value that is not looked into: an instance of ``kind``."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind}>"


class Record(dict[Any, Any]):
    """Attributes of an object that has nothing but attributes, by name."""

    def build(self, state: object) -> None:
        """Take the attributes that a BUILD gives."""
        if isinstance(state, dict):
            self.update((key, value) for key, value in state.items() if isinstance(key, str))


class Window:
    """The bytes ``begin`` to ``end`` of a file, read forward; no more than ``LINE_LIMIT`` of a line."""

    def __init__(self, file: BinaryIO, begin: int, end: int) -> None:
        self._file, self._at, self._end = file, begin, end
        file.seek(begin)

    def tell(self) -> int:
        """The position in the file, in bytes."""
        return self._at

    def read(self, count: int) -> bytes:
        """``count`` bytes. Raises BadPickle where the window ends before."""
        if count > self._end - self._at:
            raise BadPickle("it ends before its values do")
        self._at += count
        return self._file.read(count)

    def readline(self) -> bytes:
        """Up to and including the next line feed."""
        line = self._file.readline(min(LINE_LIMIT, self._end - self._at))
        self._at += len(line)
        if len(line) == LINE_LIMIT:
            raise BadPickle(f"a line of it is above {LINE_LIMIT} bytes")
        return line


class Reader:
    """Interprets pickles one after another.

    ``calls`` maps a dotted name to what stands for it when it is applied to arguments, ``names`` says whether a
    dotted name may be mentioned, ``persistent`` turns a persistent id into a value.
    """

    def __init__(
        self, calls: Mapping[str, Call], names: Callable[[str], bool], persistent: Callable[[object], object]
    ) -> None:
        self.asked: dict[str, None] = {}
        self._calls, self._names, self._persistent = calls, names, persistent
        self._steps = 0
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def read(self, window: Window) -> Any:
        """The value of the next pickle. Raises BadPickle for one that is damaged or out of all proportion."""
        self._stack, self._marks, self._memo = [], [], {}
        table = _OPCODES
        try:
            for opcode, argument, _ in pickletools.genops(window):  # type: ignore[arg-type]
                self._steps += 1
                if self._steps > STEPS_LIMIT:
                    self.spend(0)
                table[opcode.name](self, argument)
            return self._stack.pop()
        except KeyError as error:
            raise BadPickle(f"an operation of it refers to nothing: {error}") from None
        except RecursionError:
            raise BadPickle("it is nested too deeply") from None
        except (ValueError, IndexError, TypeError, OverflowError) as error:
            raise BadPickle(f"an operation of it makes no sense: {error}") from None

    def spend(self, steps: int) -> None:
        """Count work that a call does besides its opcode. Raises BadPickle beyond ``STEPS_LIMIT``."""
        self._steps += steps
        if self._steps > STEPS_LIMIT:
            raise TooMuch(f"it takes more than {STEPS_LIMIT:,} operations, which no checkpoint does")

    def copied(self, value: Any) -> Any:
        """``value`` after its length is counted as work."""
        size = len(value)
        self.spend(1 + (size // COPIED_AT_ONCE if isinstance(value, (str, bytes, bytearray)) else size))
        return value

    def call(self, function: object, arguments: object) -> Any:
        """What stands for ``function(*arguments)``."""
        if not isinstance(function, Named) or not isinstance(arguments, tuple):
            return Opaque("value")
        stand_in = self._calls.get(function.name)
        if stand_in is not None:
            return stand_in(self, arguments)
        if self._names(function.name):
            self.ask(f"{function.name}(...)")
        return Opaque(function.name)

    def ask(self, name: str) -> None:
        """Keep a name that the pickle asks for and may not have."""
        if len(self.asked) < _ASKED_LIMIT:
            self.asked[name] = None

    # -- opcodes ------------------------------------------------------------------------------------------

    def name(self, module: str, attribute: str) -> None:
        """Push a named class or function."""
        dotted = _modern(module, attribute)
        if dotted not in self._calls and not self._names(dotted):
            self.ask(dotted)
        self._stack.append(Named(dotted))

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _mark(self, _: object) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _new_set(self) -> None:
        self.spend(4)  # an empty one takes as much memory as four other objects
        self._stack.append(set())

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _pop(self, _: object) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._since_mark()

    def _drop(self, _: object) -> None:
        self._since_mark()

    def _tuple(self, count: int) -> None:
        items = tuple(self._stack[len(self._stack) - count :]) if count else ()
        if len(items) != count:
            raise IndexError("the stack is too short")
        if count:
            del self._stack[-count:]
        self._stack.append(items)

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _append(self, items: Sequence[Any]) -> None:
        held = self._stack[-1]
        if isinstance(held, list):
            held.extend(items)
        elif isinstance(held, set):
            held.update(_key(item) for item in items)

    def _set(self, items: Sequence[Any]) -> None:
        held = self._stack[-1]
        if isinstance(held, dict):
            held.update(_pairs(items))

    def _reduce(self, _: object) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        self._stack.append(self.call(function, arguments))

    def _new_with_keywords(self, _: object) -> None:
        keywords = self._stack.pop()
        if keywords:
            self.ask("an object with keyword arguments")
        self._reduce(None)

    def _build(self, _: object) -> None:
        state = self._stack.pop()
        build = getattr(self._stack[-1], "build", None)
        if build is not None:
            if isinstance(state, (dict, tuple)):
                self.copied(state)
            build(state)

    def _instance(self, name: str) -> None:
        arguments = tuple(self._since_mark())
        self.name(*name.split(" ", 1))
        self._stack.append(self.call(self._stack.pop(), arguments))

    def _object(self, _: object) -> None:
        cls, *arguments = self._since_mark()
        self._stack.append(self.call(cls, tuple(arguments)))

    def _extension(self, code: object) -> None:
        self.ask(f"extension code {code}")
        self._stack.append(Opaque("extension"))

    def _buffer(self, _: object) -> None:
        raise BadPickle("it keeps data outside itself")

    def _stack_global(self, _: object) -> None:
        attribute, module = self._stack.pop(), self._stack.pop()
        if type(attribute) is not str or type(module) is not str:
            raise TypeError("a name that is no text")
        self.name(module, attribute)


_ASKED_LIMIT = 10_000


def _modern(module: str, attribute: str) -> str:
    """A dotted name; module names of Python 2, which protocol 2 writes, in today's spelling."""
    module, attribute = _compat_pickle.NAME_MAPPING.get((module, attribute), (module, attribute))
    return f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{attribute}"


def _pairs(items: Sequence[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise ValueError("a key without a value")
    return {_key(items[at]): items[at + 1] for at in range(0, len(items), 2)}


def _key(value: Any) -> Any:
    """``value`` as a key: one whose hash is quick and cannot be made to collide, else a stand-in."""
    if type(value) in _SCALARS or (type(value) is int and value.bit_length() <= _HASH_BITS):
        return value
    return value if isinstance(value, (Named, Opaque)) else Opaque(type(value).__name__)


def _popped(count: int) -> Callable[[Reader], list[Any]]:
    def pop(reader: Reader) -> list[Any]:
        items = reader._stack[len(reader._stack) - count :]
        if len(items) != count:
            raise IndexError("the stack is too short")
        del reader._stack[-count:]
        return items

    return pop


_two, _one = _popped(2), _popped(1)
_Operation = Callable[[Reader, Any], None]
_LITERALS = (
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 "
    "BYTEARRAY8 UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 FLOAT BINFLOAT"
).split()
_OPCODES: dict[str, _Operation] = {
    **dict.fromkeys(_LITERALS, Reader._push),
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda r, a: None),
    "NONE": lambda r, a: r._push(None),
    "NEWTRUE": lambda r, a: r._push(True),
    "NEWFALSE": lambda r, a: r._push(False),
    "MARK": Reader._mark,
    "EMPTY_LIST": lambda r, a: r._push([]),
    "EMPTY_DICT": lambda r, a: r._push({}),
    "EMPTY_SET": lambda r, a: r._new_set(),
    "EMPTY_TUPLE": lambda r, a: r._tuple(0),
    "TUPLE1": lambda r, a: r._tuple(1),
    "TUPLE2": lambda r, a: r._tuple(2),
    "TUPLE3": lambda r, a: r._tuple(3),
    "TUPLE": lambda r, a: r._push(tuple(r._since_mark())),
    "LIST": lambda r, a: r._push(r._since_mark()),
    "DICT": lambda r, a: r._push(_pairs(r._since_mark())),
    "FROZENSET": lambda r, a: r._push(frozenset(map(_key, r._since_mark()))),
    "APPEND": lambda r, a: r._append(_one(r)),
    "APPENDS": lambda r, a: r._append(r._since_mark()),
    "ADDITEMS": lambda r, a: r._append(r._since_mark()),
    "SETITEM": lambda r, a: r._set(_two(r)),
    "SETITEMS": lambda r, a: r._set(r._since_mark()),
    "POP": Reader._pop,
    "DUP": lambda r, a: r._push(r._stack[-1]),
    "POP_MARK": Reader._drop,
    "MEMOIZE": lambda r, a: r._put(len(r._memo)),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), Reader._put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda r, a: r._push(r._memo[a])),
    "GLOBAL": lambda r, a: r.name(*a.split(" ", 1)),
    "STACK_GLOBAL": Reader._stack_global,
    "REDUCE": Reader._reduce,
    "NEWOBJ": Reader._reduce,
    "NEWOBJ_EX": Reader._new_with_keywords,
    "BUILD": Reader._build,
    "INST": Reader._instance,
    "OBJ": Reader._object,
    "PERSID": lambda r, a: r._push(r._persistent(a)),
    "BINPERSID": lambda r, a: r._push(r._persistent(r._stack.pop())),
    **dict.fromkeys(("EXT1", "EXT2", "EXT4"), Reader._extension),
    **dict.fromkeys(("NEXT_BUFFER", "READONLY_BUFFER"), Reader._buffer),
}

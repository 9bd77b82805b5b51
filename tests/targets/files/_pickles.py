"""Pickles written opcode by opcode, and the files that torch.save would put them in."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch

MAGIC = 0x1950A86A20F9469CFC6C


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def archived(pickled: bytes, path: Path, **entries: bytes) -> Path:
    """An archive in the layout of torch.save around a pickle; ``entries`` are storages by key (``s0`` is 0)."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
        for key, data in entries.items():
            archive.writestr(f"archive/data/{key.removeprefix('s')}", data)
    return path


def legacy(pickled: bytes, path: Path, keys: tuple[str, ...] = (), storages: bytes = b"") -> Path:
    """A file in the layout of torch.save before 1.6 around a pickle."""
    facts = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    head = b"".join(pickle.dumps(part, 2) for part in (MAGIC, 1001, facts))
    path.write_bytes(head + pickled + pickle.dumps(list(keys), 2) + storages)
    return path


def hostile(mark: Path) -> dict[str, bytes]:
    """Pickles of a state dict beside which every known way to apply a function makes the folder ``mark``."""
    at = text(str(mark))
    tensor = b""  # the state dict is left empty: what matters is whether anything runs
    head, tail = b"\x80\x04}(" + tensor + text("x"), b"u."
    mkdir, args = b"cposix\nmkdir\n", b"(" + at + b"t"
    nested = io.BytesIO()
    torch.save({"a": torch.ones(1)}, nested)
    call = {
        "REDUCE": mkdir + args + b"R",
        "STACK_GLOBAL": text("posix") + text("mkdir") + b"\x93" + args + b"R",
        "STACK_GLOBAL from the memo": (
            text("mkdir") + b"q\x05" + text("posix") + b"q\x06" + b"00h\x06h\x05\x93" + args + b"R"
        ),
        "STACK_GLOBAL from a tuple": b"(" + text("posix") + text("mkdir") + b"t0" + mkdir + args + b"R",
        "os.mkdir": b"cos\nmkdir\n" + args + b"R",
        "INST": b"(" + at + b"iposix\nmkdir\n",
        "OBJ": b"(" + mkdir + at + b"o",
        "NEWOBJ": mkdir + args + b"\x81",
        "NEWOBJ_EX": mkdir + args + b"}\x92",
        "EXT": b"\x82\xf0" + args + b"R",
        "BUILD": b"cposix\nmkdir\n)R" + args + b"b",
        "eval": b"cbuiltins\neval\n(" + text(f"__import__('os').mkdir({str(mark)!r})") + b"tR",
        "getattr": b"cbuiltins\ngetattr\n(cos\npath\n" + text("os") + b"tR" + args + b"R",
        "partial": b"cfunctools\npartial\n(" + mkdir + at + b"tR)R",
        "of type": b"ctorch._tensor\n_rebuild_from_type_v2\n(" + mkdir + b"N" + args + b"NtR",
        "wrapper": b"ctorch._utils\n_rebuild_wrapper_subclass\n(" + mkdir + b"tR",
        "reconstructor": b"ccopyreg\n_reconstructor\n(" + mkdir + b"cbuiltins\nobject\nNtR",
        "default factory": b"ccollections\ndefaultdict\n(" + mkdir + b"tR",
        "namespace": b"cargparse\nNamespace\n)\x81}(" + text("f") + mkdir + b"ub",
        "nested": b"ctorch.storage\n_load_from_bytes\n(B"
        + struct.pack("<I", len(nested.getvalue()))
        + nested.getvalue()
        + b"tR",
        "as a storage": b"(" + text("storage") + mkdir + text("0") + text("cpu") + b"K\x01tQ",
        "as a name": b"P" + str(mark).encode() + b"\n",
    }
    return {name: head + body + tail for name, body in call.items()}


def with_tensor(body: bytes) -> bytes:
    """A state dict whose value ``a`` is made by ``body``."""
    return b"\x80\x02}" + text("a") + body + b"s."


def rebuilt(
    count: int, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], key: str = "0"
) -> bytes:
    """A float32 tensor as torch.save writes it."""
    storage = (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu") + number(count) + b"tQ"
    )
    numbers = b"".join(b"(" + b"".join(map(number, row)) + b"t" for row in (shape, stride))
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset) + numbers + b"\x89}tR"


def number(value: int) -> bytes:
    raw = value.to_bytes(9, "little", signed=True)
    return b"\x8a\x09" + raw


def config(**changes: Any) -> str:
    """A tiny Llama's config.json."""
    values = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
    }
    return json.dumps({**values, **changes}, indent=2)

#!/usr/bin/env python3
"""Reads the model of a Tessera checkpoint, saved by any number of ranks: a state dict of its parameters and buffers, or
of the tensors that were saved by name. A tied tensor appears under each of its names. Checksums are not compared; use
`tessera ckpt verify`.

    read_checkpoint.py CKPT
"""
import functools
import json
import math
import pathlib
import sys

import torch
from safetensors import safe_open

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn, "C64": torch.complex64, "BOOL": torch.bool,
          "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
          "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8}


def read_checkpoint(path):
    path = pathlib.Path(path)
    if not (path / "index.json").exists() and (path / "checkpoint").exists():  # at a mount point
        path = path / "checkpoint"
    index = json.loads((path / "index.json").read_text())
    assert index["format_version"] == 2, f"{path} has another format version than 2: {index['format_version']}"
    opened = functools.cache(lambda name: safe_open(path / name, framework="pt"))
    state = {}
    for tensor in index["tensors"]:
        if tensor["kind"] not in ("param", "buffer", "tensor"):  # "state", "master" and "rank" are for resuming
            continue
        flat = torch.empty(math.prod(tensor["shape"]), dtype=DTYPES[tensor["dtype"]])
        for piece in tensor["chunks"]:
            box = piece.get("box", {"shape": [len(flat)], "offset": [0], "sizes": [len(flat)]})
            part = flat.view(box["shape"])[tuple(slice(o, o + s) for o, s in zip(box["offset"], box["sizes"]))]
            values = part.flatten()  # shares memory with part, or copies it if that has gaps
            values[piece["begin"]:piece["end"]] = opened(piece["file"]).get_tensor(piece["key"]).flatten()
            if values.data_ptr() != part.data_ptr():
                part.copy_(values.view(part.shape))
        state |= dict.fromkeys(tensor["names"], flat.as_strided(tensor["shape"], tensor["strides"]))
    return state


if __name__ == "__main__":
    for name, value in read_checkpoint(sys.argv[1]).items():
        print(name, value.dtype, list(value.shape))

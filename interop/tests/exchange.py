#!/usr/bin/env python3
"""Writes and reads files of PyTorch's, for the tests of export_checkpoint() and import_checkpoint().

    exchange.py save DIRECTORY    writes the files below; beside FILE, FILE.txt with a line for each of its tensors
    exchange.py load_model FILE   prints the lines of a Picture that safetensors' load_model() filled

A line is a tensor's name, dtype, shape (as 2,3; - for a scalar) and bytes in hexadecimal. Without PyTorch, or the
package `safetensors` where it is needed, the output is "no torch" or "no safetensors".
"""
import os
import sys
import warnings
import zipfile

warnings.simplefilter("ignore")
try:
    import torch
except ImportError:
    print("no torch")
    sys.exit()

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
          torch.complex64: "C64"}


class Picture(torch.nn.Module):
    """That of saved_model.h."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 13, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(13)
        self.encode = torch.nn.Linear(13, 17)
        self.decode = self.encode.weight
        self.scale = torch.nn.Parameter(torch.tensor(2.5), requires_grad=False)
        self.nothing = torch.nn.Parameter(torch.zeros(0, 4))
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.norm.running_mean.uniform_()
        self.norm.num_batches_tracked.fill_(7)


class Trap:
    """Makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def line_of(name, tensor):
    values = tensor.detach().resolve_conj().contiguous().flatten().view(torch.uint8).tolist()
    return f"{name} {DTYPES[tensor.dtype]} {','.join(map(str, tensor.shape)) or '-'} {bytes(values).hex() or '-'}\n"


def rezip(path, to, method, changes):
    """The same records, stored by `method`, some of them changed."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(to, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, changes.get(name.partition("/")[2], old.read(name)))


def save(directory):
    def put(name, value, tensors=None, **options):
        path = os.path.join(directory, name)
        torch.save(value, path, **options)
        with open(path + ".txt", "w") as file:
            file.writelines(line_of(*item) for item in (tensors or {}).items())

    picture = Picture()
    state = picture.state_dict()
    put("state_dict.pt", state, state)

    moments = {0: torch.rand(5), 1: torch.rand(5)}
    named = {f"model.{name}": tensor for name, tensor in state.items()}
    named.update({f"optimizer.state.{i}.exp_avg": moment for i, moment in moments.items()})
    optimizer = {"state": {i: {"step": 3, "exp_avg": moment} for i, moment in moments.items()},
                 "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]}]}
    rest = {"step": 3, "bytes": 1 << 40, "debt": -(1 << 40), "rate": 0.5, "note": "a text", "none": None, "done": True,
            "dtype": torch.float32, "device": torch.device("cpu"), "size": torch.Size([2, 3]), "trap": None}
    rest["trap"] = Trap(os.path.join(directory, "executed"))
    put("nested.pt", {"model": state, "optimizer": optimizer, **rest}, named)

    base = torch.arange(24.).view(4, 6)
    views = {"all": base, "row": base[2], "again": base[2], "column": base[:, 1], "turned": base.t(),
             "wide": base[1, 2].expand(3, 2), "some": base[1:, ::2]}
    put("views.pt", views, views)

    dtypes = {str(dtype).removeprefix("torch."): (torch.arange(-3, 4) * 1.25).to(dtype) for dtype in DTYPES}
    put("dtypes.pt", dtypes, dtypes)

    ones = torch.ones(3, 2)
    put("module.pt", picture)
    put("legacy.pt", {"a": ones}, _use_new_zipfile_serialization=False)
    put("quantized.pt", {"a": torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)})
    put("sparse.pt", {"a": ones.to_sparse()})
    put("conjugated.pt", {"a": torch.ones(2, dtype=torch.complex64).conj()})
    put("storage.pt", {"a": torch.ones(2), "b": torch.ones(2).storage()}, {"a": torch.ones(2)})
    put("plain.pt", {"a": ones}, {"a": ones})
    for name, method, changes in (("rezipped.pt", zipfile.ZIP_STORED, {}), ("compressed.pt", zipfile.ZIP_DEFLATED, {}),
                                  ("big_endian.pt", zipfile.ZIP_STORED, {"byteorder": b"big"})):
        rezip(os.path.join(directory, "plain.pt"), os.path.join(directory, name), method, changes)


def load_model(path):
    try:
        from safetensors.torch import load_model as load_into
    except ImportError:
        print("no safetensors")
        return
    picture = Picture()
    load_into(picture, path)  # strict
    for name, tensor in picture.state_dict().items():
        print(line_of(name, tensor), end="")


if __name__ == "__main__":
    {"save": save, "load_model": load_model}[sys.argv[1]](sys.argv[2])

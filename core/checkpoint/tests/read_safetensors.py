#!/usr/bin/env python3
"""Prints what is in safetensors files, as Python sees it.

    read_safetensors.py FILE...

One line per tensor: its name, dtype, shape (as 2,3; - for a scalar) and bytes in hexadecimal. The files are read by the
few lines below and, if it is installed, by the package `safetensors`, which must find the same. The last line says
whether it was: "package VERSION" or "package none".
"""
import json
import struct
import sys

try:
    import safetensors
except ImportError:
    safetensors = None


def read_plain(data):
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    metadata = header.pop("__metadata__", {})
    assert all(isinstance(value, str) for value in metadata.values())
    payload = data[8 + length:]
    end = 0
    for begin, stop in sorted(entry["data_offsets"] for entry in header.values()):
        assert begin == end, "a hole or an overlap"
        end = stop
    assert end == len(payload), "bytes that belong to no tensor"
    return {name: (entry["dtype"], entry["shape"], payload[slice(*entry["data_offsets"])]) for name, entry in header.items()}


def read_by_package(data):
    return {name: (entry["dtype"], entry["shape"], bytes(entry["data"])) for name, entry in safetensors.deserialize(data)}


def main():
    for path in sys.argv[1:]:
        with open(path, "rb") as file:
            data = file.read()
        tensors = read_plain(data)
        assert not safetensors or read_by_package(data) == tensors, f"{path}: the package reads something else"
        for name, (dtype, shape, values) in tensors.items():
            print(name, dtype, ",".join(map(str, shape)) or "-", values.hex() or "-")
    print("package", safetensors.__version__ if safetensors else "none")


if __name__ == "__main__":
    main()

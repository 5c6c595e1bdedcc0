#!/usr/bin/env python3
"""Compares what docs/guide/read_checkpoint.py reads with an export as a safetensors file.

    compare_with_guide.py GUIDE CHECKPOINT EXPORT

GUIDE is the folder of that script. Prints the number of tensors; says "no safetensors" if that package is missing.
"""
import sys

import torch

sys.path.insert(0, sys.argv[1])
try:
    from safetensors import safe_open
except ImportError:
    print("no safetensors")
    sys.exit()
from read_checkpoint import read_checkpoint

read = read_checkpoint(sys.argv[2])
with safe_open(sys.argv[3], framework="pt") as file:
    exported = {name: file.get_tensor(name) for name in file.keys()}
    exported.update({name: exported[first] for name, first in file.metadata().items() if first in exported})
assert read.keys() == exported.keys(), f"{sorted(read)} against {sorted(exported)}"
for name, value in exported.items():
    assert value.dtype == read[name].dtype and torch.equal(value, read[name]), name
print(len(read), "tensors")

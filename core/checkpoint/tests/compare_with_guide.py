#!/usr/bin/env python3
"""Compares what docs/guide/read_checkpoint.py reads with an export for torch.load.

    compare_with_guide.py GUIDE CHECKPOINT EXPORT

GUIDE is the folder of that script. Prints the number of tensors; says "no safetensors" if that package is missing.
"""
import sys

import torch

sys.path.insert(0, sys.argv[1])
try:
    import safetensors  # noqa: F401
except ImportError:
    print("no safetensors")
    sys.exit()
from read_checkpoint import read_checkpoint

read, exported = read_checkpoint(sys.argv[2]), torch.load(sys.argv[3], weights_only=True)
assert read.keys() == exported.keys(), f"{sorted(read)} against {sorted(exported)}"
for name, value in exported.items():
    assert value.dtype == read[name].dtype and torch.equal(value, read[name]), name
print(len(read), "tensors")

#!/usr/bin/env python3
"""Writes one model in the layouts that Python's tools have for models, for the tests of load_safetensors().

    exchange_layouts.py DIRECTORY    state.pt; the directories bin and bin_index as Hugging Face wrote them before
                                     safetensors; lines.txt with a line for each tensor, as exchange.py prints them

Without PyTorch the output is "no torch".
"""
import json
import os
import sys

from exchange import Picture, line_of

import torch


def main(directory):
    def path(*names):
        return os.path.join(directory, *names)

    torch.manual_seed(3)
    state = Picture().state_dict()
    with open(path("lines.txt"), "w") as file:
        file.writelines(line_of(*item) for item in state.items())
    torch.save(state, path("state.pt"))
    for name in ("bin", "bin_index"):
        os.mkdir(path(name))
    torch.save(state, path("bin", "pytorch_model.bin"))
    names = [name for name in state if name != "decode"]  # tied: one of its names is stored
    parts = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[i::2] for i in range(2)}
    for part, inside in parts.items():
        torch.save({name: state[name] for name in inside}, path("bin_index", part))
    weight_map = {name: part for part, inside in parts.items() for name in inside}
    with open(path("bin_index", "pytorch_model.bin.index.json"), "w") as file:
        json.dump({"metadata": {"total_size": 0}, "weight_map": weight_map}, file)


if __name__ == "__main__":
    main(sys.argv[1])

#!/usr/bin/env python3
"""Writes one model in the layouts that Python's tools have for models, for the tests of load_safetensors().

    exchange_layouts.py DIRECTORY    state.pt; the directories bin and bin_index as Hugging Face wrote them before
                                     safetensors; dcp, and dcp_cut with tensors in chunks, of torch.distributed.checkpoint;
                                     lines.txt with a line for each tensor, as exchange.py prints them

Without PyTorch the output is "no torch".
"""
import json
import os
import sys

from exchange import Picture, line_of

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def rank_main(rank, directory):
    """Saves the model with its large tensors cut over two ranks."""
    dist.init_process_group("gloo", init_method="file://" + os.path.join(directory, "meeting"), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state = torch.load(os.path.join(directory, "state.pt"), weights_only=True)
    cut = {name: distribute_tensor(value.contiguous(), mesh, [Shard(value.dim() - 1)]) if value.dim() else value
           for name, value in state.items() if value.numel()}
    cut.update({name: value for name, value in state.items() if not value.numel()})
    dcp.save(cut, checkpoint_id=os.path.join(directory, "dcp_cut"))
    dist.destroy_process_group()


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
    dcp.save(state, checkpoint_id=path("dcp"), no_dist=True)
    torch.multiprocessing.spawn(rank_main, (directory,), nprocs=2)


if __name__ == "__main__":
    main(sys.argv[1])

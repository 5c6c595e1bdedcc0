#!/usr/bin/env python3
"""Saves the checkpoint by which later versions show that they read this one's format: run it once for each format.

    save.py DIRECTORY       such as core/checkpoint/tests/formats/2

python/tests/test_formats.py loads it, and knows its values.
"""
import sys

import torch

import tessera


def make_net() -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3, bias=False))
    net.register_parameter("tied", net[2].weight)
    with torch.no_grad():
        for number, tensor in enumerate(net.state_dict().values()):
            tensor.copy_((torch.arange(tensor.numel()) + number).view(tensor.shape))
    return net


def make_job(level: str):
    """The numbers of a step of this optimizer are exact in every order of computation."""
    net = make_net()
    sharded = tessera.fully_shard(net, level=level, unit_bytes=64)
    inner = torch.optim.AdamW(net.parameters(), lr=0.0, betas=(0.5, 0.5), weight_decay=0.25)
    return net, sharded, tessera.ShardedOptimizer(sharded, inner, fused=False)


def step(net, sharded, optimizer) -> None:
    sum((value * 4).sum() for value in {id(value): value for value in net.parameters()}.values()).backward()
    optimizer.step()


def main() -> None:
    tessera.init()
    net, sharded, optimizer = make_job("p_g_os")
    step(net, sharded, optimizer)
    tessera.save_checkpoint(sys.argv[1], sharded, optimizer, numbers={"step": 1, "loss": 0.5}, texts={"note": "größer"},
                            rank_state={"position": torch.tensor([tessera.rank() + 10])}, random_state=False)


if __name__ == "__main__":
    tessera.spawn(main, 2)

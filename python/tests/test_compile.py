"""torch.compile of sharded modules."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tessera
from models import batch, loss_of, make_net, my_rows


def _train(system, backend=None, blocks=False, **plan):
    torch._dynamo.reset()
    net = make_net()
    net.unused.requires_grad_(False)  # DDP would wait for its gradient
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
    if system == "ddp":
        model = DistributedDataParallel(net)
    else:
        model = tessera.fully_shard(net, unit_bytes=2000, **plan)
        optimizer = tessera.ShardedOptimizer(model, optimizer, fused=False)
    if blocks:
        for block in net.block:
            block.compile(backend=backend)
        net.norm.compile(backend=backend)
    called = torch.compile(model, backend=backend) if backend and not blocks else model
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(called, my_rows(batch(step)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = net.state_dict() if system == "ddp" else model.full_state()
    return losses, {name: value.clone() for name, value in state.items()}


def _compare(own, expected):
    assert own[0] == expected[0]
    for name, value in expected[1].items():
        assert torch.equal(own[1][name], value), name


def _eager():
    for plan in ({}, {"level": "os"}):
        plain = _train("tessera", **plan)
        for backend in ("eager", "aot_eager"):
            _compare(_train("tessera", backend, **plan), plain)
    with pytest.raises(ValueError, match="torch.compile"):
        tessera.fully_shard(torch.compile(make_net()))
    return True


def test_without_kernels_of_its_own(ranks):
    assert all(ranks(2, _eager, transport="gloo"))


def _inductor():
    dist.init_process_group("gloo")
    for blocks in (False, True):
        expected = _train("ddp", "inductor", blocks)
        for plan in ({}, {"level": "os_g"}, {"partition": "whole_param", "resident_bytes": -1}):
            _compare(_train("tessera", tessera.inductor, blocks, **plan), expected)
    with pytest.raises(RuntimeError, match="backend=tessera.inductor"):
        _train("tessera", "inductor")
    dist.destroy_process_group()
    return True


@pytest.mark.parametrize("transport", ["arena", "gloo"])
def test_kernels_of_inductor_find_what_they_read(ranks, transport):
    assert all(ranks(2, _inductor, transport=transport))

"""The systems that `python -m tessera.bench` compares train alike, or the times of their steps would say nothing."""

import pytest
import torch
import torch.distributed as dist

import tessera
from tessera.bench.systems import make_system
from tessera.bench.workloads import make_batch, make_model


def _losses(optimizer, level):
    dist.init_process_group("gloo")
    tessera.init()
    losses, seconds, kept = {}, {}, {}
    for name in ("tessera", "fsdp2", "ddp"):
        system = make_system(name, make_model("tiny"), level, optimizer)
        generator = torch.Generator().manual_seed(dist.get_rank())
        losses[name] = [system.step(*make_batch("tiny", generator)) for _ in range(3)]
        seconds[name], kept[name] = system.optimizer_seconds, system.kept_bytes()
    tessera.shutdown()
    dist.barrier()
    dist.destroy_process_group()
    return losses, seconds, kept


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_systems_train_alike_with_each_optimizer(ranks, size, optimizer):
    for losses, seconds, kept in ranks(size, _losses, optimizer, "p_g_os", joins=False):
        for name in ("fsdp2", "ddp"):
            # Sums of two have one order.
            assert losses[name] == (losses["tessera"] if size == 2 else pytest.approx(losses["tessera"], rel=1e-5))
        assert min(seconds.values()) > 0
        assert 0 < kept["tessera"] < kept["ddp"]
    assert len(set(losses["tessera"])) == 3

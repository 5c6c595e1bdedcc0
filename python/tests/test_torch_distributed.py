"""Jobs that tessera and torch.distributed both join."""

import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist

import tessera

_ORDERS = ["init,process_group", "process_group,init"]


def _join_both(order):
    for call in order.split(","):
        tessera.init() if call == "init" else dist.init_process_group("gloo")
    try:
        assert (tessera.rank(), tessera.size()) == (dist.get_rank(), dist.get_world_size())
        ours, theirs = torch.full((3,), tessera.rank() + 1.0), torch.full((3,), tessera.rank() + 1.0)
        tessera.world.default_group().all_reduce(ours)
        dist.all_reduce(theirs)
        assert torch.equal(ours, theirs)
        module = torch.nn.Linear(5, 3)
        tessera.fully_shard(module, group=dist.group.WORLD)(torch.ones(2, 5)).sum().backward()
        return ours.tolist()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("order", _ORDERS)
def test_either_may_come_first(ranks, order):
    assert ranks(2, _join_both, order, joins=False) == [[3.0] * 3] * 2


@pytest.mark.parametrize("order", _ORDERS)
def test_either_may_come_first_under_torchrun(tmp_path, order):
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(f"""
        import tessera, test_torch_distributed as tests
        print(tests._join_both({order!r}), flush=True)
    """))
    run = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script],
                         capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("[3.0, 3.0, 3.0]") == 2, run.stdout


def _alone_in_the_other():
    tessera.init()
    rank = tessera.rank()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        group = tessera.world.resolve_group(dist.group.WORLD)
        return rank, group.rank, group.size, tessera.size()
    finally:
        dist.destroy_process_group()


def test_a_process_group_of_other_ranks_is_a_world_of_its_own(ranks):
    assert ranks(2, _alone_in_the_other, joins=False) == [(0, 0, 1, 2), (1, 0, 1, 2)]

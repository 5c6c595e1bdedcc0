"""Training on ranks gives the numbers of one process."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import tessera
from models import LEVELS, batch, loss_of, make_net, my_rows, train_alone, train_sharded

OPTIMIZERS = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-2),
    "Adam": functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3),
    "NAdam": functools.partial(torch.optim.NAdam, lr=1e-2),
    "Adadelta": functools.partial(torch.optim.Adadelta, lr=1.0),
}


class Lion(torch.optim.Optimizer):
    """An optimizer as a user writes it."""

    elementwise = True

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["average"] = torch.zeros_like(param)
                average, (slow, fast) = state["average"], group["betas"]
                param.sub_(torch.sign(average * slow + param.grad * (1 - slow)), alpha=group["lr"])
                average.mul_(fast).add_(param.grad, alpha=1 - fast)


OPTIMIZERS["Lion"] = Lion


def _levels(make_optimizer):
    return [train_sharded(make_optimizer, 4, level=level, unit_bytes=2000) for level in LEVELS]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2])
def test_parity_of_optimizers(ranks, name, size):
    state, losses = train_alone(OPTIMIZERS[name], 4, size)
    for number, results in enumerate(ranks(size, _levels, OPTIMIZERS[name])):
        for level, (got, got_losses) in zip(LEVELS, results):
            assert got_losses == [each[number] for each in losses], level
            for key, value in state.items():
                assert torch.equal(got[key], value), (level, key)


@pytest.mark.parametrize("transport", ["gloo", "arena"])
def test_parity_of_three_ranks(ranks, transport):
    # Thirds are not exact: gradients are rounded in another order.
    state, losses = train_alone(OPTIMIZERS["AdamW"], 4, 3)
    for results in ranks(3, _levels, OPTIMIZERS["AdamW"], transport=transport):
        for got, _ in results:
            for key, value in state.items():
                torch.testing.assert_close(got[key], value, rtol=1e-5, atol=1e-5)
            assert torch.equal(got["block.0.weight"], results[0][0]["block.0.weight"])


def _replicas():
    states = []
    for plan in ({}, {"partition": "whole_param"}, {"param_dtype": torch.bfloat16}, {"offload": "host"},
                 {"reduce_dtype": torch.bfloat16}, {"prefetch": 0, "unit_bytes": 0}, {"memory_budget": 1 << 30}):
        states.append(train_sharded(OPTIMIZERS["AdamW"], 3, **plan)[0])
    return states


def test_replicas_are_equal_with_every_plan(ranks):
    one, other = ranks(2, _replicas)
    for left, right in zip(one, other):
        assert left.keys() == right.keys()
        for key in left:
            assert torch.equal(left[key], right[key]), key


def _averaged():
    # Each rank is a replica. `single` is the group of this rank alone.
    single = tessera.new_group([tessera.rank()])
    everyone = tessera.new_group(range(tessera.size()))
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    state, _ = train_sharded(sgd, 2, group=single, replicate_group=everyone,
                             outer={"every": 2, "learning_rate": 1, "momentum": 0})
    with pytest.raises(TypeError, match="outer has every, learning_rate, momentum, nesterov and reduce_dtype; got 'lr'"):
        tessera.fully_shard(make_net(), group=single, replicate_group=everyone, outer={"lr": 1})
    net = make_net()
    sharded = tessera.fully_shard(net, group=single, replicate_group=everyone, outer=3)
    optimizer = tessera.ShardedOptimizer(sharded, sgd(net.parameters()))
    assert optimizer.steps_since_average == 0
    loss_of(sharded, batch(0)).backward()
    optimizer.step()
    assert optimizer.steps_since_average == 1
    return state


def test_replicas_are_averaged(ranks):
    states = ranks(2, _averaged)
    alone = []
    for rank in range(2):
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(net, batch(step).view(2, -1, 6)[rank]).backward()
            optimizer.step()
        alone.append(net.state_dict())
    assert not torch.equal(alone[0]["head.weight"], alone[1]["head.weight"])
    for state in states:
        for name, value in state.items():
            torch.testing.assert_close(value, (alone[0][name] + alone[1][name]) / 2, rtol=1e-5, atol=1e-6)


def _fused():
    states = []
    for fused in (False, True):
        net = make_net()
        sharded = tessera.fully_shard(net)
        inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
        optimizer = tessera.ShardedOptimizer(sharded, inner, fused=fused)
        assert bool(inner.param_groups[0]["fused"]) == fused
        for step in range(3):
            optimizer.zero_grad()
            loss_of(sharded, my_rows(batch(step))).backward()
            optimizer.step()
        states.append(sharded.full_state())
    return states


def test_fused_steps_agree_to_rounding(ranks):
    for plain, fused in ranks(2, _fused):
        for key in plain:
            torch.testing.assert_close(plain[key], fused[key], rtol=1e-5, atol=1e-5)


def _accumulate():
    net = make_net()
    sharded = tessera.fully_shard(net)
    optimizer = tessera.ShardedOptimizer(sharded, torch.optim.SGD(net.parameters(), lr=0.1), fused=False)
    rows = my_rows(batch(0))
    with sharded.no_sync():
        (loss_of(sharded, rows[:3]) / 2).backward()
    (loss_of(sharded, rows[3:]) / 2).backward()
    whole = sharded.full_grad(net.block[0].weight)
    norm = sharded.clip_grad_norm_(0.1)
    optimizer.step()
    with sharded.keep_unsharded():
        first = net.block[0].weight.detach().clone()
    return whole, norm, first


def test_accumulation_and_clipping(ranks):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for part in batch(0).view(4, 3, 6):
        (loss_of(net, part) / 4).backward()
    want = net.block[0].weight.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    for whole, got_norm, first in ranks(2, _accumulate):
        torch.testing.assert_close(whole, want)
        torch.testing.assert_close(got_norm.float(), norm)
        torch.testing.assert_close(first, net.block[0].weight.detach())


def _scaled():
    net = make_net()
    sharded = tessera.fully_shard(net)
    optimizer = tessera.ShardedOptimizer(sharded, torch.optim.SGD(net.parameters(), lr=0.1))
    scaler = tessera.GradScaler(init_scale=4.0, growth_interval=1)
    scaler.scale(loss_of(sharded, my_rows(batch(0)))).backward()
    before = sharded.full_state()["block.0.weight"]
    stepped = scaler.step(optimizer)
    scaler.update()
    grown = scaler.get_scale()
    optimizer.zero_grad()
    loss = loss_of(sharded, my_rows(batch(0)))
    if tessera.rank() == tessera.size() - 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    skipped = scaler.step(optimizer)
    scaler.update()
    other = tessera.GradScaler()
    other.load_state_dict(scaler.state_dict())
    return stepped, grown, skipped, other.get_scale(), bool((before != sharded.full_state()["block.0.weight"]).any())


def test_scaler_skips_on_all_ranks(ranks):
    for result in ranks(2, _scaled):
        assert result == (True, 8.0, False, 4.0, True)


def _scheduled():
    net = make_net()
    sharded = tessera.fully_shard(net)
    optimizer = tessera.ShardedOptimizer(sharded, torch.optim.SGD(net.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    rates = []
    for step in range(4):
        optimizer.zero_grad()
        loss_of(sharded, my_rows(batch(step))).backward()
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return isinstance(optimizer, torch.optim.Optimizer), rates


def test_schedulers_take_the_optimizer(ranks):
    for is_optimizer, rates in ranks(2, _scheduled):
        assert is_optimizer
        torch.testing.assert_close(rates, [1.0, 0.1, 0.1, 0.01])


def _unfreeze():
    net = make_net()
    head = [net.norm.weight, net.norm.bias]
    sharded = tessera.fully_shard(net)
    optimizer = tessera.ShardedOptimizer(sharded, torch.optim.AdamW(head, lr=1e-2), fused=False)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": list(net.block.parameters()), "lr": 1e-3})
        optimizer.zero_grad()
        loss_of(sharded, my_rows(batch(step))).backward()
        optimizer.step()
    return sharded.full_state()


def test_groups_may_be_added(ranks):
    net = make_net()
    optimizer = torch.optim.AdamW([net.norm.weight, net.norm.bias], lr=1e-2)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": list(net.block.parameters()), "lr": 1e-3})
        net.zero_grad()
        for part in batch(step).view(2, -1, 6):
            (loss_of(net, part) / 2).backward()
        optimizer.step()
    for state in ranks(2, _unfreeze):
        for key, value in net.state_dict().items():
            assert torch.equal(state[key], value), key


_INTERRUPTED = """
import signal, sys, time, torch, tessera
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs the tests in the background

def rank_main(folder):
    tessera.init()
    open(f"{folder}/{tessera.rank()}", "w").close()
    if tessera.rank() == 1:
        time.sleep(60)
    tessera.world.default_group().all_reduce(torch.ones(1))  # rank 0 waits for rank 1

if __name__ == "__main__":
    tessera.spawn(rank_main, 2, (sys.argv[1],), start_method="fork")
"""


def test_ctrl_c_ends_all_ranks(tmp_path):
    """Those that wait in the engine, too: they hear that another rank has left."""
    program = subprocess.Popen([sys.executable, "-c", _INTERRUPTED, str(tmp_path)], start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while program.poll() is None and not all((tmp_path / str(rank)).exists() for rank in range(2)):
            time.sleep(0.05)
        time.sleep(0.5)
        os.killpg(program.pid, signal.SIGINT)
        text, _ = program.communicate(timeout=40)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
    assert program.returncode != 0 and "KeyboardInterrupt" in text, text

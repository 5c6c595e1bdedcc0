"""FairScale's interface. Its own tests run against it by hand; see dialects/fairscale/README.md."""

import copy
import io
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tessera
from models import batch, loss_of, make_net, my_rows, train_alone
from tessera.fairscale import OSS, ShardedDataParallel, ShardedGradScaler


def _train(steps, **options):
    net = make_net()
    optimizer = OSS(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    model = ShardedDataParallel(net, optimizer, **options)
    losses = []
    for step in range(steps):
        model.zero_grad(set_to_none=True)
        loss = loss_of(model, my_rows(batch(step)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return net, model, optimizer, losses


def _parity():
    results = []
    for options in ({}, {"reduce_buffer_size": 0}, {"broadcast_buffers": False}):
        net, _, _, losses = _train(4, **options)
        results.append((dict(net.state_dict()), losses))
    return results


@pytest.mark.parametrize("size", [1, 2])
def test_parity(ranks, size):
    state, losses = train_alone(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), 4, size)
    for number, results in enumerate(ranks(size, _parity)):
        for got, got_losses in results:
            torch.testing.assert_close(got_losses, [each[number] for each in losses])
            for key, value in state.items():
                torch.testing.assert_close(got[key], value)


def _gradients():
    net, model, optimizer, _ = _train(1)
    loss_of(model, my_rows(batch(0))).backward()
    owner = optimizer._param_to_rank
    for param in net.parameters():
        whole = model.full_grad(param)
        if owner[param] == tessera.rank() and whole is not None:
            assert torch.equal(param.grad, whole)
        else:
            assert param.grad is None
    owned = {id(param) for group in optimizer.optim.param_groups for param in group["params"]}
    assert owned == {id(param) for param in owner if owner[param] == tessera.rank()}
    for param, state in optimizer.state.items():
        assert state["momentum_buffer"].shape == param.shape and owner[param] == tessera.rank()
    norm = optimizer.clip_grad_norm(1e-3)
    local = [param.grad.norm() ** 2 for param in net.parameters() if param.grad is not None]
    total = torch.stack([*local, torch.zeros(())]).sum().reshape(1)
    tessera.world.default_group().all_reduce(total)
    torch.testing.assert_close(total.sqrt(), torch.tensor([1e-3]), rtol=1e-2, atol=0)
    optimizer.zero_grad()
    assert all(param.grad is None for param in net.parameters()) and norm > 1e-3
    return True


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_are_the_owners(ranks, size):
    assert all(ranks(size, _gradients))


def _state():
    net, model, optimizer, _ = _train(2)
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        optimizer.state_dict()
    optimizer.consolidate_state_dict(tessera.size() - 1)
    if tessera.rank() == tessera.size() - 1:
        assert optimizer.state_dict()["state"]
    state = optimizer.state_dict(all_ranks=True)
    plain = torch.optim.SGD(make_net().parameters(), lr=1.0, momentum=0.5)
    plain.load_state_dict(state)
    assert plain.param_groups[0]["lr"] == 0.1
    other = make_net()
    other.load_state_dict(net.state_dict())
    loaded = OSS(other.parameters(), torch.optim.SGD, lr=1.0, momentum=0.1)
    other_model = ShardedDataParallel(other, loaded)
    loaded.load_state_dict(copy.deepcopy(state))
    assert loaded.param_groups[0]["lr"] == 0.1
    for one, its in ((model, optimizer), (other_model, loaded)):
        its.zero_grad()
        loss_of(one, my_rows(batch(5))).backward()
        its.step()
    for key, value in net.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key
    stream = io.BytesIO()
    torch.save(net.state_dict(), stream)
    return True


def test_state(ranks):
    assert all(ranks(2, _state))


def _alone():
    dist.init_process_group("gloo")
    net = make_net()
    for name in ("unused", "scale"):
        delattr(net, name)
    net.scale = 0.5
    optimizer = OSS(net.parameters(), torch.optim.AdamW, lr=1e-2)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 1.0})
    reference = copy.deepcopy(net)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    models = DistributedDataParallel(net), DistributedDataParallel(reference)
    for step in range(3):
        for model, its in zip(models, (optimizer, plain)):
            its.zero_grad()
            loss_of(model, batch(step)[dist.get_rank()::2]).backward()
            its.step()
    state = copy.deepcopy(models[0].state_dict())  # whole, right after the step
    for key, value in models[1].state_dict().items():
        assert torch.equal(state[key], value), key
    with pytest.raises(ValueError):
        optimizer.add_param_group({"params": [net.norm.weight]})
    assert len(optimizer.param_groups) == 2
    tessera.shutdown()
    dist.barrier()  # rank 0 has the store
    dist.destroy_process_group()
    return True


def test_oss_with_the_gradients_of_ddp(ranks):
    assert all(ranks(2, _alone, joins=False))


def _beside():
    dist.init_process_group("gloo")
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return None
    net = make_net()
    optimizer = OSS(net.parameters(), lr=0.1, group=group)
    model = ShardedDataParallel(net, optimizer, process_group=group)
    loss_of(model, batch(dist.get_rank())).backward()
    optimizer.step()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    tessera.shutdown()
    dist.barrier(group)  # rank 0 has the store
    return optimizer.world_size, state


def test_a_group_of_some_ranks(ranks):
    first, none, last = ranks(3, _beside, joins=False)
    assert none is None and first[0] == last[0] == 2
    for key, value in first[1].items():
        assert torch.equal(last[1][key], value)


def _uneven():
    # Each rank owns one parameter, whose gradient is 1 on each rank that still trains.
    net = nn.ParameterList([nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))])
    optimizer = OSS(net.parameters(), lr=1.0)
    model = ShardedDataParallel(net, optimizer)

    def train():
        for step in range(3 if tessera.rank() == 0 else 1):
            optimizer.param_groups[0]["lr"] = 10.0**step
            optimizer.zero_grad()
            sum(param.sum() for param in net).backward()
            optimizer.step()

    model.join(train)
    return [param.detach().clone() for param in net]


def test_ranks_that_have_ended_take_the_rate_of_those_that_train(ranks):
    for values in ranks(2, _uneven):
        for value in values:  # mean of both ranks, then of one
            assert torch.equal(value, torch.full((4,), -(1.0 + 0.5 * 10 + 0.5 * 100)))


def _scaler():
    net = make_net()
    optimizer = OSS(net.parameters(), lr=0.1)
    model = ShardedDataParallel(net, optimizer)
    scaler = ShardedGradScaler(init_scale=8.0)
    scaler.scale(loss_of(model, my_rows(batch(0)))).backward()
    stepped = scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(loss_of(model, my_rows(batch(0))) * (float("inf") if tessera.rank() else 1.0)).backward()
    return stepped, scaler.step(optimizer)


def test_scaler(ranks):
    assert ranks(2, _scaler) == [(True, False)] * 2


def _accumulate():
    net = make_net()
    with pytest.warns(UserWarning, match="broadcast_buffer_size"):
        OSS(net.parameters(), lr=0.1, broadcast_buffer_size=4)
    with pytest.raises(NotImplementedError, match="LBFGS"):
        OSS(net.parameters(), torch.optim.LBFGS).step()
    with pytest.raises(TypeError, match="OSS"):
        ShardedGradScaler().step(torch.optim.SGD(net.parameters()))
    optimizer = OSS(net.parameters(), lr=0.1)
    model = ShardedDataParallel(net, optimizer)
    with model.no_sync():
        loss_of(model, my_rows(batch(0))).backward()
    with pytest.raises(RuntimeError, match="no_sync"):
        optimizer.step()  # FairScale steps with gradients that differ between ranks
    model.reduce()
    optimizer.step()
    model.to(dtype=torch.float64)
    assert net.norm.weight.dtype == torch.float64
    assert model.module is net and model.block is net.block and not model.is_multi_device_module
    model.unwrap()
    assert type(net.norm.weight) is nn.Parameter
    for param in net.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    before = net.norm.weight.detach().clone()
    optimizer.step()  # by itself again: the values are there at once
    assert torch.equal(copy.deepcopy(net.norm.weight.detach()), before - 0.1)
    return True


def test_accumulation_conversion_unwrap(ranks):
    assert all(ranks(2, _accumulate))


def _compat():
    import tessera.compat.fairscale
    from fairscale.nn.data_parallel import ShardedDataParallel as Wrapper
    from fairscale.optim import OSS as Optimizer
    from fairscale.optim.grad_scaler import ShardedGradScaler as Scaler

    return (Wrapper, Optimizer, Scaler) == (ShardedDataParallel, OSS, ShardedGradScaler) and "fairscale" in sys.modules


def test_compat(ranks):
    assert all(ranks(1, _compat))

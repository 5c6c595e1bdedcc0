"""Gradients in `.grad` are what code around a model expects, and what it changes is what the optimizer steps with."""

import copy
import functools
import io

import pytest
import torch
from torch import nn

import tessera
from models import LEVELS, batch, loss_of, make_net, my_rows

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, fused=False, foreach=False)


def _clip_norm(net, optimizer, **options):
    return nn.utils.clip_grad_norm_(net.parameters(), 0.5, **options)


def _clip_groups(net, optimizer):
    # As Lightning does.
    return nn.utils.clip_grad_norm_([param for group in optimizer.param_groups for param in group["params"]], 0.5)


def _clip_value(net, optimizer):
    nn.utils.clip_grad_value_(net.parameters(), 0.01)


def _by_hand(net, optimizer):
    norms = []
    for param in net.parameters():
        if param.grad is None:
            continue
        norms.append(param.grad.norm())
        assert param.grad.isfinite().all() and param.grad.dtype == param.dtype
        param.grad.mul_(0.5).add_(1e-3).clamp_(-1, 1)
        param.grad.div_(norms[-1] + 1)
        param.grad *= torch.tensor(0.9)
        param.grad.data.neg_()
    return torch.stack(norms)


def _foreach(net, optimizer):
    grads = [param.grad for param in net.parameters() if param.grad is not None]
    torch._foreach_mul_(grads, 0.5)
    torch._foreach_mul_(grads, torch.tensor(0.9))
    torch._foreach_add_(grads, [torch.ones(grad.shape) * 1e-3 for grad in grads])
    return torch.stack(torch._foreach_norm(grads))


def _parts(net, optimizer):
    # Rows, views and masks, and other tensors of the gradient's shape.
    grad = net.block[0].weight.grad
    grad[3:5].zero_()
    grad.view(-1)[7] = 2.0
    grad.t()[0].add_(0.25)
    grad.unbind(0)[1].fill_(0.125)
    grad[grad > 0.05] = 0.05
    grad.add_(torch.arange(grad.numel()).view(grad.shape), alpha=1e-4)
    for half in net.head.weight.grad.chunk(2):
        half.sub_(half.mean())
    net.norm.weight.grad = net.norm.weight.grad.sign()
    net.norm.bias.grad = torch.full((19,), 0.125)
    net.block[2].bias.grad.copy_(net.block[2].bias.grad.sort().values)
    return torch.stack([grad.sum(), grad.abs().max(), (grad - 1).square().mean(), torch.linalg.vector_norm(grad, 1)])


def _zeros(net, optimizer):
    for param in net.parameters():
        if param.grad is not None:
            param.grad.zero_()


CHANGES = {"clip_grad_norm": _clip_norm, "clip_inf": functools.partial(_clip_norm, norm_type=torch.inf),
           "clip_groups": _clip_groups, "clip_grad_value": _clip_value, "by_hand": _by_hand, "foreach": _foreach, "parts": _parts,
           "zeros": _zeros}


def _train(model, net, optimizer, change, rows):
    """Returns the state after 3 steps, and what `change` has returned."""
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        for part, share in rows(step):
            (loss_of(model, part) * share).backward()
        seen.append(change(net, optimizer))
        optimizer.step()
    return seen


def _alone(change, size):
    net = make_net()
    optimizer = ADAMW(net.parameters())
    seen = _train(net, net, optimizer, change, lambda step: [(part, 1 / size) for part in batch(step).view(size, -1, 6)])
    return net.state_dict(), seen


def _sharded(level, plan, change):
    net = make_net()
    sharded = tessera.fully_shard(net, level=level, **plan)
    optimizer = tessera.ShardedOptimizer(sharded, ADAMW(net.parameters()), fused=False)
    seen = _train(sharded, net, optimizer, change, lambda step: [(my_rows(batch(step)), 1)])
    return sharded.full_state(), seen


def _all_levels():
    return {(level, number, name): _sharded(level, plan, change) for level in LEVELS
            for number, plan in enumerate(({}, {"unit_bytes": 2000}, {"partition": "whole_param"}))
            for name, change in CHANGES.items()}


# On three ranks, thirds are rounded in another order.
@pytest.mark.parametrize("size, transport", [(1, ""), (2, "gloo"), (2, "arena"), (3, "arena")])
def test_changed_gradients_are_stepped(ranks, size, transport):
    close = torch.equal if size < 3 else functools.partial(torch.allclose, rtol=1e-5, atol=1e-5)
    alone = {name: _alone(change, size) for name, change in CHANGES.items() if size < 3 or name != "parts"}
    for results in ranks(size, _all_levels, transport=transport):
        for (level, number, name), (state, seen) in results.items():
            if name not in alone:
                continue
            want, want_seen = alone[name]
            for got_value, value in zip(seen, want_seen, strict=True):
                assert value is None or close(got_value, value), (level, number, name)
            for key, value in want.items():
                assert close(state[key], value), (level, number, name, key)


def _reading():
    for level in LEVELS:
        net = make_net()
        sharded = tessera.fully_shard(net, level=level)
        optimizer = tessera.ShardedOptimizer(sharded, ADAMW(net.parameters()))
        weight = net.block[0].weight
        assert weight.grad is None
        with pytest.raises(RuntimeError, match="only in place of one that a backward has made"):
            weight.grad = torch.zeros_like(weight)
        loss_of(sharded, my_rows(batch(0))).backward()
        grad, whole = weight.grad, sharded.full_grad(weight)
        assert grad.shape == weight.shape and grad.dtype == weight.dtype and not grad.requires_grad
        assert net.unused.grad is None and net.scale.grad is None
        assert "block.0.weight" in repr(grad) and "full_tensor" in repr(grad)
        for read in (lambda: grad.full_tensor(), lambda: grad + 0, lambda: copy.deepcopy(grad), lambda: torch.from_numpy(grad.numpy()),
                     lambda: torch.tensor(grad.tolist()), lambda: grad.detach().clone(), lambda: grad.view(-1).view(31, 19) * 1):
            assert torch.equal(read(), whole)
        stream = io.BytesIO()
        torch.save(grad, stream)
        assert torch.equal(torch.load(io.BytesIO(stream.getvalue())), whole)
        assert torch.zeros_like(grad).shape == grad.shape and grad.new_zeros(3).tolist() == [0, 0, 0]
        part = grad.to_local()
        assert part.numel() == (0 if sharded.local_grad(weight) is None else sharded.local_grad(weight).numel())
        with pytest.raises(RuntimeError, match="no part of its own"):
            grad.view(-1).to_local()
        net.float()  # and the like, as trainers call them: nothing changes
        assert weight.grad.cpu() is not None and torch.equal(sharded.full_grad(weight), whole)
        with pytest.raises(ValueError, match="must have its shape"):
            sharded._model.set_full_grad(weight, torch.zeros(3))
        # Zeros are a gradient; none is none.
        sharded.zero_grad(set_to_none=False)
        assert torch.equal(weight.grad.full_tensor(), torch.zeros_like(whole)) and not sharded.full_grad(weight).any()
        assert net.unused.grad is None
        net.zero_grad(set_to_none=False)
        optimizer.zero_grad(set_to_none=False)
        weight.grad.zero_()
        with pytest.raises(RuntimeError, match="can't be changed by aten::mul_"):
            weight.grad.mul_(2)
        assert not weight.grad.any()
        loss_of(sharded, my_rows(batch(0))).backward()
        assert torch.equal(weight.grad + 0, whole)
        optimizer.step()
        net.block.zero_grad()
        assert weight.grad is None and net.norm.weight.grad is not None
        sharded.zero_grad()
        assert all(param.grad is None for param in net.parameters())
        with pytest.raises(RuntimeError, match="backward"):
            optimizer.step()
        with sharded.no_sync():
            loss_of(sharded, my_rows(batch(0))).backward()
        with pytest.raises(RuntimeError, match="not reduced since no_sync"):
            weight.grad.norm()
        sharded.zero_grad()
        stale = grad
        with pytest.raises(RuntimeError, match="has been cleared"):
            stale.norm()
    return True


@pytest.mark.parametrize("size", [1, 2])
def test_reading(ranks, size):
    assert all(ranks(size, _reading))


def _scale(model, net, optimizer, rows):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        for part, share in rows(step):
            loss = loss_of(model, part) * share
            if step == 1 and tessera.rank() == tessera.size() - 1:
                loss = loss * torch.inf  # on one rank
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def _scaled():
    results = []
    for level in LEVELS:
        net = make_net()
        sharded = tessera.fully_shard(net, level=level, unit_bytes=2000)
        optimizer = tessera.ShardedOptimizer(sharded, ADAMW(net.parameters()), fused=False)
        results.append((_scale(sharded, net, optimizer, lambda step: [(my_rows(batch(step)), 1)]), sharded.full_state()))
    return results


@pytest.mark.parametrize("size", [1, 2])
def test_torch_s_grad_scaler(ranks, size):
    net = make_net()
    optimizer = ADAMW(net.parameters())
    scales = _scale(net, net, optimizer, lambda step: [(part, 1 / size) for part in batch(step).view(size, -1, 6)])
    assert scales == [2.0**10, 2.0**9, 2.0**9, 2.0**10]
    for results in ranks(size, _scaled):
        for got, state in results:
            assert got == scales
            for key, value in net.state_dict().items():
                assert torch.equal(state[key], value), key


def _groups():
    net = make_net()
    sharded = tessera.fully_shard(net)
    inner = ADAMW([{"params": [net.embedding.weight]}, {"params": net.block.parameters(), "lr": 0.5}])
    params = [list(group["params"]) for group in inner.param_groups]
    optimizer = tessera.ShardedOptimizer(sharded, inner)
    seen = []
    inner.register_step_pre_hook(lambda it, args, kwargs: seen.append(
        [param.dim() for group in it.param_groups for param in group["params"]]))

    def check(count):
        assert optimizer.param_groups is inner.param_groups
        assert [[id(param) for param in group["params"]] for group in optimizer.param_groups] == [
            [id(param) for param in group] for group in params]
        assert [id(param) for param in optimizer.state] == [id(param) for group in params for param in group] * (count > 0)
        for param, state in optimizer.state.items():
            assert int(state["step"]) == count and state["exp_avg"].dim() == 1

    check(0)
    for count in (1, 2):
        optimizer.zero_grad()
        loss_of(sharded, my_rows(batch(count))).backward()
        optimizer.step()
        check(count) if tessera.size() == 1 else None
    assert seen == [[1] * 5] * 2  # the optimizer inside steps parts
    optimizer.add_param_group({"params": [net.norm.weight]})
    optimizer.param_groups[0]["params"].append(net.norm.bias)
    loss_of(sharded, my_rows(batch(3))).backward()
    optimizer.step()
    assert seen[-1] == [1] * 7 and optimizer.param_groups[2]["params"][0] is net.norm.weight
    optimizer.state[net.norm.weight]["mine"] = torch.ones(())
    assert "mine" in optimizer.state[net.norm.weight] and net.unused not in optimizer.state
    return True


@pytest.mark.parametrize("size", [1, 2])
def test_param_groups_have_the_model_s_parameters(ranks, size):
    assert all(ranks(size, _groups))

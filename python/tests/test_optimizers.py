"""Optimizers on shards: fused operators, classes that need whole parameters, several on one model, state inside."""

import copy

import pytest
import torch

import tessera
from models import LEVELS, batch, loss_of, make_net, my_rows
from tessera import optimizer as proofs

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
OPTIONS = {
    torch.optim.SGD: [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1}],
    torch.optim.Adam: [{}, {"amsgrad": True}],
    torch.optim.AdamW: [{}, {"amsgrad": True}],
    torch.optim.Adagrad: [{}, {"lr_decay": 0.1}],
}


def _numbers(dtype, seed):
    return (1 + torch.rand(1000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", FUSED)
def test_proved_operators_step_as_the_plain_optimizer(kind, dtype):
    unit = torch.finfo(dtype).eps / 2
    computed = min(unit, 2.0**-24)
    for options in OPTIONS[kind]:
        for more in ({}, {"weight_decay": 0.1}, {"maximize": True}, {"weight_decay": 0.1, "maximize": True}):
            options = {"lr": 0.5, **options, **more}
            optimizer = kind([torch.nn.Parameter(_numbers(dtype, 1))], **options)
            key = tuple((name, proofs._simplified(value)) for name, value in optimizer.defaults.items())
            if not proofs._is_proved(kind, torch.device("cpu"), dtype, key):
                assert kind is torch.optim.SGD and dtype.itemsize == 2, "only this one is known to be wrong"
                continue
            results = []
            for fused in (False, True):
                param = torch.nn.Parameter(_numbers(dtype, 1).to(dtype if fused else torch.float64))
                optimizer = kind([param], fused=fused, foreach=False, **options)
                for step in range(3):
                    param.grad = _numbers(dtype, step + 2).to(param.dtype)
                    optimizer.step()
                results.append(param.detach().double())
            exact, fused = results
            # 3 steps store 4 tensors each and round up to 6 options; float's own roundings are 30 a step.
            assert (exact - fused).abs().max() <= 3 * (10 * unit + 30 * computed) * exact.abs().max(), options


def _sgd_of_16_bits():
    changes = []
    for dtype in (torch.bfloat16, torch.float16):
        for level in LEVELS:
            net = make_net().to(dtype)
            want = {name: param.detach() - 1 for name, param in net.named_parameters() if param.requires_grad}
            sharded = tessera.fully_shard(net, level=level)
            optimizer = tessera.ShardedOptimizer(sharded, torch.optim.SGD(net.parameters(), lr=1.0))
            sum(param.sum() for param in net.parameters()).backward()  # all gradients are 1
            optimizer.step()
            state = sharded.full_state()
            changes += [torch.equal(state[name], value) for name, value in want.items()]
    return all(changes)


@pytest.mark.parametrize("size", [1, 2])
def test_sgd_trains_parameters_of_16_bits(ranks, size):
    assert ranks(size, _sgd_of_16_bits) == [True] * size


class Direction(torch.optim.SGD):
    """Steps each parameter by its gradient's direction."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / param.grad.norm(), alpha=group["lr"])


class Logged(torch.optim.AdamW):
    """Has the step of its base."""


def _whole_parameters():
    for kind in (Direction, torch.optim.Muon, torch.optim.Adafactor):
        net = make_net()
        params = [param for param in net.parameters() if param.dim() == 2]
        sharded = tessera.fully_shard(net)
        with pytest.raises(NotImplementedError, match=rf"must be elementwise.*{kind.__name__}.*whole_param.*elementwise = True"):
            tessera.ShardedOptimizer(sharded, kind(params, lr=0.1))
        declared = kind(params, lr=0.1)
        declared.elementwise = True
        tessera.ShardedOptimizer(sharded, declared)
        refused = Logged(params)
        refused.elementwise = False
        with pytest.raises(NotImplementedError, match="got a Logged"):
            tessera.ShardedOptimizer(sharded, refused)
    tessera.ShardedOptimizer(sharded, Logged([net.norm.weight]))
    states = []
    for kind in (Direction, torch.optim.Muon):
        net = make_net()
        sharded = tessera.fully_shard(net, partition="whole_param")
        optimizer = tessera.ShardedOptimizer(sharded, kind([p for p in net.parameters() if p.dim() == 2], lr=0.1))
        for step in range(3):
            optimizer.zero_grad()
            loss_of(sharded, my_rows(batch(step))).backward()
            optimizer.step()
        states.append(sharded.full_state())
    return states


def test_classes_that_need_whole_parameters(ranks):
    alone = []
    for kind in (Direction, torch.optim.Muon):
        net = make_net()
        optimizer = kind([p for p in net.parameters() if p.dim() == 2], lr=0.1)
        for step in range(3):
            net.zero_grad()
            for part in batch(step).view(2, -1, 6):
                (loss_of(net, part) / 2).backward()
            optimizer.step()
        alone.append(net.state_dict())
    for states in ranks(2, _whole_parameters):
        for state, want in zip(states, alone, strict=True):
            for name, value in want.items():
                assert torch.equal(state[name], value), name


def _in_turns(optimizers, backward):
    for step in range(6):
        backward(step)
        optimizers[step % 2].step()
        optimizers[step % 2].zero_grad(set_to_none=step < 4)


def _halves(net):
    params = list(net.parameters())
    return params[:2], params[2:]


def _two_optimizers():
    net = make_net()
    inner = [torch.optim.SGD(params, lr=0.1) for params in _halves(net)]
    sharded = tessera.fully_shard(net)
    optimizers = [tessera.ShardedOptimizer(sharded, each, fused=False) for each in inner]
    _in_turns(optimizers, lambda step: loss_of(sharded, my_rows(batch(step))).backward())
    return sharded.full_state()


def test_zero_grad_leaves_the_gradients_of_other_optimizers(ranks):
    net = make_net()

    def backward(step):
        for part in batch(step).view(2, -1, 6):
            (loss_of(net, part) / 2).backward()

    _in_turns([torch.optim.SGD(params, lr=0.1) for params in _halves(net)], backward)
    for state in ranks(2, _two_optimizers):
        for name, value in net.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6)


def _state_inside():
    net = make_net()
    sharded = tessera.fully_shard(net)
    inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
    optimizer = tessera.ShardedOptimizer(sharded, inner)
    loss_of(sharded, my_rows(batch(0))).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="part of the state only"):
        inner.state_dict()
    with pytest.raises(RuntimeError, match="part of the state only"):
        inner.load_state_dict(optimizer.state_dict())
    whole = optimizer.state_dict()["state"]
    optimizer.unwrap()
    return whole.keys() == inner.state_dict()["state"].keys() and len(whole) > 0


def test_the_state_inside_is_a_part(ranks):
    assert ranks(2, _state_inside) == [True] * 2


SMALL = {torch.float32: lambda n: 8 * n, torch.bfloat16: lambda n: 4 * n, torch.uint8: lambda n: 2 * n + 8 * -(-n // 256)}


def _small_adam(net, dtype, **options):
    params = [param for param in net.parameters() if param.requires_grad]
    return tessera.CPUAdam(params, lr=1e-2, weight_decay=0.1, state_dtype=dtype, **options)


def _small_states(folder, size):
    cuts = [("*", "elements", 256)]
    for dtype, nbytes in SMALL.items():
        alone = make_net()
        adam = _small_adam(alone, dtype)
        for step in range(4):
            adam.zero_grad()
            loss_of(alone, batch(step)).backward()
            adam.step()
            if step == 1:
                half = copy.deepcopy(adam.state_dict())
        kept = [sum(value.nbytes for name, value in state.items() if name != "step") for state in adam.state.values()]
        assert kept == [nbytes(param.numel()) for param in adam.state]
        for level in LEVELS:
            net = make_net()
            sharded = tessera.fully_shard(net, level=level, cuts=cuts)
            optimizer = tessera.ShardedOptimizer(sharded, _small_adam(net, dtype))
            for step in range(4):
                optimizer.zero_grad()
                loss_of(sharded, batch(step)).backward()
                optimizer.step()
                if step == 1:
                    whole = optimizer.state_dict()
                    saved = {name: value.clone() for name, value in sharded.full_state().items()}
                    path = f"{folder}/{size}-{level}-{dtype}"
                    tessera.save_checkpoint(path, sharded, optimizer)
            assert whole["param_groups"][0]["state_dtype"] == dtype
            for number, state in whole["state"].items():
                for name, value in half["state"][number].items():
                    assert torch.equal(torch.as_tensor(state[name]), torch.as_tensor(value)), (level, dtype, name)
            for name, value in alone.state_dict().items():
                if name != "calls":
                    assert torch.equal(sharded.full_state()[name], value), (level, dtype, name)
            for how in ("state_dict", "checkpoint", "alone"):  # and on from there
                net = make_net()
                inner = _small_adam(net, dtype, seed=5)
                if how == "alone":
                    net.load_state_dict(saved)
                    optimizer = inner
                    optimizer.load_state_dict(whole)
                    model = net
                else:
                    model = tessera.fully_shard(net, level="p_g_os", cuts=cuts, unit_bytes=3000)
                    optimizer = tessera.ShardedOptimizer(model, inner)
                    if how == "checkpoint":
                        tessera.load_checkpoint(path, model, optimizer)
                    else:
                        optimizer.load_state_dict(whole)
                        model.load_full_state(saved)
                assert inner.param_groups[0]["state_dtype"] == dtype and inner.param_groups[0]["seed"] == 0
                for step in (2, 3):
                    optimizer.zero_grad()
                    loss_of(model, batch(step)).backward()
                    optimizer.step()
                state = model.state_dict() if how == "alone" else model.full_state()
                assert torch.equal(state["embedding.weight"], alone.state_dict()["embedding.weight"]), (level, dtype, how)
    if size > 1:
        net = make_net()
        with pytest.raises(NotImplementedError, match="needs blocks of 256 elements together on a rank"):
            tessera.ShardedOptimizer(tessera.fully_shard(net), _small_adam(net, torch.uint8))


@pytest.mark.parametrize("size", [1, 2])
def test_small_states_are_those_of_one_process(ranks, tmp_path, size):
    ranks(size, _small_states, str(tmp_path), size)


def test_small_states_are_converted_and_refused():
    for old in SMALL:
        for new in SMALL:
            net = make_net()
            adam, other = _small_adam(net, old), _small_adam(net, new)
            loss_of(net, batch(0)).backward()
            adam.step()
            other.load_state_dict(adam.state_dict())
            assert other.param_groups[0]["state_dtype"] == new
            other.step()
            assert all(state["exp_avg"].dtype == new and state["step"] == 2 for state in other.state.values())
    with pytest.raises(ValueError, match="state_dtype must be torch.float32, torch.bfloat16 or torch.uint8"):
        _small_adam(net, torch.float16)
    wide = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    wide.grad = torch.ones_like(wide)
    with pytest.raises(NotImplementedError, match="it is Double"):
        tessera.CPUAdam([wide], state_dtype=torch.uint8).step()

"""Sharded modules in the hands of code that does not know them: wrapped again, moved, in plain optimizers, stepped in hooks."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import tessera
from models import LEVELS, batch, loss_of, make_net, my_rows


def _adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=False, foreach=False)


def _join_both():
    dist.init_process_group("gloo")
    tessera.init()


def _wraps():
    _join_both()
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    wraps = (nn.parallel.DistributedDataParallel, lambda module: fully_shard(module, mesh=mesh),
             lambda module: FullyShardedDataParallel(module, device_id=torch.device("cpu")),
             lambda module: FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True))
    for level in LEVELS:
        for wrap in wraps:
            for part in (lambda sharded: sharded, lambda sharded: sharded.module, lambda sharded: sharded.module.block):
                with pytest.raises(RuntimeError, match="sharded module can't be wrapped again.*unwrap"):
                    wrap(part(tessera.fully_shard(make_net(), level=level)))
    # Copies, and modules after unwrap(), are ordinary.
    sharded = tessera.fully_shard(make_net())
    nn.parallel.DistributedDataParallel(copy.deepcopy(sharded.module), find_unused_parameters=True)
    copied = copy.deepcopy(sharded.module)
    assert not getattr(copied, "_is_accelerate_prepared")
    module = sharded.unwrap()
    assert not hasattr(module, "_is_accelerate_prepared")
    fully_shard(module.block, mesh=mesh)
    nn.parallel.DistributedDataParallel(make_net(), find_unused_parameters=True)
    dist.destroy_process_group()


def test_modules_are_not_wrapped_again(ranks):
    ranks(2, _wraps, joins=False)


def _steps(model, optimizer, first, last, rows):
    for step in range(first, last):
        optimizer.zero_grad()
        for part, share in rows(step):
            (loss_of(model, part) * share).backward()
        optimizer.step()


def _all_rows(size):
    return lambda step: [(part, 1 / size) for part in batch(step).view(size, -1, 6)]


def _plain_optimizers(size):
    for level in LEVELS:
        rows = lambda step: [(my_rows(batch(step)), 1)]
        nets = [make_net() for _ in range(2)]
        sharded = [tessera.fully_shard(net, level=level) for net in nets]
        plain = _adamw(nets[0].parameters())
        _steps(sharded[0], plain, 0, 4, rows)
        # One that has begun without its state being sharded goes on.
        plain = _adamw(nets[1].parameters())
        _steps(sharded[1], plain, 0, 2, rows)
        _steps(sharded[1], tessera.ShardedOptimizer(sharded[1], plain, fused=False), 2, 4, rows)
        alone = make_net()
        _steps(alone, _adamw(alone.parameters()), 0, 4, _all_rows(size))
        for model in sharded:
            for name, value in model.state_dict().items():
                assert torch.equal(value, alone.state_dict()[name]), (level, name)


@pytest.mark.parametrize("size, transport", [(1, ""), (2, "gloo"), (2, "arena")])
def test_plain_optimizers_step_as_alone(ranks, size, transport):
    ranks(size, _plain_optimizers, size, transport=transport)


def _refused_optimizers():
    for level in LEVELS:
        nets = [make_net() for _ in range(2)]
        sharded = [tessera.fully_shard(net, level=level) for net in nets]
        params = [*nets[0].parameters(), *nets[1].block.parameters()]
        with pytest.raises(ValueError, match=r"parameter \d+ of param group 0, .* another sharded module: make an optimizer"):
            tessera.ShardedOptimizer(sharded[0], _adamw(params))
        inner = _adamw(nets[0].parameters())
        optimizer = tessera.ShardedOptimizer(sharded[0], inner)
        loss_of(sharded[0], my_rows(batch(0))).backward()
        if level != "none":
            with pytest.raises(RuntimeError, match="inside is stepped by the ShardedOptimizer"):
                inner.step()
        optimizer.step()
        optimizer.unwrap()
        sharded[0].unwrap()
        loss_of(nets[0], my_rows(batch(0))).backward()
        inner.step()


def test_optimizers_that_are_refused(ranks):
    ranks(2, _refused_optimizers)


def _moves():
    for level in LEVELS:
        net = make_net()
        sharded = tessera.fully_shard(net, level=level)
        before = sharded.full_state()
        for move in (lambda: sharded.to(torch.bfloat16), sharded.half, net.block.double):
            with pytest.raises(RuntimeError, match="can't be moved from torch.float32 on cpu.*before fully_shard"):
                move()
        assert sharded.to("cpu", torch.float32) is sharded and net.float() is net
        assert all(torch.equal(before[name], value) for name, value in sharded.full_state().items())
        loss_of(sharded, my_rows(batch(0))).backward()
        sharded.unwrap().half()
        assert net.scale.dtype == torch.float16
        for module in (tessera.fully_shard(make_net(), level=level), tessera.fully_shard(make_net(), level=level).module):
            with pytest.raises(RuntimeError, match="can't be pickled.*state_dict"):
                torch.save(module, io.BytesIO())
    with torch.device("meta"):
        net = make_net()
    with pytest.raises(ValueError, match="has no data .device meta.: .*DeferredInit"):
        tessera.fully_shard(net)


def test_modules_are_not_moved_or_pickled(ranks):
    ranks(2, _moves)


def _hooked(level, make_optimizers):
    """Trains 3 steps with optimizers that step in hooks of the parameters."""
    net = make_net()
    sharded = tessera.fully_shard(net, level=level)
    used = [param for name, param in net.named_parameters() if param.requires_grad and name != "unused"]
    step_of = make_optimizers(sharded, used)
    for param, step in step_of.items():
        param.register_post_accumulate_grad_hook(step)
    for step in range(3):
        loss_of(sharded, my_rows(batch(step))).backward()
        assert all(param.grad is None for param in net.parameters())
    return sharded.full_state()


def _one_for_each(sharded, params):
    def step_with(optimizer):
        def step(param):
            optimizer.step()
            optimizer.zero_grad()

        return step

    return {param: step_with(tessera.ShardedOptimizer(sharded, _adamw([param]), fused=False)) for param in params}


def _one_for_all(sharded, params):
    optimizer = tessera.ShardedOptimizer(sharded, _adamw(params), fused=False)
    left = set(params)

    def step(param):
        left.discard(param)
        if not left:
            optimizer.step()
            optimizer.zero_grad()
            left.update(params)

    return dict.fromkeys(params, step)


def _plain_for_each(sharded, params):
    return {param: lambda param, optimizer=_adamw([param]): optimizer.step() for param in params}


def _all_hooked(size):
    alone = make_net()
    _steps(alone, _adamw(alone.parameters()), 0, 3, _all_rows(size))
    for level in LEVELS:
        for make_optimizers in (_one_for_each, _one_for_all):
            for name, value in _hooked(level, make_optimizers).items():
                assert torch.equal(value, alone.state_dict()[name]), (level, name)
        with pytest.raises(RuntimeError, match="plain optimizer can't step.*during backward.*ShardedOptimizer"):
            _hooked(level, _plain_for_each)


@pytest.mark.parametrize("size, transport", [(1, ""), (2, "gloo"), (2, "arena")])
def test_optimizers_in_backward_step_at_its_end(ranks, size, transport):
    ranks(size, _all_hooked, size, transport=transport)


class _Extra(nn.Linear):
    """Has state that is no tensor, and renames what it loads."""

    def __init__(self):
        super().__init__(5, 3)
        self.seen, self.count = [], 0
        self.register_load_state_dict_pre_hook(self._before)
        self.register_load_state_dict_post_hook(lambda module, keys: module.seen.append("after"))

    @staticmethod
    def _before(module, state, prefix, *_):
        module.seen.append("before")
        if prefix + "old" in state:
            state[prefix + "weight"] = state.pop(prefix + "old")

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def _extra_state():
    for level in LEVELS:
        net = nn.Sequential(_Extra(), nn.Linear(3, 2))
        sharded = tessera.fully_shard(net, level=level)
        net[0].count = 7
        state = sharded.state_dict()
        assert state["0._extra_state"] == {"count": 7}
        state["0.old"], state["0._extra_state"] = state.pop("0.weight") + 1, {"count": 9}
        result = sharded.load_state_dict(state)
        assert not result.missing_keys and not result.unexpected_keys
        assert net[0].seen == ["before", "after"] and net[0].count == 9
        assert torch.equal(sharded.full_state()["0.weight"], state["0.old"])


def test_extra_state_and_hooks_of_loading(ranks):
    ranks(2, _extra_state)

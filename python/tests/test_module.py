"""A sharded module behaves as a module of PyTorch, or refuses with a reason."""

import copy
import ctypes
import io
import pickle

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import tessera
from models import LEVELS, batch, loss_of, make_net, my_rows


def _trained(level, **plan):
    net = make_net()
    sharded = tessera.fully_shard(net, level=level, **plan)
    optimizer = tessera.ShardedOptimizer(sharded, torch.optim.AdamW(net.parameters(), lr=1e-2))
    loss_of(sharded, my_rows(batch(0))).backward()
    return net, sharded, optimizer


def _state_dict():
    for level in LEVELS:
        net, sharded, optimizer = _trained(level, unit_bytes=2000)
        optimizer.step()
        full = sharded.full_state()
        stream = io.BytesIO()
        torch.save(net.state_dict(), stream)  # after a step, before any use
        stream.seek(0)
        loaded = torch.load(stream)
        assert list(loaded) == list(make_net().state_dict())
        for key, value in loaded.items():
            assert torch.equal(value, full[key]), (level, key)
        assert list(net.block.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert (net.block[0].weight.detach().clone().numpy() == full["block.0.weight"].numpy()).all()
        assert (net.norm.weight.numpy() == full["norm.weight"].numpy()).all()
        other = tessera.fully_shard(make_net(), level=level)
        other.load_state_dict(loaded)
        for key, value in other.full_state().items():
            assert torch.equal(value, full[key]), (level, key)
        with pytest.raises(RuntimeError, match="Missing key"):
            other.load_state_dict({})
        assert other.load_state_dict({"more": torch.ones(1)}, strict=False).unexpected_keys == ["more"]
    return True


@pytest.mark.parametrize("transport", ["gloo", "arena"])
def test_state_dict_is_whole(ranks, transport):
    assert all(ranks(2, _state_dict, transport=transport))


def _array(tensor):
    memory = (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(bytearray(memory), dtype=tensor.dtype).view(tensor.shape)


def _saved(tensor):
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return torch.load(io.BytesIO(stream.getvalue()))


_RAW_READS = {
    "numpy": lambda tensor: torch.from_numpy(tensor.numpy().copy()),
    "asarray": lambda tensor: torch.from_numpy(numpy.asarray(tensor).copy()),
    "dlpack": lambda tensor: torch.from_dlpack(tensor).clone(),
    "numpy's dlpack": lambda tensor: torch.from_numpy(numpy.from_dlpack(tensor).copy()),
    "tolist": lambda tensor: torch.tensor(tensor.tolist()),
    "data_ptr": _array,
    "save": _saved,
    "deepcopy": copy.deepcopy,
    "share_memory_": lambda tensor: tensor.share_memory_().clone(),
    "storage": lambda tensor: torch.tensor([], dtype=tensor.dtype).set_(
        tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.shape, tensor.stride()),
}


def _raw_reads():
    for level in LEVELS:
        net = make_net()
        sharded = tessera.fully_shard(net, level=level, unit_bytes=2000)
        optimizer = tessera.ShardedOptimizer(sharded, torch.optim.SGD(net.parameters(), lr=0.1))

        def check(when):
            found = []
            for name, param in net.named_parameters():
                for way, read in _RAW_READS.items():
                    try:
                        found.append((name, way, param, read(param.detach())))
                    except RuntimeError as error:
                        assert f"'{name}'" in str(error) and "keep_unsharded" in str(error), (level, when, way, error)
            for name, way, param, value in found:
                assert torch.equal(value, param.detach().clone()), (level, when, name, way)

        check("sharded")
        loss = loss_of(sharded, my_rows(batch(0)))
        check("forward")
        loss.backward()
        check("backward")
        optimizer.step()
        check("step")
        with sharded.keep_unsharded():
            assert torch.equal(torch.from_numpy(net.norm.weight.detach().numpy()), net.norm.weight.detach().clone())
            check("whole")
        check("sharded again")
    return True


@pytest.mark.parametrize("transport", ["gloo", "arena"])
def test_memory_has_the_values_or_is_refused(ranks, transport):
    assert all(ranks(2, _raw_reads, transport=transport))


def _copies():
    net, sharded, optimizer = _trained("p_g_os")
    optimizer.step()
    copied = copy.deepcopy(net)
    full = sharded.full_state()
    for key, value in copied.state_dict().items():
        assert torch.equal(value, full[key])
    assert type(copied.block[0].weight) is nn.Parameter and copied.block[0].weight.grad is None
    assert copied.head.weight is copied.embedding.weight
    loss_of(copied, my_rows(batch(1))).backward()
    assert copied.block[0].weight.grad.norm() > 0
    for thing in (sharded, optimizer, net.block[0].weight):
        with pytest.raises(RuntimeError, match="can't be pickled"):
            pickle.dumps(thing)
    with pytest.raises(RuntimeError, match="copied"):
        copy.deepcopy(sharded)
    return True


def test_copies(ranks):
    assert all(ranks(2, _copies))


def _unwrap():
    net, sharded, optimizer = _trained("p_g_os")
    optimizer.step()
    full = sharded.full_state()
    inner = optimizer.unwrap()
    assert sharded.unwrap() is net
    assert type(net.block[0].weight) is nn.Parameter
    for key, value in net.state_dict().items():
        assert torch.equal(value, full[key])
    assert inner.state[net.block[0].weight]["exp_avg"].shape == net.block[0].weight.shape
    loss_of(net, batch(1)).backward()
    inner.step()
    assert net.block[0].weight.grad.norm() > 0
    with pytest.raises(RuntimeError, match="unwrapped"):
        sharded.full_state()
    return True


def test_unwrap(ranks):
    assert all(ranks(2, _unwrap))


class _Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return batch(index, 1)[0]


def _workers(context):
    net, sharded, optimizer = _trained("p_g_os")
    for _ in range(2 if context == "fork" else 1):  # a worker that is spawned imports PyTorch
        for tokens in DataLoader(_Tokens(), 6, num_workers=2 if context == "fork" else 1, multiprocessing_context=context):
            optimizer.zero_grad()
            loss_of(sharded, tokens).backward()
            optimizer.step()
    return sharded.full_state()["norm.weight"]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_loader_workers(ranks, context):
    one, other = ranks(2, _workers, context)
    assert torch.equal(one, other)


def _hooks():
    net = make_net()
    seen = []
    net.norm.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    sharded = tessera.fully_shard(net)
    net.norm.bias.register_hook(lambda grad: grad * 2)
    loss_of(sharded, my_rows(batch(0))).backward()
    assert len(seen) == 1 and seen[0].shape == net.norm.weight.shape

    def fails(param):
        raise ValueError("in a hook")

    sharded.zero_grad()
    handle = net.norm.weight.register_post_accumulate_grad_hook(fails)
    with pytest.raises(ValueError, match="in a hook"):
        loss_of(sharded, my_rows(batch(0))).backward()
    return True


def test_hooks(ranks):
    assert all(ranks(1, _hooks))


class _Recomputed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.net, self.reentrant = make_net(), reentrant

    def forward(self, tokens):
        hidden = self.net.embedding(tokens)
        if self.reentrant is None:
            hidden = self.net.block(hidden)
        else:
            hidden = torch.utils.checkpoint.checkpoint(self.net.block, hidden, use_reentrant=self.reentrant)
        return self.net.head(hidden)


def _recompute():
    grads = []
    for reentrant in (None, True, False):
        model = _Recomputed(reentrant)
        sharded = tessera.fully_shard(model, unit_bytes=2000)
        loss_of(sharded, my_rows(batch(0))).backward()
        grads.append(sharded.full_grad(model.net.block[0].weight))
    return grads


def test_activation_checkpoint(ranks):
    for plain, reentrant, other in ranks(2, _recompute):
        assert torch.equal(plain, reentrant) and torch.equal(plain, other)


def _others():
    net, sharded, optimizer = _trained("p_g_os")
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(sharded, my_rows(batch(0)))
    loss.backward()
    optimizer.step()
    with torch.profiler.profile() as profile:
        loss_of(sharded, my_rows(batch(0))).backward()
    assert len(profile.events()) > 10
    whole = sharded.full_state()
    out = torch.func.functional_call(net, whole, (my_rows(batch(0)),))
    assert torch.equal(out, sharded(my_rows(batch(0))))
    assert sharded.block is net.block and not hasattr(sharded, "orange")
    assert "elements" in sharded.describe() and sharded.memory()["parameters"] > 0
    return True


def test_autocast_profiler_functional_call(ranks):
    assert all(ranks(2, _others))


def _memory(folder):
    net = make_net()
    net.calls += tessera.rank()
    sharded = tessera.fully_shard(net, unit_bytes=2000, offload="host", sync_buffers=True)
    optimizer = tessera.ShardedOptimizer(sharded, torch.optim.AdamW(net.parameters(), lr=1e-2), max_grad_norm=1e-3)
    tracer = tessera.MemoryTracer(sharded)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(sharded, my_rows(batch(step))).backward()
        optimizer.step()
    assert net.calls == 0  # rank 0's
    norm = sum(float(part.norm()) ** 2 for param in net.parameters() if (part := sharded.local_grad(param)) is not None)
    total = torch.tensor([norm])
    tessera.world.default_group().all_reduce(total)
    torch.testing.assert_close(total.sqrt(), torch.tensor([1e-3]), rtol=1e-2, atol=0)
    before = optimizer.memory()
    moved = optimizer.keep_on_device(1 << 30)
    after = optimizer.memory()
    assert before["offloaded"] > 0 and before["optimizer_state"] == 0
    assert after["offloaded"] == 0 and after["optimizer_state"] > 0 and moved > 0
    assert len(tracer) > 10 and tracer.peak_model_bytes > 0
    name = folder / f"memory-{tessera.rank()}"
    for write, suffix in ((tracer.write_svg, "svg"), (tracer.write_chrome_trace, "json"), (tracer.dump_memory_stats, "txt")):
        write(name.with_suffix("." + suffix))
        assert name.with_suffix("." + suffix).stat().st_size > 100
    return True


def test_memory_and_offload(ranks, tmp_path):
    assert all(ranks(2, _memory, tmp_path))


def _refusals():
    with pytest.raises(TypeError, match="torch.nn.Module"):
        tessera.fully_shard([torch.ones(2)])
    with pytest.raises(ValueError, match="level must be one of"):
        tessera.fully_shard(make_net(), level="zero3")
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        tessera.fully_shard(make_net(), colour=1)
    with pytest.raises(TypeError, match="wrong type for 'prefetch'"):
        tessera.fully_shard(make_net(), prefetch="many")
    with pytest.raises(ValueError, match="parameters"):
        tessera.fully_shard(nn.GELU())
    net = make_net()
    sharded = tessera.fully_shard(net)
    with pytest.raises(ValueError, match="sharded already"):
        tessera.fully_shard(net)
    with pytest.raises(NotImplementedError, match="LBFGS"):
        tessera.ShardedOptimizer(sharded, torch.optim.LBFGS(net.parameters()))
    with pytest.raises(ValueError, match="must be the model's"):
        tessera.ShardedOptimizer(sharded, torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.1))
    with pytest.raises(ValueError, match="parameter of the sharded model"):
        sharded.full_grad(torch.ones(3))
    return True


def test_refusals(ranks):
    assert all(ranks(2, _refusals))


def _differ():
    net = nn.Linear(3, 4 + tessera.rank())
    with pytest.raises(ValueError, match="weight"):
        tessera.fully_shard(net)
    return type(net.weight) is nn.Parameter


def test_models_that_differ_fail_on_all_ranks(ranks):
    assert all(ranks(2, _differ))


def _planned():
    net = make_net()
    planned = tessera.plan(net, ranks=tessera.size(), rank=tessera.rank(), shares_memory=tessera.size() > 1, unit_bytes=2000)
    sharded = tessera.fully_shard(net, unit_bytes=2000)
    optimizer = tessera.ShardedOptimizer(sharded, torch.optim.AdamW(net.parameters()))
    for step in range(2):
        optimizer.zero_grad()
        (loss_of(sharded, my_rows(batch(step))) + sharded.unused.sum()).backward()
        optimizer.step()
    kept = ("parameters", "gradients", "optimizer_state", "master_weights", "offloaded")
    return [(planned.rank.memory[name], optimizer.memory()[name]) for name in kept], planned


@pytest.mark.parametrize("size", [1, 2, 3])
def test_plan(ranks, size):
    for pairs, planned in ranks(size, _planned):
        assert all(planned == measured for planned, measured in pairs), pairs
        assert planned.parameters == sum(param.numel() for param in make_net().parameters())
        assert sum(unit.numel for unit in planned.units) >= planned.parameters and planned.fullest.kept >= planned.rank.kept
    with torch.device("meta"):
        assert tessera.plan(nn.Linear(1000, 1000), ranks=4, level="os_g", state_tensors=0).rank.bytes_sent > 0
    with pytest.raises(ValueError, match="ranks"):
        tessera.plan(make_net(), ranks=0)


def test_the_cpu_may_have_an_index():
    net = make_net()
    sharded = tessera.fully_shard(net, device=torch.device("cpu:0"))
    loss_of(sharded, batch(0)).backward()
    assert sharded.full_grad(net.head.weight).device == torch.device("cpu")

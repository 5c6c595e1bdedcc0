"""Paddle's interface."""

import pytest
import torch
from torch import nn

import tessera
from models import batch, loss_of, make_net, my_rows, train_alone
from tessera.paddle import (ClipGradByGlobalNorm, ColWiseParallel, Partial, PrepareLayerInput, PrepareLayerOutput, ProcessMesh,
                            ReduceType, Replicate, RowWiseParallel, SequenceParallelBegin, SequenceParallelDisable,
                            SequenceParallelEnable, SequenceParallelEnd, Shard, get_mesh, group_sharded_parallel,
                            load_group_sharded_model, parallelize, save_group_sharded_model, set_mesh, shard_dataloader,
                            shard_tensor)

LEVELS = ("os", "os_g", "p_g_os")


def _make(level, **options):
    net = make_net()
    return group_sharded_parallel(net, torch.optim.AdamW(net.parameters(), lr=1e-2), level, fused=False, **options)


def _train(model, optimizer, steps):
    for step in steps:
        loss_of(model, my_rows(batch(step))).backward()
        optimizer.step()
        optimizer.clear_grad()
    return model.full_state()


def _parity():
    states = []
    for level in LEVELS:
        for options in ({}, {"segment_size": 0, "buffer_max_size": 500}, {"offload": True}, {"sync_comm": True}):
            states.append(_train(*_make(level, **options)[:2], range(4)))
    return states


@pytest.mark.parametrize("size", [1, 2])
def test_parity(ranks, size):
    want, _ = train_alone(lambda params: torch.optim.AdamW(params, lr=1e-2), 4, size)
    for states in ranks(size, _parity):
        for state in states:
            for key, value in want.items():
                assert torch.equal(state[key], value), key


def _save(path):
    model, optimizer, scaler = _make("p_g_os", scaler=tessera.GradScaler(init_scale=4.0))
    _train(model, optimizer, range(2))
    save_group_sharded_model(model, path, optimizer)
    want = _train(model, optimizer, range(2, 4))
    for level in LEVELS:
        other, its, loaded = _make(level, scaler=tessera.GradScaler())
        load_group_sharded_model(other, path, its)
        assert loaded.get_scale() == 4.0
        for key, value in _train(other, its, range(2, 4)).items():
            assert torch.equal(value, want[key]), (level, key)
    return True


def test_save(ranks, tmp_path):
    assert all(ranks(2, _save, tmp_path / "model"))
    files = list((tmp_path / "model").glob("model-*.safetensors"))
    assert files


def _clips():
    model, optimizer, _ = _make("os_g", grad_clip=ClipGradByGlobalNorm(0.01))
    return _train(model, optimizer, range(2))["norm.weight"]


def test_clipping(ranks):
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        for part in batch(step).view(2, -1, 6):
            (loss_of(net, part) / 2).backward()
        norm = nn.utils.get_total_norm([param.grad for param in net.parameters() if param.grad is not None])
        for param in net.parameters():
            if param.grad is not None:
                param.grad.mul_(0.01 / max(norm, 0.01))
        optimizer.step()
    for got in ranks(2, _clips):
        torch.testing.assert_close(got, net.norm.weight.detach())


def _refusals():
    with pytest.raises(ValueError, match="level must be"):
        _make("stage3")
    with pytest.raises(ValueError, match="GE than 0"):
        _make("os_g", buffer_max_size=-1)
    with pytest.raises(ValueError, match="none that is 'Conv9'"):
        _make("p_g_os", exclude_layer=["Conv9"])
    net = make_net()
    with pytest.raises(NotImplementedError, match="elementwise; got LBFGS"):
        group_sharded_parallel(net, torch.optim.LBFGS(net.parameters()), "os_g")
    with pytest.raises(TypeError, match="tessera.GradScaler"):
        _make("os_g", scaler=torch.amp.GradScaler("cpu"))
    model, optimizer, _ = _make("p_g_os", segment_size=0, exclude_layer=["LayerNorm", "block.0"])
    with pytest.raises(RuntimeError, match="minimize"):
        optimizer.minimize(None)
    optimizer.set_lr(0.5)
    assert optimizer.get_lr() == 0.5
    with pytest.raises(ValueError, match="wrapped with"):
        save_group_sharded_model(model.module, "somewhere")
    return True


def test_refusals(ranks):
    assert all(ranks(2, _refusals))


def _excluded_by_id():
    net = make_net()
    layer = net.block[0]
    model, optimizer, _ = group_sharded_parallel(net, torch.optim.SGD(net.parameters(), lr=0.1), "p_g_os", segment_size=0,
                                                 exclude_layer=["LayerNorm", id(layer)])
    with pytest.raises(ValueError, match="must be a list with layers' name or layers' id"):
        _make("p_g_os", exclude_layer="LayerNorm")
    with pytest.raises(ValueError, match="none that is 7"):
        _make("p_g_os", exclude_layer=[7])
    units = {line.split()[-1]: line.split()[3] for line in model.describe().splitlines()[1:]}
    return units["block.0.weight..norm.bias"], units["unused..block.2.bias"]


def test_layers_are_excluded_by_id(ranks):
    assert ranks(2, _excluded_by_id) == [("gradients", "parameters")] * 2  # what is sharded


class _Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        return self.head(self.down(torch.relu(self.up(x))))


_PLANS = {
    "columns and rows": {"embed": RowWiseParallel(), "up": ColWiseParallel(), "do*": RowWiseParallel(),
                         "head": ColWiseParallel(gather_output=True)},
    "weights alone": {"up.weight": ColWiseParallel(gather_output=True), "down.weight": RowWiseParallel(is_input_parallel=False)},
    "sequence": {"embed": [ColWiseParallel(gather_output=True), SequenceParallelBegin()], "up": SequenceParallelDisable(),
                 "head": SequenceParallelEnd()},
    "sequence of one layer": {"norm": SequenceParallelEnable()},
    "hooks": {"up": PrepareLayerInput(lambda mesh: lambda layer, inputs: (inputs[0] * 1,)),
              "down": PrepareLayerOutput(lambda mesh: lambda layer, inputs, output: output * 1)},
}


def _losses(model, optimizer):
    losses = []
    for step in range(3):
        tokens = torch.randint(12, (4, 6), generator=torch.Generator().manual_seed(step))
        getattr(optimizer, "clear_grad", optimizer.zero_grad)()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten() % 5)
        loss.backward()
        optimizer.step()
        losses.append(float(tessera.full_tensor(loss) if loss.is_dist() else loss))
    return losses


def _make_mlp():
    torch.manual_seed(3)
    model = _Mlp()
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def _parallelized(name, level):
    mesh = ProcessMesh(torch.arange(tessera.size()).view(1, -1), ["dp", "mp"])
    model, optimizer = _make_mlp()
    set_mesh(mesh)
    assert get_mesh() is mesh
    model, optimizer = parallelize(model, optimizer, config={"mp_config": {"parallelize_plan": _PLANS[name]},
                                                             "dp_config": {"sharding_level": level}})
    losses = _losses(model, optimizer)
    if "columns" in name:
        assert model.up.weight.placements == [Replicate(), Shard(0)] and model.up.weight.process_mesh == mesh
    return losses


@pytest.mark.parametrize("name", _PLANS)
def test_parallelize(ranks, name):
    want = _losses(*_make_mlp())
    for level in (0, 1) if "columns" in name else (0,):
        for losses in ranks(2, _parallelized, name, level):
            torch.testing.assert_close(losses, want, rtol=1e-5, atol=0)


def _meshes():
    mesh = ProcessMesh([[2, 0, 1], [3, 5, 4]], dim_names=["x", "y"])
    assert mesh[0] == ProcessMesh([2, 0, 1]) and mesh[0].dim_names == ["y"]
    assert mesh[0, 1].ranks == [0] and mesh[:, 1].ranks == [0, 5] and mesh[:, 1].dim_names == ["x"]
    assert mesh[1, :2].ranks == [3, 5] and mesh[-1].ranks == [3, 5, 4] and mesh[:1].shape == [1, 3]
    with pytest.raises(IndexError):
        mesh[0, 1, 2]
    assert mesh != 3 and len({mesh, ProcessMesh([[2, 0, 1], [3, 5, 4]])}) == 1
    one = ProcessMesh(list(range(tessera.size())), ["dp"])
    largest = shard_tensor(torch.ones(2), one, [Partial(ReduceType.kRedMax)])
    assert largest.placements == [Partial("max")] and largest.is_dist() and not torch.ones(1).is_dist()
    assert torch.ones(1).placements is None and torch.ones(1).process_mesh is None
    with pytest.raises(ValueError, match="no dim|pp"):
        parallelize(_Mlp(), mesh=one, config={"pp_config": {"split_spec": "up"}})
    with pytest.raises(ValueError, match="matches none"):
        parallelize(_Mlp(), mesh=one, config={"mp_config": {"parallelize_plan": {"middle": ColWiseParallel()}}})
    batches = [{"x": [torch.zeros(6, 2), {"more": torch.ones(12)}], "y": (torch.ones(6), "text")}]
    loader = shard_dataloader(batches, [one, one], input_keys=["x", "y"], shard_dims="dp")
    (batch,) = loader
    assert batch["x"][0].placements == [Shard(0)] and batch["y"][1] == "text"
    assert tessera.to_local(batch["x"][1]["more"]).shape == (2,)
    return True


def test_meshes_and_batches(ranks):
    assert all(ranks(6, _meshes))

"""Tensor and context parallelism, functions on DistTensors, and copies of them."""

import copy
import pickle

import pytest
import torch
from torch import nn

import tessera
from tessera import (ColwiseParallel, ContextParallel, DeviceMesh, Partial, PrepareModuleInput, PrepareModuleOutput, Replicate,
                     RowwiseParallel, SequenceParallel, Shard, distribute, full_tensor, local_map, parallelize_module)


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(8, 12)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


_PLANS = {
    "tensor": {"embed": RowwiseParallel(), "blocks.*.up": ColwiseParallel(), "**.down": RowwiseParallel(),
               "head": ColwiseParallel(output=Replicate())},
    "sequence": {"embed": RowwiseParallel(output=Shard(1)), "blocks.*.norm": SequenceParallel(),
                 "blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel(output=Shard(1)),
                 "head": ColwiseParallel(output=Replicate())},
    "prepared": {"blocks.0": PrepareModuleInput(desired_input=Shard(0)), "blocks.1": PrepareModuleOutput(Replicate())},
}


def _losses(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
    losses = []
    for step in range(3):
        tokens = torch.randint(12, (4, 6), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(full_tensor(loss) if tessera.is_dist(loss) else loss))
    return losses


def _model():
    torch.manual_seed(3)
    return _Model()


def _parallelized(name, shape):
    mesh = DeviceMesh.over_world(shape, ["dp", "tp"][-len(shape):])
    model = parallelize_module(_model(), mesh, _PLANS[name], mesh_dim="tp")
    if name == "tensor":
        assert tessera.placements_of(model.blocks[1].up.weight)[-1] == Shard(0)
        assert tessera.placements_of(model.blocks[1].down.weight)[-1] == Shard(1)
    losses = _losses(model)
    tessera.unwrap(model)
    assert not any(map(tessera.is_dist, model.parameters()))
    return losses


@pytest.mark.parametrize("shape", [(2,), (3,), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", _PLANS)
def test_parallelize_module(ranks, name, shape):
    want = _losses(_model())
    for losses in ranks(torch.Size(shape).numel(), _parallelized, name, shape):
        torch.testing.assert_close(losses, want, rtol=1e-5, atol=0)


def _refused_plans():
    mesh = DeviceMesh.over_world()
    for plan, error, text in (({"middle": ColwiseParallel()}, ValueError, "'middle' matches none of"),
                              ({"**.up": ColwiseParallel(), "blocks.0.*": PrepareModuleInput()}, ValueError, "two entries"),
                              ({"blocks.0.norm": ColwiseParallel()}, ValueError, "got 'blocks.0.norm', a LayerNorm"),
                              ({"head": "colwise"}, TypeError, "needs a style"),
                              ({"head": [ColwiseParallel(), RowwiseParallel()][tessera.rank()]}, ValueError, "the same plan")):
        model = _model()
        with pytest.raises(error, match=text):
            parallelize_module(model, mesh, plan)
        assert not any(map(tessera.is_dist, model.parameters()))
    with pytest.raises(ValueError, match="needs mesh_dim"):
        parallelize_module(_model(), DeviceMesh.over_world((1, 2)), {})
    return True


def test_plans_are_refused(ranks):
    assert all(ranks(2, _refused_plans))


def _local_map():
    mesh = DeviceMesh.over_world()
    values = torch.arange(30.0).view(5, 6)
    x = distribute(values, mesh, [Shard(0)]).requires_grad_()
    scaled = local_map(lambda rows, factor, *, offset: {"out": rows.softmax(-1) * factor + offset, "text": "kept"},
                       [[Shard(0)], None], [[Shard(0)], None])
    result = scaled(x, 0.5, offset=1.0)
    assert result["text"] == "kept" and tessera.placements_of(result["out"]) == [Shard(0)]
    want = values.clone().requires_grad_()
    expected = want.softmax(-1) * 0.5 + 1.0
    assert torch.equal(full_tensor(result["out"]), expected)
    (full_tensor(result["out"]) ** 2).sum().backward()
    (expected ** 2).sum().backward()
    torch.testing.assert_close(full_tensor(x.grad), want.grad)
    total = local_map(torch.sum, [Partial()], [[Shard(0)]])(x.detach())
    assert float(full_tensor(total)) == values.sum()
    with pytest.raises(ValueError, match="laced|placement"):
        local_map(torch.sum, [Partial()], [[Shard(1)]])(x)
    moved = local_map(lambda rows: rows.sum(0), [Shard(0)], [[Shard(1)]], redistribute_inputs=True)(x)
    torch.testing.assert_close(full_tensor(moved), values.sum(0))
    return True


@pytest.mark.parametrize("size", [2, 3])
def test_local_map(ranks, size):
    assert all(ranks(size, _local_map))


def _rule():
    library = torch.library.Library("tessera_test", "DEF")
    library.define("shifted(Tensor x, float by) -> Tensor")
    library.impl("shifted", lambda x, by: x.tanh() + by, "CPU")
    library.impl("shifted", lambda x, by: torch.empty_like(x), "Meta")
    seen = []

    def rule(inputs, outputs, arguments, ranks):
        seen.append((inputs, outputs, arguments["by"], ranks))
        return [([Shard(dim)], [Shard(dim)]) for dim in range(len(inputs[0]))]

    tessera.register_rule("tessera_test::shifted", rule)
    mesh = DeviceMesh.over_world()
    values = torch.arange(20.0).view(5, 4)
    with tessera.StrictOperators():
        result = torch.ops.tessera_test.shifted(distribute(values, mesh, [Shard(1)]), 2.5)
    assert tessera.placements_of(result) == [Shard(1)] and torch.equal(full_tensor(result), values.tanh() + 2.5)
    assert seen[0] == ([[5, 4]], [[5, 4]], 2.5, tessera.size())
    with pytest.raises(ValueError, match="rule"):
        tessera.register_rule("tessera_test::shifted", rule)
    with pytest.raises(ValueError, match="nothing"):
        tessera.register_rule("tessera_test::nothing", rule)
    return True


def test_rule(ranks):
    assert all(ranks(2, _rule))


def _attention(rotate, balance):
    mesh = DeviceMesh.over_world((), ["cp"])
    torch.manual_seed(1)
    whole = [torch.randn(2, 2, 12, 8, requires_grad=True) for _ in range(3)]
    want = nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
    want.square().sum().backward()
    parts = [tessera.balance_sequence(each.detach(), 2, mesh) if balance else each.detach() for each in whole]
    parts = [distribute(each, mesh, [Shard(2)]).requires_grad_() for each in parts]
    with ContextParallel(mesh, mesh_dim="cp", load_balance=balance, rotate=rotate), tessera.StrictOperators():
        out = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
    assert tessera.placements_of(out) == [Shard(2)]
    out.square().sum().backward()
    for got, expected in [(out, want)] + [(part.grad, each.grad) for part, each in zip(parts, whole)]:
        got = full_tensor(got.detach())
        got = tessera.unbalance_sequence(got, 2, mesh) if balance else got
        torch.testing.assert_close(got, expected.detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="rotate"):
        ContextParallel(mesh, rotate="both")
    return True


@pytest.mark.parametrize("rotate", ["ring", "all_gather"])
@pytest.mark.parametrize("balance", [False, True])
def test_context_parallel(ranks, rotate, balance):
    assert all(ranks(2, _attention, rotate, balance))


def _made():
    mesh = DeviceMesh.over_world()
    assert torch.equal(full_tensor(tessera.dist_zeros([5, 2], mesh, [Shard(0)])), torch.zeros(5, 2))
    assert torch.equal(full_tensor(tessera.dist_ones([5], mesh, Shard(0), dtype=torch.int64)), torch.ones(5, dtype=torch.int64))
    assert tessera.dist_full([3], 7, mesh, []).dtype == torch.int64
    full = tessera.dist_full([3], 2.5, mesh, [Shard(0)], requires_grad=True)
    assert full.requires_grad and full_tensor(full).tolist() == [2.5] * 3
    assert tessera.dist_empty([4, 4], mesh, [Shard(1)]).shape == (4, 4)
    for make, like in ((tessera.dist_rand, torch.rand), (tessera.dist_randn, torch.randn)):
        made = make([5, 3], mesh, [Shard(0)], generator=torch.Generator().manual_seed(2))
        assert torch.equal(full_tensor(made), like(5, 3, generator=torch.Generator().manual_seed(2)))
    return True


def test_factories(ranks):
    assert all(ranks(2, _made))


def _copies():
    mesh = DeviceMesh.over_world((), ["tp"])
    module = parallelize_module(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 5)), mesh,
                                {"0": ColwiseParallel(), "1": RowwiseParallel()})
    module(torch.ones(3, 6)).sum().backward()
    twin = copy.deepcopy(module)
    for one, other in zip(module.parameters(), twin.parameters()):
        assert one is not other and isinstance(other, nn.Parameter)
        assert tessera.placements_of(one) == tessera.placements_of(other)
        assert torch.equal(full_tensor(one), full_tensor(other))
    assert torch.equal(full_tensor(module(torch.ones(3, 6))), full_tensor(twin(torch.ones(3, 6))))
    before = full_tensor(module[0].weight).clone()
    with torch.no_grad():
        twin[0].weight.add_(1)
    assert torch.equal(full_tensor(module[0].weight), before)
    averaged = torch.optim.swa_utils.AveragedModel(module)
    averaged.update_parameters(module)
    with torch.no_grad():
        module[0].weight.add_(2)
    averaged.update_parameters(module)
    torch.testing.assert_close(full_tensor(averaged.module[0].weight), before + 1)
    plain = copy.deepcopy(distribute(torch.ones(4), mesh, [Shard(0)]))
    assert tessera.is_dist(plain) and full_tensor(plain).tolist() == [1.0] * 4
    with pytest.raises(RuntimeError, match="leaves"):
        copy.deepcopy(module[0].weight * 2)

    same = pickle.loads(pickle.dumps({"mesh": mesh, "placements": [Shard(1, 2), Shard(0), Replicate(), Partial("avg")]}))
    assert same["mesh"] == mesh and hash(same["mesh"]) == hash(mesh) and same["mesh"].dim_names == ["tp"]
    assert same["placements"] == [Shard(1, 2), Shard(0), Replicate(), Partial("avg")]
    assert mesh != "mesh" and mesh in {same["mesh"]: 1} and mesh != DeviceMesh([0])

    torch.manual_seed(4)
    weight = distribute(torch.empty(50, 4), mesh, [Shard(0)])
    nn.init.trunc_normal_(weight, std=0.5, a=-0.3, b=0.3)
    torch.manual_seed(4)
    assert torch.equal(full_tensor(weight), nn.init.trunc_normal_(torch.empty(50, 4), std=0.5, a=-0.3, b=0.3))
    made = weight.new_tensor([1, 2])
    assert made.dtype == weight.dtype and made.tolist() == [1.0, 2.0] and not tessera.is_dist(made)
    return True


def test_copies_and_values(ranks):
    assert all(ranks(2, _copies))

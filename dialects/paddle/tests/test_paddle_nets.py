"""Small models trained on meshes: data, tensor, sequence and pipeline parallel, alone and together, as one process trains."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tessera
from tessera.paddle import (Partial, ProcessMesh, Replicate, Shard, ShardingStage1, ShardingStage2, ShardingStage3,
                            dtensor_from_local, dtensor_to_local, load_state_dict, reshard, save_state_dict, shard_dataloader,
                            shard_layer, shard_optimizer, shard_scaler, shard_tensor, unshard_dtensor)

R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)
LOWER, UPPER = [[0, 1], [2, 3]], [[4, 5], [6, 7]]


def _close(have, want, name=""):
    # A sum of n float64 terms in another order is off by at most n of its roundings; the sums here have below 1000 terms.
    torch.testing.assert_close(have.detach(), want.detach(), rtol=1e-12, atol=1e-13, msg=lambda text: f"{name}: {text}")


def _is_member(tensor):
    return tensor.process_mesh.contains(tessera.rank())


class _Net(nn.Module):
    """Two layers; the second may be on another mesh, to which `between` brings its input."""

    def __init__(self, between=None, recompute=False):
        super().__init__()
        self.linear_0 = nn.Linear(12, 16, dtype=torch.float64)
        self.linear_1 = nn.Linear(16, 10, dtype=torch.float64)
        self.between, self.recompute = between, recompute

    def _middle(self, x):
        return torch.relu(self.linear_0(x))

    def forward(self, x):
        y = checkpoint(self._middle, x, use_reentrant=False) if self.recompute else self._middle(x)
        return self.linear_1(y if self.between is None else reshard(y, *self.between))


def _make(*options):
    torch.manual_seed(3)
    return _Net(*options)


def _data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.rand(16, 12, dtype=torch.float64, generator=generator), torch.rand(16, 10, dtype=torch.float64,
                                                                                    generator=generator)


def _train(model, optimizer, place=lambda x: x, steps=4):
    for step in range(steps):
        image, label = _data(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(place(image)), label)
        loss.backward()
        optimizer.step()
    return loss


# Ranks, the meshes of the two layers, the placements of their weights (of [out, in]), biases, the input, and what is between.
_NETS = {
    "one rank": (1, [0], [0], [R], [R], [R], [R], [R], None),
    "dp": (2, [0, 1], [0, 1], [R], [R], [R], [R], [S0], None),
    "mp": (2, [0, 1], [0, 1], [S0], [S0], [S1], [R], [R], None),
    "mp of three": (3, [0, 1, 2], [0, 1, 2], [S0], [S0], [S1], [R], [R], None),
    "pp": (2, [0], [1], [R], [R], [R], [R], [R], [R]),
    "pp, uneven": (4, [0, 1, 2], [3], [S0], [R], [R], [R], [S0], [R]),
    "dp mp": (4, LOWER, LOWER, [R, S0], [R, R], [R, S1], [R, R], [S0, R], None),
    "dp mp pp": (8, LOWER, UPPER, [R, S0], [R, R], [R, S1], [R, R], [S0, R], [S0, S1]),
    "mp, overlapping": (4, [0, 1, 2], [1, 2, 3], [S0], [S0], [S1], [R], [R], [S1]),
}


def _sharded(name, recompute=False, make=_make):
    _, first, second, w0, b0, w1, b1, x, between = _NETS[name]
    first, second = ProcessMesh(first), ProcessMesh(second)

    def place(name, layer, mesh):
        if name == "linear_0":
            layer.weight, layer.bias = shard_tensor(layer.weight, first, w0), shard_tensor(layer.bias, first, b0)
        elif name == "linear_1":
            layer.weight, layer.bias = shard_tensor(layer.weight, second, w1), shard_tensor(layer.bias, second, b1)

    model = shard_layer(make(None if between is None else (second, between), recompute), first, place)
    return model, lambda image: shard_tensor(image, first, x)


def _nets(name, recompute, kind, path):
    alone = _make()
    want = _train(alone, getattr(torch.optim, kind)(alone.parameters(), lr=0.01))
    model, place = _sharded(name, recompute)
    optimizer = shard_optimizer(getattr(torch.optim, kind)(model.parameters(), lr=0.01))
    loss = _train(model, optimizer, place)
    if _is_member(loss):
        _close(unshard_dtensor(loss), want, "loss")
    for key, parameter in alone.named_parameters():
        have = model.get_parameter(key)
        if _is_member(have):
            _close(unshard_dtensor(have), parameter, key)
            _close(unshard_dtensor(have.grad), parameter.grad, key)
            assert have.grad.placements == have.placements and have.grad.process_mesh == have.process_mesh
    # Each rank's parts come back from a checkpoint.
    optimizer.clear_grad()
    state = {**model.state_dict(), **{f"optimizer.{key}": value for key, value in optimizer.state_dict().items()
                                      if value.is_dist()}}
    assert kind != "AdamW" or "optimizer.linear_1.weight.exp_avg" in state
    before = {key: dtensor_to_local(value).clone() for key, value in state.items() if _is_member(value)}
    save_state_dict(state, path)
    with torch.no_grad():
        for value in state.values():
            value.add_(1)
    assert load_state_dict(state, path) == []
    for key, value in before.items():
        assert torch.equal(dtensor_to_local(state[key]), value), key
    return True


@pytest.mark.parametrize("name, recompute, kind", [*((name, False, "AdamW") for name in _NETS), ("mp", True, "SGD"),
                                                   ("dp mp pp", True, "SGD")])
def test_nets(ranks, tmp_path, name, recompute, kind):
    assert all(ranks(_NETS[name][0], _nets, name, recompute, kind, tmp_path / "state"))


class _SequenceNet(nn.Module):
    """Heads, two layers, a norm on parts of the sequence, and two layers on the next mesh."""

    def __init__(self, first=None, second=None, on_parts=(), whole=()):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.norm = nn.LayerNorm(16, eps=1e-4, dtype=torch.float64)
        self.weights = nn.ParameterList([torch.randn(sizes, dtype=torch.float64, generator=generator) / 4
                                         for sizes in ((4, 32), (32, 4), (16, 32), (32, 10))])
        self.first, self.second, self.on_parts, self.whole = first, second, on_parts, whole
        if first is not None:
            for index, (mesh, cut) in enumerate(zip((first, first, second, second), (S1, S0, S1, S0))):
                self.weights[index] = nn.Parameter(shard_tensor(self.weights[index].detach(), mesh, [R] * (mesh.ndim - 1) + [cut]))
            for name, parameter in list(self.norm.named_parameters()):
                setattr(self.norm, name, nn.Parameter(shard_tensor(parameter.detach(), first, [])))

    def forward(self, x):
        y = x.reshape(4, 6, 4, 4).transpose(1, 2) @ self.weights[0] @ self.weights[1]
        y = y.permute(2, 0, 1, 3).reshape(6, 4, 16)
        if self.first is not None:
            y = reshard(y, self.first, self.on_parts)
        y = self.norm(y)
        if self.first is not None:
            y = reshard(y, self.second, self.whole)
        return (y @ self.weights[2] @ self.weights[3]).transpose(0, 1)


def _sequence_nets(size):
    def train(net, place=lambda x: x):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.001)
        for step in range(3):
            image, label = torch.randn(4, 6, 16, dtype=torch.float64), torch.randn(4, 6, 10, dtype=torch.float64)
            optimizer.zero_grad()
            loss = F.mse_loss(net(place(image)), label)
            loss.backward()
            optimizer.step()
        return loss

    torch.manual_seed(1)
    alone = _SequenceNet()
    want = train(alone)
    torch.manual_seed(1)
    if size == 4:
        first, parts = ProcessMesh([0, 1]), ProcessMesh([2, 3])
        net = _SequenceNet(first, parts, [S0], [R])
        loss = train(net)
    else:
        first = ProcessMesh(LOWER)
        net = _SequenceNet(first, ProcessMesh(UPPER), [S1, S0], [S1, R])
        loss = train(net, lambda image: shard_tensor(image, first, [S0, R]))
    if _is_member(loss):
        _close(unshard_dtensor(loss), want, "loss")
    for (key, parameter), have in zip(alone.named_parameters(), net.parameters()):
        if _is_member(have):
            _close(unshard_dtensor(have), parameter, key)
    return True


@pytest.mark.parametrize("size", [4, 8])
def test_nets_on_parts_of_a_sequence(ranks, size):
    assert all(ranks(size, _sequence_nets, size))


def _in_framework():
    """Hooks, gradients that are cleared, lost or zero, and functions of autograd."""
    model, place = _sharded("mp")
    seen = []
    weight = model.linear_0.weight
    weight.register_hook(lambda grad: seen.append(("hook", grad.placements)))
    weight.register_post_accumulate_grad_hook(lambda leaf: seen.append(("after", leaf.grad.placements)))
    image, label = _data(0)
    loss_of = lambda net, x=image: F.mse_loss(net(x), label)
    loss_of(model).backward()
    assert seen[0][0] == "hook" and seen[1] == ("after", [S0])
    loss_of(model).backward()
    alone = _make()
    for _ in range(2):
        loss_of(alone).backward()
    _close(unshard_dtensor(weight.grad), alone.linear_0.weight.grad)
    weight.grad.zero_()
    assert weight.grad.placements == [S0] and not unshard_dtensor(weight.grad).any()
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    # Half of the result is lost: its part of the gradient is zero.
    for net in (alone, model):
        net.zero_grad()
        F.mse_loss(net(image).split(8)[0], label.split(8)[0]).backward()
    for key, parameter in alone.named_parameters():
        _close(unshard_dtensor(model.get_parameter(key).grad), parameter.grad, key)

    class Relu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clamp(min=0)

        @staticmethod
        def backward(ctx, grad):
            return grad * (ctx.saved_tensors[0] > 0)

    packed = []
    for net, x in ((alone, image), (model, place(image))):
        net.zero_grad()
        pack = lambda tensor: (packed.append(tensor.is_dist()), tensor)[1]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            F.mse_loss(net.linear_1(Relu.apply(net.linear_0(x))), label).backward()
    assert any(packed) and not all(packed)
    for key, parameter in alone.named_parameters():
        _close(unshard_dtensor(model.get_parameter(key).grad), parameter.grad, key)
    # A tensor that was changed after it was saved.
    mesh = ProcessMesh([0, 1])
    x = shard_tensor(torch.rand(64, 32), mesh, [S0], stop_gradient=False)
    y = shard_tensor(torch.rand(32, 48), mesh, [R], stop_gradient=False)
    first, second = x + x, y + y
    out = first @ second
    first.add_(first)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    return True


def test_gradients_and_hooks(ranks):
    assert all(ranks(2, _in_framework))


def _locals():
    """Gradients of conversions lie where the tensors do."""
    mesh, seen = ProcessMesh([[0, 1]], ["x", "y"]), []
    note = lambda tensor: tensor.register_hook(lambda grad: seen.append((grad.process_mesh, grad.placements)))
    leaf = torch.ones(10, 20, requires_grad=True)
    local = leaf + 3
    dist = dtensor_from_local(local, mesh, [S0, R])
    assert not local.is_dist() and dist.process_mesh == mesh and dist.placements == [S0, R] and dist.shape == (10, 20)
    for tensor in (local, dist):
        note(tensor)
    (dist * 3).backward(shard_tensor(torch.ones(10, 20), mesh, [S0, R]))
    assert seen == [(mesh, [S0, R]), (None, None)] and torch.equal(leaf.grad, torch.full((10, 20), 3.0))
    seen.clear()
    line = ProcessMesh([0, 1])
    summed = shard_tensor(torch.ones(10, 20), line, [P], stop_gradient=False)
    local = dtensor_to_local(summed)
    note(summed)
    note(local)
    (local * 3).sum().backward()
    assert seen[0] == (None, None) and seen[1][0] == line
    # A masked loss on local rows, and its sum over the ranks.
    pred, label = [(torch.tensor([[1.0, 2], [4, 4]]), torch.tensor([[1], [3]])),
                   (torch.tensor([[2.0, 2], [7, 8]]), torch.tensor([[2], [-100]]))][tessera.rank()]

    def loss_of(pred, label):
        mask = (label != -100).flatten().float()
        return ((pred[:, :1] + 1 - label).abs().flatten() * mask).sum() / mask.sum()

    views = [dtensor_to_local(dtensor_from_local(each, line, [S0])) for each in (pred, label)]
    assert torch.equal(loss_of(*views), loss_of(pred, label))
    return float(unshard_dtensor(dtensor_from_local(loss_of(*views), line, [P])))


def test_local_parts(ranks):
    # |1 + 1 - 1| and |4 + 1 - 3| on the first rank, |2 + 1 - 2| alone on the second.
    assert ranks(2, _locals) == [1.5 + 1.0] * 2


def _double():
    """The gradient of a Laplace operator, a norm, and rows of the boundary."""
    mesh = ProcessMesh(list(range(tessera.size())))

    def run(place_weight, place_input, whole):
        torch.manual_seed(4)
        weights = [place_weight(torch.rand(sizes, dtype=torch.float64) - 0.5, index)
                   for index, sizes in enumerate(((2, 7), (7, 7), (7, 1)))]
        points = place_input(torch.rand(12, 2, dtype=torch.float64))
        net = lambda x: torch.tanh(torch.tanh(x @ weights[0]) @ weights[1]) @ weights[2]
        out = net(points)
        (slope,) = torch.autograd.grad(out.sum(), points, create_graph=True)
        laplace = sum(torch.autograd.grad(slope[:, dim].sum(), points, create_graph=True)[0][:, dim] for dim in range(2))
        loss = laplace.norm() + (out.index_select(0, torch.tensor([0, 3, 11])) - 0.5).norm()
        loss.backward()
        return [whole(tensor).detach() for tensor in (loss, *(weight.grad for weight in weights), points.grad)]

    want = run(lambda tensor, _: tensor.requires_grad_(), lambda tensor: tensor.requires_grad_(), lambda tensor: tensor)
    for cuts, rows in itertools.product(([R, R, R], [S1, S0, R], [S0, S1, S0]), (R, S0)):
        have = run(lambda tensor, index: shard_tensor(tensor, mesh, [cuts[index]], stop_gradient=False),
                   lambda tensor: shard_tensor(tensor, mesh, [rows], stop_gradient=False), unshard_dtensor)
        for index, (a, b) in enumerate(zip(have, want)):
            _close(a, b, (cuts, rows, index))
    return True


@pytest.mark.parametrize("size", [1, 2, 3])
def test_second_derivatives(ranks, size):
    assert all(ranks(size, _double))


def _losses():
    """Cross entropy over cut rows, cut classes and both."""
    mesh = ProcessMesh(LOWER)
    logits = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    label = torch.tensor([[0, 3, 1], [2, 2, -100]])

    def run(data, target):
        loss = F.cross_entropy(data.flatten(0, 1), target.flatten(), reduction="none")
        (loss.sum() / 5).backward()
        return loss

    whole = logits.clone().requires_grad_()
    want = run(whole, label)
    for places, rows in (([S0, R], [S0, R]), ([R, S2], [R, R]), ([S0, S2], [S0, R]), ([S2, S2], [R, R]), ([S1, S2], [S1, R])):
        data = shard_tensor(logits, mesh, places, stop_gradient=False)
        have = run(data, shard_tensor(label, mesh, rows))
        _close(unshard_dtensor(have), want, places)
        _close(unshard_dtensor(data.grad), whole.grad, places)
        assert data.grad.placements == places
    return True


def test_cross_entropy(ranks):
    assert all(ranks(4, _losses))


def _linear(kind=torch.float64, sizes=(10, 10)):
    torch.manual_seed(6)
    return nn.Linear(*sizes, dtype=kind)


def _columns(name, layer, mesh):
    cut = [R] * (mesh.ndim - 1) + [S0]
    layer.weight, layer.bias = shard_tensor(layer.weight, mesh, cut), shard_tensor(layer.bias, mesh, cut)


def _steps(layer, optimizer, batch, steps=5):
    for _ in range(steps):
        layer(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _optimizers(stage, grouped):
    mesh = ProcessMesh(torch.arange(tessera.size()).view(-1, 2), ["x", "y"])
    torch.manual_seed(9)
    batch = torch.rand(10, 10, dtype=torch.float64)
    groups = lambda layer: ([{"params": [layer.weight], "lr": 0.02}, {"params": [layer.bias]}] if grouped
                            else layer.parameters())
    alone = _linear()
    _steps(alone, torch.optim.AdamW(groups(alone), lr=0.01), batch)
    layer = shard_layer(_linear(), mesh, _columns)
    shard_fn = {"none": None, "function": lambda name, parameter, state: shard_tensor(
        state, parameter.process_mesh, parameter.placements)}.get(stage)
    if not isinstance(stage, str):
        shard_fn = stage("x", mesh)
    optimizer = shard_optimizer(torch.optim.AdamW(groups(layer), lr=0.01), shard_fn)
    _steps(layer, optimizer, shard_tensor(batch, mesh, [S0, R]))
    for key, parameter in alone.named_parameters():
        have = layer.get_parameter(key)
        _close(unshard_dtensor(have), parameter, key)
        if isinstance(stage, str):
            assert have.placements == [R, S0]
            for name, state in optimizer.state_dict().items():
                if name.startswith(key + ".exp_avg"):
                    assert state.placements == [R, S0] and dtensor_to_local(state).shape[0] * 2 == state.shape[0]
    plain = _linear()
    _steps(plain, shard_optimizer(torch.optim.AdamW(groups(plain), lr=0.01)), batch)
    assert torch.equal(plain.weight, alone.weight)
    return True


@pytest.mark.parametrize("stage", ["none", "function", ShardingStage1, ShardingStage2, ShardingStage3])
@pytest.mark.parametrize("size, grouped", [(2, False), (4, False), (4, True)])
def test_optimizers(ranks, size, stage, grouped):
    assert all(ranks(size, _optimizers, stage, grouped))


def _lazy(kind):
    meshes = {"dp": ([0, 1], [0, 1]), "pp": ([0], [1]), "mp": ([0, 1], [0, 1])}[kind]
    weights, biases = ([S0], [S0]) if kind == "mp" else ([R], [R])
    for size in (70, 71):  # smaller tensors are not deferred
        eager = _linear(torch.float32, (size, size))
        with tessera.DeferredInit():
            layer = _linear(torch.float32, (size, size))
        assert tessera.is_deferred(layer.weight)

        def place(name, its, mesh):
            its.weight = shard_tensor(its.weight, ProcessMesh(meshes[0]), weights)
            its.bias = shard_tensor(its.bias, ProcessMesh(meshes[1]), biases)

        shard_layer(layer, ProcessMesh([0, 1]), place)
        for have, want in ((layer.weight, eager.weight), (layer.bias, eager.bias)):
            if _is_member(have):
                assert torch.equal(unshard_dtensor(have).detach(), want.detach())
        rows = -(-size // 2) if tessera.rank() == 0 else size // 2
        if kind == "mp":
            assert dtensor_to_local(layer.weight).shape == (rows, size) and dtensor_to_local(layer.bias).shape == (rows,)
    return True


@pytest.mark.parametrize("kind", ["dp", "pp", "mp"])
def test_lazy_layers(ranks, kind):
    assert all(ranks(2, _lazy, kind))


def _precision(name):
    """Integers that bfloat16 holds, as are all sums of them: so the results do not depend on the order of sums."""
    def integers(net):
        generator = torch.Generator().manual_seed(5)
        for parameter in net.float().parameters():
            parameter.data.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
        return net

    def step(net, optimizer, scaler, image, rows=lambda x: x):
        with torch.autocast("cpu", torch.bfloat16):
            out = net(rows(image))
            assert out.dtype == torch.bfloat16
            loss = out.float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    image = torch.randint(0, 2, (16, 12), generator=torch.Generator().manual_seed(6)).float()
    alone = integers(_make())
    step(alone, torch.optim.SGD(alone.parameters(), lr=0.125), torch.amp.GradScaler("cpu", init_scale=1024.0), image)
    model, place = _sharded(name, make=lambda *options: integers(_make(*options)))
    step(model, shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.125)),
         shard_scaler(tessera.GradScaler(init_scale=1024.0)), image, place)
    for key, parameter in alone.named_parameters():
        have = model.get_parameter(key)
        assert not _is_member(have) or torch.equal(unshard_dtensor(have), parameter), key
    return True


@pytest.mark.parametrize("name", ["dp", "mp", "mp of three", "dp mp", "pp", "dp mp pp"])
def test_mixed_precision(ranks, name):
    assert all(ranks(_NETS[name][0], _precision, name))


def _overflow(name, key, own):
    """Infinity in one rank's part of a gradient alone: no rank steps, whatever mesh it is in."""
    model, place = _sharded(name)
    before = {key: dtensor_to_local(value).clone() for key, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if own else shard_scaler(tessera.GradScaler(init_scale=8.0))
    stepped = optimizer if own else shard_optimizer(optimizer)
    scales = []
    for infinite in (True, False):
        stepped.zero_grad()
        scaler.scale(model(place(_data(0)[0])).sum()).backward()
        if infinite:
            model.get_parameter(key).grad.view(-1)[-1] = float("inf")
        scaler.step(stepped)
        scaler.update()
        scales.append(scaler.get_scale() if own else scaler.scaler.get_scale())
        for its, value in model.named_parameters():
            is_same = torch.equal(dtensor_to_local(value), before[its])
            assert is_same == infinite or not _is_member(value), its
    return scales


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", ["mp", "pp", "pp, uneven", "mp, overlapping", "dp mp pp"])
def test_an_overflow_on_one_mesh_skips_the_step_on_all(ranks, name, own):
    for key in ("linear_0.weight", "linear_1.weight"):
        assert ranks(_NETS[name][0], _overflow, name, key, own) == [[4.0, 4.0]] * _NETS[name][0]


def _clipped(name):
    alone = _make()
    F.mse_loss(alone(_data(0)[0]), _data(0)[1]).backward()
    want = nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    model, place = _sharded(name)
    F.mse_loss(model(place(_data(0)[0])), _data(0)[1]).backward()
    norm = float(shard_optimizer(torch.optim.SGD(model.parameters())).clip_grad_norm_(0.01))
    assert abs(norm / float(want) - 1) < 1e-6  # it is a float
    for key, parameter in alone.named_parameters():
        have = model.get_parameter(key)
        if _is_member(have):
            _close(unshard_dtensor(have.grad), parameter.grad, key)
    return norm


@pytest.mark.parametrize("name", ["mp", "pp", "pp, uneven", "mp, overlapping", "dp mp", "dp mp pp"])
def test_clipping(ranks, name):
    assert len(set(ranks(_NETS[name][0], _clipped, name))) == 1


class _Mlp(nn.Module):
    def __init__(self, first=None, second=None, everywhere=None):
        super().__init__()
        generator = torch.Generator().manual_seed(8)
        w0, w1, shared = (torch.rand(sizes, dtype=torch.float64, generator=generator) for sizes in ((8, 8), (8, 8), (4, 8)))
        place = lambda tensor, mesh, places: tensor if mesh is None else shard_tensor(tensor, mesh, places)
        self.w0, self.w1 = nn.Parameter(place(w0, first, [R, S1])), nn.Parameter(place(w1, second, [R, S0]))
        self.shared, self.first, self.second = place(shared, everywhere, []), first, second

    def forward(self, x, more=0, scale=1.0):
        on = lambda mesh: self.shared + 0.25 if mesh is None else reshard(self.shared + 0.25, mesh, [R, R])
        y = (x + more * scale + on(self.first)) @ self.w0
        if self.second is not None:
            y = reshard(y, self.second, [S0, S2])
        return (y + on(self.second)) @ self.w1


def _batches(kind):
    generator = torch.Generator().manual_seed(0)
    for index in range(4):
        x, more = torch.rand(2, 2, 4, 8, dtype=torch.float64, generator=generator)
        label = torch.tensor([2.0 * index, 2.0 * index + 1], dtype=torch.float64)
        yield {"global input": (x, label), "multi inputs": {"inputs": [x, more], "label": label},
               "no tensors": {"inputs": [x, more, 2.0], "extra": "text", "label": label}}[kind]


def _loaded(kind):
    def train(model, optimizer, batches):
        for batch in batches:
            if isinstance(batch, dict):
                assert batch.get("extra", "text") == "text"
                out, label = model(*batch["inputs"]), batch["label"]
            else:
                out, label = model(batch[0]), batch[1]
            optimizer.zero_grad()
            loss = F.mse_loss(out.sum((1, 2)), label, reduction="sum") / 1000
            loss.backward()
            optimizer.step()
        return loss

    alone = _Mlp()
    want = train(alone, torch.optim.AdamW(alone.parameters(), lr=0.001), _batches(kind))
    world = ProcessMesh([LOWER, UPPER], ["pp", "dp", "mp"])
    model = _Mlp(world[0], world[1], world)
    meshes = [world[0], world[0], world[1]] if kind == "no tensors" else [world[0], world[1]]
    keys = {"multi inputs": ["inputs", "label"], "no tensors": ["inputs", "extra", "label"]}.get(kind)
    loader = shard_dataloader(list(_batches(kind)), meshes, input_keys=keys, shard_dims="dp")
    loss = train(model, shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.001)), loader)
    if _is_member(loss):
        _close(unshard_dtensor(loss), want)
    for have, parameter in zip(model.parameters(), alone.parameters()):
        if _is_member(have):
            _close(unshard_dtensor(have), parameter)
    return True


@pytest.mark.parametrize("kind", ["global input", "multi inputs", "no tensors"])
def test_loaders_over_two_stages(ranks, kind):
    assert all(ranks(8, _loaded, kind))

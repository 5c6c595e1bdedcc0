"""DistTensors, and Paddle's shard_layer on them."""

import pytest
import torch
from torch import nn

import tessera
import tessera.paddle as dist
from tessera import DeviceMesh, Partial, Replicate, Shard


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(5, 6)
        self.act = nn.ReLU()
        self.down = nn.Linear(6, 3)
        self.register_buffer("shift", torch.arange(3.0))

    def forward(self, x):
        return self.down(self.act(self.up(x))) + self.shift


def _make():
    torch.manual_seed(3)
    return Mlp()


def _batch(step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step))


def _train(model, optimizer, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        model(_batch(step)).square().mean().backward()
        optimizer.step()


def _values(module):
    return {name: (tessera.full_tensor(value) if tessera.is_dist(value) else value).detach().clone()
            for name, value in module.state_dict().items()}


def _alone(make_optimizer):
    model = _make()
    _train(model, make_optimizer(model.parameters()))
    return model.state_dict()


def _assert_close(state, want):
    assert list(state) == list(want)
    for key, value in want.items():
        assert torch.allclose(state[key], value, rtol=1e-5, atol=1e-6), key


def _tensors():
    mesh = DeviceMesh(torch.arange(tessera.size()), ["d"])
    whole = torch.arange(14.0).view(7, 2)
    tensor = tessera.distribute(whole, mesh, [Shard(0)])
    assert tessera.is_dist(tensor) and not tessera.is_dist(whole)
    assert tensor.shape == (7, 2) and torch.equal(tessera.to_local(tensor), whole.chunk(tessera.size())[tessera.rank()])
    assert tessera.placements_of(tensor) == [Shard(0)] and tessera.mesh_of(tensor) == mesh
    assert torch.equal(tessera.full_tensor(tensor @ torch.ones(2, 3)), whole @ torch.ones(2, 3))
    assert "Shard(0)" in repr(tensor) and "Shard(0)" in repr(nn.Parameter(tensor))
    cut = tessera.redistribute(tensor, [Shard(-1)])
    assert tessera.placements_of(cut) == [Shard(1)]
    terms = tessera.from_local(torch.ones(3), mesh, [Partial("sum")])
    assert torch.equal(tessera.full_tensor(terms), torch.full((3,), float(tessera.size())))
    weight = tessera.distribute(whole, mesh, Shard(1)).requires_grad_()
    (weight * 2).sum().backward()
    assert torch.equal(tessera.full_tensor(weight.grad), torch.full((7, 2), 2.0))
    with pytest.raises(RuntimeError, match="to_local|full_tensor"):
        tensor.numpy()
    with pytest.raises(ValueError, match="dim"):
        tessera.distribute(whole, mesh, [Shard(2)])
    with pytest.raises(TypeError, match="DeviceMesh"):
        tessera.distribute(whole, [0, 1], [Shard(0)])
    with tessera.CommDebug() as debug:
        tessera.full_tensor(tensor)
    assert debug.calls("all_gather") == 1 and tessera.CommDebug().calls() == 0
    with tessera.StrictOperators(), pytest.raises(NotImplementedError, match="aten::"):
        torch.linalg.svd(tensor)
    return True


def test_tensors(ranks):
    for size in (2, 3):
        assert all(ranks(size, _tensors))


def _terms_of_gradients():
    # Each rank uses the whole of x with its own factor, so the gradient of its copy is a term.
    mesh, rank = DeviceMesh.over_world(), tessera.rank()
    x = tessera.distribute(torch.arange(6.0).view(3, 2), mesh, [Replicate()]).requires_grad_()
    (tessera.to_local(x, [Partial()]) * (rank + 1)).sum().backward()
    assert tessera.full_tensor(x.grad).eq(sum(range(1, tessera.size() + 1))).all()
    y = tessera.distribute(torch.arange(6.0).view(3, 2), mesh, [Shard(0)]).requires_grad_()
    part = tessera.to_local(y, Shard(0))
    (part * (rank + 1)).sum().backward()
    assert tessera.to_local(y.grad).eq(rank + 1).all()
    with pytest.raises(ValueError, match="to_local"):
        tessera.to_local(y, [Replicate()])
    return True


def test_terms_of_gradients(ranks):
    for size in (1, 2, 3):
        assert all(ranks(size, _terms_of_gradients))


def _from_meta(parallelizes):
    mesh = DeviceMesh.over_world()
    with torch.device("meta"):
        model = Mlp()
    if parallelizes:
        tessera.parallelize_module(model, mesh, {"up": tessera.ColwiseParallel(), "down": tessera.RowwiseParallel()})
    else:
        tessera.distribute_module(model, mesh, lambda name, module, its: [tessera.distribute_(parameter, its, [Shard(0)])
                                                                          for parameter in module._parameters.values()])
    placements = [tessera.placements_of(parameter) for parameter in model.parameters()]
    assert all(parameter.is_meta and tessera.is_dist(parameter) for parameter in model.parameters())
    with tessera.CommDebug() as debug:
        model.to_empty(device="cpu")
    assert debug.calls() == 0
    assert placements == [tessera.placements_of(parameter) for parameter in model.parameters()]
    torch.manual_seed(3)
    model.up.reset_parameters(), model.down.reset_parameters(), model.shift.copy_(torch.arange(3.0))
    expected = _make().state_dict()
    values = _values(model)
    assert list(values) == list(expected) and all(torch.equal(values[name], expected[name]) for name in values)
    return True


@pytest.mark.parametrize("parallelizes", [False, True])
def test_models_from_the_meta_device(ranks, parallelizes):
    for size in (1, 2, 3):
        assert all(ranks(size, _from_meta, parallelizes))


def _masks():
    # Optimizers load torch._dynamo, with which PyTorch's functions for meta tensors come.
    mesh = DeviceMesh.over_world()
    whole = torch.arange(20.0).view(5, 4)
    mask, counts = whole % 3 == 0, torch.tensor([2, 0, 1, 3, 1])
    for where in ([Shard(0)], [Shard(1)], [Replicate()]):
        tensor = tessera.distribute(whole, mesh, where)
        its = tessera.distribute(mask, mesh, where)
        assert torch.equal(tessera.full_tensor(tensor[its]), whole[mask])
        assert torch.equal(tessera.full_tensor(tensor.masked_select(its)), whole[mask])
        assert torch.equal(tessera.full_tensor(its.nonzero()), mask.nonzero())
        repeats = tessera.distribute(counts, mesh, [Shard(0)])
        assert torch.equal(tessera.full_tensor(tensor.repeat_interleave(repeats, 0)), whole.repeat_interleave(counts, 0))
    return True


def test_sizes_that_depend_on_values(ranks):
    assert all(ranks(2, _masks))


def _grouped_products():
    """PyTorch's function for tensors without data refuses all dtypes but one."""
    mesh = DeviceMesh([0, 1])
    ends = torch.tensor([1, 4, 6], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(6, 16, dtype=dtype), torch.arange(3 * 16 * 24.0).remainder(5).view(3, 16, 24).to(dtype)
        expected = torch.nn.functional.grouped_mm(a, b, offs=ends)
        for where in (Shard(0), Shard(1), Shard(2), Replicate()):
            placed = tessera.distribute(b, mesh, [where]).requires_grad_()
            result = torch.nn.functional.grouped_mm(tessera.distribute(a, mesh, [Replicate()]), placed, offs=ends)
            (result * tessera.distribute(torch.ones_like(expected), mesh, [Replicate()])).sum().backward()
            assert result.shape == expected.shape and placed.grad.shape == b.shape
            if mesh.is_member():
                assert torch.equal(tessera.full_tensor(result.detach()), expected)
                assert torch.equal(tessera.full_tensor(placed.grad)[:, 0, 0], torch.tensor([1, 3, 2], dtype=dtype))
    return True


def test_grouped_products(ranks):
    assert all(ranks(3, _grouped_products))


def _some_gradients():
    # PyTorch's decompositions return gradients that nobody asked for.
    mesh = DeviceMesh.over_world()
    torch.manual_seed(1)
    x, gradient = torch.randn(6, 3), torch.randn(6, 3)
    for asked in ((True, False), (False, True)):
        whole = [torch.ones(3, requires_grad=wanted) for wanted in asked]
        nn.functional.batch_norm(x, None, None, *whole, training=True).backward(gradient)
        its = [tessera.distribute(torch.ones(3), mesh, [Replicate()]).requires_grad_(wanted) for wanted in asked]
        y = nn.functional.batch_norm(x, None, None, *its, training=True)
        y.backward(tessera.distribute(gradient, mesh, [Replicate()]))
        for one, other in zip(whole, its):
            assert one.grad is None or torch.allclose(tessera.full_tensor(other.grad), one.grad, atol=1e-6)
    return True


def test_operators_that_are_asked_for_some_gradients(ranks):
    assert all(ranks(2, _some_gradients))


def _no_elements():
    # PyTorch's functions for meta tensors divide by the number of elements.
    x = tessera.distribute(torch.zeros(0, 2), DeviceMesh.over_world(), [Replicate()]).requires_grad_()
    nn.functional.mse_loss(x, x.detach()).backward()
    return x.grad.shape == (0, 2)


def test_losses_of_no_elements(ranks):
    assert all(ranks(2, _no_elements))


def _outside():
    # Of PyTorch's functions for meta tensors, some raise errors of Python, some return gradients that nobody asked for, and one
    # sizes its last result as no kernel does.
    mesh = DeviceMesh([0])
    line = tessera.distribute(torch.ones(3), mesh, [Replicate()])
    for refused in (line.tril_, lambda: line.addmm_(line, line)):
        try:
            refused()
        except RuntimeError:
            continue
        return False
    scale = tessera.distribute(torch.ones(3), mesh, [Replicate()]).requires_grad_()
    x = tessera.distribute(torch.arange(18.0).view(6, 3), mesh, [Replicate()])
    nn.functional.batch_norm(x, None, None, scale, scale, training=True).sum().backward()
    plain = torch.ones(5, 4), torch.tensor([1, 2, 3, 4, 0, 4]), torch.arange(0, 6, 2)
    bags = (tessera.distribute(plain[0], mesh, [Shard(0)]), *plain[1:])
    shapes = [[tuple(result.shape) for result in torch._embedding_bag(*given, mode=1)] for given in (plain, bags)]
    return scale.grad.shape == (3,) and shapes[0] == shapes[1]


def test_ranks_outside_of_a_mesh(ranks):
    assert all(ranks(2, _outside))


def test_values_of_placements():
    assert Shard(1) == Shard(1) != Shard(0) and Shard(0, split_factor=3) != Shard(0) and Replicate() == Replicate()
    assert len({Partial(), Partial("sum"), Partial("max"), Replicate()}) == 3
    assert Partial("max").op == "max" and repr(Shard(0, 3)) == "Shard(0, split_factor=3)" and Shard(0) != "Shard(0)"
    with pytest.raises(ValueError, match="must be one of"):
        Partial("median")


def _columns_then_rows(name, layer, mesh):
    if name == "up":
        layer.weight = dist.shard_tensor(layer.weight, mesh, [Replicate(), Shard(0)])
        layer.bias = dist.shard_tensor(layer.bias, mesh, [Replicate(), Shard(0)])
    elif name == "down":
        tessera.distribute_(layer.weight, mesh, [Replicate(), Shard(1)])


def _mesh():
    shape = {1: (1, 1), 2: (1, 2), 4: (2, 2)}[tessera.size()]
    return dist.ProcessMesh(torch.arange(tessera.size()).view(shape), dim_names=["dp", "mp"])


def _shard(model, calls=None):
    def shard_fn(name, layer, mesh):
        if calls is not None:
            calls.append((name, type(layer).__name__))
        _columns_then_rows(name, layer, mesh)

    return dist.shard_layer(model, _mesh(), shard_fn,
                            lambda inputs, mesh: dist.shard_tensor(inputs[0], mesh, [Shard(0)]),
                            lambda outputs, mesh: dist.reshard(outputs, mesh, [Shard(0)]))


_adamw = lambda params: torch.optim.AdamW(params, lr=1e-2)


def _layer():
    states, calls = [], []
    model = _make()
    weight = model.up.weight
    assert _shard(model, calls) is model and model.up.weight is weight and tessera.is_dist(model.down.bias)
    assert calls == [("", "Mlp"), ("up", "Linear"), ("act", "ReLU"), ("down", "Linear")]
    _train(model, _adamw(model.parameters()))  # PyTorch's own
    states.append(_values(model))
    for shard_fn in (None, dist.ShardingStage1("dp"), dist.ShardingStage2("dp"), dist.ShardingStage3("dp"),
                     lambda name, param, state: dist.reshard(state, tessera.mesh_of(param), [Shard(0), Replicate()])):
        model = _shard(_make())
        optimizer = dist.shard_optimizer(_adamw(model.parameters()), shard_fn)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        _train(model, optimizer)
        scheduler.step()
        states.append(_values(model))
        if shard_fn is None:
            state = optimizer.state_dict()
            assert state["up.weight.exp_avg"].shape == (6, 5) and tessera.is_dist(state["up.weight.exp_avg"])
            other = _shard(_make())
            again = dist.shard_optimizer(_adamw(other.parameters()))
            again.set_state_dict(state)
            other.load_state_dict(model.state_dict())
            _train(model, optimizer)
            _train(other, again)
            for key, value in _values(model).items():
                assert torch.equal(_values(other)[key], value), key
    tessera.unwrap(model)
    assert not tessera.is_dist(model.up.weight) and torch.equal(model.up.weight, states[-1]["up.weight"])
    assert model(_batch(0)).shape == (4, 3)
    return states


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shard_layer(ranks, size):
    want = _alone(_adamw)
    for states in ranks(size, _layer):
        for state in states:
            _assert_close(state, want)


def _precision_and_scaler():
    model = _shard(_make().to(torch.bfloat16))
    optimizer = dist.shard_optimizer(_adamw(model.parameters()), multi_precision=True)
    scaler = dist.shard_scaler(tessera.GradScaler(init_scale=8.0))
    scales = []
    for step in range(3):
        loss = model(_batch(step).to(torch.bfloat16)).square().mean()
        if step == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scales.append((scaler.minimize(optimizer), scaler.scaler.get_scale()))
        optimizer.clear_grad()
    assert scales == [(True, 8.0), (False, 4.0), (True, 4.0)]
    model(_batch(0).to(torch.bfloat16)).sum().backward()
    assert optimizer.clip_grad_norm_(0.5) > 0.5
    with pytest.raises(NotImplementedError, match="dropped"):
        optimizer.clear_grad(set_to_zero=True)
    return _values(model)["up.weight"]


def test_precision_and_scaler(ranks):
    first, second = ranks(2, _precision_and_scaler)
    assert torch.equal(first, second)


def _loader():
    mesh = _mesh()
    rows = torch.arange(12.0).view(6, 2)
    for batch in dist.shard_dataloader([(rows, rows[:, 0])], mesh, shard_dims="mp"):
        assert tessera.placements_of(batch[0]) == [Replicate(), Shard(0)]
        assert torch.equal(tessera.full_tensor(batch[0]), rows)
    own = rows.chunk(2)[tessera.rank()]
    loader = dist.shard_dataloader([{"x": own}, {"x": own + 1}], [mesh], ["x"], "mp", is_dataset_splitted=True)
    assert len(loader) == 2
    assert [tessera.full_tensor(batch["x"]).sum().item() for batch in loader] == [66.0, 78.0]
    listed = dist.local_tensor_list_from_dtensor(tessera.distribute(rows, mesh, [Replicate(), Shard(0)]))
    assert torch.equal(tessera.full_tensor(dist.dtensor_from_local_list(listed, mesh, [Replicate(), Shard(0)])), rows)
    numbers = dist.shard_tensor([[1, 2], [3, 4]], mesh, [Replicate(), Shard(0)], dtype=torch.float64, stop_gradient=False)
    assert numbers.dtype == torch.float64 and numbers.requires_grad
    assert torch.equal(dist.dtensor_to_local(numbers, mesh, [Replicate(), Replicate()]).detach(),
                       torch.tensor([[1.0, 2], [3, 4]], dtype=torch.float64))
    other = DeviceMesh.over_world((2,), ["x"])
    assert dist.dtensor_to_local(numbers, other, [Shard(1)]).shape == (2, 1)
    assert dist.dtensor_to_local(tessera.distribute(rows, other, [Shard(0)]), other).shape == (3, 2)
    with pytest.raises(ValueError, match="that of the tensor"):
        dist.local_tensor_list_from_dtensor(numbers, other)
    assert mesh.get_dim_size("mp") == 2 and mesh.get_mesh_with_dim("mp").shape == [2, 1] and mesh[0].ranks == [0, 1]
    assert torch.equal(dist.unshard_dtensor(dist.dtensor_from_fn(torch.ones, mesh, [Shard(0)], 3)), torch.ones(3))
    return True


def test_loaders_and_lists(ranks):
    assert all(ranks(2, _loader))


def _save(path):
    model = _shard(_make())
    optimizer = dist.shard_optimizer(_adamw(model.parameters()))
    _train(model, optimizer)
    dist.save_state_dict({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    other = _shard(_make())
    tessera.distribute_(other.up.weight, _mesh(), [Shard(1)])
    assert dist.load_state_dict({"model": other.state_dict()}, path) == []
    for key, value in _values(model).items():
        assert torch.equal(_values(other)[key], value), key
    with pytest.raises(ValueError, match="twice"):
        dist.save_state_dict({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, path)
    return True


def test_save(ranks, tmp_path):
    assert all(ranks(2, _save, tmp_path / "state"))


def _bad_partitions():
    mesh = _mesh()
    model = _make()

    def replaces(name, layer, mesh):
        if name == "up":
            layer.weight = nn.Parameter(torch.zeros(6, 5))

    with pytest.raises((ValueError, RuntimeError), match="in place"):
        dist.shard_layer(model, mesh, replaces)

    def fails_on_one(name, layer, mesh):
        _columns_then_rows(name, layer, mesh)
        if tessera.rank() == 1 and name == "down":
            raise KeyError("no such layer")

    with pytest.raises(Exception, match="no such layer"):
        dist.shard_layer(model, mesh, fails_on_one)
    for key, value in _make().state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    with pytest.raises(ValueError, match="cannot be empty"):
        dist.shard_layer(model, None)
    with pytest.raises(ValueError, match="is not"):
        dist.shard_layer(model, [0, 1])
    sharded = tessera.fully_shard(_make())
    with pytest.raises(ValueError, match="unwrap\\(\\) of the ShardedModule"):
        tessera.unwrap(sharded.module)
    return True


def test_bad_partitions_change_nothing(ranks):
    assert all(ranks(2, _bad_partitions))


def _with_fully_shard():
    mesh = DeviceMesh.over_world((2, 2), ["dp", "tp"])
    model = tessera.distribute_module(_make(), mesh, _columns_then_rows)
    sharded = tessera.fully_shard(model, mesh_dim=0)  # and "tp" of distribute_module
    optimizer = tessera.ShardedOptimizer(sharded, _adamw(model.parameters()))
    _train(sharded, optimizer)
    return sharded.full_state()


def test_two_dims(ranks):
    want = _alone(_adamw)
    for state in ranks(4, _with_fully_shard):
        _assert_close({key: state[key] for key in want}, want)


def _sent(name):
    from tessera.bench.parallel import _Ours
    from tessera.bench.parallel_models import MODELS

    make, make_input, dims, formula = MODELS[name]
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    system = _Ours(make, dims, [tessera.size()])
    torch.manual_seed(1)
    inputs = make_input()
    expected = plain(inputs)
    expected.backward()
    loss, _, forward = system.count(lambda: system.model(system.input(inputs)))
    _, _, backward = system.count(lambda: loss.backward())
    assert torch.allclose(tessera.full_tensor(loss), expected, atol=1e-5)
    for param, value in zip(system.model.parameters(), plain.parameters()):
        assert torch.allclose(tessera.full_tensor(param.grad), value.grad, rtol=1e-3, atol=1e-5)
    return [forward, backward], [4 * elements for elements in formula()]


@pytest.mark.parametrize("name", ["llama", "llama, GQA by expand", "llama, tied", "llama, complex rotary",
                                  "llama, cut vocabulary", "vit", "unet", "mlp"])
def test_models_as_written_send_what_explicit_reductions_send(ranks, name):
    for found, most in ranks(2, _sent, name):
        assert found[0] <= most[0] and found[1] <= most[1], (found, most)


def _sent_by_dtensor():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import implicit_replication

    from tessera.bench import parallel

    dist.init_process_group("gloo")
    mesh, local, sent = init_device_mesh("cpu", (2,)), torch.ones(4, 6), {}
    for label, start, end in (("all_reduce", Partial(), Replicate()), ("reduce_scatter", Partial(), Shard(0)),
                              ("all_gather", Shard(0), Replicate())):
        with parallel._Counter() as counter:
            DTensor.from_local(local, mesh, [start]).redistribute(mesh, [end]).to_local().sum()
        sent[label] = counter.get_total_counts(), counter.nbytes
    with implicit_replication():
        for label, kind in list(parallel.SYSTEMS.items())[1:]:
            system, inputs = parallel._make(kind, "llama", [2])
            loss, *forward = system.count(lambda: system.model(inputs))
            sent[label] = (*forward, *system.count(lambda: loss.backward())[1:])
    dist.destroy_process_group()
    return sent


def test_collectives_of_dtensor_are_counted_once(ranks):
    for sent in ranks(2, _sent_by_dtensor, joins=False):
        assert sent == {"all_reduce": (1, 96), "reduce_scatter": (1, 96), "all_gather": (1, 192),
                        "DTensor": (19, 368640, 31, 589824), "parallelize_module": (4, 65536, 10, 163840),
                        "and PrepareModuleInput": (4, 65536, 4, 65536)}

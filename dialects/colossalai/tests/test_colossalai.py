"""ColossalAI's interface."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tessera
from models import Net, batch, loss_of, make_net, my_rows, train_alone
from tessera.colossalai import (BaseShardStrategy, BucketTensorShardStrategy, CPUAdam, HybridAdam, ShardedModelV2,
                                ShardedOptimizerV2, TensorShardStrategy, ZeroInitContext, col_model_deepcopy,
                                no_shard_zero_context, no_shard_zero_decrator)


def _build(strategy, make=Net, seed=5, **options):
    options = {"shard_param": True, "param_dtype": torch.float32, **options}
    torch.manual_seed(seed)
    with ZeroInitContext(torch.device("cpu:0"), strategy, **options):
        return make()


def _wrap(strategy=None, model_options=None, optimizer=lambda params: CPUAdam(params, lr=1e-2), optimizer_options=None,
          **init):
    strategy = strategy or TensorShardStrategy()
    model = ShardedModelV2(_build(strategy, **init), strategy, **(model_options or {}))
    return model, ShardedOptimizerV2(model, optimizer(model.parameters()), **(optimizer_options or {}))


def _train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, my_rows(batch(step))))
        assert optimizer.step()
    return model.full_state()


def _parity():
    states = []
    for strategy in (TensorShardStrategy, BucketTensorShardStrategy):
        for init in ({}, {"shard_param": False}, {"rm_torch_payload_on_the_fly": False}):
            for options in ({}, {"tensor_placement_policy": "cpu"}, {"offload_config": {"device": "cpu"}},
                            {"reuse_fp16_shard": True}, {"reduce_scatter_bucket_size_mb": 0}):
                states.append(_train(*_wrap(strategy(), options, **init), range(4)))
    return states


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parity(ranks, size):
    want, _ = train_alone(lambda params: CPUAdam(params, lr=1e-2), 4, size)
    for states in ranks(size, _parity):
        for state in states:
            for key, value in want.items():
                assert torch.allclose(state[key], value, rtol=1e-5, atol=1e-6), key


def _half():
    strategy = BucketTensorShardStrategy()
    numel = torch.zeros(1, dtype=torch.int)
    net = _build(strategy, param_dtype=torch.float16, model_numel_tensor=numel)
    assert numel.item() == sum(param.numel() for param in net.parameters() if param.requires_grad)
    for param in net.parameters():
        attributes = param.colo_attr
        assert attributes.sharded_data_tensor.is_sharded and attributes.sharded_data_tensor.dtype == torch.half
        assert attributes.data_payload.shape == param.shape
    model = ShardedModelV2(net, strategy)
    plain = make_net().half()
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for key, value in plain.state_dict().items():
        assert torch.equal(state[key], value), key
    other = make_net().half()
    nn.init.zeros_(other.head.weight)
    col_model_deepcopy(model, other)
    assert torch.equal(other.head.weight, plain.head.weight)
    optimizer = ShardedOptimizerV2(model, HybridAdam(model.parameters(), lr=1e-3), initial_scale=2**5)
    optimizer.backward(loss_of(model, my_rows(batch(0))).float())
    weight = model.block[0].weight
    for part, whole, dtype in ((weight.colo_attr.grad_payload, model.full_grad(weight), torch.float32),
                               (weight.colo_attr.data_payload, weight.detach(), torch.half)):
        own = whole.flatten().to(dtype).chunk(tessera.size())[tessera.rank()]
        assert part.dtype == dtype and part.numel() == 295 and torch.equal(part[:own.numel()], own)
        assert not part[own.numel():].any()
    assert optimizer.step() and optimizer.loss_scale == 32
    on_device, in_memory = optimizer.get_memory_usage()
    assert on_device == 0 and in_memory > 0
    return model.full_state()["head.weight"]


def _bf16():
    strategy = TensorShardStrategy()
    net = _build(strategy, bf16=True)
    model = ShardedModelV2(net, strategy, bf16=True)
    assert net.head.weight.dtype == net.head.weight.colo_attr.data_payload.dtype == torch.bfloat16
    optimizer = ShardedOptimizerV2(model, HybridAdam(model.parameters(), lr=1e-2))
    assert model(batch(0)).dtype == torch.bfloat16
    states = _train(model, optimizer, range(2))
    with pytest.raises(ValueError, match="bf16"):
        ShardedModelV2(_build(strategy), strategy, bf16=True)
    return states["head.weight"]


def test_bf16(ranks):
    first, second = ranks(2, _bf16)
    assert torch.equal(first, second)


def test_half(ranks):
    first, second = ranks(2, _half)
    assert torch.equal(first, second)


def _overflow():
    model, optimizer = _wrap(optimizer_options={"initial_scale": 4.0, "hysteresis": 1})
    before = model.full_state()
    loss = loss_of(model, my_rows(batch(0)))
    assert model.overflow_counter == 0
    optimizer.backward(loss * (float("inf") if tessera.rank() == 0 else 1.0))
    assert model.overflow_counter > 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert optimizer.step() is False
    assert any("found inf" in str(warning.message) for warning in caught)
    assert optimizer.loss_scale == 2.0 and model.overflow_counter == 0
    for key, value in model.full_state().items():
        assert torch.equal(value, before[key])
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="found inf"):
        warnings.simplefilter("error")
        optimizer.backward(loss_of(model, my_rows(batch(0))) * float("inf"))
        optimizer.step()
    optimizer.backward(loss_of(model, my_rows(batch(0))))
    norm = optimizer.clip_grad_norm(model, 0.0)  # which does not clip
    assert norm > 0.01 and optimizer.clip_grad_norm(model, 0.01) == norm and optimizer.step() is True
    return norm


def test_an_overflow_skips_the_step(ranks):
    first, second = ranks(2, _overflow)
    assert first == second


def _resume():
    schedule = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer = _wrap(optimizer_options={"initial_scale": 8.0})
    schedule(optimizer)
    _train(model, optimizer, range(2))
    weights, state = model.state_dict(), copy.deepcopy(optimizer.state_dict())
    assert state["scaler"] and state["state"]
    want = _train(model, optimizer, range(2, 4))
    other, its = _wrap(BucketTensorShardStrategy(), seed=9)
    other.load_state_dict(weights)
    its.load_state_dict(state)
    assert its.loss_scale == 8.0
    for key, value in _train(other, its, range(2, 4)).items():
        assert torch.equal(value, want[key]), key
    return True


def test_state(ranks):
    assert all(ranks(2, _resume))


def _checkpoint(path):
    model, optimizer = _wrap()
    _train(model, optimizer, range(2))
    tessera.save_checkpoint(path, model, optimizer)
    want = _train(model, optimizer, range(2, 4))
    other, its = _wrap(model_options={"tensor_placement_policy": "cpu"}, seed=9)
    tessera.load_checkpoint(path, other, its)
    for key, value in _train(other, its, range(2, 4)).items():
        assert torch.equal(value, want[key]), key
    assert its.unwrap() and other.unwrap() is not None
    assert type(other.module.head.weight) is nn.Parameter and not hasattr(other.module.head.weight, "colo_attr")
    return True


def test_checkpoints(ranks, tmp_path):
    assert all(ranks(2, _checkpoint, tmp_path / "step-2"))


class _Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(6, 6)
        with no_shard_zero_context():
            self.gate = nn.Linear(6, 6)
        self.expert = self.make_expert()

    @no_shard_zero_decrator(is_replicated=False)
    def make_expert(self):
        return nn.Linear(6, 6)

    def forward(self, x):
        return self.expert(self.gate(checkpoint(self.inside, x, use_reentrant=False)))


def _experts():
    strategy = TensorShardStrategy()
    model = ShardedModelV2(_build(strategy, _Experts), strategy)
    flags = {name: (param.colo_attr.param_is_sharded, param.colo_attr.is_replicated)
             for name, param in model.named_parameters()}
    optimizer = ShardedOptimizerV2(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(tessera.rank())
    optimizer.backward(model(torch.randn(3, 6)).sum())
    optimizer.step()
    return flags, [param.detach().clone() for param in (model.gate.weight, model.expert.weight)]


def test_experts_are_each_ranks_own(ranks):
    (flags, (gate, expert)), (_, (other_gate, other_expert)) = ranks(2, _experts)
    assert flags["inside.weight"] == (True, True)
    assert flags["gate.weight"] == (False, True)
    assert flags["expert.weight"] == (False, False)
    assert torch.equal(gate, other_gate) and not torch.equal(expert, other_expert)


def test_experts_are_ordinary_without_a_context():
    net = _Experts()
    assert not hasattr(net.gate.weight, "colo_attr") and not tessera.is_deferred(net.expert.weight)
    net(torch.randn(3, 6)).sum().backward()
    assert net.expert.weight.grad is not None


class _TwoUnits(BaseShardStrategy):
    def apply(self, parameters):
        names = list(parameters)
        return {"units": [names[:3], names[3:]]}


class _Moves(BaseShardStrategy):
    def shard(self, tensors, group=None):
        pass


def test_strategies_may_be_the_users_own():
    strategy = _TwoUnits()
    model = ShardedModelV2(_build(strategy), strategy)
    assert [line.split()[-1] for line in model.describe().splitlines()[1:] if line] == [
        "scale", "unused..embedding.weight", "block.0.weight..norm.bias"]
    with pytest.raises(TypeError, match="does not move data"):
        ShardedModelV2(_build(strategy), _Moves())
    copied = pickle.loads(pickle.dumps(strategy))
    assert ShardedModelV2(_build(copied), strategy).describe() == model.describe()
    with pytest.raises(TypeError, match="must be a BaseShardStrategy"):
        ZeroInitContext("cpu", "tensor")


def test_models_must_be_built_in_a_context():
    with pytest.raises(ValueError, match="You must use ZeroInitContext"):
        ShardedModelV2(make_net(), TensorShardStrategy())
    model, optimizer = _wrap()
    with pytest.raises(ValueError, match="Nested ShardedModelV2"):
        ShardedModelV2(model.module, TensorShardStrategy())
    with pytest.raises(TypeError, match="Unknown tensor placement policy"):
        _wrap(model_options={"tensor_placement_policy": "disk"})
    with pytest.raises(TypeError, match="must be wrapped"):
        ShardedOptimizerV2(nn.Linear(2, 2), optimizer.optimizer)
    with pytest.raises(RuntimeError, match="not offloaded"):
        ShardedOptimizerV2(_wrap()[0], CPUAdam(model.parameters()), cpu_offload=True)
    with pytest.raises(RuntimeError, match="all backwards of a step"):
        model.backward(loss_of(model, batch(0)))
        optimizer.backward(loss_of(model, batch(0)))


def test_copies_are_ordinary_modules():
    model, _ = _wrap()
    plain = copy.deepcopy(model.module)
    assert type(plain.head.weight) is nn.Parameter and not hasattr(plain.head.weight, "colo_attr")
    listed = ShardedModelV2(_build(TensorShardStrategy(), lambda: nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2)])),
                            TensorShardStrategy())
    assert len(listed) == 2 and [layer.in_features for layer in listed] == [2, 3] and listed[1] is listed.module[1]


def test_memory_is_traced(tmp_path):
    model, optimizer = _wrap(model_options={"use_memory_tracer": True})
    _train(model, optimizer, range(2))
    model.dump_memory_stats(str(tmp_path / "memory.log"))
    assert all((tmp_path / name).stat().st_size for name in ("memory.log", "memory.log.svg", "memory.log.json"))


@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_cpu_adam_is_adam(adamw_mode, dtype):
    torch.manual_seed(3)
    values = [torch.randn(shape).to(dtype) for shape in ((7, 5), (1,), (129,))]
    wide = torch.float64 if dtype == torch.float64 else torch.float32  # of the moments, and of the reference
    mine, theirs = ([nn.Parameter(value.to(its, copy=True)) for value in values] for its in (dtype, wide))
    adam = CPUAdam([{"params": mine[:2]}, {"params": mine[2:], "lr": 0.5}], lr=0.1, weight_decay=0.2, adamw_mode=adamw_mode)
    reference = (torch.optim.AdamW if adamw_mode else torch.optim.Adam)(
        [{"params": theirs[:2]}, {"params": theirs[2:], "lr": 0.5}], lr=0.1, weight_decay=0.2)
    for step in range(3):
        for one, other in zip(mine, theirs):
            grad = torch.randn(one.shape, dtype=torch.float64).to(dtype)
            one.grad, other.grad = (None, None) if step == 1 and one.numel() == 1 else (grad, grad.to(wide))
        adam.step()
        reference.step()
        with torch.no_grad():
            for other in theirs:
                other.copy_(other.to(dtype))
    tolerance = 2e-3 if dtype == torch.float16 else 1e-5
    for one, other in zip(mine, theirs):
        assert torch.allclose(one.to(wide), other, rtol=tolerance, atol=tolerance)
        assert adam.state[one]["exp_avg"].dtype == wide
        assert adam.state[one]["step"] == int(reference.state[other]["step"])
    state = copy.deepcopy(adam.state_dict())
    again = [nn.Parameter(param.detach().clone()) for param in mine]
    other = CPUAdam([{"params": again[:2]}, {"params": again[2:]}])
    other.load_state_dict(state)
    for one, copied in zip(mine, again):
        one.grad = torch.ones_like(one)
        copied.grad = torch.ones_like(one)
    adam.step()
    other.step()
    if dtype != torch.float16:  # load_state_dict() of PyTorch rounds moments to the parameter's dtype
        assert all(torch.equal(one, copied) for one, copied in zip(mine, again))
    with pytest.raises(ValueError, match="betas"):
        CPUAdam(again, betas=(1.0, 0.9))


def _deferred():
    torch.manual_seed(5)
    with tessera.DeferredInit():
        net = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 7))
        nn.init.orthogonal_(net[1].weight)
    drawn = torch.rand(())
    assert tessera.is_deferred(net[0].weight) and not tessera.is_deferred(net[0].bias)
    sharded = tessera.fully_shard(net)
    return sharded.full_state(), drawn


def test_deferred_init(ranks):
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 7))
    nn.init.orthogonal_(plain[1].weight)
    drawn = torch.rand(())
    for state, its in ranks(2, _deferred):
        assert torch.equal(its, drawn)
        for key, value in plain.state_dict().items():
            assert torch.equal(state[key], value), key
    with tessera.DeferredInit():
        other = nn.Linear(300, 200)
    tessera.materialize(other)
    assert not tessera.is_deferred(other.weight)

"""torch.distributed.checkpoint on sharded modules and optimizers, and checkpoints to and from FSDP2, DDP and one process."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     get_state_dict, set_model_state_dict, set_optimizer_state_dict,
                                                     set_state_dict)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tessera
from tessera.colossalai import ShardedModelV2, ShardedOptimizerV2, TensorShardStrategy, ZeroInitContext
from models import LEVELS, batch, loss_of, make_net, my_rows
from ranks import in_process_group

_OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02, foreach=False),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
}


def _make(system, kind="AdamW", fused=False, **plan):
    """Returns a model that `torch.distributed.checkpoint` takes, and its optimizer."""
    net = make_net()
    net.unused.requires_grad_(False)  # PyTorch can't load state of a parameter that was never used
    if system == "tessera":
        model = tessera.fully_shard(net, **plan)
        return model, tessera.ShardedOptimizer(model, _OPTIMIZERS[kind](net.parameters()), fused=fused)
    model = net
    if system == "fsdp2":
        fully_shard(net)
    elif system == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(net)
    return model, _OPTIMIZERS[kind](net.parameters())


def _train(model, optimizer, steps):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, my_rows(batch(step)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@in_process_group
def _train_and_save(folder, system, kind, plan):
    model, optimizer = _make(system, kind, **plan)
    _train(model, optimizer, range(2))
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": optimizer_state}, checkpoint_id=folder)
    return _train(model, optimizer, range(2, 4))


@in_process_group
def _load_and_train(folder, system, kind, plan):
    model, optimizer = _make(system, kind, **plan)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optim": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    return _train(model, optimizer, range(2, 4))


@pytest.mark.parametrize("kind", _OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_torch_continues_what_tessera_saved(ranks, tmp_path, kind, level):
    plan = {"level": level, "unit_bytes": 2000}
    own = ranks(2, _train_and_save, tmp_path, "tessera", kind, plan)
    for system in ("tessera", "fsdp2", "ddp"):
        assert ranks(2, _load_and_train, tmp_path, system, kind, plan if system == "tessera" else {}) == own, system


@pytest.mark.parametrize("system", ["fsdp2", "ddp"])
@pytest.mark.parametrize("kind", _OPTIMIZERS)
def test_tessera_continues_what_torch_saved(ranks, tmp_path, system, kind):
    theirs = ranks(2, _train_and_save, tmp_path, system, kind, {})
    for plan in ({}, {"partition": "whole_param"}, {"level": "os"}):
        assert ranks(2, _load_and_train, tmp_path, "tessera", kind, plan) == theirs, plan


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3), (2, 1), (1, 2)])
def test_other_world_sizes(ranks, tmp_path, sizes):
    saved, loaded = sizes
    ranks(saved, _train_and_save, tmp_path, "tessera", "AdamW", {})
    losses = {system: torch.tensor(ranks(loaded, _load_and_train, tmp_path, system, "AdamW", {}))
              for system in ("tessera", "fsdp2", "ddp")}
    torch.testing.assert_close(losses["tessera"], losses["ddp"], rtol=1e-6, atol=0)
    if loaded < 3:
        assert torch.equal(losses["tessera"], losses["ddp"])
        assert torch.equal(losses["tessera"], losses["fsdp2"])


@in_process_group
def _rows_of_each_rank():
    model, optimizer = _make("tessera")
    whole = model.full_state()
    _train(model, optimizer, range(1))
    whole_state = optimizer.state_dict()["state"]
    trained = model.full_state()
    state, optimizer_state = get_state_dict(model, optimizer)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert all(isinstance(state[name], DTensor) for name in names) and state.keys() == whole.keys()
    assert not any("module." in name for name in state)
    for name in names:
        assert torch.equal(state[name].full_tensor(), trained[name]), name
    numbers = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    for name, values in optimizer_state["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(values[key].full_tensor(), whole_state[numbers[name]][key]), (name, key)
        assert values["step"] == 1
    kept = sum(state[name].to_local().numel() for name, _ in model.named_parameters())
    return kept, sum(parameter.numel() for parameter in model.parameters())


def test_state_is_sharded(ranks):
    kept = ranks(3, _rows_of_each_rank, joins=False)
    assert sum(own for own, _ in kept) == kept[0][1] and max(own for own, _ in kept) < kept[0][1] // 2


@in_process_group
def _options(cpu_offload, broadcast, flatten):
    model, optimizer = _make("tessera")
    _train(model, optimizer, range(2))
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
    state, optimizer_state = get_state_dict(model, optimizer, options=options)
    reference = model.full_state()
    if cpu_offload and dist.get_rank():
        assert not state and not optimizer_state
    else:
        assert all(torch.equal(state[name], reference[name]) for name in reference)
    after = _train(model, optimizer, range(2, 4))
    given = [state, optimizer_state]
    if cpu_offload and not broadcast:
        dist.broadcast_object_list(given)
    other, other_optimizer = _make("tessera")
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload, broadcast_from_rank0=broadcast)
    set_model_state_dict(other, given[0], options=options)
    set_optimizer_state_dict(other, other_optimizer, given[1], options=options)
    assert _train(other, other_optimizer, range(2, 4)) == after
    return True


@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.parametrize("broadcast", [False, True])
def test_full_state_dict(ranks, cpu_offload, broadcast):
    assert all(ranks(2, _options, cpu_offload, broadcast, False, joins=False))


@in_process_group
def _flattened(folder, system, plan):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = _make("tessera", **plan)
    _train(model, optimizer, range(2))
    state = {"model": get_model_state_dict(model), **get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.async_save(state, checkpoint_id=folder).result()
    after = _train(model, optimizer, range(2, 4))
    model, optimizer = _make(system, **(plan if system == "tessera" else {}))
    loaded = {"model": get_model_state_dict(model), **get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.load(loaded, checkpoint_id=folder)
    set_model_state_dict(model, loaded.pop("model"))
    set_optimizer_state_dict(model, optimizer, loaded, options=options)
    assert _train(model, optimizer, range(2, 4)) == after
    return True


@pytest.mark.parametrize("system", ["tessera", "fsdp2"])
@pytest.mark.parametrize("partition", ["flat_even", "whole_param"])
def test_flat_state_saved_in_the_background(ranks, tmp_path, system, partition):
    assert all(ranks(2, _flattened, tmp_path, system, {"partition": partition}, joins=False))


@in_process_group
def _by_objects(folder):
    model, optimizer = _make("tessera")
    _train(model, optimizer, range(2))
    dcp.save({"model": model.module, "optim": optimizer}, checkpoint_id=folder)
    after = _train(model, optimizer, range(2, 4))
    other, other_optimizer = _make("tessera")
    dcp.load({"model": other.module, "optim": other_optimizer}, checkpoint_id=folder)
    assert _train(other, other_optimizer, range(2, 4)) == after
    return True


def test_objects_with_state(ranks, tmp_path):
    assert all(ranks(2, _by_objects, tmp_path, joins=False))


@in_process_group
def _mixed_precision():
    model, optimizer = _make("tessera", param_dtype=torch.bfloat16)
    _train(model, optimizer, range(2))
    state, optimizer_state = get_state_dict(model, optimizer)
    assert state["norm.weight"].dtype == torch.float32
    after = _train(model, optimizer, range(2, 4))
    other, other_optimizer = _make("tessera", param_dtype=torch.bfloat16)
    set_state_dict(other, other_optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    assert _train(other, other_optimizer, range(2, 4)) == after
    return True


def test_master_precision(ranks):
    assert all(ranks(2, _mixed_precision, joins=False))


def _without_process_group():
    model, _ = _make("tessera")
    with pytest.raises(RuntimeError, match="call torch.distributed.init_process_group"):
        get_model_state_dict(model)
    return True


def test_torch_distributed_is_needed(ranks):
    assert all(ranks(2, _without_process_group))


@in_process_group
def _without_elements():
    net = torch.nn.Linear(1, 1, bias=False)
    model = tessera.fully_shard(net)
    optimizer = tessera.ShardedOptimizer(model, torch.optim.AdamW(net.parameters()))
    state, optimizer_state = get_state_dict(model, optimizer)  # which makes the optimizer's state
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return get_optimizer_state_dict(model, optimizer)["state"]["weight"]["step"].item()


def test_ranks_without_elements(ranks):
    assert ranks(3, _without_elements, joins=False) == [1, 1, 1]


@in_process_group
def _in_a_group():
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    if dist.get_rank() == 1:
        return True
    model, optimizer = _make("tessera", group=groups[0])
    _train(model, optimizer, range(1))
    state = get_model_state_dict(model)
    assert state["embedding.weight"].device_mesh.size() == 2
    assert torch.equal(state["embedding.weight"].full_tensor(), model.full_state()["embedding.weight"])
    return True


def test_a_group_of_some_ranks(ranks):
    assert all(ranks(3, _in_a_group))


@in_process_group
def _replicas(folder):
    rank = dist.get_rank()
    groups = [tessera.new_group([0, 1]), tessera.new_group([2, 3])], [tessera.new_group([0, 2]), tessera.new_group([1, 3])]
    plan = {"group": groups[0][rank // 2], "replicate_group": groups[1][rank % 2]}
    model, optimizer = _make("tessera", **plan)
    _train(model, optimizer, range(2))
    state, optimizer_state = get_state_dict(model, optimizer)
    assert state["embedding.weight"].device_mesh.size() == 4
    dcp.save({"model": state, "optim": optimizer_state}, checkpoint_id=folder)
    after = _train(model, optimizer, range(2, 4))
    other, other_optimizer = _make("tessera", **plan)
    state, optimizer_state = get_state_dict(other, other_optimizer)
    dcp.load({"model": state, "optim": optimizer_state}, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    assert _train(other, other_optimizer, range(2, 4)) == after
    return True


def test_replicas_of_shards(ranks, tmp_path):
    assert all(ranks(4, _replicas, tmp_path))


@in_process_group
def _other_state(make_optimizer):
    def make():
        net = make_net()
        net.unused.requires_grad_(False)
        model = tessera.fully_shard(net, partition="whole_param")
        groups = [{"params": [*net.block.parameters()], "lr": 0.03}, {"params": [net.embedding.weight, *net.norm.parameters()]}]
        return model, tessera.ShardedOptimizer(model, make_optimizer(groups), fused=False)

    model, optimizer = make()
    _train(model, optimizer, range(2))
    state, optimizer_state = get_state_dict(model, optimizer)
    assert [group["lr"] for group in optimizer_state["param_groups"]] == [0.03, 0.01]
    after = _train(model, optimizer, range(2, 4))
    other, other_optimizer = make()
    set_state_dict(other, other_optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    assert _train(other, other_optimizer, range(2, 4)) == after
    return sorted(optimizer_state["state"]["block.0.weight"])


@pytest.mark.parametrize("kind", ["Adafactor", "NAdam", "RMSprop"])
def test_param_groups_and_state_of_other_shapes(ranks, kind):
    names = ranks(2, _other_state, lambda groups: getattr(torch.optim, kind)(groups, lr=0.01), joins=False)
    assert names[0] == names[1] and len(names[0]) >= 2


@in_process_group
def _without_frozen():
    model, optimizer = _make("tessera")
    _train(model, optimizer, range(2))
    state, optimizer_state = get_state_dict(model, optimizer, options=StateDictOptions(ignore_frozen_params=True))
    assert not {"scale", "unused"} & state.keys() and {"calls", "norm.weight"} <= state.keys()
    after = _train(model, optimizer, range(2, 4))
    other, other_optimizer = _make("tessera")
    with pytest.raises(RuntimeError, match="Missing key.*scale"):
        set_model_state_dict(other, state)
    set_state_dict(other, other_optimizer, model_state_dict=state, optim_state_dict=optimizer_state,
                   options=StateDictOptions(strict=False))
    assert _train(other, other_optimizer, range(2, 4)) == after
    return True


def test_frozen_parameters_left_out(ranks):
    assert all(ranks(2, _without_frozen))


@in_process_group
def _colossalai(folder):
    def make():
        strategy = TensorShardStrategy()
        with ZeroInitContext(target_device=torch.device("cpu"), shard_strategy=strategy, shard_param=True):
            net = make_net()
        net.unused.requires_grad_(False)
        model = ShardedModelV2(net, strategy, tensor_placement_policy="cpu")
        return model, ShardedOptimizerV2(model, _OPTIMIZERS["AdamW"](net.parameters()), initial_scale=16)

    def train(model, optimizer, steps):
        losses = []
        for step in steps:
            optimizer.zero_grad()
            loss = loss_of(model, my_rows(batch(step))).float()
            optimizer.backward(loss)
            assert optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = make()
    train(model, optimizer, range(2))
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": optimizer_state}, checkpoint_id=folder)
    masters = optimizer.state_dict()["master_weights"]
    after = train(model, optimizer, range(2, 4))
    other, other_optimizer = make()
    state, optimizer_state = get_state_dict(other, other_optimizer)
    dcp.load({"model": state, "optim": optimizer_state}, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    for name, value in other_optimizer.state_dict()["master_weights"].items():
        assert torch.equal(value, masters[name]), name
    assert train(other, other_optimizer, range(2, 4)) == after
    return True


def test_of_colossalai(ranks, tmp_path):
    assert all(ranks(2, _colossalai, tmp_path))


@in_process_group
def _small_states():
    def make(dtype):
        net = make_net()
        net.unused.requires_grad_(False)
        model = tessera.fully_shard(net, cuts=[("*", "elements", 256)])
        return model, tessera.ShardedOptimizer(model, tessera.CPUAdam(net.parameters(), lr=0.01, state_dtype=dtype))

    model, optimizer = make(torch.uint8)
    _train(model, optimizer, range(2))
    with pytest.raises(NotImplementedError, match="would cut the blocks of 8-bit state"):
        get_optimizer_state_dict(model, optimizer)
    model, optimizer = make(torch.bfloat16)
    _train(model, optimizer, range(2))
    states = get_state_dict(model, optimizer)
    moments = [state["exp_avg"] for state in states[1]["state"].values()]
    assert all(moment.to_local().dtype == torch.bfloat16 for moment in moments)
    other, loaded = make(torch.bfloat16)
    set_state_dict(other, loaded, model_state_dict=states[0], optim_state_dict=states[1])
    assert _train(other, loaded, range(2, 4)) == _train(model, optimizer, range(2, 4))
    return True


def test_small_states(ranks):
    assert all(ranks(2, _small_states, joins=False))

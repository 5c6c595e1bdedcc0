"""Checkpoints of Python load at any number of ranks."""

import json

import pytest
import torch

import tessera
from models import batch, loss_of, make_net, my_rows


def _job(level, optimizer=torch.optim.AdamW):
    net = make_net()
    sharded = tessera.fully_shard(net, level=level, unit_bytes=2000)
    return sharded, tessera.ShardedOptimizer(sharded, optimizer(net.parameters(), lr=1e-2), fused=False)


def _train(sharded, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(sharded, my_rows(batch(step))).backward()
        optimizer.step()


def _save(path, asynchronously):
    sharded, optimizer = _job("p_g_os")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = tessera.GradScaler(init_scale=8.0)
    _train(sharded, optimizer, range(2))
    scheduler.step()
    arguments = {"numbers": {"step": 2}, "rank_state": {"position": torch.tensor([tessera.rank()])}, "scaler": scaler,
                 "schedulers": [scheduler]}
    if asynchronously:
        checkpointer = tessera.AsyncCheckpointer()
        checkpointer.save(path, sharded, optimizer, **arguments)
        checkpointer.wait()
    else:
        tessera.save_checkpoint(path, sharded, optimizer, **arguments)
    _train(sharded, optimizer, range(2, 4))
    return sharded.full_state()


def _resume(path, level):
    sharded, optimizer = _job(level)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = tessera.GradScaler()
    loaded = tessera.load_checkpoint(path, sharded, optimizer, scaler=scaler, schedulers=[scheduler])
    assert loaded.numbers == {"step": 2} and scaler.get_scale() == 8.0 and scheduler.last_epoch == 1
    assert optimizer.param_groups[0]["lr"] == 0.005 and optimizer.steps == 2
    assert int(loaded.rank_state["position"]) == tessera.rank()
    _train(sharded, optimizer, range(2, 4))
    return sharded.full_state()


def _save_series(path):
    sharded, optimizer = _job("p_g_os")
    for step, loss in enumerate([3.0, 1.0, 2.0, 4.0], 1):
        tessera.save_checkpoint(path / f"step-{step}", sharded, optimizer, numbers={"loss": loss}, texts={"config": "{}"},
                                keep_last=1, keep_best="loss")
    return tessera.load_checkpoint(tessera.best_checkpoint(path, "loss"), sharded, optimizer).texts


def test_the_best_of_a_series_is_kept(ranks, tmp_path):
    assert ranks(2, _save_series, tmp_path) == [{"config": "{}"}] * 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-2", "step-4"]
    assert tessera.best_checkpoint(tmp_path, "loss", highest=True) == tmp_path / "step-4"
    assert tessera.best_checkpoint(tmp_path, "accuracy") is None


@pytest.mark.parametrize("asynchronously", [False, True])
def test_resume_has_the_same_bits(ranks, tmp_path, asynchronously):
    want = ranks(2, _save, tmp_path / "step-2", asynchronously)[0]
    assert tessera.latest_checkpoint(tmp_path) == tmp_path / "step-2"
    for level in ("os", "p_g_os"):
        for got in ranks(2, _resume, tmp_path / "step-2", level):
            for key, value in want.items():
                assert torch.equal(got[key], value), (level, key)


def _load_on_other_ranks(path):
    sharded, optimizer = _job("os_g")
    tessera.load_checkpoint(path, sharded, optimizer)
    state = optimizer.state_dict()
    return {name: value.clone() for name, value in sharded.full_state().items()}, state


def test_loads_on_other_numbers_of_ranks(ranks, tmp_path):
    ranks(2, _save, tmp_path / "one", False)
    results = [ranks(size, _load_on_other_ranks, tmp_path / "one")[0] for size in (1, 2, 3)]
    for state, optimizer_state in results[1:]:
        for key, value in results[0][0].items():
            assert torch.equal(state[key], value)
        for number, values in results[0][1]["state"].items():
            for key, value in values.items():
                assert torch.equal(optimizer_state["state"][number][key], value), key


def _exchange_state(plain_state):
    sharded, optimizer = _job("p_g_os")
    optimizer.load_state_dict(plain_state)
    return optimizer.state_dict()


def test_state_dict_is_that_of_the_plain_optimizer(ranks):
    net = make_net()
    plain = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loss_of(net, batch(0)).backward()
    plain.step()
    for state in ranks(2, _exchange_state, plain.state_dict()):
        assert state["param_groups"][0]["params"] == plain.state_dict()["param_groups"][0]["params"]
        assert state["state"].keys() == plain.state_dict()["state"].keys()
        for number, values in plain.state_dict()["state"].items():
            for key, value in values.items():
                assert torch.equal(state["state"][number][key], value), key
        torch.optim.AdamW(make_net().parameters(), lr=1.0).load_state_dict(state)


def _wrong():
    sharded, optimizer = _job("p_g_os")
    with pytest.raises(ValueError, match="/nonexistent/step-1"):
        tessera.load_checkpoint("/nonexistent/step-1", sharded, optimizer)
    return True


def test_missing_checkpoint(ranks):
    assert all(ranks(2, _wrong))


class _Balance(torch.optim.SGD):
    """SGD that keeps numbers of any sign beside its momentum."""

    elementwise = True

    def step(self, closure=None):
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param].update(balance=-3, lowest=float("-inf"), drift=-0.25, step=2)


def _numbers(path):
    sharded, optimizer = _job("os_g", lambda params, lr: _Balance(params, lr=lr, momentum=0.9))
    _train(sharded, optimizer, range(1))
    tessera.save_checkpoint(path, sharded, optimizer)
    again, other = _job("p_g_os", lambda params, lr: _Balance(params, lr=lr, momentum=0.9))
    tessera.load_checkpoint(path, again, other)
    state = other.state_dict()["state"][0]
    return {name: value for name, value in state.items() if name != "momentum_buffer"}


def test_numbers_of_optimizer_state_may_have_any_sign(ranks, tmp_path):
    assert ranks(2, _numbers, tmp_path / "step-1") == [{"balance": -3, "lowest": float("-inf"), "drift": -0.25, "step": 2}] * 2


def _derived_buffers(path):
    net = make_net()
    net.register_buffer("angles", torch.ones(2), persistent=False)
    net.block.register_buffer("mask", torch.ones(3), persistent=False)
    sharded = tessera.fully_shard(net)
    for name, options in (("parts", {}), ("whole", {"whole_parameters": True})):
        tessera.save_checkpoint(path / name, sharded, **options)
    net.angles.fill_(2)
    assert not tessera.load_checkpoint(path / "parts", sharded).missing
    assert net.angles.tolist() == [2, 2]
    return sorted(sharded.state_dict())


def test_buffers_that_are_not_persistent_are_left_out(ranks, tmp_path):
    names = ranks(2, _derived_buffers, tmp_path)[0]
    for name in ("parts", "whole"):
        tensors = json.loads(tessera._C.CheckpointTensors(tmp_path / name, False, [], None, None).index())["tensors"]
        assert sorted(own for tensor in tensors if tensor["kind"] in ("param", "buffer", "tensor") for own in tensor["names"]) == names

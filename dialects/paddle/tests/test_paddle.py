"""Paddle's interface."""

import pytest
import torch
from torch import nn

import tessera
from models import batch, loss_of, make_net, my_rows, train_alone
from tessera.paddle import (ClipGradByGlobalNorm, group_sharded_parallel, load_group_sharded_model,
                            save_group_sharded_model)

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

"""Every optimizer and every schedule of PyTorch steps as in one process, or is refused when it is given."""

import inspect

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import tessera
from models import LEVELS, batch, loss_of, make_net, my_rows


def _subclasses(module, base, *without):
    return sorted((kind for kind in vars(module).values() if inspect.isclass(kind) and issubclass(kind, base)
                   and kind not in (base, *without) and not kind.__name__.startswith("_")), key=lambda kind: kind.__name__)


OPTIMIZERS = _subclasses(torch.optim, torch.optim.Optimizer)
# They mix the elements of a parameter: each is stepped whole, by one rank.
WHOLE = (torch.optim.Adafactor, torch.optim.Muon)
# These mix parameters, or need sparse gradients.
REFUSED = {torch.optim.LBFGS: "LBFGS", torch.optim.SparseAdam: "SparseAdam"}
MORE = {torch.optim.SGD: [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.5}], torch.optim.Adam: [{"amsgrad": True}],
        torch.optim.RMSprop: [{"centered": True, "momentum": 0.5}], torch.optim.NAdam: [{"decoupled_weight_decay": True}],
        torch.optim.RAdam: [{"decoupled_weight_decay": True}]}
PLANS = ({}, {"partition": "whole_param"}, {"cuts": [("*", "whole", 1, 2), ("norm.*", "whole"), ("*bias", "elements", 8)]})


def _make(kind, net, options):
    options = {"lr": 0.05, "weight_decay": 0.1, **options}
    takes = inspect.signature(kind).parameters
    options = {name: value for name, value in {"foreach": False, "fused": False, **options}.items() if name in takes}
    params = [param for param in net.parameters() if param.dim() == 2 or kind is not torch.optim.Muon]
    return kind([{"params": params[::2]}, {"params": params[1::2], "lr": 0.02}], **options)


def _step(model, optimizer, rows, step):
    optimizer.zero_grad()
    for part, share in rows(step):
        (loss_of(model, part) * share).backward()
    optimizer.step()


def _rows_of(size):
    return lambda step: [(part, 1 / size) for part in batch(step).view(size, -1, 6)]


def _own_rows(step):
    return [(my_rows(batch(step)), 1)]


def _state(optimizer):
    return [value for state in optimizer.state_dict()["state"].values() for _, value in sorted(state.items())]


def _trained(kind):
    results = []
    for options in ({}, *MORE.get(kind, [])):
        for level in LEVELS:
            for plan in PLANS:
                if kind is torch.optim.Adafactor and "cuts" in plan:
                    plan = {"cuts": [("*", "whole")]}
                if not plan and kind in WHOLE:
                    continue
                net = make_net()
                sharded = tessera.fully_shard(net, level=level, **plan)
                optimizer = tessera.ShardedOptimizer(sharded, _make(kind, net, options), fused=False)
                for step in range(3):
                    _step(sharded, optimizer, _own_rows, step)
                results.append((options, (level, plan), sharded.full_state(), _state(optimizer)))
    return results


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind not in REFUSED], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("size", [1, 2])
def test_every_optimizer(ranks, kind, size):
    alone = []
    for options in ({}, *MORE.get(kind, [])):
        net = make_net()
        optimizer = _make(kind, net, options)
        for step in range(3):
            _step(net, optimizer, _rows_of(size), step)
        alone.append((options, net.state_dict(), _state(optimizer)))
    for results in ranks(size, _trained, kind):
        for options, plan, state, optimizer_state in results:
            _, want, want_state = next(each for each in alone if each[0] == options)
            for key, value in want.items():
                assert torch.equal(state[key], value), (options, plan, key)
            for got, value in zip(optimizer_state, want_state, strict=True):
                assert torch.equal(torch.as_tensor(got), torch.as_tensor(value)), (options, plan)


def _refused():
    for kind, name in REFUSED.items():
        net = make_net()
        params = [param for param in net.parameters() if param.requires_grad]
        for partition in ("flat_even", "whole_param"):
            sharded = tessera.fully_shard(make_net() if partition == "flat_even" else net, partition=partition)
            with pytest.raises(NotImplementedError, match=name):
                tessera.ShardedOptimizer(sharded, kind(list(sharded.module.parameters())))
    for kind in WHOLE:
        net = make_net()
        sharded = tessera.fully_shard(net)
        with pytest.raises(NotImplementedError, match=kind.__name__):
            tessera.ShardedOptimizer(sharded, _make(kind, net, {}))
    return True


def test_refused_optimizers(ranks):
    assert all(ranks(2, _refused))


SCHEDULES = {
    "LambdaLR": lambda it: lr_scheduler.LambdaLR(it, lambda step: 0.9**step),
    "MultiplicativeLR": lambda it: lr_scheduler.MultiplicativeLR(it, lambda step: 0.9),
    "StepLR": lambda it: lr_scheduler.StepLR(it, 2, 0.5),
    "MultiStepLR": lambda it: lr_scheduler.MultiStepLR(it, [1, 3], 0.5),
    "ConstantLR": lambda it: lr_scheduler.ConstantLR(it, 0.5, 2),
    "LinearLR": lambda it: lr_scheduler.LinearLR(it, 0.1, 1.0, 3),
    "ExponentialLR": lambda it: lr_scheduler.ExponentialLR(it, 0.8),
    "PolynomialLR": lambda it: lr_scheduler.PolynomialLR(it, 6, 2.0),
    "CosineAnnealingLR": lambda it: lr_scheduler.CosineAnnealingLR(it, 4),
    "CosineAnnealingWarmRestarts": lambda it: lr_scheduler.CosineAnnealingWarmRestarts(it, 2),
    "CyclicLR": lambda it: lr_scheduler.CyclicLR(it, 0.01, 0.1, 2),
    "OneCycleLR": lambda it: lr_scheduler.OneCycleLR(it, 0.1, total_steps=6),
    "ReduceLROnPlateau": lambda it: lr_scheduler.ReduceLROnPlateau(it, factor=0.5, patience=0),
    "SequentialLR": lambda it: lr_scheduler.SequentialLR(
        it, [lr_scheduler.LinearLR(it, 0.1, 1.0, 2), lr_scheduler.ExponentialLR(it, 0.8)], [2]),
    "ChainedScheduler": lambda it: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(it, 0.1, 1.0, 2), lr_scheduler.ExponentialLR(it, 0.8)], it),
    "SWALR": lambda it: SWALR(it, 0.01, 2),
}


def test_all_schedules_are_listed():
    assert {kind.__name__ for kind in _subclasses(lr_scheduler, lr_scheduler.LRScheduler)} | {"SWALR"} == SCHEDULES.keys()


def _scheduled_steps(model, optimizer, name, rows):
    schedule = SCHEDULES[name](optimizer)
    rates = []
    for step in range(6):
        _step(model, optimizer, rows, step)
        schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        rates.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
        if step == 3:  # it is saved, and goes on
            saved = schedule.state_dict()
            schedule = SCHEDULES[name](optimizer) if name in ("StepLR", "CosineAnnealingLR") else schedule
            schedule.load_state_dict(saved)
            for group, (lr, momentum) in zip(optimizer.param_groups, rates[-1]):
                group["lr"], group["momentum"] = lr, momentum
    return rates


def _sgd(net):
    params = list(net.parameters())
    return torch.optim.SGD([{"params": params[:2]}, {"params": params[2:], "lr": 0.02}], lr=0.05, momentum=0.9, foreach=False,
                           fused=False)


def _scheduled():
    results = {}
    for name in SCHEDULES:
        net = make_net()
        sharded = tessera.fully_shard(net)
        optimizer = tessera.ShardedOptimizer(sharded, _sgd(net), fused=False)
        results[name] = _scheduled_steps(sharded, optimizer, name, _own_rows), sharded.full_state()
    return results


@pytest.mark.parametrize("size", [1, 2])
def test_every_schedule(ranks, size):
    results = ranks(size, _scheduled)
    for name in SCHEDULES:
        net = make_net()
        rates = _scheduled_steps(net, _sgd(net), name, _rows_of(size))
        for each in results:
            assert each[name][0] == rates, name
            for key, value in net.state_dict().items():
                assert torch.equal(each[name][1][key], value), (name, key)

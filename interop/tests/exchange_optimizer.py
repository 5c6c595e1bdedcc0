#!/usr/bin/env python3
"""Trains a small model with PyTorch, for the tests that exchange optimizer state.

    exchange_optimizer.py save DIRECTORY          for each optimizer of OPTIMIZERS, KIND.pt with the model and the optimizer
                                                  after 3 steps, KIND.dcp with the same, and KIND.after.pt with the model
                                                  after 6; other files are described in save_others(). Makes a checkpoint
                                                  FILE.ckpt of each, as IMPORTS says
    exchange_optimizer.py resume DIRECTORY        for each optimizer, exports the checkpoint KIND to KIND.pt, loads that, takes
                                                  3 steps and writes the model's state dict to KIND.pt.after; and the same for
                                                  the directory KIND.dcp

Without PyTorch the output is "no torch", without the package tessera "no tessera".
"""
import os
import sys
import warnings

warnings.simplefilter("ignore")
try:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
except ImportError:
    print("no torch")
    sys.exit()
try:
    from tessera import exchange
except ImportError:
    print("no tessera")
    sys.exit()

OPTIMIZERS = {
    "AdamW": lambda p, lr=0.02: torch.optim.AdamW(p, lr=lr, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.1, amsgrad=True),
    "Adam": lambda p, lr=0.02: torch.optim.Adam(p, lr=lr, weight_decay=0.01),
    "SGD": lambda p, lr=0.05: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adagrad": lambda p, lr=0.05: torch.optim.Adagrad(p, lr=lr, lr_decay=0.01, initial_accumulator_value=0.1),
    "RMSprop": lambda p, lr=0.01: torch.optim.RMSprop(p, lr=lr, alpha=0.9, momentum=0.5, centered=True),
}


# The options with which a file is imported.
IN_FILE, IN_DIRECTORY = {"optimizer_key": "optimizer"}, {"optimizer_key": "optim"}
ORDER = ["first.weight", "norm.bias", "norm.weight", "first.bias", "last.weight"]
NAMELESS = ["first.bias", "norm.bias", "first.weight", "norm.weight", "last.weight"]
IMPORTS = {**{f"{kind}.pt": IN_FILE for kind in OPTIMIZERS}, **{f"{kind}.dcp": IN_DIRECTORY for kind in OPTIMIZERS},
           "groups.pt": IN_FILE, "flat.dcp": IN_DIRECTORY, "tied.dcp": IN_DIRECTORY,
           "order.pt": {**IN_FILE, "optimizer_params": ORDER}, "nameless.pt": {**IN_FILE, "optimizer_params": NAMELESS},
           "old.pt": {**IN_FILE, "optimizer_class": "AdamW"}}


class Net(torch.nn.Module):
    """That of python_optimizer_test.cpp."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.last = torch.nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.first(x))))


class Tied(torch.nn.Module):
    """That of python_optimizer_test.cpp."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.last = torch.nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))[:, :4]


def train(net, optimizer, first, last):
    for step in range(first, last):
        numbers = torch.arange(30.).view(5, 6) + step
        x, y = torch.sin(numbers), torch.cos(numbers[:, :4])
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()


def state_of(net, optimizer):
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


def save(directory):
    def path(name):
        return os.path.join(directory, name)

    for kind, make in OPTIMIZERS.items():
        torch.manual_seed(1)
        net = Net()
        optimizer = make(net.named_parameters())
        train(net, optimizer, 0, 3)
        torch.save(state_of(net, optimizer), path(kind + ".pt"))
        model, optim = get_state_dict(net, optimizer)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=path(kind + ".dcp"), no_dist=True)
        train(net, optimizer, 3, 6)
        torch.save(net.state_dict(), path(kind + ".after.pt"))
    save_others(path)
    for file, options in IMPORTS.items():
        exchange.import_checkpoint(path(file), path(file + ".ckpt"), **options)


def save_others(path):
    """order.pt: an optimizer, without names, of parameters in another order than the model's, which shapes do not show; and
    order.after.pt. Two param groups: groups.pt with names, nameless.pt without, flat.dcp with flattened options; groups.after.pt.
    frozen.pt: an optimizer of some of the parameters, without names. old.pt: as PyTorch before 2.7 stores AdamW, with
    counts as numbers. nadam.pt: an optimizer that LibTorch has not. tied.dcp and tied.after.pt: of a Tied model, after 3
    and 6 steps."""
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.SGD([net.first.weight, net.norm.bias, net.norm.weight, net.first.bias, net.last.weight], lr=0.05,
                                momentum=0.9)
    train(net, optimizer, 0, 3)
    torch.save(state_of(net, optimizer), path("order.pt"))
    train(net, optimizer, 3, 6)
    torch.save(net.state_dict(), path("order.after.pt"))

    for named in (True, False):
        torch.manual_seed(1)
        net = Net()
        params = list(net.named_parameters() if named else net.parameters())
        optimizer = torch.optim.AdamW([{"params": params[1::2], "weight_decay": 0.}, {"params": params[::2], "lr": 0.03}],
                                      lr=0.02, weight_decay=0.1)
        train(net, optimizer, 0, 3)
        torch.save(state_of(net, optimizer), path("groups.pt" if named else "nameless.pt"))
        if named:
            model, optim = get_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
            dcp.save({"model": model, "optim": optim}, checkpoint_id=path("flat.dcp"), no_dist=True)
            train(net, optimizer, 3, 6)
            torch.save(net.state_dict(), path("groups.after.pt"))

    torch.manual_seed(1)
    net = Tied()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    train(net, optimizer, 0, 3)
    model, optim = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=path("tied.dcp"), no_dist=True)
    train(net, optimizer, 3, 6)
    torch.save(net.state_dict(), path("tied.after.pt"))

    net = Net()
    optimizer = torch.optim.AdamW([net.first.weight, net.last.weight])
    train(net, optimizer, 0, 1)
    torch.save(state_of(net, optimizer), path("frozen.pt"))
    state = torch.load(path("AdamW.pt"), weights_only=True)
    for group in state["optimizer"]["param_groups"]:
        del group["decoupled_weight_decay"]
    for values in state["optimizer"]["state"].values():
        values["step"] = int(values["step"])
    torch.save(state, path("old.pt"))
    optimizer = torch.optim.Adamax(net.named_parameters())
    train(net, optimizer, 0, 1)
    torch.save(state_of(net, optimizer), path("adamax.pt"))


def resume_file(kind, path):
    state = torch.load(path, weights_only=True)
    net = Net()
    net.load_state_dict(state["model"])
    optimizer = OPTIMIZERS[kind](net.parameters(), lr=1.)
    optimizer.load_state_dict(state["optimizer"])
    return net, optimizer


def resume_dcp(kind, path):
    net = Net()
    optimizer = OPTIMIZERS[kind](net.parameters(), lr=1.)
    model, optim = get_state_dict(net, optimizer)
    state = {"model": model, "optim": optim}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return net, optimizer


def resume(directory):
    for kind in OPTIMIZERS:
        for suffix, load in ((".pt", resume_file), (".dcp", resume_dcp)):
            path = os.path.join(directory, kind + suffix)
            exchange.export_checkpoint(os.path.join(directory, kind), path, format="torch" if suffix == ".pt" else "dcp",
                                       **(IN_FILE if suffix == ".pt" else IN_DIRECTORY))
            net, optimizer = load(kind, path)
            train(net, optimizer, 3, 6)
            torch.save(net.state_dict(), path + ".after")


if __name__ == "__main__":
    {"save": save, "resume": resume}[sys.argv[1]](sys.argv[2])

"""Models and data that the tests share."""

import torch
from torch import nn

import tessera

LEVELS = ("none", "os", "os_g", "p_g_os")


class Net(nn.Module):
    """Odd sizes, a tied and a frozen parameter, a buffer, a parameter that is not used."""

    def __init__(self, width=19):
        super().__init__()
        self.embedding = nn.Embedding(23, width)
        self.block = nn.Sequential(nn.Linear(width, 31), nn.GELU(), nn.Linear(31, width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 23, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.full((1,), 0.5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.block(self.norm(x)) * self.scale
        return self.head(x)


def make_net():
    torch.manual_seed(5)
    return Net()


def batch(step, rows=12):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(23, (rows, 6), generator=generator)


def my_rows(tokens):
    return tokens.view(tessera.size(), -1, tokens.shape[1])[tessera.rank()]


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def train_alone(make_optimizer, steps, size, rows=12):
    """Trains one process on the rows of all ranks; returns the state and the losses of each rank."""
    net = make_net()
    optimizer = make_optimizer(net.parameters())
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        parts = batch(step, rows).view(size, -1, 6)
        each = []
        for part in parts:
            loss = loss_of(net, part)
            (loss / size).backward()
            each.append(loss.item())
        optimizer.step()
        losses.append(each)
    return {name: value.detach().clone() for name, value in net.state_dict().items()}, losses


def train_sharded(make_optimizer, steps, rows=12, **plan):
    """Trains this rank's rows; returns the whole state and the losses."""
    net = make_net()
    sharded = tessera.fully_shard(net, **plan)
    optimizer = tessera.ShardedOptimizer(sharded, make_optimizer(net.parameters()), fused=False)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(sharded, my_rows(batch(step, rows)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sharded.full_state(), losses

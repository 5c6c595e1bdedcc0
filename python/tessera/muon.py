"""Which parameters `torch.optim.Muon` takes, and the rules that keep them whole on shards."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn


def _by_kind(module: nn.Module, exceptions: Iterable[str]) -> tuple[dict[str, nn.Parameter], list[nn.Parameter]]:
    patterns = [re.compile(re.escape(pattern).replace(r"\*", ".*"), re.DOTALL) for pattern in exceptions]
    names = [(name, param) for name, param in module.named_parameters(remove_duplicate=False)]
    excepted = {id(param) for name, param in names if param.dim() != 2 or any(it.fullmatch(name) for it in patterns)}
    matrices = {name: param for name, param in module.named_parameters() if id(param) not in excepted}
    return matrices, [param for param in module.parameters() if id(param) in excepted]


def muon_groups(module: nn.Module, exceptions: Iterable[str] = ()) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the matrices of a module, for `torch.optim.Muon`, and all its other parameters, for another optimizer: vectors,
    parameters of more dims, and those whose names fit one of `exceptions`: embeddings and heads, as patterns in which `*`
    stands for any characters. A tied parameter is listed once, and any of its names may be an exception. Each optimizer gets a
    `ShardedOptimizer` of its own."""
    matrices, others = _by_kind(module, exceptions)
    return list(matrices.values()), others


def muon_cuts(module: nn.Module, exceptions: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Returns the rules for `fully_shard(module, cuts=...)` that keep those matrices whole. Call it before."""
    return [(name, "whole") for name in _by_kind(module, exceptions)[0]]

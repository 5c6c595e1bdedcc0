"""Building models that fit on no rank."""

from __future__ import annotations

import torch
from torch import nn

from . import _C

is_deferred = _C.is_deferred


class DeferredInit:
    """A context in which large tensors that this thread makes get no lasting memory: the operators that make their values
    are recorded instead, and `fully_shard()`, called after the context, makes the values unit by unit.

        with tessera.DeferredInit():
            model = Gpt(config)
        sharded = tessera.fully_shard(model)

    Values and the state of the random generator are those of a model that was built without it. A deferred tensor that an
    operator uses after the context gets its values then; call `materialize()` before reading memory by `data_ptr()` or
    `numpy()`. Contexts nest.
    """

    def __init__(self):
        self._scopes: list[_C.DeferredInit] = []

    def __enter__(self) -> "DeferredInit":
        scope = _C.DeferredInit()
        scope.enter()
        self._scopes.append(scope)
        return self

    def __exit__(self, *exception) -> None:
        self._scopes.pop().exit()


def materialize(target: torch.Tensor | nn.Module) -> None:
    """Makes the values of a deferred tensor, or of all parameters and buffers of a module, permanently."""
    tensors = [target] if isinstance(target, torch.Tensor) else [*target.parameters(), *target.buffers()]
    for tensor in tensors:
        _C.materialize(tensor)

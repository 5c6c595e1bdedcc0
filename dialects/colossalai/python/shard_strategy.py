"""How parameters are cut, and which are gathered together."""

from __future__ import annotations

from typing import Any

import torch

from .. import _C


class BaseShardStrategy:
    """Derive from it to write a strategy: it chooses fields of a plan, and leaves the moving of data to the engine."""

    def _native(self) -> _C.ShardStrategy:
        return _C.PythonStrategy(self.apply)

    def apply(self, parameters: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Returns fields of a plan for the model that has these parameters: `units` (lists of names that are gathered
        together) or `unit_bytes`, `partition`, `owners`, `whole`. All ranks must return the same."""
        raise NotImplementedError(f"{type(self).__name__}.apply() is missing")


class TensorShardStrategy(BaseShardStrategy):
    """Cuts each parameter into equal parts, and gathers it by itself."""

    def _native(self) -> _C.ShardStrategy:
        return _C.TensorShardStrategy()


class BucketTensorShardStrategy(BaseShardStrategy):
    """Gathers the parameters of a submodule (not of its children) at once."""

    def _native(self) -> _C.ShardStrategy:
        return _C.BucketTensorShardStrategy()


def native(strategy: BaseShardStrategy, caller: str) -> _C.ShardStrategy:
    """Returns the engine's strategy. Raises `TypeError`."""
    if not isinstance(strategy, BaseShardStrategy):
        raise TypeError(f"[{caller}] shard_strategy must be a BaseShardStrategy; got {type(strategy).__name__}")
    for name in ("shard", "gather"):
        if hasattr(strategy, name):
            raise TypeError(f"[{caller}] a strategy does not move data here, so {type(strategy).__name__}.{name}() would not be "
                            "called: write apply(), which returns fields of a plan")
    return strategy._native()

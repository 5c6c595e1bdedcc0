"""Loss scaling for half precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from . import _C
from .optimizer import ShardedOptimizer
from .world import resolve_group


class GradScaler:
    """Multiplies losses by an adaptive scale, and skips steps whose gradients overflow, on all ranks or on none. The
    calls are those of `torch.amp.GradScaler`; works on every device. All ranks must make the same calls.
    """

    _class = _C.GradScaler

    def __init__(self, init_scale: float = 65536.0, growth_factor: float = 2.0, backoff_factor: float = 0.5,
                 growth_interval: int = 2000, enabled: bool = True, *, hysteresis: int = 1, min_scale: float = 0.0,
                 max_scale: float = math.inf, group=None):
        self._scaler = self._class(init_scale, growth_factor, backoff_factor, growth_interval, enabled, hysteresis,
                                   min_scale, max_scale, None if group is None else resolve_group(group))

    def scale(self, outputs):
        """Returns a tensor, or each one of a list or tuple, times the scale."""
        if isinstance(outputs, torch.Tensor):
            return self._scaler.scale(outputs)
        return type(outputs)(self.scale(output) for output in outputs)

    def unscale_(self, optimizer: ShardedOptimizer) -> None:
        """Divides the reduced gradients by the scale, say to clip them before the step. Collective."""
        self._with_engines(optimizer, self._scaler.unscale_)

    def step(self, optimizer: ShardedOptimizer, *args, **kwargs) -> bool:
        """Steps if all gradients of all ranks are finite, and returns whether it did. Collective."""
        if args or kwargs:
            raise RuntimeError(f"[{type(self).__name__}] closures can't be used with a scaler: their gradients would have "
                               "other scales")
        return self._with_engines(optimizer, self._scaler.step)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapts the scale to the overflows since the last update, or sets it."""
        self._scaler.update(None if new_scale is None else float(new_scale))

    def get_scale(self) -> float:
        return self._scaler.get_scale()

    def is_enabled(self) -> bool:
        return self._scaler.is_enabled()

    def state_dict(self) -> dict:
        return dict(self._scaler.state())

    def load_state_dict(self, state: dict) -> None:
        self._scaler.load_state(state)

    def _with_engines(self, optimizer: ShardedOptimizer, use: Callable[[Any], Any]) -> Any:
        """Calls `use` with the engine's own optimizer."""
        if not isinstance(optimizer, ShardedOptimizer):
            raise TypeError(f"GradScaler takes a ShardedOptimizer; got {type(optimizer).__name__}")
        return use(optimizer._sharded)

"""Loss scaling for `OSS`."""

from __future__ import annotations

import torch

from .. import _C
from .oss import OSS


class ShardedGradScaler:
    """`torch.amp.GradScaler` for `OSS`: a step is skipped on all ranks of the optimizer's group or on none. Works on every
    device. `process_group` is the optimizer's own, and ignored here.
    """

    def __init__(self, init_scale: float = 2.0**16, growth_factor: float = 2.0, backoff_factor: float = 0.5,
                 growth_interval: int = 2000, enabled: bool = True, process_group=None):
        self._scaler = _C.ShardedGradScaler(init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def scale(self, outputs):
        if isinstance(outputs, torch.Tensor):
            return self._scaler.scale(outputs)
        return type(outputs)(self.scale(output) for output in outputs)

    def unscale_(self, optimizer: OSS) -> None:
        """Collective over the optimizer's group."""
        optimizer.lend(self._scaler.unscale_)

    def step(self, optimizer: OSS, *args, **kwargs) -> bool:
        """Returns whether it stepped. Collective over the optimizer's group."""
        if args or kwargs:
            raise RuntimeError("[ShardedGradScaler] closures can't be used with a scaler")
        return optimizer.lend(self._scaler.step)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        self._scaler.update(None if new_scale is None else float(new_scale))

    def get_scale(self) -> float:
        return self._scaler.get_scale()

    def is_enabled(self) -> bool:
        return self._scaler.is_enabled()

    def state_dict(self) -> dict:
        return dict(self._scaler.state())

    def load_state_dict(self, state: dict) -> None:
        self._scaler.load_state(state)

"""Loss scaling for `OSS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import _C
from ..grad_scaler import GradScaler
from .oss import OSS


class ShardedGradScaler(GradScaler):
    """`torch.amp.GradScaler` for `OSS`: a step is skipped on all ranks of the optimizer's group or on none. Works on every
    device. `process_group`: further ranks that skip the step together with these. Collective, as are its functions that
    take an optimizer.
    """

    _class = _C.ShardedGradScaler

    def __init__(self, init_scale: float = 2.0**16, growth_factor: float = 2.0, backoff_factor: float = 0.5,
                 growth_interval: int = 2000, enabled: bool = True, process_group=None):
        super().__init__(init_scale, growth_factor, backoff_factor, growth_interval, enabled, group=process_group)

    def _with_engines(self, optimizer: OSS, use: Callable[[Any], Any]) -> Any:
        if not isinstance(optimizer, OSS):
            raise TypeError(f"ShardedGradScaler takes an OSS; got {type(optimizer).__name__}")
        return optimizer.lend(use)

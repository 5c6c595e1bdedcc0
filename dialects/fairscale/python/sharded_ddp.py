"""`ShardedDataParallel`: gradients are averaged on the rank that owns their parameter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .. import _C
from ..parameter import parameters_of
from ..sharded_module import Wrapper, named_tensors, read_copy
from ..world import resolve_group
from .oss import OSS


class ShardedDataParallel(Wrapper):
    """Data parallel training of a module with optimizers that are `OSS`.

    The arguments are FairScale's. `.grad` of a parameter is its averaged gradient on the rank that owns it, and None on
    others. Any number of forwards and backwards may precede a step. Parameters that no optimizer has are not reduced.
    `reduce_buffer_size`: elements of gradients that are reduced together, about; 0: one reduction per parameter.
    `reduce_fp16` works with it and without.

    Raises `ValueError` on every rank if an optimizer has a parameter that does not belong to the module.
    """

    def __init__(self, module: nn.Module, sharded_optimizer: OSS | list[OSS], process_group=None,
                 broadcast_buffers: bool = True, sync_models_at_startup: bool = True, reduce_buffer_size: int = 2**23,
                 auto_refresh_trainable: bool = True, reduce_fp16: bool = False,
                 warn_on_trainable_params_changed: bool = True):
        super().__init__(module)
        self._optimizers = sharded_optimizer if isinstance(sharded_optimizer, list) else [sharded_optimizer]
        for optimizer in self._optimizers:
            if not isinstance(optimizer, OSS):
                raise TypeError(f"ShardedDataParallel takes optimizers that are OSS; got {type(optimizer).__name__}")
        devices = {param.device for param in module.parameters()}
        self.is_multi_device_module = len(devices) > 1
        self.device_type = next(iter(devices)).type if devices else "cpu"
        self._options = (None if process_group is None else resolve_group(process_group), broadcast_buffers,
                         sync_models_at_startup, reduce_buffer_size, auto_refresh_trainable, reduce_fp16,
                         warn_on_trainable_params_changed)
        self._ddp = None
        if not self._chained_gradients():
            self._build()

    def _chained_gradients(self) -> list[str]:
        return [name for name, param in self.module.named_parameters()
                if param.grad is not None and param.grad.requires_grad]

    def _build(self) -> None:
        # As in FairScale, this is an error of the first forward, so that gradients may be cleared before.
        if chained := self._chained_gradients():
            raise RuntimeError(f"[ShardedDataParallel] the gradients of {chained} require gradients themselves, which can't be "
                               "reduced; clear them before")
        parameters, buffers = named_tensors(self.module)
        self._ddp = _C.ShardedDataParallel(parameters, buffers, [optimizer._oss for optimizer in self._optimizers],
                                           *self._options)
        for optimizer in self._optimizers:
            optimizer._ddp = self
        shown = ((param, optimizer._oss.gradient) for optimizer in self._optimizers for param in parameters_of(optimizer))
        self._take_over(shown, read_copy)

    def forward(self, *inputs, **kwargs):
        if self._ddp is None:
            self._build()
        self._ddp.begin_forward()
        result = self.module(*inputs, **kwargs)
        self._ddp.end_forward()
        return result

    def __getitem__(self, key):
        return self.module[key]

    def to(self, device=None, dtype: torch.dtype | None = None, non_blocking: bool = False) -> "ShardedDataParallel":
        """Converts floating parameters and buffers, and keeps the optimizers' state. The type of device can't change.
        Collective."""
        self._ddp.convert(None if device is None else torch.device(device), dtype, non_blocking)
        return self

    def no_sync(self):
        """A context in which backward sends nothing; the next backward after it reduces the sum of all gradients."""
        return self._ddp.sharded().no_sync()

    def reduce(self) -> None:
        """Reduces the gradients accumulated under `no_sync()`, if no other backward is to follow. Collective."""
        self._ddp.reduce()

    def sync_buffers(self, blocking: bool = False) -> None:
        """Takes rank 0's buffers. Collective."""
        self._ddp.sync_buffers(blocking)

    def refresh_trainable(self) -> None:
        """Checks that all ranks train the same parameters. Collective."""
        self._ddp.refresh_trainable()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Sets gradients to zero, or clears them."""
        if self._ddp is None:
            self.module.zero_grad(set_to_none)
        else:
            self._ddp.zero_grad(set_to_none)

    def full_grad(self, param: torch.Tensor) -> torch.Tensor | None:
        """Returns a parameter's averaged gradient, on every rank. Collective."""
        return self._ddp.sharded().full_grad(param)

    def join(self, train: Callable[[], None]) -> None:
        """Runs `train`, in which ranks may take different numbers of steps."""
        self._ddp.join(train)

    def unwrap(self) -> nn.Module:
        """Makes the module's parameters ordinary ones again, and returns the module. Collective."""
        self._ddp.unwrap()
        for optimizer in self._optimizers:
            optimizer._ddp = None
        return self._give_back()

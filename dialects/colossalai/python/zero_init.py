"""`ZeroInitContext`: builds modules for `ShardedModelV2`."""

from __future__ import annotations

import contextlib
import threading

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from .. import _C
from ..world import resolve_group
from .param_attributes import ColoAttributes
from .shard_strategy import BaseShardStrategy, native

_contexts = threading.local()  # `stack`: the settings of this thread's contexts, the innermost last


def _stack() -> list[dict]:
    if not hasattr(_contexts, "stack"):
        _contexts.stack = []
    return _contexts.stack


def _describe(module, name, parameter) -> None:
    # Runs for every parameter that a module gets. A tied one is placed as its first module says.
    if _stack() and not hasattr(parameter, "colo_attr"):
        parameter.colo_attr = ColoAttributes(parameter, **_stack()[-1])


class ZeroInitContext:
    """A context in which a model for `ShardedModelV2` is built.

    `target_device`: of the wrapped model. `shard_param`: True: each rank keeps only its part of the parameters (ZeRO 3);
    False: all of them, and parts of gradients and optimizer state (ZeRO 2). `rm_torch_payload_on_the_fly`: True: parameters
    get no memory before the model is wrapped or used; False: they get it at once. `model_numel_tensor`: one element of
    dtype int or long, to which the number of elements of the parameters is added at the end. `dp_process_group`: the ranks
    that the model is for; None: those given to `ShardedModelV2`.

    Not in ColossalAI: `param_dtype`, in which the model computes; `seed`, for the generator in the context, which continues
    afterwards as if nothing had been drawn. `default_dtype` (ColossalAI 0.1.8): of what the constructors make; the model is
    converted to `param_dtype` when it is wrapped. `bf16` (ColossalAI 0.3): the same as `param_dtype=torch.bfloat16`.
    """

    def __init__(self, target_device: torch.device | str | int, shard_strategy: BaseShardStrategy, shard_param: bool = False,
                 rm_torch_payload_on_the_fly: bool = True, model_numel_tensor: torch.Tensor | None = None,
                 dp_process_group=None, *, param_dtype: torch.dtype = torch.float16, seed: int | None = None,
                 default_dtype: torch.dtype | None = None, bf16: bool = False):
        param_dtype = torch.bfloat16 if bf16 else param_dtype
        device = torch.device(target_device)
        group = None if dp_process_group is None else resolve_group(dp_process_group)
        self._arguments = (device, native(shard_strategy, "ZeroInitContext"), shard_param, rm_torch_payload_on_the_fly,
                           model_numel_tensor, group, param_dtype, seed)
        self._settings = dict(is_sharded=shard_param, is_replicated=True, dtype=param_dtype, device=device, group=group)
        self._default_dtype = default_dtype

    def __enter__(self) -> "ZeroInitContext":
        with contextlib.ExitStack() as stack:
            if self._default_dtype is not None:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._default_dtype)
            context = _C.ZeroInitContext()
            context.enter(*self._arguments)
            stack.callback(context.exit)
            _stack().append(self._settings)
            stack.callback(_stack().pop)
            stack.callback(register_module_parameter_registration_hook(_describe).remove)
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        self._undo.close()


class no_shard_zero_context(contextlib.ContextDecorator):
    """A context in a `ZeroInitContext`, and a decorator: parameters made in it stay whole on all ranks. With
    `is_replicated=False` they are also each rank's own: never sent, and their gradients never reduced, as for experts that
    ranks do not share. Does nothing outside of a `ZeroInitContext`."""

    def __init__(self, is_replicated: bool = True):
        self._is_replicated = is_replicated
        self._context = _C.NoShardZeroContext()

    def __enter__(self) -> "no_shard_zero_context":
        self._context.enter(self._is_replicated)
        _stack().extend(dict(outer, is_sharded=False, is_replicated=self._is_replicated) for outer in _stack()[-1:])
        return self

    def __exit__(self, *exception) -> None:
        del _stack()[-1:]
        self._context.exit()

    def _recreate_cm(self) -> "no_shard_zero_context":
        return no_shard_zero_context(self._is_replicated)  # of a function that calls itself, each call has its own


no_shard_zero_decrator = no_shard_zero_context
"""ColossalAI's name for the decorator."""

"""`ShardedOptimizerV2`."""

from __future__ import annotations

import torch

from .. import _C, dcp
from ..optimizer import ShardedOptimizer, use_fused
from ..world import resolve_group
from .sharded_model import ShardedModelV2


class ShardedOptimizerV2(ShardedOptimizer):
    """Steps an optimizer, which has the parameters of a `ShardedModelV2`, on this rank's part of them in float32, with an
    adaptive loss scale.

    Arguments are ColossalAI's. `initial_scale`: ColossalAI's 2**32 costs 17 skipped steps. `cpu_offload`: states that master
    weights and optimizer state are in host memory, which the model's `tensor_placement_policy` decides.
    `gpu_margin_mem_ratio`, of an offloaded model: the fraction of the part of its `memory_budget` that the first step leaves
    free, which is then filled with master weights and optimizer state. `mp_process_group`: ranks that hold other parts of
    the model: if gradients overflow on one, all skip the step. `fused`: see `ShardedOptimizer`.

    All functions are collective. Raises `ValueError` for invalid options, and `RuntimeError` for `cpu_offload` with a model
    that is not offloaded.
    """

    def __init__(self, sharded_model: ShardedModelV2, optimizer: torch.optim.Optimizer, cpu_offload: bool = False,
                 gpu_margin_mem_ratio: float = 0.0, initial_scale: float = 2**16, min_scale: float = 1,
                 growth_factor: float = 2, backoff_factor: float = 0.5, growth_interval: int = 1000, hysteresis: int = 2,
                 max_scale: float = 2**32, keep_unsharded: bool = False, dp_process_group=None, mp_process_group=None, *,
                 fused: bool = True):
        if not isinstance(sharded_model, ShardedModelV2):
            raise TypeError(f"[ShardedOptimizerV2] model must be wrapped with ShardedModelV2; got "
                            f"{type(sharded_model).__name__}")
        if isinstance(optimizer, ShardedOptimizer) or not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"[ShardedOptimizerV2] optimizer must be of torch.optim; got {type(optimizer).__name__}")
        if fused:
            use_fused(optimizer)
        groups = [None if group is None else resolve_group(group) for group in (dp_process_group, mp_process_group)]
        options = _C.ShardedOptimizerV2Options(cpu_offload, gpu_margin_mem_ratio, initial_scale, min_scale, growth_factor,
                                               backoff_factor, growth_interval, hysteresis, max_scale, keep_unsharded,
                                               *groups)
        self._attach(sharded_model, optimizer,
                     _C.ShardedOptimizerV2(sharded_model._model_v2, optimizer, options))

    def backward(self, loss: torch.Tensor) -> None:
        """Multiplies the loss by the scale, and runs backward as the model's `backward` does."""
        self._sharded.backward(loss)

    def backward_by_grad(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        """The same from the gradient of `tensor`, which is scaled."""
        self._sharded.backward_by_grad(tensor, grad)

    def step(self, closure=None) -> bool:
        """Unscales the gradients, and updates the parameters. If a gradient is not finite on any rank, all ranks warn,
        clear all gradients, change no parameter, and return False."""
        if closure is not None:
            raise RuntimeError("[ShardedOptimizerV2] closures can't be used: their losses would not be scaled; call backward()")
        return self._sharded.step()

    def clip_grad_norm(self, model: ShardedModelV2, max_norm: float, norm_type: float = 2.0) -> float:
        """Unscales the gradients, then scales them so that their norm is at most `max_norm`; returns the norm before."""
        if model is not self._model:
            raise ValueError("[clip_grad_norm] the model must be the one of the optimizer")
        return self._sharded.clip_grad_norm(float(max_norm), float(norm_type))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return torch.tensor(self.clip_grad_norm(self._model, max_norm, norm_type))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the optimizer's parameters."""
        if not set_to_none:
            raise ValueError("[ShardedOptimizerV2] zero_grad() clears the gradients; the model's zero_grad(False) keeps zeros")
        self._sharded.zero_grad()

    def state_dict(self) -> dict:
        """Returns the whole state with the master weights, and the scaler's under "scaler", on every rank. Functions of
        `torch.distributed.checkpoint` leave the scaler's out."""
        if dcp.is_asking():
            dcp.ensure_state(self)  # so that it can be loaded into
        optimizer, scaler = self._sharded.state_dict()
        return dict(optimizer, scaler=scaler)

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads such a state, from any number of ranks; parameters have numbers or names. Warns if it has no scaler's; the
        scaler is then unchanged."""
        state = dcp.numbered(state_dict)
        scaler = state.pop("scaler", {})
        self._sharded.load_state_dict(state, scaler)

    @property
    def loss_scale(self) -> float:
        return self._sharded.loss_scale()

    def get_memory_usage(self) -> tuple[int, int]:
        """Returns the bytes of master weights and optimizer state on devices and in host memory. Not collective."""
        return self._sharded.get_memory_usage()

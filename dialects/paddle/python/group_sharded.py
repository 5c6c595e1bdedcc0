"""`group_sharded_parallel` and what belongs to it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from .. import _C
from ..checkpoint import load_checkpoint, save_checkpoint
from ..grad_scaler import GradScaler
from ..optimizer import ShardedOptimizer, use_fused
from ..sharded_module import ShardedModule, named_tensors
from ..world import resolve_group


@dataclasses.dataclass
class ClipGradByGlobalNorm:
    """Paddle's clipping: gradients are multiplied by `clip_norm / max(norm, clip_norm)` at each step. `no_clip`: names of
    parameters that are neither counted nor scaled."""

    clip_norm: float = 1.0
    no_clip: Iterable[str] = ()


class GroupShardedOptimizer(ShardedOptimizer):
    """The optimizer as `group_sharded_parallel` returns it."""

    def __init__(self, model: ShardedModule, optimizer: torch.optim.Optimizer, sharded: _C.Optimizer,
                 scaler: GradScaler | None):
        self._attach(model, optimizer, sharded)
        self.scaler = scaler

    def clear_grad(self, set_to_zero: bool = False) -> None:
        self.zero_grad(set_to_none=not set_to_zero)

    def get_lr(self) -> float:
        return self.param_groups[0]["lr"]

    def set_lr(self, value: float) -> None:
        for group in self.param_groups:
            group["lr"] = value

    def minimize(self, *args, **kwargs):
        raise RuntimeError("optimizer.minimize() not support now, please use optimizer.step()")


def _excluded(model: nn.Module, layers) -> list[str]:
    # By type name, dotted name, class, module or its id, as dotted names.
    if not isinstance(layers, (list, tuple, type(None))):
        raise ValueError("[group_sharded_parallel] the exclude_layers must be a list with layers' name or layers' id; got "
                         f"{layers!r}")
    names: list[str] = []
    for layer in layers or ():
        found = [name for name, module in model.named_modules() if name and (
            module is layer or id(module) == layer or name == layer or type(module) is layer or type(module).__name__ == layer)]
        if not found:
            raise ValueError(f"[group_sharded_parallel] exclude_layer must name layers of the model, by type, dotted name, "
                             f"object or id; it has none that is {layer!r}")
        names += found
    return names


def group_sharded_parallel(model: nn.Module, optimizer: torch.optim.Optimizer, level: str, scaler: GradScaler | None = None,
                           group=None, offload: bool | str = False, sync_buffers: bool = False,
                           buffer_max_size: int = 2**23, segment_size: int = 2**20, sync_comm: bool = False,
                           dp_group=None, exclude_layer=None, *, grad_clip: ClipGradByGlobalNorm | None = None,
                           fused: bool = True) -> tuple[ShardedModule, GroupShardedOptimizer, GradScaler | None]:
    """Shards `model`, and makes `optimizer` step on the shards. `level`: "os" (as "os_g"), "os_g" or "p_g_os". Collective.

    The other arguments are Paddle's, and mean the same. `group` and `dp_group` are of Tessera or of `torch.distributed`;
    `offload` is also "cpu" or a directory. `grad_clip` stands for the one of Paddle's optimizers, `fused` is that of
    `ShardedOptimizer`.
    """
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"[group_sharded_parallel] scaler must be a tessera.GradScaler; got {type(scaler).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"[group_sharded_parallel] optimizer must be of torch.optim; got {type(optimizer).__name__}")
    if fused:
        use_fused(optimizer)
    groups = {"group": resolve_group(group), "replicate_group": None if dp_group is None else resolve_group(dp_group)}
    options = _C.GroupShardedOptions(
        None if scaler is None else scaler._scaler, groups["group"], offload, sync_buffers, buffer_max_size,
        segment_size, sync_comm, groups["replicate_group"], _excluded(model, exclude_layer),
        None if grad_clip is None else grad_clip.clip_norm, [] if grad_clip is None else list(grad_clip.no_clip))
    parameters, buffers = named_tensors(model)
    sharded, sharded_optimizer = _C.group_sharded_parallel(parameters, buffers, optimizer, level, options)
    wrapper = ShardedModule(model, sharded, dict(groups, level=level))
    return wrapper, GroupShardedOptimizer(wrapper, optimizer, sharded_optimizer, scaler), scaler


def save_group_sharded_model(model: ShardedModule, output: str | os.PathLike,
                             optimizer: GroupShardedOptimizer | None = None) -> None:
    """Saves the whole parameters as safetensors files in the directory `output` and, if the optimizer is given, all
    ranks' parts of its state, its scaler and its step. Collective."""
    if not isinstance(model, ShardedModule):
        raise ValueError("[save_group_sharded_model] Please use the layer which is wrapped with group_sharded_parallel.")
    if Path(output).is_file():
        raise ValueError(f"[save_group_sharded_model] Saving directory ({output}) should be a directory, not a file")
    save_checkpoint(output, model, optimizer, whole_parameters=True,
                    scaler=optimizer.scaler if isinstance(optimizer, GroupShardedOptimizer) else None)


def load_group_sharded_model(model: ShardedModule, input: str | os.PathLike,
                             optimizer: GroupShardedOptimizer | None = None) -> None:
    """Reads a checkpoint of `save_group_sharded_model`, at any number of ranks and level. Collective."""
    load_checkpoint(input, model, optimizer,
                    scaler=optimizer.scaler if isinstance(optimizer, GroupShardedOptimizer) else None)

"""`parallelize` and its plans for layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..dist_tensor import DeviceMesh, Replicate, Shard, is_dist, placements_of
from ..parallel import match_modules, moved, place_along
from .shard_layer import ShardingStage1, ShardingStage2, ShardingStage3, get_mesh, shard_optimizer
from .stages import Stages


class PlanBase:
    """What `parallelize` does to a layer: the dims along which its parameters are cut, and what its inputs and outputs become.
    `mesh_dim`: the number of "mp" in the mesh."""

    def cuts(self, layer: nn.Module) -> dict[str, int]:
        return {}

    def on_input(self, tensor: Any, mesh: DeviceMesh, mesh_dim: int) -> Any:
        return tensor

    def on_output(self, tensor: Any, mesh: DeviceMesh, mesh_dim: int) -> Any:
        return tensor


def _cuts(plan: PlanBase, layer: nn.Module, linear: dict[str, int], embedding: dict[str, int]) -> dict[str, int]:
    if not isinstance(layer, (nn.Linear, nn.Embedding)):
        raise ValueError(f"[parallelize] {type(plan).__name__} places an nn.Linear or an nn.Embedding; got a "
                         f"{type(layer).__name__}")
    return linear if isinstance(layer, nn.Linear) else embedding


@dataclass(frozen=True)
class ColWiseParallel(PlanBase):
    """Cuts the columns of the result. `gather_output`: replicates it."""

    gather_output: bool = False

    def cuts(self, layer):
        return _cuts(self, layer, {"weight": 0, "bias": 0}, {"weight": 1})

    def on_input(self, tensor, mesh, mesh_dim):
        return moved(tensor, mesh, mesh_dim, Replicate())

    def on_output(self, tensor, mesh, mesh_dim):
        return moved(tensor, mesh, mesh_dim, Replicate() if self.gather_output else Shard(-1))


@dataclass(frozen=True)
class RowWiseParallel(PlanBase):
    """Cuts what is summed over; the result is replicated. `is_input_parallel`: the input is cut already; otherwise it is whole.
    Both are placed as they must be."""

    is_input_parallel: bool = True

    def cuts(self, layer):
        return _cuts(self, layer, {"weight": 1}, {"weight": 0})

    def on_input(self, tensor, mesh, mesh_dim):
        return moved(tensor, mesh, mesh_dim, Shard(-1) if tensor.is_floating_point() else Replicate())

    def on_output(self, tensor, mesh, mesh_dim):
        return moved(tensor, mesh, mesh_dim, Replicate())


@dataclass(frozen=True)
class PrepareLayerInput(PlanBase):
    """`fn(process_mesh)` returns a hook `hook(layer, inputs)`, which returns the inputs in their place."""

    fn: Callable | None = None


@dataclass(frozen=True)
class PrepareLayerOutput(PlanBase):
    """`fn(process_mesh)` returns a hook `hook(layer, inputs, outputs)`, which returns the outputs in their place."""

    fn: Callable | None = None


@dataclass(frozen=True)
class SequenceParallelBegin(PlanBase):
    """For the last layer before a range of layers that keep parts of the sequence: cuts its output along the sequence.
    `need_transpose`: the output is [batch, sequence, ...], and the range gets [sequence, batch, ...]. Otherwise it is
    [sequence, batch, ...] as it is, unless dim 0 is cut along another mesh dim, and so the batch."""

    need_transpose: bool = True

    def on_output(self, tensor, mesh, mesh_dim):
        if self.need_transpose:
            return moved(tensor.transpose(0, 1), mesh, mesh_dim, Shard(0))
        others = placements_of(tensor) if is_dist(tensor) else []
        is_batch_first = any(each == Shard(0) for dim, each in enumerate(others) if dim != mesh_dim)
        return moved(tensor, mesh, mesh_dim, Shard(1 if is_batch_first else 0))


@dataclass(frozen=True)
class SequenceParallelEnd(PlanBase):
    """For the first layer after such a range: gathers its input, and undoes the transposition."""

    need_transpose: bool = True

    def on_input(self, tensor, mesh, mesh_dim):
        whole = moved(tensor, mesh, mesh_dim, Replicate())
        return whole.transpose(0, 1) if self.need_transpose else whole


class SequenceParallelEnable(PlanBase):
    """For a layer between others that have whole sequences, [batch, sequence, ...]: it keeps a part."""

    def on_input(self, tensor, mesh, mesh_dim):
        return moved(tensor, mesh, mesh_dim, Shard(1))

    def on_output(self, tensor, mesh, mesh_dim):
        return moved(tensor, mesh, mesh_dim, Replicate())


class SequenceParallelDisable(SequenceParallelBegin, SequenceParallelEnd):
    """For a layer in a range from `SequenceParallelBegin` to `SequenceParallelEnd` that needs whole sequences."""


_STAGES = {1: ShardingStage1, 2: ShardingStage2, 3: ShardingStage3}
_CONFIGS = {"dp_config": {"sharding_level"}, "mp_config": {"parallelize_plan"}, "pp_config": {"split_spec", "global_spec"}}


def _checked_config(config: Mapping[str, Any] | None) -> dict[str, Any]:
    config = {name: options for name, options in (config or {}).items() if options is not None}
    for name, options in config.items():
        unknown = set(options or ()) - _CONFIGS.get(name, set())
        if name not in _CONFIGS or unknown:
            raise ValueError(f"[parallelize] config has {sorted(_CONFIGS)}, with {_CONFIGS}; got {name!r} with "
                             f"{sorted(options or ())}")
    return {name: dict(options or {}) for name, options in config.items()}


def parallelize(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, mesh: DeviceMesh | None = None,
                config: Mapping[str, Any] | None = None):
    """Places a model as `config` says, and makes the optimizer step on it. Returns both.

        parallelize(model, optimizer, mesh, {
            "mp_config": {"parallelize_plan": {"layers.*.up": ColWiseParallel(), "layers.*.down": RowWiseParallel()}},
            "dp_config": {"sharding_level": 1}})

    `mesh`: None: that of `set_mesh()`. A plan's names are those of layers, or of parameters ("up.weight", "up.lora_A"), of
    which each part may be a pattern as a shell has them; values are a plan or a list of plans. Its dim is "mp".
    `sharding_level`: 0, or a stage of `shard_optimizer` along the dim "dp". Collective.

    "pp_config" puts ranges of layers on the parts of the mesh along its dim "pp", and moves what goes from one to the next, in
    the order of `model.named_modules()`. `split_spec`: a prefix ("layers", or a list of them), whose numbered layers divide into
    equal ranges, or `SplitPoint.BEGINNING` or `END` by the names of the layers at which stages begin or end. `global_spec`: names
    of layers whose output all stages use. Each batch goes through one stage after the other; `tessera.Pipeline` overlaps them.
    """
    mesh, config = mesh or get_mesh(), _checked_config(config)
    if mesh is None:
        raise ValueError("[parallelize] mesh must be given, or set by set_mesh()")
    level = config.get("dp_config", {}).get("sharding_level", 0)
    if level not in (0, *_STAGES):
        raise ValueError(f"[parallelize] sharding_level must be 0, 1, 2 or 3; got {level!r}")
    plans = _resolve(model, config.get("mp_config", {}).get("parallelize_plan", {}))
    pipeline = {name: value for name, value in config.get("pp_config", {}).items() if value is not None}
    if "global_spec" in pipeline and "split_spec" not in pipeline:
        raise ValueError("[parallelize] pp_config's global_spec needs a split_spec; got none")
    stages = Stages(model, mesh, **pipeline) if pipeline else None
    if stages and level > 1:
        raise NotImplementedError(f"[parallelize] layers on several meshes can have a sharding_level of 0 or 1; got {level}: "
                                  f"stages of a tessera.Pipeline may have any, by fully_shard()")
    mesh_at = stages.mesh if stages else lambda name: mesh
    dim = mesh_at("").dim("mp") if plans else 0

    hooks = place_along(model, mesh, dim, lambda name, layer: {
        key: Shard(cut) for only, plan in plans.get(name, ()) for key, cut in _cuts_of(plan, layer, only).items()}, mesh_at)
    for name, own in plans.items():
        for only, plan in own:
            if only in (None, *_OF_LAYERS):
                _add_hooks(model.get_submodule(name), plan, mesh_at(name), dim, hooks)
    if stages:
        stages.add_hooks(model, hooks)
    if optimizer is not None:
        shard_fn = (stages.shard_state if stages else _STAGES[level]("dp", mesh)) if level else None
        optimizer = shard_optimizer(optimizer, shard_fn)
    return model, optimizer


_OF_LAYERS = ("weight", "bias")


def _cuts_of(plan: PlanBase, layer: nn.Module, only: str | None) -> dict[str, int]:
    # Other parameters of a layer, as "lora_A", are cut as its weight is.
    cuts = plan.cuts(layer)
    if only is None:
        return cuts
    key = only if only in _OF_LAYERS else "weight"
    return {only: cuts[key]} if key in cuts else {}


def _resolve(model: nn.Module, plan: Mapping[str, PlanBase | list]) -> dict[str, list[tuple[str | None, PlanBase]]]:
    """Returns the plans by the layers' names, each with the only parameter that it is for."""
    plans: dict[str, list[tuple[str | None, PlanBase]]] = {}
    for pattern, value in plan.items():
        owner, _, last = pattern.rpartition(".")
        names, key = match_modules(model, pattern), None
        if not names:
            key = last
            names = [name for name in match_modules(model, owner) if key in model.get_submodule(name)._parameters]
        if not names:
            raise ValueError(f"[parallelize] each name of a plan must match a layer or a parameter; '{pattern}' matches none of "
                             f"{[name for name, _ in model.named_modules() if name]}")
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(each, PlanBase):
                raise TypeError(f"[parallelize] '{pattern}' needs plans such as ColWiseParallel(); got {each!r}")
            for name in names:
                plans.setdefault(name, []).append((key, each))
    return plans


def _add_hooks(layer: nn.Module, plan: PlanBase, mesh, dim: int, hooks: list) -> None:
    if isinstance(plan, (PrepareLayerInput, PrepareLayerOutput)):
        if plan.fn is not None:
            is_input = isinstance(plan, PrepareLayerInput)
            hooks.append((layer.register_forward_pre_hook if is_input else layer.register_forward_hook)(plan.fn(mesh)))
        return
    hooks.append(layer.register_forward_pre_hook(
        lambda _, inputs: (plan.on_input(inputs[0], mesh, dim), *inputs[1:]) if inputs else None))
    hooks.append(layer.register_forward_hook(lambda _, __, output: plan.on_output(output, mesh, dim)))

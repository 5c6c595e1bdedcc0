"""State dicts as functions of `torch.distributed.checkpoint` get them from `state_dict()` of sharded modules and optimizers:
DTensors, of which each rank has some rows. Others get whole tensors. See docs/guide/checkpoints.md."""

from __future__ import annotations

import copy
import sys
import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from . import _C, world
from .cpu_adam import CPUAdam
from .parameter import parameters_of

_meshes: "weakref.WeakKeyDictionary[dist.ProcessGroup, Any]" = weakref.WeakKeyDictionary()


def is_asking() -> bool:
    """Returns whether a function of `torch.distributed.checkpoint` is among the callers."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint."):
        frame = frame.f_back
    return frame is not None


class Layout:
    """Which ranks have rows of the values of a sharded model."""

    def __init__(self, plan: Mapping[str, Any]):
        self._groups = [plan.get("group") or world.default_group(), plan.get("replicate_group")]
        self._is_replicated = plan.get("level") == "none"

    def mesh(self, device: torch.device):
        """Returns the `torch.distributed.DeviceMesh` of all ranks of the model; None if each rank has whole values."""
        ranks = self._groups[0].size * (self._groups[1].size if self._groups[1] else 1)
        if ranks == 1 or self._is_replicated:
            return None
        group = self._group(ranks)
        if group not in _meshes:
            _meshes[group] = dist.device_mesh.DeviceMesh.from_group(group, device.type)
        return _meshes[group]

    def _group(self, ranks: int) -> dist.ProcessGroup:
        if not dist.is_initialized():
            raise RuntimeError("[tessera] torch.distributed.checkpoint needs torch.distributed, or it takes each of the "
                               f"{ranks} ranks for one that is alone: call torch.distributed.init_process_group() before or "
                               "after tessera.init(), or use tessera.save_checkpoint()")
        if ranks == dist.get_world_size():
            return dist.group.WORLD
        for group, beside in world._beside.items():
            if beside.group is self._groups[0]:
                return group
        raise RuntimeError(f"[tessera] torch.distributed.checkpoint needs a group of torch.distributed with the {ranks} ranks "
                           f"of the model; the default one has {dist.get_world_size()}: give fully_shard() one of "
                           "torch.distributed.new_group() as `group`")

    def rows(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns a DTensor with a copy of this rank's rows; `whole` itself if that has none, or each rank has all."""
        mesh = self.mesh(whole.device)
        if mesh is None or not whole.dim():
            return whole
        from torch.distributed.tensor import DTensor, Shard

        whole = whole.contiguous()
        count = -(-len(whole) // mesh.size())
        begin = min(mesh.get_local_rank() * count, len(whole))
        return DTensor.from_local(whole[begin:begin + count].clone(), mesh, [Shard(0)], run_check=False, shape=whole.shape,
                                  stride=whole.stride())


def whole_of(value: Any) -> Any:
    """Returns the whole of a DTensor, and other values as they are. Collective."""
    return value.full_tensor() if is_dtensor(value) else value


def is_dtensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor") and hasattr(value, "device_mesh")


# --- optimizers --------------------------------------------------------------------------------


def _mesh_of(optimizer):
    """As `Layout.mesh()`."""
    params = parameters_of(optimizer)
    return optimizer._model._layout.mesh(params[0].device) if params else None


def _check_rows(optimizer) -> None:
    if any(group.get("state_dtype") == torch.uint8 for group in optimizer.optimizer.param_groups):
        raise NotImplementedError("[tessera] torch.distributed.checkpoint would cut the blocks of 8-bit state into rows: use "
                                  "tessera.save_checkpoint(), or the optimizer's state_dict()")


def ensure_state(optimizer) -> None:
    """Makes the state of a `ShardedOptimizer` that has not stepped: what its class makes for zero gradients. Collective."""
    if not optimizer._model._model.any_rank(len(optimizer.state) > 0):
        _make_state(optimizer)


def state_names(optimizer) -> dict[int, dict[str, Any]]:
    """Returns what each parameter's state has, also where it lies on other ranks, by the parameter's id. Collective."""
    if _mesh_of(optimizer) is None:
        return {}
    return {id(param): kinds for param, kinds in zip(parameters_of(optimizer), _kinds(optimizer)) if kinds is not None}


def _make_state(optimizer) -> None:
    inner, pairs = optimizer.optimizer, []
    groups, state = inner.param_groups, inner.state
    inner.param_groups, inner.state = [dict(group) for group in groups], defaultdict(dict)
    try:
        for group in inner.param_groups:
            params, group["params"] = group["params"], []
            for param in params:
                part = optimizer._sharded.part_of(param)
                if param.requires_grad and part.numel():
                    stand_in = torch.zeros_like(part, requires_grad=False)
                    stand_in.grad = torch.zeros_like(stand_in)
                    group["params"].append(stand_in)
                    pairs.append((part, stand_in))
        inner.param_groups = [group for group in inner.param_groups if group["params"]]
        inner.step()
        made = inner.state
    finally:
        inner.param_groups, inner.state = groups, state
    for part, stand_in in pairs:
        if own := made.get(stand_in):
            if isinstance(own.get("step"), torch.Tensor):
                own["step"].zero_()
            inner.state[part] = own


def _kinds(optimizer) -> list[dict[str, Any] | None]:
    """Returns, for each parameter, its state by name: the dtype of what has a value for each element, other values as they are;
    None for no state. Collective."""
    _check_rows(optimizer)
    own = []
    for param in parameters_of(optimizer):
        part = optimizer._sharded.part_of(param)
        state = optimizer.optimizer.state.get(part) if part.numel() else None
        own.append(state and {name: (value.dtype, value.shape == part.shape)
                              if isinstance(value, torch.Tensor) and value.dim() else value for name, value in state.items()})
    group = _mesh_of(optimizer).get_group()
    kinds = _first_of_each(own, group)
    others = {name for each in kinds for name, kind in (each or {}).items() if isinstance(kind, tuple) and not kind[1]}
    values = [None] * len(own)
    if others:  # such as the factors of Adafactor
        values = _first_of_each([state and {name: optimizer.optimizer.state[optimizer._sharded.part_of(param)][name]
                                            for name in state.keys() & others}
                                 for param, state in zip(parameters_of(optimizer), own)], group)
    return [each and {name: value[name] if name in others else kind[0] if isinstance(kind, tuple) else kind
                      for name, kind in each.items()} for each, value in zip(kinds, values)]


def _first_of_each(own: list, group: dist.ProcessGroup) -> list:
    """Returns each item of the first rank on which it is not None."""
    ranks = [None] * group.size()
    dist.all_gather_object(ranks, own, group)
    return [next((item for item in items if item is not None), None) for items in zip(*ranks)]


def state_of(optimizer) -> dict[str, Any]:
    """Returns the state of a `ShardedOptimizer`, as the optimizer inside would number it. Collective."""
    ensure_state(optimizer)  # so that it can be loaded into
    if _mesh_of(optimizer) is not None:
        numbers = {id(param): number for number, param in enumerate(parameters_of(optimizer))}
        whole = {"state": _rows_of_state(optimizer), "param_groups": [
            {**{name: copy.deepcopy(value) for name, value in group.items() if name != "params"},
             "params": [numbers[id(param)] for param in group["params"]]} for group in optimizer.param_groups]}
    else:
        whole = optimizer._sharded.full_state_dict(-1)
    if hasattr(optimizer.optimizer, "_prepares_fused"):
        for group in whole["param_groups"]:
            group.update(fused=None, foreach=None)  # as the user has left them: others may lack the operator
    return whole


def _rows_of_state(optimizer) -> dict[int, dict[str, Any]]:
    model, layout, state = optimizer._model._model, optimizer._model._layout, {}
    for number, (param, kinds) in enumerate(zip(parameters_of(optimizer), _kinds(optimizer))):
        if kinds is None:
            continue
        part = optimizer._sharded.part_of(param)
        own = optimizer.optimizer.state[part] if part.numel() else {}
        state[number] = {
            name: layout.rows(model.gather(param, own.get(name, torch.empty(0, dtype=kind, device=param.device))))
            if isinstance(kind, torch.dtype) else copy.deepcopy(kind) for name, kind in kinds.items()}
    return state


def numbered(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an optimizer's state by numbers of the parameters in place of names."""
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    if all(isinstance(name, int) for name in names):
        return dict(state_dict)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return {**state_dict,
            "state": {numbers[name]: state for name, state in state_dict["state"].items() if name in numbers},
            "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]}
                             for group in state_dict["param_groups"]]}


def load_state(optimizer, state_dict: Mapping[str, Any]) -> None:
    """Loads state with DTensors into a `ShardedOptimizer`, one tensor after the other. Collective."""
    _check_rows(optimizer)
    inner, model = optimizer.optimizer, optimizer._model._model
    sizes = [[len(group["params"]) for group in groups] for groups in (inner.param_groups, state_dict["param_groups"])]
    if sizes[0] != sizes[1]:
        raise ValueError(f"[load_state_dict] the optimizer's param groups have {sizes[0]} parameters, those of the state "
                         f"{sizes[1]}")
    params = parameters_of(optimizer)
    order = [number for group in state_dict["param_groups"] for number in group["params"]]
    for number, param in zip(order, params):
        for name, value in state_dict["state"].get(number, {}).items():
            if is_dtensor(value) and value.shape != param.shape:
                raise ValueError(f"[load_state_dict] '{name}' of parameter {number} must have its shape {list(param.shape)}; "
                                 f"got {list(value.shape)}")
    for number, param in zip(order, params):
        part, given = optimizer._sharded.part_of(param), state_dict["state"].get(number)
        state = {}
        for name, value in (given or {}).items():
            whole = whole_of(value)
            if isinstance(whole, torch.Tensor):
                is_elementwise = whole.dim() and whole.shape == param.shape
                own = model.cut(param, whole) if is_elementwise else whole.clone()
                # The optimizer keeps its state in the dtype that it updates.
                state[name] = own.to(part.device, part.dtype if whole.dtype == param.dtype else None) if is_elementwise else own
            else:
                state[name] = copy.deepcopy(whole)
        if part.numel() and given is not None:
            inner.state[part] = state
        else:
            inner.state.pop(part, None)
    for group, given in zip(inner.param_groups, state_dict["param_groups"]):
        kept = {"params", "state_dtype"} if isinstance(inner, CPUAdam) else {"params"}
        group.update({name: copy.deepcopy(value) for name, value in given.items() if name not in kept})


def has_dtensors(tree: Any) -> bool:
    return any(is_dtensor(leaf) for leaf in pytree.tree_leaves(tree))

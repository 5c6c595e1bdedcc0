"""`shard_layer` and what belongs to it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .. import _C
from ..dist_optimizer import DistOptimizer
from ..dist_tensor import (DeviceMesh, Partial, Replicate, Shard, distribute_module, from_local, full_tensor, mesh_of,
                           placements_of, redistribute, to_local)
from ..grad_scaler import GradScaler


class ProcessMesh(DeviceMesh):
    """Paddle's mesh: ranks in an array, of which an index or a slice for each dim, as `mesh[0]`, `mesh[:, 1]` or `mesh[0, 1]`,
    is a mesh of the dims that are left, or of the one rank; `mesh["mp"]` is `get_submesh_with_dim("mp")`."""

    @property
    def process_ids(self) -> list[int]:
        return self.ranks

    @property
    def mesh(self) -> torch.Tensor:
        return torch.tensor(self.ranks).view(self.shape)

    def get_dim_size(self, dim_name: str) -> int:
        return self.size(self.dim(dim_name))

    def get_mesh_with_dim(self, dim_name: str, index: int | None = None) -> "ProcessMesh":
        """The mesh with that dim first; with `index`, only the ranks at that index along it."""
        return _process_mesh(self.with_first(dim_name, index))

    def get_submesh_with_dim(self, dim_name: str) -> "ProcessMesh | None":
        """The ranks that differ from this one in that dim alone; None on ranks outside of the mesh."""
        self.dim(dim_name)  # must be one
        return _process_mesh(self.sub_mesh([dim_name])) if self.is_member() else None

    def get_group(self, dim_name: str | None = None) -> _C.ProcessGroup:
        """The group of this rank's line along a dim; None: the only dim. Collective over the line at its first call."""
        if dim_name is None and self.ndim != 1:
            raise ValueError(f"[get_group] dim_name must be one of {self.dim_names}, as the mesh has {self.ndim} dims; got None")
        return self.process_group(0 if dim_name is None else self.dim(dim_name))

    def __getitem__(self, index: int | slice | str | tuple[int | slice, ...]) -> "ProcessMesh | None":
        if isinstance(index, str):
            return self.get_submesh_with_dim(index)
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) > self.ndim or not all(isinstance(each, (int, slice)) for each in indices):
            raise IndexError(f"a mesh of {self.ndim} dims takes an index or a slice for each of them; got {index!r}")
        names = [name for name, each in zip(self.dim_names, [*indices, *[slice(None)] * self.ndim]) if isinstance(each, slice)]
        ranks = self.mesh[indices]
        return ProcessMesh(ranks, names) if ranks.dim() else ProcessMesh([int(ranks)])


def _process_mesh(mesh: _C.DeviceMesh) -> ProcessMesh:
    return mesh if isinstance(mesh, ProcessMesh) else ProcessMesh(torch.tensor(mesh.ranks).view(mesh.shape), mesh.dim_names)


class ReduceType(str, enum.Enum):
    """The reduction of a `Partial`: `Partial(ReduceType.kRedMax)`."""

    kRedSum, kRedMax, kRedMin, kRedProd, kRedAvg, kRedAny, kRedAll = "sum", "max", "min", "prod", "avg", "any", "all"


_mesh: DeviceMesh | None = None


def set_mesh(mesh: DeviceMesh) -> None:
    """Sets the mesh that functions take if they are given none. Local."""
    global _mesh
    if not isinstance(mesh, _C.DeviceMesh):
        raise TypeError(f"[set_mesh] mesh must be a ProcessMesh; got {type(mesh).__name__}")
    _mesh = mesh


def get_mesh() -> DeviceMesh | None:
    """Returns the mesh of `set_mesh()`; None without one."""
    return _mesh


# Attributes that Paddle's tensors and placements have.
torch.Tensor.is_dist = lambda self: _C.is_dist(self)
torch.Tensor.process_mesh = property(lambda self: _process_mesh(_C.mesh_of(self)) if _C.is_dist(self) else None)
for _kind in (Partial, Replicate, Shard):
    _kind.is_partial, _kind.is_replicated, _kind.is_shard = (
        lambda self: isinstance(self, Partial), lambda self: isinstance(self, Replicate),
        lambda self, dim=None: isinstance(self, Shard) and dim in (None, self.dim))
Shard.get_dim, Partial.reduce_type = lambda self: self.dim, lambda self: ReduceType(self.op)
torch.Tensor.placements = property(lambda self: _C.placements_of(self) if _C.is_dist(self) else None)


def shard_tensor(data, mesh: DeviceMesh, placements: Sequence, dtype: torch.dtype | None = None, place=None,
                 stop_gradient: bool | None = None) -> torch.Tensor:
    """Distributes `data` (a tensor, a number or lists of numbers), equal on all ranks, over a mesh; nothing is sent.

    In a `shard_fn`, places a parameter or buffer of the layer itself and returns it, so that
    `layer.weight = shard_tensor(layer.weight, mesh, [Shard(1)])` works as written; elsewhere the result is a new tensor.
    """
    tensor = data if isinstance(data, torch.Tensor) else torch.tensor(data, dtype=dtype)
    return _C.shard_tensor(tensor, mesh, list(placements), dtype, None if place is None else torch.device(place),
                           stop_gradient)


def dtensor_from_fn(fn: Callable, mesh: DeviceMesh, placements: Sequence, *args, **kwargs) -> torch.Tensor:
    return shard_tensor(fn(*args, **kwargs), mesh, placements)


def dtensor_from_local(local_tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence) -> torch.Tensor:
    return from_local(local_tensor, mesh, placements)


def dtensor_to_local(dist_tensor: torch.Tensor, mesh=None, placements=None) -> torch.Tensor:
    """Returns this rank's part, as `mesh` and `placements` say, if they are given."""
    if mesh is not None or placements is not None:
        dist_tensor = redistribute(dist_tensor, placements_of(dist_tensor) if placements is None else placements, mesh)
    return to_local(dist_tensor)


def reshard(dist_tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence) -> torch.Tensor:
    return redistribute(dist_tensor, placements, mesh)


def unshard_dtensor(dist_tensor: torch.Tensor) -> torch.Tensor:
    return full_tensor(dist_tensor)


def dtensor_from_local_list(local_tensor_list: Sequence[torch.Tensor], mesh: DeviceMesh, placements: Sequence,
                            local_mesh_dim: int = -1) -> torch.Tensor:
    """Makes one DistTensor from those on the slices of `mesh` along a dim."""
    return _C.dtensor_from_local_list(list(local_tensor_list), mesh, list(placements), local_mesh_dim)


def local_tensor_list_from_dtensor(dist_tensor: torch.Tensor, mesh=None, local_mesh_dim: int = -1) -> list[torch.Tensor]:
    """The inverse: a DistTensor for each slice of the mesh along a dim. `mesh`: if given, that of the tensor."""
    if mesh is not None and not mesh == mesh_of(dist_tensor):
        raise ValueError(f"[local_tensor_list_from_dtensor] mesh must be that of the tensor, {mesh_of(dist_tensor)}; got {mesh}")
    return _C.local_tensor_list_from_dtensor(dist_tensor, local_mesh_dim)


def shard_layer(layer: nn.Module, process_mesh: DeviceMesh,
                shard_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None, input_fn: Callable | None = None,
                output_fn: Callable | None = None) -> nn.Module:
    """Places the parameters and buffers of `layer` by `shard_fn`, in place; those that it does not place are replicated.
    Returns the layer. `input_fn(inputs, mesh)` replaces the arguments of its forward, `output_fn(outputs, mesh)` its result.
    Collective; see `tessera.distribute_module()`."""
    if process_mesh is None:
        raise ValueError("The argument `process_mesh` cannot be empty.")
    if not isinstance(process_mesh, _C.DeviceMesh):
        raise ValueError("The argument `process_mesh` is not `dist.ProcessMesh` type.")
    return distribute_module(layer, process_mesh, shard_fn,
                             input_fn and (lambda _, inputs, mesh: input_fn(inputs, mesh)),
                             output_fn and (lambda _, outputs, mesh: output_fn(outputs, mesh)))


class ShardingStage1(_C.ShardingStage):
    """For `shard_optimizer`: accumulators are sharded over a mesh dim, by name or number; None: the first along which all
    parameters are replicated. `mesh`: that of the parameters."""

    _level = "os"

    def __init__(self, sharding_mesh_dim: str | int | None = None, mesh: DeviceMesh | None = None):
        super().__init__(self._level, sharding_mesh_dim, mesh)


class ShardingStage2(ShardingStage1):
    """And gradients."""

    _level = "os_g"


class ShardingStage3(ShardingStage1):
    """And parameters."""

    _level = "p_g_os"


def shard_optimizer(optimizer: torch.optim.Optimizer, shard_fn: Callable | _C.ShardingStage | None = None,
                    gradient_accumulation_steps: int = 1, *, multi_precision: bool = False) -> DistOptimizer:
    """Makes an optimizer step on DistTensors, with accumulators placed by `shard_fn(name, param, accumulator)` or a stage.
    `multi_precision` stands for the option of Paddle's optimizers: float32 master weights."""
    if optimizer is None:
        raise ValueError("The argument `optimizer` cannot be empty.")
    if gradient_accumulation_steps != 1:
        raise NotImplementedError("[shard_optimizer] gradient_accumulation_steps is not supported: call step() after as many "
                                  "backwards as are to be accumulated")
    return _ShardOptimizer(optimizer, _C.shard_optimizer(optimizer, shard_fn, multi_precision))


class _ShardOptimizer(DistOptimizer):
    def __init__(self, optimizer: torch.optim.Optimizer, dist: _C.DistOptimizer):
        self._become(optimizer)
        self._dist = dist

    def clear_grad(self, set_to_zero: bool = False) -> None:
        self.zero_grad(set_to_none=not set_to_zero)

    set_state_dict = DistOptimizer.load_state_dict


class ShardScaler:
    """A `GradScaler` for sharded optimizers: an overflow on any rank of any mesh skips all ranks' step."""

    def __init__(self, scaler: GradScaler):
        self.scaler = scaler

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return self.scaler.scale(loss)

    def unscale_(self, optimizer: DistOptimizer) -> None:
        optimizer._dist.unscale_(self.scaler._scaler)

    def step(self, optimizer: DistOptimizer) -> bool:
        return optimizer._dist.step_scaled(self.scaler._scaler)

    def update(self) -> None:
        self.scaler.update()

    def minimize(self, optimizer: DistOptimizer, scaled_loss: torch.Tensor | None = None) -> bool:
        """`step()` and `update()`. `scaled_loss`: as in Paddle, its backward has run, and it is not used."""
        stepped = self.step(optimizer)
        self.update()
        return stepped


def shard_scaler(scaler: GradScaler) -> ShardScaler:
    return ShardScaler(scaler)


class ShardDataloader:
    """A loader whose batches are DistTensors. A batch is a tensor, a tuple, a list, or a dict by name; with several meshes,
    its items go to one mesh each, in order. An item may be a tuple, list or dict of tensors, which go to its mesh; what is no
    tensor stays as it is."""

    def __init__(self, dataloader: Iterable, placement: _C.InputPlacement):
        self._loader, self._placement = dataloader, placement

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self):
        for batch in self._loader:
            if isinstance(batch, torch.Tensor):
                yield self._place(batch, 0, 1)
            elif isinstance(batch, Mapping):
                yield {name: self._place(item, name, len(batch)) for name, item in batch.items()}
            else:
                items = [self._place(item, index, len(batch)) for index, item in enumerate(batch)]
                yield type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)

    def _place(self, item, at: int | str, count: int):
        return pytree.tree_map_only(torch.Tensor, lambda tensor: self._placement.place(tensor, at, count), item)


def shard_dataloader(dataloader: Iterable, meshes: DeviceMesh | Sequence[DeviceMesh], input_keys: Sequence[str] | None = None,
                     shard_dims: Sequence | str | int | None = None, is_dataset_splitted: bool = False, *,
                     check_values: bool = False) -> ShardDataloader:
    """Wraps a loader. `shard_dims`: the mesh dim over which batches are cut along their first dim, one for all meshes or one
    for each; None: batches are replicated. Every rank reads whole batches and keeps its rows, unless `is_dataset_splitted`.
    `check_values` compares the batches of the ranks."""
    meshes = [meshes] if isinstance(meshes, _C.DeviceMesh) else list(meshes)
    dims = list(shard_dims) if isinstance(shard_dims, (list, tuple)) else [shard_dims]
    return ShardDataloader(dataloader, _C.InputPlacement(meshes, list(input_keys or ()), dims, is_dataset_splitted,
                                                         check_values))

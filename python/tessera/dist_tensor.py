"""DistTensors: tensors that stand for a global one, of which each rank of a mesh holds a part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils import _pytree as pytree

from . import _C, world
from ._C import Partial, Replicate, Shard, is_dist
from .sharded_module import named_tensors

Placement = Replicate | Shard | Partial


class DeviceMesh(_C.DeviceMesh):
    """An array of ranks with named dims, on which tensors are placed.

        mesh = tessera.DeviceMesh([[0, 1], [2, 3]], ["dp", "tp"])

    `mesh`: ranks of the job, as nested lists or a tensor of integers; `dim_names`: d0, d1... unless given. Any rank of the
    job may make any mesh, and nothing is sent; `process_group(dim)`, of this rank's line along a dim, is collective over the
    line at its first call.
    """

    def __init__(self, mesh: Sequence | torch.Tensor, dim_names: Sequence[str] = ()):
        ranks = torch.as_tensor(mesh)
        if ranks.is_floating_point() or ranks.is_complex() or ranks.dtype == torch.bool:
            raise ValueError(f"a mesh must consist of ranks, which are integers; got {ranks.dtype}")
        super().__init__(world.current_world("DeviceMesh"), list(ranks.shape), ranks.flatten().tolist(), list(dim_names))

    @classmethod
    def over_world(cls, shape: Sequence[int] = (), dim_names: Sequence[str] = ()) -> "DeviceMesh":
        """Returns a mesh of all ranks in their order. An empty shape: one dim."""
        return cls(torch.arange(world.size()).view(*(shape or (-1,))), dim_names)


def _checked(mesh) -> _C.DeviceMesh:
    if not isinstance(mesh, _C.DeviceMesh):
        raise TypeError(f"mesh must be a tessera.DeviceMesh; got {type(mesh).__name__}")
    return mesh


def _where(mesh, placements) -> tuple[_C.DeviceMesh, list]:
    return _checked(mesh), [placements] if isinstance(placements, Placement) else list(placements)


def distribute(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """Returns a DistTensor of `tensor`, whose values must be equal on all ranks; each rank keeps its part, and nothing is
    sent. `placements`: one for each mesh dim; missing ones are `Replicate`. Differentiable."""
    return _C.distribute(tensor, *_where(mesh, placements))


def distribute_(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """Turns a parameter or buffer itself into a DistTensor, or redistributes it; returns it. Drops its gradient."""
    _C.distribute_(tensor, *_where(mesh, placements))
    return tensor


def from_local(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement],
               sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Makes a DistTensor from the parts that the ranks hold; nothing is sent. It is contiguous, and shares memory with parts
    that are. `sizes`: the global ones; None: all parts have equal sizes. Differentiable."""
    return _C.from_local(local, *_where(mesh, placements), None if sizes is None else list(sizes))


def to_local(tensor: torch.Tensor, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
    """Returns this rank's part, which shares memory with the DistTensor. Differentiable.

    `grad_placements`: of the part's gradients; None: those of `tensor`, with `Replicate` for `Partial`. `Partial` where each
    rank computes a term, as it uses the whole tensor with its part of another one. Raises `ValueError` unless they cut the
    same dims.
    """
    return _C.to_local(tensor, None if grad_placements is None else _where(_C.mesh_of(tensor), grad_placements)[1])


def redistribute(tensor: torch.Tensor, placements: Sequence[Placement], mesh: DeviceMesh | None = None) -> torch.Tensor:
    """Returns the same global tensor with other placements, or on another mesh. Collective; differentiable."""
    return _C.redistribute(tensor, *_where(mesh or _C.mesh_of(tensor), placements))


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the global values as an ordinary tensor, on every rank of the mesh. Collective; differentiable."""
    return _C.full_tensor(tensor)


def mesh_of(tensor: torch.Tensor) -> DeviceMesh:
    """Returns the mesh of a DistTensor."""
    return _C.mesh_of(tensor)


def placements_of(tensor: torch.Tensor) -> list[Placement]:
    """Returns the placements of a DistTensor."""
    return _C.placements_of(tensor)


def distribute_module(module: nn.Module, mesh: DeviceMesh,
                      partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
                      input_fn: Callable | None = None, output_fn: Callable | None = None, *,
                      check_values: bool = False) -> nn.Module:
    """Turns all parameters and buffers of a module into DistTensors, in place, and returns the module.

    `partition_fn(name, submodule, mesh)` is called once for each module, outer first; it places the parameters that the
    submodule itself holds by `distribute_()`. Those that it does not place are replicated. `input_fn(module, inputs, mesh)`
    returns the positional arguments of the module's forward, `output_fn(module, outputs, mesh)` its result. Values must be
    equal on all ranks; `check_values` compares them first.

    Collective. If `partition_fn` raises on one rank, or places a tensor differently on one, every rank raises, and the module
    is unchanged.
    """
    modules = dict(module.named_modules())
    partition = None
    if partition_fn is not None:
        partition = lambda name, own_mesh: _run_partition(partition_fn, name, modules.get(name), own_mesh)
    _C.distribute_module(*named_tensors(module), [name for name in modules if name], _checked(mesh), partition,
                         check_values)
    hooks = [module.register_forward_pre_hook(functools.partial(_place_inputs, mesh, input_fn), with_kwargs=True)]
    if output_fn is not None:
        hooks.append(module.register_forward_hook(lambda its, _, outputs: output_fn(its, outputs, mesh)))
    module.__dict__.setdefault("_tessera_hooks", []).extend(hooks)
    return module


def _run_partition(partition_fn, name: str, module: nn.Module | None, mesh) -> None:
    if module is None:
        return  # another name of a module that was placed before
    held = lambda: {**module._parameters, **module._buffers}
    before = held()
    partition_fn(name, module, mesh)
    for key, tensor in held().items():
        if before.get(key) is not None and tensor is not before[key]:
            for name_before, value in before.items():
                (module._parameters if name_before in module._parameters else module._buffers)[name_before] = value
            raise ValueError(f"[distribute_module] a partition must place tensors in place, by distribute_() or its dialect's "
                             f"shard_tensor(); it assigned another tensor to '{name + '.' if name else ''}{key}'")


def _place_inputs(mesh, input_fn, module, args, kwargs):
    # Ordinary tensors that require a gradient are replicated; operators take the others as they are.
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: _C.as_input(tensor, mesh), (args, kwargs))
    if input_fn is not None:
        changed = input_fn(module, args, mesh)
        if changed is not None:
            args = changed if isinstance(changed, (tuple, list)) else (changed,)
    return tuple(args), kwargs


def unwrap(module: nn.Module) -> nn.Module:
    """Turns all parameters and buffers of a module on DistTensors back into ordinary ones with the full values; returns the
    module. Collective. For a module of `fully_shard()`, call `unwrap()` of what that returned."""
    if any(_C.is_sharded(parameter) for parameter in module.parameters()):
        raise ValueError("[unwrap] the module was sharded by fully_shard(): call unwrap() of the ShardedModule")
    _C.unwrap_distributed(*named_tensors(module))
    for hook in module.__dict__.pop("_tessera_hooks", []):
        hook.remove()
    return module


class StrictOperators:
    """A context in which an operator on DistTensors that needs shards of other ranks, or has no rule, raises on this thread,
    instead of gathering them; `redistribute()` where they should be sent. `TESSERA_STRICT=1` has the same effect everywhere."""

    def __init__(self, strict: bool = True):
        self._strict, self._scope = strict, _C.StrictOperators()

    def __enter__(self) -> "StrictOperators":
        self._scope.enter(self._strict)
        return self

    def __exit__(self, *exception) -> None:
        self._scope.exit()


class CommDebug:
    """A context that counts the collectives of this thread, and of its backwards: `entries` are tuples of kind, subject (the
    operator, the unit), calls and bytes."""

    def __init__(self):
        self._scope = _C.CommDebug()
        self.entries: list[tuple[str, str, int, int, str]] = []

    def __enter__(self) -> "CommDebug":
        self._scope.enter()
        return self

    def __exit__(self, *exception) -> None:
        self.entries = self._scope.entries()
        self._scope.exit()

    def calls(self, kind: str = "", subject: str = "") -> int:
        """Returns the number of collectives, of one kind or subject if given."""
        return sum(calls for its, of, calls, _, _ in self.entries if kind in ("", its) and subject in ("", of))


def _mesh_of_ranks(kind: type, shape: Sequence[int], ranks: Sequence[int], dim_names: Sequence[str]) -> _C.DeviceMesh:
    kind = kind if issubclass(kind, DeviceMesh) else DeviceMesh  # parts of meshes are the engine's
    return kind(torch.tensor(ranks).view(*shape), dim_names)


# Meshes and placements are values: a pickled mesh is made anew from its ranks, in the job that reads it.
_equal_meshes = _C.DeviceMesh.__eq__
_C.DeviceMesh.__eq__ = lambda self, other: isinstance(other, _C.DeviceMesh) and _equal_meshes(self, other)
_C.DeviceMesh.__hash__ = lambda self: hash((tuple(self.shape), tuple(self.ranks)))
_C.DeviceMesh.__reduce__ = lambda self: (_mesh_of_ranks, (type(self), self.shape, self.ranks, self.dim_names))
_C.DeviceMesh.__deepcopy__ = lambda self, memo: self
Replicate.__reduce__ = lambda self: (Replicate, ())
Shard.__reduce__ = lambda self: (Shard, (self.dim, self.split_factor))
Partial.__reduce__ = lambda self: (Partial, (self.op,))


def _on_dist(function: Callable) -> None:
    """Puts a function in the place of a method of tensors, for those that are DistTensors."""
    plain = getattr(torch.Tensor, function.__name__)

    @functools.wraps(plain)
    def method(self, *args, **kwargs):
        is_ours = type(self) in (torch.Tensor, nn.Parameter) and is_dist(self)
        return function(self, *args, **kwargs) if is_ours else plain(self, *args, **kwargs)

    setattr(torch.Tensor, function.__name__, method)


# PyTorch's text and copies would need the values' memory, which is that of several ranks, and its new_tensor() a device's key.


@_on_dist
def __repr__(self, *, tensor_contents=None):
    return f"DistTensor({_C.describe(self)})"


@_on_dist
def __deepcopy__(self, memo):
    if id(self) not in memo:
        if not self.is_leaf:
            raise RuntimeError("[tessera] only DistTensors that are leaves of the graph can be copied by deepcopy; call "
                               "detach() before")
        copy = memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        if self.grad is not None:
            copy.grad = self.grad.detach().clone()
    return memo[id(self)]


@_on_dist
def new_tensor(self, data, *, dtype: torch.dtype | None = None, device=None, requires_grad: bool = False, **options):
    return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device, requires_grad=requires_grad, **options)

"""Tensor and context parallelism, and what computes on DistTensors."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from . import _C
from .dist_tensor import (DeviceMesh, Placement, Replicate, Shard, _checked, _where, distribute, distribute_,
                          distribute_module, from_local, is_dist, placements_of, redistribute)


def _make(make: Callable, sizes: Sequence[int], *place, last: tuple = (), dtype: torch.dtype | None = None,
          device: torch.device | str | None = None, requires_grad: bool = False) -> torch.Tensor:
    *value, mesh, placements = place
    return make(list(sizes), *value, *_where(mesh, placements), dtype, device and torch.device(device), requires_grad, *last)


def _make_random(make: Callable, *args, generator: torch.Generator | None = None, **options) -> torch.Tensor:
    return _make(make, *args, last=(generator,), **options)


# dist_zeros(sizes, mesh, placements, *, dtype=None, device=None, requires_grad=False) and so on, and dist_full(sizes, value,
# mesh, placements), return DistTensors of these global sizes. Each rank makes its part only, and nothing is sent.
dist_zeros, dist_ones = functools.partial(_make, _C.dist_zeros), functools.partial(_make, _C.dist_ones)
dist_empty, dist_full = functools.partial(_make, _C.dist_empty), functools.partial(_make, _C.dist_full)
# These have the values, to the bit, of torch.rand(sizes) and torch.randn(sizes) in one process, and also take a `generator`.
# All ranks call them, with generators in one state.
dist_rand, dist_randn = functools.partial(_make_random, _C.dist_rand), functools.partial(_make_random, _C.dist_randn)


def local_map(fn: Callable, out_placements, in_placements=None, in_grad_placements=None, mesh: DeviceMesh | None = None, *,
              redistribute_inputs: bool = False) -> Callable:
    """Returns a function that calls `fn`, written for ordinary tensors, with this rank's parts of DistTensors, and makes
    DistTensors of its results.

    `out_placements`, `in_placements`, `in_grad_placements`: placements for each result or positional argument, in order; None
    for one that is not a DistTensor. Values in lists, tuples and dicts count one by one. `in_placements`: those that arguments
    must have, or get with `redistribute_inputs`; None: any. `in_grad_placements`: of the gradients that `fn`'s backward
    computes; None: those of the arguments, with `Replicate` for `Partial`. `mesh`: of the results; None: that of the first
    DistTensor. Keyword arguments are passed on as they are. Differentiable.
    """
    lists = [_placements_list(each) for each in (out_placements, in_placements, in_grad_placements)]

    def call(*args, **kwargs):
        local_call = _C.LocalCall(*lists, mesh, redistribute_inputs)
        values, spec = pytree.tree_flatten(args)
        locals_ = _with_tensors(values, local_call.to_local(_tensors_of(values)))
        results, result_spec = pytree.tree_flatten(fn(*pytree.tree_unflatten(locals_, spec), **kwargs))
        return pytree.tree_unflatten(_with_tensors(results, local_call.to_dist(_tensors_of(results))), result_spec)

    return call


def _placements_list(placements) -> list:
    if placements is None:
        return []
    placements = list(placements)
    if placements and all(isinstance(each, Placement) for each in placements):
        placements = [placements]  # of the only value
    return [None if each is None else [each] if isinstance(each, Placement) else list(each) for each in placements]


def _tensors_of(values: list) -> list:
    return [value if isinstance(value, torch.Tensor) else None for value in values]


def _with_tensors(values: list, tensors: list) -> list:
    return [value if tensor is None else tensor for value, tensor in zip(values, tensors)]


def register_rule(name: str, rule: Callable, *, size_argument: str = "", splits: bool = False) -> None:
    """Tells how an operator, such as "mine::scaled_tanh", is computed on DistTensors from the parts that ranks have.

    `rule(inputs, outputs, arguments, ranks)` gets the global sizes of the tensors that go in and out, the other arguments by
    name, and the number of ranks along a mesh dim. It returns a list of pairs: with inputs of these placements along that mesh
    dim, the operator on parts makes outputs of those. Replicating everything is always allowed.

    `size_argument`: the argument that gives the size of the output, if there is one. `splits`: each pair also holds for parts
    of several blocks. Must be called on all ranks before the operator meets a DistTensor, once in a process. Raises
    `ValueError` if there is no such operator, or if it has a rule.
    """
    _C.register_rule(name, rule, size_argument, splits)


class ContextParallel:
    """A context in which `scaled_dot_product_attention` of DistTensors that are cut along the sequence is computed by ring
    attention: no rank gathers keys and values.

    `mesh_dim`: along which sequences are cut; None: the mesh's only one. `load_balance`: sequences are in the order of
    `balance_sequence()`; results are wrong if they are not. `rotate`: "ring" or "all_gather".
    """

    def __init__(self, mesh: DeviceMesh, *, mesh_dim: str | int | None = None, load_balance: bool = False,
                 rotate: str = "ring"):
        if rotate not in ("ring", "all_gather"):
            raise ValueError(f"[ContextParallel] rotate must be 'ring' or 'all_gather'; got {rotate!r}")
        self._arguments = _checked(mesh), mesh_dim, load_balance, rotate == "all_gather"
        self._scope = _C.ContextParallel()

    def __enter__(self) -> "ContextParallel":
        self._scope.enter(*self._arguments)
        return self

    def __exit__(self, *exception) -> None:
        self._scope.exit()


def balance_sequence(tensor: torch.Tensor, dim: int, mesh: DeviceMesh, mesh_dim: str | int | None = None) -> torch.Tensor:
    """Returns `tensor` with its dim `dim`, the sequence, in the order that `load_balance` expects."""
    return _C.balance_sequence(tensor, dim, _checked(mesh), mesh_dim)


def unbalance_sequence(tensor: torch.Tensor, dim: int, mesh: DeviceMesh, mesh_dim: str | int | None = None) -> torch.Tensor:
    """Reverses `balance_sequence()`, for outputs."""
    return _C.unbalance_sequence(tensor, dim, _checked(mesh), mesh_dim)


@dataclass(frozen=True)
class ColwiseParallel:
    """Cuts the columns of the result: of an `nn.Linear` the rows of the weight and the bias, of an `nn.Embedding` the features.
    The input is replicated. `input`: placement of ordinary tensors that come in, which are then parts; None: they are whole."""

    input: Placement | None = None
    output: Placement = Shard(-1)


@dataclass(frozen=True)
class RowwiseParallel:
    """Cuts what is summed over: of an `nn.Linear` the columns of the weight, and the last dim of the input; of an
    `nn.Embedding` the vocabulary. An `output` of `Replicate` sums by an all-reduce, a `Shard` by a reduce-scatter."""

    input: Placement | None = None
    output: Placement = Replicate()


@dataclass(frozen=True)
class SequenceParallel:
    """Replicates the parameters of a module, such as a norm, and shards its input and output along `dim`, the sequence.
    `output` None: `Shard(dim)`."""

    dim: int = 1
    output: Placement | None = None
    input: Placement | None = None


@dataclass(frozen=True)
class PrepareModuleInput:
    """Redistributes the first input of a module."""

    input: Placement | None = None
    desired_input: Placement = Replicate()


@dataclass(frozen=True)
class PrepareModuleOutput:
    """Redistributes the output of a module."""

    desired_output: Placement = Replicate()


ParallelStyle = ColwiseParallel | RowwiseParallel | SequenceParallel | PrepareModuleInput | PrepareModuleOutput


def _flow(style: ParallelStyle, module: nn.Module) -> tuple[Placement | None, Placement | None, Placement | None]:
    """Returns the placements of ordinary inputs, of the input and of the output; None: as they are."""
    match style:
        case ColwiseParallel():
            return style.input, Replicate(), style.output
        case RowwiseParallel():
            return style.input, Replicate() if isinstance(module, nn.Embedding) else Shard(-1), style.output
        case SequenceParallel():
            return style.input, Shard(style.dim), style.output or Shard(style.dim)
        case PrepareModuleInput():
            return style.input, style.desired_input, None
    return None, None, style.desired_output


def _own_placements(style: ParallelStyle, module: nn.Module) -> dict[str, Placement]:
    if isinstance(style, SequenceParallel):
        return dict.fromkeys(module._parameters, Replicate())
    if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return {}
    is_colwise = isinstance(style, ColwiseParallel)
    if isinstance(module, nn.Linear):
        return {"weight": Shard(0 if is_colwise else 1), "bias": Shard(0) if is_colwise else Replicate()}
    return {"weight": Shard(1 if is_colwise else 0)}


def match_modules(module: nn.Module, pattern: str) -> list[str]:
    """Returns the dotted names that a pattern of `parallelize_module()` matches."""
    def matches(parts: list[str], name: list[str]) -> bool:
        if not parts:
            return not name
        if parts[0] == "**":
            return matches(parts[1:], name) or bool(name) and matches(parts, name[1:])
        return bool(name) and fnmatch.fnmatchcase(name[0], parts[0]) and matches(parts[1:], name[1:])

    return [name for name, _ in module.named_modules()
            if matches(pattern.split(".") if pattern else [], name.split(".") if name else [])]


def _resolve(module: nn.Module, plan: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        names = match_modules(module, pattern)
        if not names:
            raise ValueError(f"[parallelize_module] each pattern must match a module; '{pattern}' matches none of "
                             f"{[name for name, _ in module.named_modules() if name]}")
        if not isinstance(style, ParallelStyle):
            raise TypeError(f"[parallelize_module] '{pattern}' needs a style such as ColwiseParallel(); got {style!r}")
        for name in names:
            inner = module.get_submodule(name)
            if name in styles:
                raise ValueError(f"[parallelize_module] '{name}' is matched by two entries of the plan; '{pattern}' is one of "
                                 "them")
            if "_tessera_style" in inner.__dict__:
                raise ValueError(f"[parallelize_module] '{name}' was parallelized before")
            if isinstance(style, (ColwiseParallel, RowwiseParallel)) and not isinstance(inner, (nn.Linear, nn.Embedding)):
                raise ValueError(f"[parallelize_module] {type(style).__name__} places an nn.Linear or an nn.Embedding; "
                                 f"expected one of them, got '{name}', a {type(inner).__name__}. distribute_module() "
                                 "places any module by a function")
            styles[name] = style
    return styles


def moved(tensor: torch.Tensor, mesh, mesh_dim: int, placement: Placement) -> torch.Tensor:
    """Returns a DistTensor with that placement along one mesh dim, and its own ones along the others."""
    if not is_dist(tensor):
        tensor = distribute(tensor, mesh, [])
    placements = placements_of(tensor)
    placements[mesh_dim] = placement
    return redistribute(tensor, placements)


def place_along(module: nn.Module, mesh, mesh_dim: int, own: Callable[[str, nn.Module], dict[str, Placement]],
                mesh_at: Callable[[str], Any] | None = None) -> list:
    """Distributes a module with the placements along one mesh dim that `own(name, submodule)` returns for a submodule's own
    parameters. `mesh_at(name)`: the mesh of a submodule; None: `mesh`. Returns the list of hooks that `unwrap()` removes."""
    def place(name: str, inner: nn.Module, own_mesh) -> None:
        there = mesh_at(name) if mesh_at else own_mesh
        cuts = own(name, inner)
        for key, tensor in {**inner._parameters, **inner._buffers}.items():
            if tensor is not None and (key in cuts or there != own_mesh):
                placements: list[Any] = [Replicate()] * there.ndim
                placements[mesh_dim] = cuts.get(key, Replicate())
                distribute_(tensor, there, placements)

    distribute_module(module, mesh, place)
    return module.__dict__["_tessera_hooks"]


def _hook_input(mesh, mesh_dim: int, given: Placement | None, wanted: Placement):
    def hook(module, args, kwargs):
        if not args or not isinstance(args[0], torch.Tensor):
            raise TypeError(f"[parallelize_module] the first positional argument of {type(module).__name__} must be a tensor, "
                            f"which its style redistributes; got {type(args[0]).__name__ if args else 'none'}")
        tensor = args[0]
        if given is not None and not is_dist(tensor):
            tensor = from_local(tensor, mesh, [given if dim == mesh_dim else Replicate() for dim in range(mesh.ndim)])
        return (moved(tensor, mesh, mesh_dim, wanted), *args[1:]), kwargs

    return hook


def parallelize_module(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle] | ParallelStyle, *,
                       mesh_dim: str | int | None = None) -> nn.Module:
    """Places the parameters of a module, and the tensors that go through its inner modules, as the plan's styles say; the rest
    is replicated. Returns the module.

        parallelize_module(model, mesh, {"layers.*.w[qkv]": ColwiseParallel(), "layers.*.wo": RowwiseParallel()})

    `plan`: styles by patterns of dotted names, of which each part matches one part of a name as a shell matches file names,
    and `**` any number; "" is the module itself, as is a style alone. `mesh_dim`: by name or number; None: the mesh's only one.
    Placements are those along it.

    Collective over the mesh. Raises on all ranks, and changes nothing, for a pattern that matches no module, a module that two
    entries match, or that was parallelized before, one that the style can't place, and plans that differ between ranks.
    """
    dim = _checked(mesh).dim(mesh_dim) if isinstance(mesh_dim, str) else mesh_dim
    if dim is None and mesh.ndim > 1:
        raise ValueError(f"[parallelize_module] a mesh of several dims needs mesh_dim, one of {mesh.dim_names}")
    dim = (dim or 0) % mesh.ndim
    styles = _resolve(module, plan if isinstance(plan, Mapping) else {"": plan})
    _compare_plans(mesh, f"{styles} along {dim}")

    hooks = place_along(module, mesh, dim, lambda name, inner: _own_placements(styles.get(name), inner))
    for name, style in styles.items():
        inner = module.get_submodule(name)
        inner.__dict__["_tessera_style"] = style
        given, wanted, result = _flow(style, inner)
        if wanted is not None:
            hooks.append(inner.register_forward_pre_hook(_hook_input(mesh, dim, given, wanted), with_kwargs=True))
        if result is not None:
            hooks.append(inner.register_forward_hook(lambda _, __, output, result=result: moved(output, mesh, dim, result)))
    return module


def _compare_plans(mesh, text: str) -> None:
    if not mesh.is_member():
        return
    value = float(sum((index + 1) * byte for index, byte in enumerate(text.encode())) % 2**31)
    both = torch.tensor([value, -value], dtype=torch.float64)
    mesh.process_group(None).all_reduce(both, "max")
    if both[0] != -both[1]:
        raise ValueError(f"[parallelize_module] all ranks must give the same plan; this one has {text}")

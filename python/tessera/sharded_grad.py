"""Gradients of sharded models, as `.grad` of their parameters shows them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch.utils import _pytree as pytree

_MAKES_NEW = frozenset((
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros", "new_ones", "new_full"))
_WRITES_EACH_ELEMENT = frozenset(("zero_", "fill_"))  # in-place functions that PyTorch does not tag as pointwise


class ShardedGrad(torch.Tensor):
    """The gradient of a sharded parameter: a tensor of the whole gradient's shape and values, of which each rank keeps its
    part.

    Functions that read values gather it, so all ranks call them, and return ordinary tensors. In-place functions change
    what the optimizer steps with; those that treat each element by itself, such as `mul_(2)`, send nothing, others gather
    the gradient first. Views of it are `ShardedGrad`s, too. Tensors that in-place functions take besides must be equal on
    all ranks.
    """

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, name: str, model, views: tuple[Callable, ...] = (),
                seen: torch.Tensor | None = None):
        """`model`: the engine's. `views`: functions that lead from the whole gradient to this tensor, which looks like
        `seen`."""
        if seen is None:
            seen = torch.empty_strided(parameter.shape, parameter.stride(), dtype=model.grad_dtype(parameter), device="meta")
        grad = torch.Tensor._make_wrapper_subclass(
            cls, seen.shape, strides=seen.stride(), storage_offset=seen.storage_offset(), dtype=seen.dtype,
            device=parameter.device)
        grad._parameter, grad._name, grad._model, grad._views = parameter, name, model, views
        return grad

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if written:
            return _write(func, args, kwargs, written)
        name = func._schema.name.removeprefix("aten::")
        if name in _MAKES_NEW:
            return func(*_tree_map(_like, args), **_tree_map(_like, kwargs))
        if any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns):
            return _view(func, args, kwargs)
        return func(*_tree_map(ShardedGrad.full_tensor, args), **_tree_map(ShardedGrad.full_tensor, kwargs))

    def full_tensor(self) -> torch.Tensor:
        """Returns a copy of the whole gradient. Collective."""
        return _seen(_gathered(self), self._views)

    def to_local(self) -> torch.Tensor:
        """Returns this rank's part, to be read or changed: see `ShardedModule.local_grad()`; empty if all of it lies on
        other ranks."""
        if self._views:
            raise RuntimeError(f"[tessera] a view of the gradient of '{self._name}' has no part of its own; read the "
                               "gradient's to_local(), or full_tensor() of the view")
        part = self._model.local_grad(self._parameter)
        return torch.empty(0, dtype=self.dtype, device=self.device) if part is None else part

    def numpy(self, *args, **kwargs):
        return self.full_tensor().numpy(*args, **kwargs)

    def tolist(self):
        return self.full_tensor().tolist()

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), self.full_tensor())

    def __reduce_ex__(self, protocol):
        return self.full_tensor().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents=None):
        return (f"ShardedGrad(of '{self._name}', shape {list(self.shape)}, {self.dtype}; full_tensor() has the values of "
                "all ranks, to_local() this rank's)")


def _tree_map(function: Callable, tree):
    return pytree.tree_map_only(ShardedGrad, function, tree)


def _like(grad: ShardedGrad) -> torch.Tensor:
    return torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device=grad.device)


def _gathered(grad: ShardedGrad) -> torch.Tensor:
    whole = grad._model.full_grad(grad._parameter)
    if whole is None:
        raise RuntimeError(f"[tessera] the gradient of '{grad._name}' has no values yet, or none any more: it was not reduced "
                           "since no_sync(), or has been cleared")
    return whole


def _seen(whole: torch.Tensor, views: Iterable[Callable]) -> torch.Tensor:
    return functools.reduce(lambda tensor, view: view(tensor), views, whole)


def _view(func, args, kwargs):
    # Only the first argument of a function that returns views may be viewed.
    grad, *others = args
    parameter = grad._parameter
    meta = _seen(torch.empty_strided(parameter.shape, parameter.stride(), dtype=grad.dtype, device="meta"), grad._views)
    see = lambda tensor: func(tensor, *others, **kwargs)
    made = see(meta)
    if isinstance(made, torch.Tensor):
        return ShardedGrad(parameter, grad._name, grad._model, (*grad._views, see), made)
    return [ShardedGrad(parameter, grad._name, grad._model, (*grad._views, lambda tensor, i=i: see(tensor)[i]), each)
            for i, each in enumerate(made)]


def _written(func, args, kwargs) -> list:
    """Returns the arguments that `func` writes to and that are, or have, sharded gradients."""
    if not func._schema.is_mutable:
        return []
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            if any(isinstance(leaf, ShardedGrad) for leaf in pytree.tree_leaves(value)):
                found.append(value)
    return found


def _write(func, args, kwargs, written: list):
    sharded = [grad for grad in pytree.tree_leaves(written) if isinstance(grad, ShardedGrad)]
    for grad in sharded:
        if grad._model.has_reduced_grad(grad._parameter):
            continue
        if func is torch.ops.aten.zero_.default and not grad._views:
            grad._model.zero_grad(grad._parameter, set_to_none=False)
        else:
            raise RuntimeError(f"[tessera] the gradient of '{grad._name}' can't be changed by {func._schema.name}: it was not "
                               "reduced since no_sync() or zero_grad(), or has been cleared")
    if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
        return _unscale(*args)
    if _is_set(func, args):
        args[0]._model.set_full_grad(args[0]._parameter, _tree_map(ShardedGrad.full_tensor, args[1]))
    elif _treats_each_element(func, args, kwargs, written):
        _write_parts(func, args, kwargs)
    else:
        _write_whole(func, args, kwargs, pytree.tree_leaves(written))
    return written[0] if len(func._schema.returns) == 1 else tuple(written) if func._schema.returns else None


def _is_set(func, args) -> bool:
    return func is torch.ops.aten.copy_.default and not args[0]._views and args[1].shape == args[0].shape


def _treats_each_element(func, args, kwargs, written: list) -> bool:
    """Returns whether `func` can be called on the ranks' parts of the gradients that it writes to."""
    name = func._schema.name.removeprefix("aten::")
    if not (torch.Tag.pointwise in func.tags or name.startswith("_foreach_") or name in _WRITES_EACH_ELEMENT):
        return False
    if len(written) != 1 or args[0] is not written[0]:
        return False
    if not all(isinstance(grad, ShardedGrad) and not grad._views for grad in pytree.tree_leaves(written)):
        return False
    others = (*args[1:], *kwargs.values())
    return all(leaf.numel() == 1 and leaf.dim() == 0 if isinstance(leaf, torch.Tensor) else True
               for leaf in pytree.tree_leaves(others)) and not any(isinstance(other, (list, tuple)) for other in others)


def _write_parts(func, args, kwargs) -> None:
    parts = [part for grad in pytree.tree_leaves(args[0]) if (part := grad.to_local()).numel()]
    if isinstance(args[0], ShardedGrad):
        for part in parts:
            func(part, *args[1:], **kwargs)
    elif parts:
        func(parts, *args[1:], **kwargs)


def _write_whole(func, args, kwargs, written: list) -> None:
    wholes: dict[int, tuple[ShardedGrad, torch.Tensor]] = {}

    def seen(grad: ShardedGrad) -> torch.Tensor:
        key = id(grad._parameter)
        if key not in wholes:
            wholes[key] = grad, _gathered(grad)
        return _seen(wholes[key][1], grad._views)

    func(*_tree_map(seen, args), **_tree_map(seen, kwargs))
    changed = {id(grad._parameter) for grad in written if isinstance(grad, ShardedGrad)}
    for key in [key for key in wholes if key in changed]:
        grad, whole = wholes[key]
        grad._model.set_full_grad(grad._parameter, whole)


def _unscale(grads: list, found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """For `torch.amp.GradScaler`. Collective."""
    sharded = [grad for grad in grads if isinstance(grad, ShardedGrad)]
    parts = [part for grad in sharded if (part := grad.to_local()).numel()]
    parts += [grad for grad in grads if not isinstance(grad, ShardedGrad)]
    found = torch.zeros_like(found_inf)
    if parts:
        torch._amp_foreach_non_finite_check_and_unscale_(parts, found, inverse)
    for model in dict.fromkeys(grad._model for grad in sharded):
        if model.any_rank(bool(found)):
            found_inf.fill_(1.0)

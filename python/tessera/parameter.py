"""Parameters of sharded models: their memory comes and goes, and their gradients lie elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from . import _C
from .foreign import refuse_wrapping

_plain_grad, _plain_data = torch.Tensor.grad, torch.Tensor.data
_OWN = ("_show_grad", "_read_whole", "_layout")  # attributes of sharded parameters


def _read_grad(self):
    if _C.keeps_grad_elsewhere(self):
        return self._show_grad(self)
    return _plain_grad.__get__(self)  # in a hook of this parameter: the gradient that has just arrived


def _write_grad(self, value):
    if value is None or not _C.keeps_grad_elsewhere(self):
        return _plain_grad.__set__(self, value)
    grad = self._show_grad(self)
    if grad is None:
        from .dcp import is_asking

        if hasattr(self, "_place") and is_asking():  # of compat.fsdp2, whose optimizers make their state without it
            return
        raise RuntimeError("[tessera] a parameter of a sharded model can be given a gradient only in place of one that a "
                           "backward has made: it has none on this rank")
    if grad is not value:
        grad.copy_(value)


def _delete_grad(self):
    _write_grad(self, None)


def _write_data(self, value):
    if value.dtype != self.dtype or value.device != self.device:
        raise RuntimeError(f"[tessera] a sharded model can't be moved from {self.dtype} on {self.device} to {value.dtype} on "
                           f"{value.device}: call to(), half(), cuda()... before fully_shard(), or choose param_dtype there")
    _plain_data.__set__(self, value)


def _numpy(self, *args, **kwargs):
    return self.detach().clone().numpy(*args, **kwargs)


def _full_tensor(self):
    """Returns a copy of the whole value, in the dtype in which it is updated. Collective."""
    with torch.no_grad():
        return self._read_whole(self)


def _deepcopy(self, memo):
    # A copy of the module is an ordinary one, with the values of now.
    if id(self) not in memo:
        copy = nn.Parameter(self.detach().clone(), self.requires_grad)
        copy.__dict__.update({name: value for name, value in self.__dict__.items()
                              if name not in _OWN and not hasattr(value, "belongs_to_one_parameter")})
        memo[id(self)] = copy
    return memo[id(self)]


def _reduce(self, protocol):
    raise RuntimeError("[tessera] parameters of a sharded model can't be pickled, as each rank has a part of them. Save "
                       "model.state_dict(), which has whole tensors, or use tessera.save_checkpoint()")


@functools.cache
def _sharded_class(base: type) -> type:
    return type(base)("Sharded" + base.__name__, (base,), {
        "grad": property(_read_grad, _write_grad, _delete_grad), "data": property(_plain_data.__get__, _write_data),
        "numpy": _numpy, "full_tensor": _full_tensor, "__deepcopy__": _deepcopy, "__reduce_ex__": _reduce,
        "_fsdp_flattened": property(refuse_wrapping), "_fsdp_orig_uid": property(refuse_wrapping),  # what FSDP asks for first
        "__module__": __name__, "_plain_class": base,
        "__doc__": "A parameter of a sharded model."})


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def make_sharded(parameter: torch.Tensor, show_grad: Callable, read_whole: Callable, layout=None) -> None:
    """Turns a parameter into one whose `.grad` is `show_grad(parameter)`, and whose whole value for a state dict
    `read_whole(parameter)`. `layout`: a `dcp.Layout`, of the rows that `torch.distributed.checkpoint` gets; None: it gets whole
    values."""
    if not hasattr(type(parameter), "_plain_class"):
        parameter.__class__ = _sharded_class(type(parameter))
    parameter._show_grad, parameter._read_whole, parameter._layout = show_grad, read_whole, layout


def make_plain(parameter: torch.Tensor) -> None:
    """Undoes `make_sharded()`."""
    for name in _OWN:
        parameter.__dict__.pop(name, None)
    if hasattr(type(parameter), "_plain_class"):
        parameter.__class__ = type(parameter)._plain_class

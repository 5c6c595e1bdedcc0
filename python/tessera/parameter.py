"""Parameters of sharded models: their memory comes and goes, and their gradients lie elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

_plain_grad = torch.Tensor.grad


class AbsentGrad(torch.Tensor):
    """Stands for a gradient that is sharded, in `.grad`: it says that there is one, and has its shape, dtype and device,
    but no values. Every operator on it raises, except for those of `zero_grad()`, of `torch.nn.utils.clip_grad_norm_()`
    (the norm is collective), and conversions to the dtype and device that it has.
    """

    @staticmethod
    def of(parameter: torch.Tensor, name: str, model) -> "AbsentGrad":
        """`model`: has `full_grad()` and `local_grad()`."""
        value = torch.zeros((), dtype=parameter.dtype, device=parameter.device)  # the memory of one element
        grad = value.expand(parameter.shape).as_subclass(AbsentGrad)
        grad.of_parameter, grad._parameter, grad._model = name, parameter, model
        return grad

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        if name in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name == "linalg_vector_norm":
            return func(args[0]._model.full_grad(args[0]._parameter), *args[1:], **(kwargs or {}))
        if name == "mul_":
            local = args[0]._model.local_grad(args[0]._parameter)
            if local is not None:
                local.mul_(*args[1:])
            return args[0]
        if name in _CONVERSIONS and _keeps(name, *args, **(kwargs or {})):
            return args[0]
        raise RuntimeError(
            f"[tessera] the gradient of '{_name_in(args)}' is sharded, so '{name}' can't be called on its .grad. Call the "
            "sharded model's clip_grad_norm_() to clip, full_grad(parameter) for the whole gradient (collective), or "
            "local_grad(parameter) for this rank's part")

    def __repr__(self):
        return f"AbsentGrad(of '{self.of_parameter}', shape {list(self.shape)}: sharded, see full_grad() and local_grad())"

    def zero_(self):
        raise RuntimeError(f"[tessera] the gradient of '{self.of_parameter}' is sharded: call zero_grad(set_to_none=False) "
                           "of the sharded model to keep zeros, or zero_grad() to clear it")


# These describe a tensor, or are called by zero_grad(), Module.to() and torch.compile.
_DESCRIBING = frozenset((
    "__get__", "__set__", "dim", "size", "numel", "element_size", "is_floating_point", "is_complex", "__repr__", "__hash__",
    "stride", "_is_view", "_has_compatible_shallow_copy_type", "requires_grad_", "detach_", "nelement", "ndimension"))
_DTYPES = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


_CONVERSIONS = ("cpu", "to", *_DTYPES)


def _keeps(name: str, grad: AbsentGrad, *args, **kwargs) -> bool:
    """True for a conversion to the dtype and device that the gradient has."""
    if name in _DTYPES:
        return grad.dtype == _DTYPES[name]
    if name == "cpu":
        return grad.device.type == "cpu"
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return device in (None, grad.device) and dtype in (None, grad.dtype)


def _name_in(args) -> str:
    for arg in args:
        if isinstance(arg, AbsentGrad):
            return arg.of_parameter
        if isinstance(arg, (list, tuple)) and (name := _name_in(arg)):
            return name
    return ""


def _read_grad(self):
    try:
        return _plain_grad.__get__(self)  # in a hook of this parameter: the gradient that has just arrived
    except RuntimeError:
        return self._show_grad(self)


def _write_grad(self, value):
    if value is not None:
        try:
            _plain_grad.__get__(self)
        except RuntimeError:
            raise RuntimeError("[tessera] the gradients of a sharded model can't be set; change the tensor that "
                               "local_grad(parameter) returns, in place") from None
    _plain_grad.__set__(self, value)


def _delete_grad(self):
    _write_grad(self, None)


def _numpy(self, *args, **kwargs):
    return self.detach().clone().numpy(*args, **kwargs)


def _deepcopy(self, memo):
    # A copy of the module is an ordinary one, with the values of now.
    if id(self) not in memo:
        copy = nn.Parameter(self.detach().clone(), self.requires_grad)
        copy.__dict__.update({name: value for name, value in self.__dict__.items()
                              if name != "_show_grad" and not hasattr(value, "belongs_to_one_parameter")})
        memo[id(self)] = copy
    return memo[id(self)]


def _reduce(self, protocol):
    raise RuntimeError("[tessera] parameters of a sharded model can't be pickled, as each rank has a part of them. Save "
                       "model.state_dict(), which has whole tensors, or use tessera.save_checkpoint()")


@functools.cache
def _sharded_class(base: type) -> type:
    return type(base)("Sharded" + base.__name__, (base,), {
        "grad": property(_read_grad, _write_grad, _delete_grad), "numpy": _numpy, "__deepcopy__": _deepcopy,
        "__reduce_ex__": _reduce, "__module__": __name__, "_plain_class": base,
        "__doc__": "A parameter of a sharded model."})


def make_sharded(parameter: torch.Tensor, show_grad: Callable) -> None:
    """Turns a parameter into one whose `.grad` is `show_grad(parameter)`."""
    if not hasattr(type(parameter), "_plain_class"):
        parameter.__class__ = _sharded_class(type(parameter))
    parameter._show_grad = show_grad


def make_plain(parameter: torch.Tensor) -> None:
    """Undoes `make_sharded()`."""
    parameter.__dict__.pop("_show_grad", None)
    if hasattr(type(parameter), "_plain_class"):
        parameter.__class__ = type(parameter)._plain_class

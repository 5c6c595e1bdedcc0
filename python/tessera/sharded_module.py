"""`fully_shard()` and its handle."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from . import _C, dcp
from .foreign import mark_plain, mark_sharded, refuse_rank_zero_alone
from .parameter import make_plain, make_sharded
from .sharded_grad import ShardedGrad
from .world import resolve_group

_GATHERED_AT_ONCE = 256 * 2**20  # bytes of DTensors that are loaded


def named_tensors(module: nn.Module) -> tuple[list, list]:
    """Returns the parameters and the buffers of a module under all of their names."""
    parameters = list(module.named_parameters(remove_duplicate=False))
    buffers = list(module.named_buffers(remove_duplicate=False))
    return parameters, buffers


def _gather(owner: nn.Module, state: dict, prefix: str, _) -> None:
    asked_by_dcp = dcp.is_asking()
    for name, parameter in owner._parameters.items():
        value = state.get(prefix + name)
        if parameter is None or value is None or isinstance(value, nn.Parameter):
            continue  # keep_vars: the parameter itself
        if _C.is_sharded(parameter):
            with torch.no_grad():
                whole = parameter._read_whole(parameter)
                state[prefix + name] = parameter._layout.rows(whole) if asked_by_dcp and parameter._layout else whole


def _make_whole(owner: nn.Module, state: dict, prefix: str, *_) -> None:
    for name, parameter in owner._parameters.items():
        value = state.get(prefix + name)
        if parameter is not None and dcp.is_dtensor(value) and _C.is_sharded(parameter):
            state[prefix + name] = dcp.whole_of(value)


def gather_in_state_dict(module: nn.Module) -> list:
    """Lets `state_dict()` of a module, and of each of its submodules, return whole tensors, as copies, or rows for
    `torch.distributed.checkpoint`, and `load_state_dict()` take both. Collective where parameters are sharded between uses,
    as every use of them is.

    Returns handles, whose `remove()` undoes it.
    """
    return [handle for submodule in module.modules() for handle in (
        submodule._register_state_dict_hook(_gather), submodule.register_load_state_dict_pre_hook(_make_whole))]


def not_in_state(module: nn.Module) -> set[str]:
    """Returns the names of the buffers that are in no state dict."""
    return {f"{prefix}.{name}" if prefix else name for prefix, submodule in module.named_modules(remove_duplicate=False)
            for name in submodule._non_persistent_buffers_set if submodule._buffers.get(name) is not None}


def names_in_state(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Yields the names and tensors that a state dict of the module has."""
    left_out = not_in_state(module)
    parameters, buffers = named_tensors(module)
    yield from parameters
    yield from ((name, buffer) for name, buffer in buffers if name not in left_out)


def take_values(module: nn.Module, load: Callable, state_dict: Mapping[str, torch.Tensor], strict: bool):
    """Lets `load`, the module's own function, load a state dict into places that are empty; returns its result, and the
    values by name."""
    places = [(submodule, kind, name, tensor) for submodule in module.modules()
              for kind in ("_parameters", "_buffers") for name, tensor in getattr(submodule, kind).items()
              if tensor is not None]
    try:
        for submodule, kind, name, tensor in places:
            empty = torch.empty_like(tensor, device="meta")
            getattr(submodule, kind)[name] = nn.Parameter(empty, tensor.requires_grad) if kind == "_parameters" else empty
        result = load(state_dict, strict, assign=True)
        return result, {name: tensor.detach() for name, tensor in names_in_state(module) if not tensor.is_meta}
    finally:
        for submodule, kind, name, tensor in places:
            getattr(submodule, kind)[name] = tensor


def take_on_all_ranks(model: _C.Model, module: nn.Module, load: Callable, state_dict: Mapping[str, torch.Tensor], strict: bool):
    """Does the same, and raises on every rank of `model` if any does. Collective."""
    result, given, error = None, {}, None
    try:
        result, given = take_values(module, load, state_dict, strict)
    except Exception as failure:
        error = failure
    if model.any_rank(error is not None):
        raise error or RuntimeError("[load_state_dict] another rank has refused the state dict, so nothing was loaded; its "
                                    "error says why")
    return result, given


def load_in_turn(model: _C.Model, values: Mapping[str, torch.Tensor]) -> None:
    """Sets parameters and buffers of `model`; from DTensors, of so many at a time as memory allows. Collective."""
    whole, nbytes = {}, 0
    for name, value in values.items():
        whole[name] = dcp.whole_of(value)
        nbytes += whole[name].nbytes if dcp.is_dtensor(value) else 0
        if nbytes > _GATHERED_AT_ONCE:
            model.load_full_state(list(whole.items()), False)
            whole, nbytes = {}, 0
    model.load_full_state(list(whole.items()), False)


@functools.lru_cache(maxsize=None)
def _class_like(base: type, forward: Callable) -> type:
    """Returns a class derived from `base` whose `forward` has the signature of `forward`, a method."""

    @functools.wraps(forward)
    def call(self, *args, **kwargs):
        return base.forward(self, *args, **kwargs)

    return type(base)(base.__name__, (base,), {"forward": call, "__module__": base.__module__, "__doc__": base.__doc__})


class Wrapper(nn.Module):
    """A module around one that was sharded in place, whose attributes it has."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self._hooks: list = []
        # Trainers choose what a batch must have by the signature.
        self.__class__ = _class_like(type(self), type(module).forward)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"": "module"}  # names for torch.distributed.checkpoint are those of the module

    def _take_over(self, shown: Iterable[tuple[nn.Parameter, Callable]], read_whole: Callable,
                   layout: dcp.Layout | None = None) -> None:
        # `shown`: parameters, and functions that return what their `.grad` shows.
        self._hooks = gather_in_state_dict(self.module)
        for parameter, show_grad in shown:
            make_sharded(parameter, show_grad, read_whole, layout)
        mark_sharded(self.module)

    def _give_back(self) -> nn.Module:
        for parameter in self.module.parameters():
            make_plain(parameter)
        mark_plain(self.module)
        for hook in self._hooks:
            hook.remove()
        return self.module


class ShardedModule(Wrapper):
    """A sharded model. The module itself was changed in place, and may be called directly, too; this wrapper adds
    functions that the module lacks, and has its attributes.

    Every backward is collective. At level "p_g_os", so is every forward: all ranks run it equally often, each on its
    own data.
    """

    _saves_masters = staticmethod(lambda: True)  # in state_dict()

    def __init__(self, module: nn.Module, model: _C.Model, plan: Mapping[str, Any]):
        super().__init__(module)
        self._model = model
        self._gathers = plan.get("level") == "p_g_os" or plan.get("param_dtype") is not None  # in state_dict()
        self._casts_to = plan.get("param_dtype") if plan.get("cast_inputs", True) else None
        self._layout = dcp.Layout(plan)
        shown, saves_masters = weakref.ref(model), self._saves_masters
        self._take_over(((parameter, lambda it, name=name: _show_grad(shown(), it, name))
                        for name, parameter in module.named_parameters()),
                        lambda it: _read_whole(shown(), it) if saves_masters() else read_copy(it), self._layout)

    def forward(self, *args, **kwargs):
        self._model.begin_forward()
        if self._casts_to is not None:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        result = self.module(*args, **kwargs)
        self._model.end_forward()
        return result

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._casts_to) if tensor.is_floating_point() else tensor

    # Names are those of the module.
    def named_parameters(self, *args, **kwargs):
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args, **kwargs):
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args, **kwargs):
        """The module's own `state_dict()`, of whole tensors in the dtype in which they are updated; of DTensors, with this
        rank's rows, if a function of `torch.distributed.checkpoint` calls this. Collective at "p_g_os", and at every level
        with `param_dtype`."""
        if self._gathers:
            refuse_rank_zero_alone()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """Sets parameters and buffers from values that are equal on all ranks, or from DTensors. Collective."""
        if assign:
            raise ValueError("[load_state_dict] assign=True would replace parameters that are sharded; leave it out")
        result, given = take_on_all_ranks(self._model, self.module, self.module.load_state_dict, state_dict, strict)
        load_in_turn(self._model, given)
        return result

    def no_sync(self):
        """A context in which backward keeps this rank's own gradients, and sends nothing; the next backward after it
        reduces their sum."""
        return self._model.no_sync()

    def keep_unsharded(self):
        """A context in which all parameters stay whole, to sample from a model, say. Collective."""
        return self._model.keep_unsharded()

    def reduce(self) -> None:
        """Reduces the gradients accumulated under `no_sync()`, if no other backward is to follow. Collective."""
        self._model.reduce()

    def sync_buffers(self, blocking: bool = True) -> None:
        """Copies rank 0's buffers to all ranks. Collective."""
        self._model.sync_buffers(blocking)

    def full_state(self) -> dict[str, torch.Tensor]:
        """Returns copies of all parameters and buffers under their names, on every rank. Collective."""
        return dict(self._model.full_state())

    def load_full_state(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Sets all parameters and buffers from values that are equal on all ranks. Collective. Raises `ValueError` on
        every rank, and changes nothing, if names or shapes differ; with `strict=False`, missing entries keep their
        values, and unknown names are ignored."""
        self._model.load_full_state(list(state.items()), strict)

    def full_grad(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Returns a parameter's whole reduced gradient, on every rank; None if it has none. Collective."""
        return self._model.full_grad(parameter)

    def local_grad(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Returns this rank's part of a parameter's reduced gradient, to be read or changed; None if it has none, or all
        of it lies on other ranks."""
        return self._model.local_grad(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients. With `set_to_none=False` they become zeros, and the optimizer also steps parameters that
        the next backward does not use. All ranks must call it."""
        self._model.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, epsilon: float = 1e-6,
                        exclude: Iterable[str] = ()) -> torch.Tensor:
        """Scales the reduced gradients so that their total norm is at most `max_norm`, and returns the norm before, as
        `torch.nn.utils.clip_grad_norm_` does. Collective. `exclude`: names of parameters to leave out."""
        return torch.tensor(self._model.clip_grad_norm_(float(max_norm), float(norm_type), epsilon, list(exclude)))

    def memory(self) -> dict[str, int]:
        """Returns the bytes that this rank keeps between steps, by kind. Without the optimizer's state, which
        `ShardedOptimizer.memory()` adds."""
        return self._model.memory()

    def describe(self) -> str:
        """Returns a table of the units: names, elements, this rank's shard, level."""
        return self._model.describe()

    def unwrap(self) -> nn.Module:
        """Undoes the sharding: the module's parameters are ordinary ones again, on every rank. Returns the module.
        Collective. Call the optimizer's `unwrap()` first."""
        self._model.unwrap()
        return self._give_back()

    def __deepcopy__(self, memo):
        raise RuntimeError("[tessera] a sharded model can't be copied as such. Copy its module before fully_shard(); "
                           "copy.deepcopy(sharded.module) makes an ordinary module with the values of now")

    def __reduce_ex__(self, protocol):
        raise RuntimeError("[tessera] a sharded model can't be pickled, as each rank has a part of it. Save "
                           "state_dict(), which has whole tensors, or use tessera.save_checkpoint()")


def read_copy(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().clone()


def _read_whole(model: _C.Model | None, parameter: torch.Tensor) -> torch.Tensor:
    if model is None or model.grad_dtype(parameter) == parameter.dtype:
        return read_copy(parameter)
    return model.full_value(parameter)  # what the optimizer updates has more digits


def _show_grad(model: _C.Model | None, parameter: torch.Tensor, name: str):
    if model is None or not model.has_grad(parameter):
        return None
    return ShardedGrad(parameter, name, model)


def fully_shard(module: nn.Module, *, level: str = "p_g_os", group=None, **plan) -> ShardedModule:
    """Shards a module's parameters, their gradients and the optimizer's state over the ranks of a process group, in place.

    Collective: all ranks call it with models of the same structure; rank 0's values count. `level`: "p_g_os" shards all
    three, "os_g" gradients and state, "os" state, "none" nothing. `group`: of Tessera or of `torch.distributed`; None: all
    ranks. `plan`: further fields of a plan, see docs/guide/python.md (`unit_bytes`, `param_dtype`, `offload`...).

    Raises `ValueError` on every rank, and changes nothing, for a model without parameters, one that is sharded already,
    models that differ between ranks, and options that contradict each other.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard() takes a torch.nn.Module; got {type(module).__name__}")
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo and isinstance(module, dynamo.OptimizedModule):
        raise ValueError("[fully_shard] the module was compiled by torch.compile already: give fully_shard() the module before, "
                         "and compile what it returns, by torch.compile(sharded, backend=tessera.inductor)")
    # On a dim of the parameters' mesh, the plan has no group.
    arguments = dict(plan, level=level)
    if group is not None or plan.get("mesh_dim") is None:
        arguments["group"] = resolve_group(group)
    if "groups" in arguments:
        arguments["groups"] = [(names, resolve_group(ranks)) for names, ranks in arguments["groups"]]
    if arguments.get("replicate_group") is not None:
        arguments["replicate_group"] = resolve_group(arguments["replicate_group"])
    parameters, buffers = named_tensors(module)
    return ShardedModule(module, _C.fully_shard(parameters, buffers, arguments, not_in_state(module)), arguments)


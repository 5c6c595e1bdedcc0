"""FSDP2's interface: programs written for `torch.distributed.fsdp.fully_shard` import it from here.

    from tessera.compat.fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard

Calls for blocks and for the root record what is wanted; the engine shards the whole model at its first use: the first forward
of any of its modules, `unshard()`, or the first step of an optimizer. Until then parameters are ordinary ones, that may be
made, loaded and converted. Blocks are the units of the engine's plan; blocks of other dtypes, meshes or offload are models of
their own in it. Plain optimizers step, see `plain_optimizer`. docs/guide/from_fsdp2.md lists what differs.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from .. import _C, dcp
from ..optimizer import ends_backward
from ..parameter import make_sharded
from ..sharded_module import _read_whole, _show_grad, gather_in_state_dict, load_in_turn, take_on_all_ranks
from ..world import ProcessGroup, init, resolve_group
from . import plain_optimizer
from .plain_optimizer import GradHooks, Place, place_of

__all__ = ["CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle", "fully_shard",
           "register_fsdp_forward_method", "share_comm_ctx"]

_REGISTER = "register_post_accumulate_grad_hook"
_unsharded: weakref.WeakSet[_Root] = weakref.WeakSet()  # recorded, and not used yet


class _Block:
    """What one call of `fully_shard()` has recorded."""

    def __init__(self, modules: list[nn.Module], mesh: DeviceMesh | None, policy: MixedPrecisionPolicy, offloads: bool,
                 reshards: bool | None, ignored: set[tuple[int, str]]):
        self.modules, self.mesh, self.policy, self.offloads = modules, mesh, policy, offloads
        self.ignored = ignored  # modules' ids and names of parameters
        self.reshards = reshards  # after forward; None: unless it is the root's
        self.syncs = True
        self.is_held = False  # from unshard() to reshard()
        self.divides_by: float | None = None
        self.root = _Root(self)
        self.model: _C.Model | None = None  # of its parameters
        self.nbytes = 0  # of these, gathered

    def kind(self) -> tuple:
        """Blocks of equal kinds are in one model of the engine."""
        return self.mesh, self.policy.param_dtype, self.policy.reduce_dtype, self.offloads


class _Root:
    """The outermost block, and all blocks in it. Its models: those of the engine."""

    def __init__(self, block: _Block):
        self.block = block
        self.blocks = [block]
        self.models: list[_C.Model] | None = None  # None: not sharded yet
        self._error: BaseException | None = None
        self._scopes: dict[tuple[str, _C.Model], Any] = {}
        self._backward = -1  # the last one at whose end hooks are to be called

    def absorb(self, inner: _Root) -> None:
        if inner.models is not None:
            raise ValueError("[fully_shard] a module in this one is sharded and in use already: call fully_shard() for the "
                             "outer module before the first forward")
        for block in inner.blocks:
            block.root = self
        self.blocks = inner.blocks + self.blocks
        _unsharded.discard(inner)

    def shard(self) -> None:
        """Shards the model unless it is. Collective."""
        if self._error is not None:
            raise RuntimeError("[fully_shard] the model is sharded in part; an earlier error says why") from self._error
        if self.models is not None:
            return
        named: dict[tuple, list[tuple[str, nn.Parameter, _Block]]] = {}
        for name, parameter, block in self._parameters():
            named.setdefault(block.kind(), []).append((name, parameter, block))
        _check_not_in_ddp(parameter for parameters in named.values() for _, parameter, _ in parameters)
        self.models = []
        _unsharded.discard(self)
        try:
            with torch.inference_mode(False), torch.no_grad():
                for parameters in named.values():
                    self._shard_kind(parameters)
        except BaseException as error:
            if self.models:
                self._error = error
            else:
                self.models = None  # nothing has changed
                _unsharded.add(self)
            raise
        for module in self.block.modules:
            gather_in_state_dict(module)
        self.update()

    def _parameters(self) -> Iterable[tuple[str, nn.Parameter, _Block]]:
        """Yields parameters under all of their names with their blocks: a shared one with the first that has it."""
        found: dict[nn.Parameter, _Block] = {}
        ignored = set().union(*(block.ignored for block in self.blocks))
        for number, outermost in enumerate(self.block.modules):
            blocks = {"": self.block}
            for prefix, module in outermost.named_modules(remove_duplicate=False):
                block = module.__dict__.get("_fsdp2_block") or blocks[prefix.rpartition(".")[0]]
                blocks[prefix] = block
                for name, parameter in module._parameters.items():
                    if parameter is None or (id(module), name) in ignored:
                        continue
                    full = ".".join(filter(None, ("" if len(self.block.modules) == 1 else str(number), prefix, name)))
                    _check_parameter(full, parameter)
                    yield full, parameter, found.setdefault(parameter, block)

    def _shard_kind(self, parameters: list[tuple[str, nn.Parameter, _Block]]) -> None:
        first = parameters[0][2]
        units: dict[_Block, dict[nn.Parameter, str]] = {}
        for name, parameter, block in parameters:
            units.setdefault(block, {}).setdefault(parameter, name)
        for block, unit in units.items():
            block.nbytes = sum(it.numel() * (block.policy.param_dtype or it.dtype).itemsize for it in unit)
        arguments = _groups_of(first.mesh)
        arguments.update(level="p_g_os", resident_bytes=self.resident_bytes(units),
                         units=[list(unit.values()) for block, unit in units.items() if block is not self.block])
        for name in ("param_dtype", "reduce_dtype"):
            if getattr(first.policy, name) is not None:
                arguments[name] = getattr(first.policy, name)
        if first.offloads:
            arguments["offload"] = "host"
        call_at_end = functools.partial(_Root._call_hooks_at_end, weakref.proxy(self))
        for _, parameter, _ in parameters:
            if not isinstance(parameter.__dict__.get(_REGISTER), GradHooks):
                setattr(parameter, _REGISTER, GradHooks(parameter, call_at_end))
        model = _C.fully_shard([(name, parameter) for name, parameter, _ in parameters], [], arguments, set())
        self.models.append(model)
        shown, layout = weakref.ref(model), dcp.Layout(arguments)
        for block, unit in units.items():
            block.model = model
            for parameter, name in unit.items():
                parameter._place = Place(model, name, layout)
                make_sharded(parameter, lambda it, name=name: _show_grad(shown(), it, name),
                             lambda it: _read_whole(shown(), it), layout)
                _set_divide_factor(parameter, block)

    def _call_hooks_at_end(self) -> None:
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._call_hooks))  # after the engine's own end of the backward

    def _call_hooks(self) -> None:
        with ends_backward():
            for parameter in dict.fromkeys(parameter for _, parameter, _ in self._parameters()):
                hooks = parameter.__dict__[_REGISTER].hooks
                if hooks and place_of(parameter).model.has_reduced_grad(parameter):
                    for hook in list(hooks.values()):
                        hook(parameter)

    def resident_bytes(self, blocks: Iterable[_Block]) -> int:
        """The bytes of those of a model's blocks that stay gathered after forward; -1 if these are all."""
        kept = [not (block.reshards if block.reshards is not None else block is not self.block) for block in blocks]
        return -1 if all(kept) else sum(block.nbytes for block, is_kept in zip(blocks, kept) if is_kept)

    def hold(self, blocks: Iterable[_Block], is_held: bool) -> None:
        for block in blocks:
            block.is_held = is_held
        self.update()

    def update(self) -> None:
        """Lets the models do what the blocks' settings say. Collective where units are to be held."""
        for model in self.models or ():
            blocks = [block for block in self.blocks if block.model is model]
            self._enter("no_sync", model, not any(block.syncs for block in blocks))
            self._enter("keep_unsharded", model, any(block.is_held for block in blocks))

    def _enter(self, scope: str, model: _C.Model, wanted: bool) -> None:
        if wanted and (scope, model) not in self._scopes:
            entered = getattr(model, scope)()
            entered.__enter__()
            self._scopes[scope, model] = entered
        elif not wanted and (scope, model) in self._scopes:
            self._scopes.pop((scope, model)).__exit__(None, None, None)


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if parameter.is_meta:
        raise RuntimeError(f"[fully_shard] parameter '{name}' is on the device 'meta' at the first forward: make its values by "
                           "to_empty() and the model's init function, or by load_state_dict(assign=True)")
    if isinstance(parameter, DTensor):
        raise NotImplementedError(f"[fully_shard] parameter '{name}' is a DTensor of torch.distributed; cut parameters over "
                                  "other mesh dims as DistTensors (tessera.distribute_module), and call "
                                  "tessera.fully_shard(mesh_dim=)")


def _check_not_in_ddp(parameters: Iterable[nn.Parameter]) -> None:
    ddp = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    reduced = set(map(id, ddp._module_parameters)) if ddp is not None else ()
    if any(id(parameter) in reduced for parameter in parameters):
        raise RuntimeError("[fully_shard] DistributedDataParallel is around a module of fully_shard(), and would reduce its "
                           "gradients again: leave it out, and call fully_shard() for the outermost module")


def _all_ranks() -> ProcessGroup:
    init()
    return resolve_group(None)


def _groups_of(mesh: DeviceMesh | None) -> dict[str, Any]:
    if mesh is None:
        return {"group": _all_ranks()}
    if mesh.ndim == 1:
        return {"group": resolve_group(mesh.get_group())}
    return {"group": resolve_group(mesh.get_group(1)), "replicate_group": resolve_group(mesh.get_group(0))}


def _set_divide_factor(parameter: nn.Parameter, block: _Block) -> None:
    # The engine takes means over ranks.
    if block.divides_by is not None and parameter.requires_grad and not hasattr(place_of(parameter), "divides"):
        mesh = block.mesh
        ranks = mesh.size() if mesh is not None else _all_ranks().size
        place_of(parameter).divides = parameter.register_hook(lambda grad: grad * (ranks / block.divides_by))


def _shard_those_of(parameters: Iterable[torch.Tensor]) -> None:
    if _unsharded:
        own = set(map(id, parameters))
        for root in list(_unsharded):
            if any(id(parameter) in own for module in root.block.modules for parameter in module.parameters()):
                root.shard()


plain_optimizer.before_first_step.append(_shard_those_of)


def _block_of(module: nn.Module) -> _Block:
    return module.__dict__["_fsdp2_block"]


def _blocks_in(module: nn.Module, recurse: bool) -> list[_Block]:
    return [_block_of(it) for it in (module.modules() if recurse else (module,)) if isinstance(it, FSDPModule)]


def _before_forward(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    block = _block_of(module)
    root = block.root
    root.shard()
    if module in root.block.modules and torch._C._current_graph_task_id() == -1:
        for model in root.models:
            model.begin_forward()
        if device := _device_of(block.mesh):
            args, kwargs = _map_tensors((args, kwargs), lambda tensor: tensor.to(device))
    if block.policy.cast_forward_inputs and block.policy.param_dtype is not None:
        args, kwargs = _cast((args, kwargs), block.policy.param_dtype)
    return args, kwargs


def _after_forward(module: nn.Module, _, output):
    block = _block_of(module)
    if module in block.root.block.modules and torch._C._current_graph_task_id() == -1:
        for model in block.root.models:
            model.end_forward()
    if block.is_held:
        block.root.hold([block], False)
    return output if block.policy.output_dtype is None else _cast(output, block.policy.output_dtype)


def _cast(tree, dtype: torch.dtype):
    return _map_tensors(tree, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _device_of(mesh: DeviceMesh | None) -> torch.device | None:
    """Returns the device to which tensors are moved, if any."""
    if mesh is None or mesh.device_type == "cpu":
        return None
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _map_tensors(tree, function: Callable[[torch.Tensor], torch.Tensor]):
    # As FSDP2, also in dataclasses.
    def convert(leaf):
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if hasattr(leaf, "__dataclass_fields__") and not isinstance(leaf, type):
            fields = {name: _map_tensors(getattr(leaf, name), function) for name in leaf.__dataclass_fields__}
            copy = object.__new__(type(leaf))
            copy.__dict__.update({**leaf.__dict__, **fields})
            return copy
        return leaf

    return pytree.tree_map(convert, tree)


class _Handle(UnshardHandle):
    def __init__(self, wait: Callable[[], None]):
        self.wait = functools.cache(wait)


class FSDPModule:
    """The class of a module after `fully_shard()`, together with the module's own."""

    def __new__(cls, *args, **kwargs):
        # A slice of a container is a container of its own, and not sharded as such.
        own = object.__new__(cls._plain_class)
        own.__init__(*args, **kwargs)
        return own

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers parameters, which then stay whole until `reshard()` or the end of the module's next forward: all those of the
        model that the module belongs to, as long as one of its modules is unsharded. Collective. With `async_op`, when the
        handle is waited for; forward gathers ahead anyway."""
        if async_op:
            return _Handle(self.unshard)
        self._hold(True)
        return None

    def reshard(self) -> None:
        """Undoes `unshard()`. Parameters are else freed when use has moved on."""
        self._hold(False)

    def _hold(self, is_held: bool) -> None:
        _block_of(self).root.shard()
        _block_of(self).root.hold([_block_of(self)], is_held)

    def reset_iter_state(self) -> None:
        """To be called on all ranks after an exception in forward or backward."""
        root = _block_of(self).root
        root.hold(root.blocks, False)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Sets whether backward reduces gradients. It does as long as any block of a model asks for it: gradients of the others
        are then reduced earlier than they need to be, and their sums are the same."""
        for block in _blocks_in(self, recurse):
            block.syncs = requires_gradient_sync
            block.root.update()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets whether parameters are freed after forward; once the model is in use, from the next step of an optimizer on."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward must be a bool; got {type(reshard_after_forward).__name__}")
        for block in _blocks_in(self, recurse):
            block.reshards = reshard_after_forward
        root = _block_of(self).root
        for model in root.models or ():
            model.set_resident_bytes(root.resident_bytes([block for block in root.blocks if block.model is model]))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Sums of gradients are divided by `factor` in place of the number of ranks: this module's own, as in FSDP2."""
        block = _block_of(self)
        if not factor > 0:
            raise ValueError(f"[set_gradient_divide_factor] the factor must be positive; got {factor}")
        block.divides_by = factor
        if block.root.models is not None:
            for _, parameter, owner in block.root._parameters():
                if owner is block:
                    _set_divide_factor(parameter, block)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def _refuse(self, *args, **kwargs):
        raise NotImplementedError("[fsdp2] the engine does its own collectives, and calls no function for them")

    set_custom_all_gather = set_custom_reduce_scatter = set_all_reduce_hook = set_symm_mem_for_comm = _refuse

    def _accept(self, *args, **kwargs) -> None:
        """Has no effect here: numbers are the same, and memory is not more. See docs/guide/from_fsdp2.md."""

    set_is_last_backward = set_requires_all_reduce = set_reshard_after_backward = _accept
    set_post_optim_event = set_force_sum_reduction_for_comms = set_reduce_scatter_unused_params = _accept
    set_separate_reduce_scatter_group = set_unshard_in_backward = _accept
    set_allocate_memory_from_process_group_for_comm = _set_unshard_async_op = _accept

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Has no effect: the engine bounds what is in flight by bytes."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int; got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int; got {max_input_buffers}")

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Has no effect: the engine gathers ahead in the order of use that it has seen."""
        _check_modules(modules)

    set_modules_to_backward_prefetch = set_modules_to_forward_prefetch

    def state_dict(self, *args, **kwargs):
        """The module's own, of whole tensors; of DTensors, with this rank's rows, if a function of
        `torch.distributed.checkpoint` calls this, which is a use of the model unless it can't be used yet."""
        root = _block_of(self).root
        parameters = (it for module in root.block.modules for it in module.parameters())
        if dcp.is_asking() and not any(it.is_meta or isinstance(it, DTensor) for it in parameters):
            root.shard()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """The module's own until the model is sharded; then with values that are equal on all ranks. DTensors are taken, too.
        Collective."""
        root = _block_of(self).root
        if not root.models:
            if dcp.has_dtensors(state_dict):
                metadata, own = getattr(state_dict, "_metadata", None), dict(self.named_parameters(remove_duplicate=False))
                state_dict = OrderedDict((name, value if isinstance(own.get(name), DTensor) else dcp.whole_of(value))
                                         for name, value in state_dict.items())
                state_dict._metadata = metadata
            return super().load_state_dict(state_dict, strict, assign)
        if assign:
            raise ValueError("[load_state_dict] assign=True would replace parameters that are sharded; leave it out, or load "
                             "before the first forward")
        result, given = take_on_all_ranks(root.models[0], self, super().load_state_dict, state_dict, strict)
        values: dict[_C.Model, dict[str, torch.Tensor]] = {model: {} for model in root.models}
        with torch.no_grad():
            for name, own in [*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)]:
                if name not in given:
                    continue
                place = place_of(own)
                if place:
                    values[place.model][place.name] = given[name]
                else:
                    own.copy_(dcp.whole_of(given[name]))
        for model, named in values.items():
            if named:
                load_in_turn(model, named)
        return result

    def _apply(self, fn, recurse: bool = True):
        if _block_of(self).root.models is None:
            return super()._apply(fn, recurse)
        for name, parameter in self.named_parameters():
            if not place_of(parameter):
                parameter.data = fn(parameter.data)
                continue
            now = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            then = fn(now)
            if (then.dtype, then.device) != (now.dtype, now.device):
                raise RuntimeError(f"[fsdp2] parameter '{name}' is sharded and in use, and can't be converted from {now.dtype} "
                                   f"on {now.device} to {then.dtype} on {then.device}: convert the model before its first "
                                   "forward")
        for module in self.modules():
            module._buffers.update((name, fn(buffer)) for name, buffer in module._buffers.items() if buffer is not None)
        return self

    def __deepcopy__(self, memo):
        raise RuntimeError("[fsdp2] a sharded module can't be copied: copy it before fully_shard(), or save its state_dict()")

    def __reduce_ex__(self, protocol):
        raise RuntimeError("[fsdp2] a sharded module can't be pickled: save its state_dict(), which has whole tensors")


def _check_modules(modules: Iterable) -> None:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"[fsdp2] modules must be those that fully_shard() was called for; got {type(module).__name__}")


@functools.cache
def _fsdp_class(plain: type) -> type:
    return type(plain)(f"FSDP{plain.__name__}", (FSDPModule, plain), {"_plain_class": plain, "__module__": plain.__module__})


def fully_shard(module: nn.Module | list[nn.Module], *, mesh: DeviceMesh | None = None,
                reshard_after_forward: bool | int | None = None,
                shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
                mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(), offload_policy: OffloadPolicy = OffloadPolicy(),
                ignored_params: set[nn.Parameter] | None = None, dp_mesh_dims=None):
    """Shards a module as `torch.distributed.fsdp.fully_shard` does: for blocks first, then for the module around them. Returns
    it; it was changed in place, and has the methods of `FSDPModule`.

    Collective at the first use. Rank 0's values count. `mesh`: one dim, or two to replicate over the first; None: all ranks.
    `shard_placement_fn` may return `Shard`s, which make no difference: each unit is cut as one flat buffer.
    """
    modules = module if isinstance(module, list) else [module]
    for each in modules:
        _check_module(each)
    if dp_mesh_dims is not None:
        raise NotImplementedError("[fully_shard] dp_mesh_dims is for parameters that are DTensors of torch.distributed; shard "
                                  "DistTensors by tessera.fully_shard(mesh_dim=)")
    if mesh is not None and (not isinstance(mesh, DeviceMesh) or mesh.ndim > 2):
        raise ValueError("[fully_shard] mesh must be a DeviceMesh of torch.distributed with one dim, or two to replicate over "
                         f"the first; got {mesh}")
    reshards = _checked_reshard(reshard_after_forward, mesh)
    inside = [each for root in modules for each in root.modules()]
    for parameter in (it for root in modules for it in root.parameters()):
        placement = shard_placement_fn(parameter) if shard_placement_fn else None
        if not (placement is None or isinstance(placement, Shard)):
            raise NotImplementedError(f"[fully_shard] shard_placement_fn may return None or a Shard; got {placement}: give "
                                      "parameters of another mesh to a fully_shard() of their own module")
    left_out = set(map(id, ignored_params or ()))
    ignored = {(id(each), name) for each in inside for name, parameter in each._parameters.items() if id(parameter) in left_out}
    block = _Block(modules, mesh, mp_policy, isinstance(offload_policy, CPUOffloadPolicy), reshards, ignored)
    for inner in dict.fromkeys(_block_of(it).root for it in inside if isinstance(it, FSDPModule)):
        block.root.absorb(inner)
    if device := _device_of(mesh):
        _move_to(device, inside)
    for each in modules:
        each.__dict__["_fsdp2_block"] = block
        each.__dict__.setdefault(REGISTRY_KEY, OrderedDict())["fully_shard"] = RegistryItem()  # for replicate()
        each.__class__ = _fsdp_class(type(each))
        each.register_forward_pre_hook(_before_forward, prepend=True, with_kwargs=True)
        each.register_forward_hook(_after_forward)
    _unsharded.add(block.root)
    return module


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"[fully_shard] takes a torch.nn.Module, or a list of them; got {type(module).__name__}")
    if isinstance(module, FSDPModule):
        raise ValueError(f"[fully_shard] was called for this {type(module).__name__} already")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        raise ValueError(f"[fully_shard] a {type(module).__name__} has no forward; call fully_shard() for the modules in it")


def _checked_reshard(reshard: bool | int | None, mesh: DeviceMesh | None) -> bool | None:
    if reshard is None or isinstance(reshard, bool):
        return reshard
    if not isinstance(reshard, int):
        raise ValueError(f"[fully_shard] reshard_after_forward must be a bool, an int or None; got {reshard!r}")
    ranks = mesh.size(mesh.ndim - 1) if mesh is not None else _all_ranks().size
    if reshard < 1 or ranks % reshard:
        raise ValueError(f"[fully_shard] reshard_after_forward as an int must be a factor of {ranks}, the ranks that are "
                         f"sharded over; got {reshard}")
    return reshard > 1


def _move_to(device: torch.device, modules: list[nn.Module]) -> None:
    for module in modules:
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None and not tensor.is_meta:
                tensor.data = tensor.data.to(device)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Lets a method besides `forward` begin and end as forward does, with the casts of the module's policy. Does nothing for a
    module that is not sharded."""
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"[register_fsdp_forward_method] {type(module).__name__} has no method {method_name}")
    method = getattr(module, method_name)

    @functools.wraps(method)
    def call(*args, **kwargs):
        args, kwargs = _before_forward(module, args, kwargs)
        return _after_forward(module, args, method(*args, **kwargs))

    setattr(module, method_name, call)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Has no effect: models have no streams of their own to share."""
    _check_modules(modules)

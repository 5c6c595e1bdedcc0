"""`ShardedOptimizer`: any optimizer of `torch.optim`, on this rank's shards."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, MutableMapping

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import _C, dcp
from .foreign import refuse_rank_zero_alone
from .parameter import parameters_of
from .sharded_module import ShardedModule

# Their fused operators step all parameters of a group at once, also on the CPU.
_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
_ELEMENTWISE = (*_FUSED, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam,
                torch.optim.RMSprop, torch.optim.Rprop)


def steps_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the optimizer steps each element of a parameter by itself: if its class says so by an attribute
    `elementwise`, or has the `step()` of one of PyTorch's classes that do."""
    declared = getattr(optimizer, "elementwise", None)
    if declared is not None:
        return bool(declared)
    step = inspect.unwrap(type(optimizer).step)  # torch.optim wraps it
    return any(step is inspect.unwrap(kind.step) for kind in _ELEMENTWISE)


def use_fused(optimizer: torch.optim.Optimizer) -> None:
    """Lets an optimizer whose user has chosen neither `fused` nor `foreach` step with LibTorch's fused operators, where
    these are right."""
    if type(optimizer) not in _FUSED:
        return
    for group in [optimizer.defaults, *optimizer.param_groups]:
        chosen = any(group.get(name) for name in ("foreach", "fused", "differentiable", "capturable"))
        starts_with_gradient = bool(group.get("momentum") and group.get("dampening"))
        if group.get("fused", 0) is None and not (chosen or starts_with_gradient or isinstance(group["lr"], torch.Tensor)):
            group["fused"], group["foreach"] = True, False
    if not hasattr(optimizer, "_prepares_fused"):
        optimizer._prepares_fused = optimizer.register_step_pre_hook(_prepare_fused)


def _prepare_fused(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    for group in optimizer.param_groups:
        if not group.get("fused"):
            continue
        params = [param for param in group["params"] if param.grad is not None]
        options = tuple((name, _simplified(group[name])) for name in optimizer.defaults if name in group)
        if not all(_is_proved(type(optimizer), *kind, options) for kind in {(param.device, param.dtype) for param in params}):
            group["fused"] = False
        elif group.get("momentum") and not group["dampening"]:
            _make_buffers(optimizer, params)


def _make_buffers(optimizer: torch.optim.SGD, params: list[torch.Tensor]) -> None:
    # The fused operator takes buffers for all parameters or for none: it can't begin with one that was frozen before.
    # Without dampening, zeros give the same bits as no buffer.
    for param in params:
        if optimizer.state[param].get("momentum_buffer") is None:
            optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param, requires_grad=False)


def _simplified(option):
    # Numbers that matter by being zero or not keep that; 1/4 is exact in all dtypes.
    if isinstance(option, (tuple, list)):
        return tuple(map(_simplified, option))
    is_number = isinstance(option, (int, float, torch.Tensor)) and not isinstance(option, bool)
    return (0.25 if option else 0.0) if is_number else option


@functools.lru_cache(maxsize=None)
def _is_proved(kind: type, device: torch.device, dtype: torch.dtype, options: tuple) -> bool:
    """Returns whether the fused operator steps tensors of `dtype` as the plain step does in double.

    Not all do: SGD's leaves most elements of 16-bit parameters on the CPU as they are. `core/engine/optim/kernel_proof.cpp` has
    the same proof, and explains it.
    """
    def numbers(factor, **place):
        return (1 + torch.arange(127, dtype=torch.float64) * factor % 127 / 127).to(dtype).to(**place)

    def results(fused, **place):
        param = numbers(1, **place)
        optimizer = kind([param])
        optimizer.param_groups[0].update(options, fused=fused, foreach=False)
        for factor in (7, 11):
            param.grad = numbers(factor, **place)
            optimizer.step()
        state = [value for _, value in sorted(optimizer.state[param].items()) if torch.is_tensor(value) and value.dim()]
        return [tensor.to("cpu", torch.float64) for tensor in (param, *state)]

    if dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        return False
    unit, computed = (torch.finfo(it).eps / 2 for it in (dtype, dtype if dtype == torch.float64 else torch.float32))
    bound = 8 * unit + 64 * computed
    try:
        pairs = zip(results(False, dtype=torch.float64), results(True, dtype=dtype, device=device), strict=True)
        return all((exact - fused).abs().max() <= bound * exact.abs().max() for exact, fused in pairs)
    except (RuntimeError, ValueError):  # the operator does not know the dtype, or needs other state
        return False


def _of_inside(name: str) -> property:
    """An attribute that is the one of the optimizer inside."""
    return property(lambda self: getattr(self.optimizer, name), lambda self, value: setattr(self.optimizer, name, value))


class _StateByParameter(MutableMapping):
    """The state of an optimizer inside by the model's parameters. That keeps it by this rank's parts of them."""

    def __init__(self, optimizer: torch.optim.Optimizer, part_of: Callable[[torch.Tensor], torch.Tensor]):
        self._optimizer, self._part_of = optimizer, part_of

    def __getitem__(self, parameter):
        return self._optimizer.state[self._part_of(parameter)]

    def __setitem__(self, parameter, state):
        self._optimizer.state[self._part_of(parameter)] = state

    def __delitem__(self, parameter):
        del self._optimizer.state[self._part_of(parameter)]

    def __contains__(self, parameter):
        return self._part_of(parameter) in self._optimizer.state

    def __iter__(self):
        return filter(self.__contains__, parameters_of(self._optimizer))

    def __len__(self):
        return sum(1 for _ in self)

    def __repr__(self):
        return repr(dict(self))


class _ShardedState(_StateByParameter):
    """That of a `ShardedOptimizer`, which is never empty for `torch.distributed.checkpoint`: that would make state itself, by
    means that a sharded model does not have."""

    def __init__(self, sharded: "ShardedOptimizer"):
        super().__init__(sharded.optimizer, sharded._sharded.part_of)
        self._sharded = sharded

    def __bool__(self):
        if not dcp.is_asking():
            return len(self) > 0
        dcp.ensure_state(self._sharded)
        self._sharded._state_names = dcp.state_names(self._sharded)
        return True

    def __getitem__(self, parameter):
        names = self._sharded._state_names.get(id(parameter))
        if names is not None and not self._part_of(parameter).numel() and dcp.is_asking():
            return names
        return super().__getitem__(parameter)


class InnerOptimizer(torch.optim.Optimizer):
    """An optimizer around another one, whose `param_groups`, `state` and `defaults` it has."""

    def _become(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._optimizer_state_dict_pre_hooks = OrderedDict()
        self._optimizer_state_dict_post_hooks = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        self._optimizer_load_state_dict_post_hooks = OrderedDict()
        self._patch_step_function()

    param_groups, state, defaults = _of_inside("param_groups"), _of_inside("state"), _of_inside("defaults")

    def __getstate__(self):
        raise RuntimeError(f"[tessera] a {type(self).__name__} can't be pickled or copied; save its state_dict()")

    def __repr__(self):
        return f"{type(self).__name__}({self.optimizer!r})"


class _Deferred(dict):
    """Calls at the end of a backward, by number of the optimizer. Goes with the backward, also if that fails."""


_deferred: "weakref.WeakValueDictionary[int, _Deferred]" = weakref.WeakValueDictionary()  # by backward
_settled = [-1]  # backwards that don't run, or are at their end
_numbers = itertools.count()


def _call_after_backward(number: int, call: Callable) -> None:
    """Makes a call at once, or at the end of the backward that runs; then optimizers take turns in the order in which they
    were made, which is the same on all ranks."""
    task = torch._C._current_graph_task_id()
    if task in _settled:
        return call()
    deferred = _deferred.get(task)
    if deferred is None:
        deferred = _deferred[task] = _Deferred()
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(lambda: _call_deferred(deferred)))  # after the engine's own, which end the model's backward
    deferred.setdefault(number, []).append(call)


@contextlib.contextmanager
def ends_backward():
    """A context at the end of the backward that runs, when all gradients of models have been reduced: optimizers may step."""
    task = torch._C._current_graph_task_id()
    _settled.append(task)
    try:
        yield
    finally:
        _settled.remove(task)


def _call_deferred(deferred: _Deferred) -> None:
    with ends_backward():
        for _, calls in sorted(deferred.items()):
            for call in calls:
                call()


def _refuse_in_backward(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    # A hook of a parameter sees this rank's own gradient.
    in_hook = torch._C._current_graph_task_id() not in _settled and not isinstance(optimizer, InnerOptimizer)
    if in_hook and any(map(_C.is_sharded, parameters_of(optimizer))):
        raise RuntimeError("[tessera] a plain optimizer can't step parameters of a sharded model during backward, when their "
                           "gradients are not reduced yet: give the hook a ShardedOptimizer, which steps when backward ends")


register_optimizer_step_pre_hook(_refuse_in_backward)


def _refuse_state(optimizer: torch.optim.Optimizer, *state_dict) -> None:
    raise RuntimeError("[ShardedOptimizer] the optimizer inside has this rank's part of the state only: use state_dict() and "
                       "load_state_dict() of the ShardedOptimizer")


class ShardedOptimizer(InnerOptimizer):
    """Steps an optimizer on this rank's shards of a sharded model.

    It is itself an optimizer: its `param_groups` are those of the one inside, with the model's parameters, and its `state`
    has this rank's part of each one's state, in one dimension. Schedulers, and code that takes any optimizer, take it. In
    `step()` the optimizer inside sees this rank's parts in place of the parameters. One that treats each element by itself,
    as those of `torch.optim` do but `LBFGS`, `Muon` and `Adafactor`, steps parts of parameters; a class of one's own says so
    by an attribute `elementwise = True`. Others need whole parameters: rules in `cuts`, for which `muon_cuts()` has those of
    matrices, or `partition="whole_param"`. `LBFGS` is refused.

    `fused`: lets AdamW, Adam, SGD and Adagrad use LibTorch's fused operators unless the user has chosen `foreach` or
    `fused` himself; results agree with the plain step to rounding. An operator that does not compute a dtype right is not
    used. `max_grad_norm`: clips at the beginning of each step.
    """

    def __init__(self, model: ShardedModule, optimizer: torch.optim.Optimizer, *, fused: bool = True,
                 max_grad_norm: float = 0.0):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"ShardedOptimizer takes an optimizer of torch.optim; got {type(optimizer).__name__}")
        own = {id(param) for param in model.module.parameters()}
        for i, group in enumerate(optimizer.param_groups):
            for j, param in enumerate(group["params"]):
                if id(param) not in own and _C.is_sharded(param):
                    raise ValueError(f"[ShardedOptimizer] parameter {j} of param group {i}, of shape {list(param.shape)}, is "
                                     "one of another sharded module: make an optimizer for each module")
        if fused:
            use_fused(optimizer)
        self._attach(model, optimizer, _C.Optimizer(model._model, optimizer, max_grad_norm))

    def _attach(self, model: ShardedModule, optimizer: torch.optim.Optimizer, sharded: _C.Optimizer) -> None:
        self._become(optimizer)
        self._model = model
        self._sharded = sharded
        self._number = next(_numbers)
        self._state_names: dict[int, dict] = {}  # of state on other ranks, for torch.distributed.checkpoint
        refuse = weakref.WeakMethod(self._refuse_step)  # the engine's own references to the optimizer are not seen by gc
        self._guards = [optimizer.register_step_pre_hook(lambda it, *_: refuse() and refuse()(it)),
                        optimizer.register_state_dict_pre_hook(_refuse_state),
                        optimizer.register_load_state_dict_pre_hook(_refuse_state)]

    def _refuse_step(self, optimizer: torch.optim.Optimizer) -> None:
        params = parameters_of(optimizer)  # none where state is made on a rank without elements
        if params and self._sharded.part_of(params[0]) is not params[0]:  # outside of step(), which lends it the parts
            raise RuntimeError("[ShardedOptimizer] the optimizer inside is stepped by the ShardedOptimizer: call that one's "
                               "step()")

    @property
    def state(self) -> MutableMapping[torch.Tensor, dict]:
        return _ShardedState(self)

    @state.setter
    def state(self, state) -> None:
        self.optimizer.state = state

    def step(self, closure=None):
        """Waits for the reductions, and updates this rank's shards. Collective. Evaluates `closure` first, if there is
        one, and returns its loss. Raises if there was no backward since `zero_grad()`. In a hook that runs during backward,
        as `register_post_accumulate_grad_hook()` makes them, it steps when that backward ends; so does `zero_grad()`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _call_after_backward(self._number, self._sharded.step)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the optimizer's own parameters, or sets them to zero. All ranks must call it."""
        _call_after_backward(self._number, lambda: self._sharded.zero_grad(set_to_none))

    def add_param_group(self, param_group: dict) -> None:
        """Adds parameters of the model, say to unfreeze layers; all ranks must add the same."""
        self.optimizer.add_param_group(param_group)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, **options) -> torch.Tensor:
        """See `ShardedModule.clip_grad_norm_()`."""
        return self._model.clip_grad_norm_(max_norm, norm_type, **options)

    def state_dict(self, recipient: int | None = None) -> dict:
        """Returns the whole state, as the optimizer inside would have it without sharding, on all ranks, or on rank
        `recipient` alone (`state` is empty on the others); DTensors, with this rank's rows, if a function of
        `torch.distributed.checkpoint` calls this. Collective."""
        refuse_rank_zero_alone()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        if dcp.is_asking():
            state = dcp.state_of(self)
        else:
            state = self._sharded.full_state_dict(-1 if recipient is None else recipient)
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads such a state, from any number of ranks or from the plain optimizer, equal on all ranks, or with DTensors.
        Parameters have numbers or names, and the order of the param groups counts. Collective."""
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        state_dict = dcp.numbered(state_dict)
        if dcp.has_dtensors(state_dict):
            dcp.load_state(self, state_dict)
        else:
            self._sharded.load_full_state_dict(state_dict)
        if hasattr(self.optimizer, "_prepares_fused"):
            use_fused(self.optimizer)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def memory(self) -> dict[str, int]:
        """Returns `ShardedModule.memory()` with the optimizer's state."""
        return self._sharded.memory()

    def keep_on_device(self, nbytes: int) -> int:
        """Moves offloaded units back to the parameters' device for good, as many as fit; returns the bytes moved."""
        return self._sharded.keep_on_device(nbytes)

    @property
    def steps(self) -> int:
        """Steps taken, including those before a checkpoint that was loaded."""
        return self._sharded.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._sharded.steps = steps

    @property
    def steps_since_average(self) -> int:
        """With `outer` in the plan: steps since replicas were averaged; 0 right after, when they are equal."""
        return self._sharded.steps_since_average

    def unwrap(self) -> torch.optim.Optimizer:
        """Returns the optimizer inside with the module's own parameters and, on every rank, its whole state. Collective.
        Afterwards this object raises."""
        self._sharded.unwrap()
        for guard in self._guards:
            guard.remove()
        return self.optimizer

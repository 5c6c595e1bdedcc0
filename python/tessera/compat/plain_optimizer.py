"""Lets plain optimizers of `torch.optim` step parameters that are sharded.

PyTorch calls a function of ours before each step of any optimizer. Where an optimizer has sharded parameters, it lets the step
run on a stand-in: an object of the optimizer's class that steps this rank's parts as soon as the step reads `param_groups`. So
closure and hooks run as ever, before it, and see the optimizer itself.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .. import _C, dcp
from ..optimizer import InnerOptimizer, ShardedOptimizer, _StateByParameter
from ..parameter import parameters_of

_HOOKS = tuple(f"_optimizer_{kind}_hooks" for kind in (
    "step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"))
_OWN = frozenset(("param_groups", "state", "step", "_steps_sharded", *_HOOKS))

before_first_step: list[Callable[[Iterable[torch.Tensor]], None]] = []  # called with the parameters of an optimizer


class Place:
    """Where a parameter is: in which model of the engine, under which name; and where rows of the model's values are."""

    belongs_to_one_parameter = True  # copies of the parameter have none

    def __init__(self, model: _C.Model, name: str, layout: dcp.Layout):
        self.model, self.name, self.layout = model, name, layout


class GradHooks:
    """Post-accumulate hooks of a parameter, in place of PyTorch's: called at the end of backward, with the reduced gradient."""

    belongs_to_one_parameter = True

    def __init__(self, parameter: torch.Tensor, call_at_end: Callable[[], None]):
        earlier = parameter._post_accumulate_grad_hooks
        self.hooks = OrderedDict() if earlier is None else earlier
        self._parameter, self._call_at_end, self._notices = weakref.ref(parameter), call_at_end, False
        if earlier is not None:
            parameter._post_accumulate_grad_hooks = OrderedDict()  # None would leave PyTorch's own list as it is
            self._notice()

    def _notice(self) -> None:
        if not self._notices and self._parameter().requires_grad:
            self._notices = True
            self._parameter().register_hook(lambda _: self._call_at_end())

    def __call__(self, hook: Callable) -> RemovableHandle:
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        self._notice()
        return handle


def place_of(parameter: torch.Tensor) -> Place | None:
    return parameter.__dict__.get("_place")


def _no_hooks() -> dict[str, OrderedDict]:
    return {hooks: OrderedDict() for hooks in _HOOKS}


def _model_of(parameter: torch.Tensor) -> _C.Model | None:
    place = place_of(parameter)
    return place.model if place else None


class _State(_StateByParameter):
    """The state of an optimizer with sharded parameters, of which each model's is that of its `ShardedOptimizer`."""

    def __bool__(self):
        return any([bool(own.state) for own in self._optimizer.engines.values()]) or len(self) > 0

    def __getitem__(self, parameter):
        model = _model_of(parameter)
        return self._optimizer.state[parameter] if model is None else self._optimizer.engines[model].state[parameter]


class _Sharded:
    """The steps of one optimizer with sharded parameters. For each model, and for the parameters that are in none, it has an
    optimizer of the same class and options over these alone; all share one state."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        whole, self._optimizer = optimizer.state, optimizer
        self.state: defaultdict = defaultdict(dict)
        self.engines: dict[_C.Model, ShardedOptimizer] = {}
        self._rest = self._alike()
        self.refresh()
        optimizer._steps_sharded = self
        optimizer.state = _State(self, self._key)
        if whole:  # loaded before the first step
            groups = [{**group, "params": self._numbers(group["params"])} for group in self.param_groups]
            self._load({"state": dict(zip(self._numbers(whole), whole.values())), "param_groups": groups})
            self.state.update((param, state) for param, state in whole.items() if _model_of(param) is None)
        optimizer.register_state_dict_post_hook(lambda _, state_dict: self._whole(state_dict))
        optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: self._before_load(state_dict))
        optimizer.register_load_state_dict_post_hook(lambda _: self._after_load())

    @property
    def param_groups(self) -> list[dict]:
        return self._optimizer.param_groups

    def _alike(self) -> torch.optim.Optimizer:
        alike = object.__new__(type(self._optimizer))
        alike.__dict__.update(_no_hooks(), param_groups=[], state=self.state, _steps_sharded=None)
        return alike

    def _show_groups(self, alike: torch.optim.Optimizer, model: _C.Model | None) -> None:
        """Gives it the options of now, and those of the parameters that are in `model`."""
        alike.__dict__.update((name, value) for name, value in self._optimizer.__dict__.items() if name not in _OWN)
        for number, group in enumerate(self.param_groups):
            own = dict(group, params=[param for param in group["params"] if _model_of(param) is model])
            if number < len(alike.param_groups):
                alike.param_groups[number].update(own)
            else:
                alike.param_groups.append(own)

    def refresh(self) -> None:
        """Takes over options that were changed, and parameters that were added."""
        self._show_groups(self._rest, None)
        for place in filter(None, map(place_of, parameters_of(self._optimizer))):
            if place.model not in self.engines:
                alike, own = self._alike(), ShardedOptimizer.__new__(ShardedOptimizer)
                self._show_groups(alike, place.model)
                model = SimpleNamespace(_model=place.model, _layout=place.layout)
                own._attach(model, alike, _C.Optimizer(place.model, alike, 0.0))
                self.engines[place.model] = own
        for model, own in self.engines.items():
            self._show_groups(own.optimizer, model)

    def _key(self, parameter: torch.Tensor) -> torch.Tensor:
        model = _model_of(parameter)
        return parameter if model is None else self.engines[model]._sharded.part_of(parameter)

    def step(self) -> None:
        self.refresh()
        for model, own in self.engines.items():
            if dcp.is_asking():  # steps to have a state
                bool(own.state)
            elif any(model.has_grad(param) for param in parameters_of(own)):
                own._sharded.step()
                self._step_empty(model, own, filter(model.has_grad, parameters_of(own)))
        if parameters_of(self._rest):
            self._rest.step()
        for alike in (self._rest, *(own.optimizer for own in self.engines.values())):
            for group, own in zip(self.param_groups, alike.param_groups):
                group.update((name, own[name]) for name in group if name != "params" and own[name] is not group[name])

    def _step_empty(self, model: _C.Model, own: ShardedOptimizer, stepped: Iterable[torch.Tensor]) -> None:
        """Steps parts without elements, so that the state has the same parameters, names and counts on all ranks."""
        alike, pairs, stepped = self._alike(), [], set(stepped)
        self._show_groups(alike, model)
        for group in alike.param_groups:
            parts = [own._sharded.part_of(param) for param in group["params"] if param in stepped]
            empty = [(part, torch.zeros_like(part, requires_grad=False)) for part in parts if not part.numel()]
            group["params"] = [stand_in for _, stand_in in empty]
            pairs += empty
        alike.state = defaultdict(dict, {stand_in: self.state[part] for part, stand_in in pairs})
        for _, stand_in in pairs:
            stand_in.grad = torch.zeros_like(stand_in)
        alike.step()
        self.state.update((part, alike.state[stand_in]) for part, stand_in in pairs)

    def _numbers(self, parameters: Iterable[torch.Tensor]) -> list[int]:
        numbers = {id(param): number for number, param in enumerate(parameters_of(self._optimizer))}
        return [numbers[id(param)] for param in parameters]

    def _whole(self, state_dict: dict) -> dict:
        """Returns the state dict that one process would have; for `torch.distributed.checkpoint` with DTensors. Collective."""
        self.refresh()
        rest = parameters_of(self._rest)
        state = {number: self.state[param] for number, param in zip(self._numbers(rest), rest) if param in self.state}
        for own in self.engines.values():
            numbers = self._numbers(parameters_of(own))
            state.update((numbers[place], value) for place, value in own.state_dict()["state"].items())
        return {**state_dict, "state": dict(sorted(state.items()))}

    def _before_load(self, state_dict: dict) -> dict:
        order = [key for group in state_dict["param_groups"] for key in group["params"]]
        numbers = {key: number for number, key in enumerate(order)}
        self._given = {"param_groups": state_dict["param_groups"],
                       "state": {numbers[key]: value for key, value in state_dict["state"].items() if key in numbers}}
        rest = {order[number] for number in self._numbers(parameters_of(self._rest)) if number < len(order)}
        return {**state_dict, "state": {key: value for key, value in state_dict["state"].items() if key in rest}}

    def _after_load(self) -> None:
        rest, self._optimizer.state = self._optimizer.state, _State(self, self._key)
        for param in parameters_of(self._rest):
            self.state.pop(param, None)
        self.state.update(rest)
        self.refresh()
        self._load(self.__dict__.pop("_given"))

    def _load(self, whole: dict) -> None:
        for model, own in self.engines.items():
            params = parameters_of(own)
            places = {number: place for place, number in enumerate(self._numbers(params))}
            order = iter(range(len(params)))
            groups = [{**saved, "params": [next(order) for _ in group["params"]]}
                      for saved, group in zip(whole["param_groups"], own.param_groups)]
            state = {places[number]: value for number, value in whole["state"].items() if number in places}
            own.load_state_dict({"state": state, "param_groups": groups})
            self._step_empty(model, own, [params[place] for place in state])
            for place, values in state.items():
                part = own._sharded.part_of(params[place])
                if not part.numel():
                    self.state[part].update((name, copy.deepcopy(values[name])) for name, value in self.state[part].items()
                                            if name in values and not (isinstance(value, torch.Tensor) and not value.numel()))


def _groups_of_stand_in(stand_in) -> list:
    if not stand_in._has_stepped:
        stand_in._has_stepped = True
        if stand_in._closure is not None:
            with torch.enable_grad():
                stand_in._closure()
        stand_in._steps_sharded.step()
    return []


@functools.cache
def _stand_in_class(kind: type) -> type:
    return type(kind)(kind.__name__, (kind,), {
        "param_groups": property(_groups_of_stand_in), "_has_stepped": False, "_closure": None})


def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict):
    if isinstance(optimizer, InnerOptimizer) or hasattr(optimizer, "_has_stepped"):
        return None
    steps = optimizer.__dict__.get("_steps_sharded", False)
    if steps is None:  # one that the engine steps
        return None
    parameters = parameters_of(optimizer)
    for call in before_first_step:
        call(parameters)
    if not steps:
        if not any(place_of(param) for param in parameters):
            return None
        steps = _Sharded(optimizer)
    stand_in = object.__new__(_stand_in_class(type(optimizer)))
    stand_in.__dict__.update(optimizer.__dict__, **_no_hooks())  # which a step() that calls another one would call again
    # Also a step that reads its groups before it calls the closure steps with the closure's gradients.
    if len(args) > 1 and callable(args[1]):
        args = (args[0], functools.cache(args[1]), *args[2:])
        stand_in._closure = args[1]
    elif callable(kwargs.get("closure")):
        stand_in._closure = functools.cache(kwargs["closure"])
        kwargs = {**kwargs, "closure": stand_in._closure}
    return (stand_in, *args[1:]), kwargs


def _after_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    if args and args[0] is not optimizer and not getattr(args[0], "_has_stepped", True):
        raise RuntimeError(f"[fsdp2] step() of {type(optimizer).__name__} has not read its param_groups, so nothing was "
                           "stepped: it can't step sharded parameters")


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)

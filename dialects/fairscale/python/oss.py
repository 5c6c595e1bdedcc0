"""`OSS`: an optimizer whose work and state are divided among ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import SGD, Optimizer

from .. import _C
from ..optimizer import use_fused
from ..parameter import parameters_of
from ..world import resolve_group


class _Owned:
    """The part of an `OSS` that this rank owns, as FairScale's attribute `optim` shows it."""

    def __init__(self, oss: "OSS"):
        self._oss = oss

    @property
    def param_groups(self) -> list[dict]:
        return self._oss.partition_parameters()[self._oss.rank]

    @property
    def state(self) -> dict[torch.Tensor, dict]:
        return self._oss.state

    def __getattr__(self, name):
        return getattr(self._oss._inner, name)


class OSS(Optimizer):
    """Shards the work and the state of an optimizer: each rank owns some of the parameters, whole.

    To schedulers it is an optimizer with all of the parameters. By itself it steps with the gradients in `.grad`, which
    the training program must make equal on all ranks, as `DistributedDataParallel` does; a `ShardedDataParallel` that it
    is given to provides the reduced gradients.

    `params`, `optim`, `group`, `broadcast_fp16` and `**default` are FairScale's; `group` is of Tessera or of
    `torch.distributed`. `broadcast_buffer_size` and `force_broadcast_object` concern FairScale's own messages, and are
    ignored with a warning if they are set. Collective, as are all functions unless they say otherwise.
    """

    def __init__(self, params, optim: type[Optimizer] = SGD, group=None, broadcast_buffer_size: int = -1,
                 broadcast_fp16: bool = False, force_broadcast_object: bool = False, **default: Any):
        if broadcast_buffer_size >= 0 or force_broadcast_object:
            warnings.warn("[OSS] broadcast_buffer_size and force_broadcast_object concern FairScale's own messages, and have "
                          "no effect here", stacklevel=2)
        self._inner = None
        super().__init__(params, default)
        self._inner = optim([dict(group) for group in self.param_groups], **default)
        use_fused(self._inner)
        self.group = group
        self._ranks = resolve_group(group)
        self.rank, self.world_size = self._ranks.rank, self._ranks.size
        self.global_rank = dist.get_rank() if dist.is_initialized() else self.rank
        self.broadcast_fp16 = broadcast_fp16
        self.buckets: dict = {}  # FairScale's buffers; there are none
        self._ddp = None  # the wrapper that it serves
        self._oss = _C.Oss(self._inner, self._ranks, broadcast_fp16)
        self._take_options()

    # --- options: the user changes those of `param_groups`, the optimizer inside steps with its own ---

    def _give_options(self) -> None:
        for own, inner in zip(self.param_groups, self._inner.param_groups):
            inner.update({name: value for name, value in own.items() if name != "params"})

    def _take_options(self) -> None:
        for own, inner in zip(self.param_groups, self._inner.param_groups):
            own.update({name: value for name, value in inner.items() if name != "params"})

    def lend(self, use: Callable[[_C.Oss], Any]) -> Any:
        """Calls `use` with the engine's optimizer while it has the options of `param_groups`."""
        self._give_options()
        result = use(self._oss)
        self._oss.note_parts()
        self._take_options()
        return result

    # --- FairScale's functions ---

    @property
    def optim(self) -> _Owned:
        """The part that this rank owns: `param_groups` and `state`."""
        return _Owned(self)

    @property
    def state(self) -> dict[torch.Tensor, dict]:
        """The state of the parameters that this rank owns, by parameter."""
        if self._inner is None:
            return self.__dict__["state"]
        states = self._inner.state
        pairs = ((param, self._oss.part_of(param)) for param in parameters_of(self))
        return {param: states[held] for param, held in pairs if held in states}

    @state.setter
    def state(self, state) -> None:
        self.__dict__["state"] = state

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any):
        """Updates the parameters that this rank owns, and sends them to the others. Evaluates `closure` first, and
        returns its loss. Further arguments go to the optimizer inside."""
        loss = None
        if callable(closure):
            with torch.enable_grad():
                loss = closure()
        elif isinstance(closure, torch.Tensor):
            loss = closure  # step(loss.backward()) and the like: it was evaluated already
        self.lend(lambda oss: oss.step(kwargs))
        if self._ddp is None:
            self._oss.gather()  # no wrapper sees to it that whole values are read
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, or sets them to zero. Not collective."""
        if not set_to_none or self._ddp is None:
            return super().zero_grad(set_to_none)
        for param in parameters_of(self):
            param.grad = None  # also of those whose gradient another rank has

    def add_param_group(self, param_group: dict) -> None:
        """Adds a group; its parameters go to the ranks that own least so far."""
        super().add_param_group(param_group)
        if self._inner is None:
            return
        try:
            self._inner.add_param_group(dict(self.param_groups[-1]))
            use_fused(self._inner)
            self._oss.add_group()
        except Exception:
            self.param_groups.pop()
            if len(self._inner.param_groups) > len(self.param_groups):
                self._inner.param_groups.pop()
            raise
        self._take_options()

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0,
                       filter_params_fn: Callable[[Any], Any] | None = None) -> torch.Tensor:
        """Scales the gradients so that their norm is at most `max_norm`, and returns the norm before.
        `filter_params_fn`: given all parameters, returns those to be counted and scaled."""
        accepts = None
        if filter_params_fn is not None:
            kept = {id(param) for param in filter_params_fn(parameters_of(self))}
            accepts = lambda param: id(param) in kept
        return torch.tensor(self._oss.clip_grad_norm(float(max_norm), float(norm_type), accepts))

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Gathers the state of all ranks on one of them (-1: on all), in host memory."""
        self.lend(lambda oss: oss.consolidate_state_dict(recipient_rank))

    def state_dict(self, all_ranks: bool = False) -> dict:
        """Returns the state that was consolidated on this rank, as the plain optimizer would have it. Not collective,
        unless `all_ranks`, which consolidates on all ranks first."""
        if all_ranks:
            self.consolidate_state_dict(-1)
        return self._oss.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads a full state, from any number of ranks or from the plain optimizer, the same on every rank."""
        self._oss.load_state_dict(state_dict)
        self._oss.note_parts()
        self._take_options()

    def refresh_trainable(self) -> None:
        """Does nothing: parameters may be frozen and unfrozen at any time. Not collective."""

    def unwrap(self) -> None:
        """Makes the parameters ordinary tensors again, with the values that all ranks use."""
        self._oss.unwrap()

    # --- who owns what; not collective ---

    def partition_parameters(self) -> list[list[dict]]:
        """Returns the param groups of each rank."""
        owner = self._param_to_rank
        return [[dict(group, params=[param for param in group["params"] if owner[param] == rank])
                 for group in self.param_groups] for rank in range(self.world_size)]

    @property
    def _param_to_rank(self) -> dict[torch.Tensor, int]:
        return {param: rank for rank, params in enumerate(self._oss.partition_parameters()) for param in params}

    @property
    def _param_to_index(self) -> dict[int, int]:
        return {id(param): index for index, param in enumerate(parameters_of(self))}

    @property
    def _per_device_params(self) -> dict[torch.device, list[list[torch.Tensor]]]:
        devices: dict = {}
        owner = self._param_to_rank
        for param in parameters_of(self):
            devices.setdefault(param.device, [[] for _ in range(self.world_size)])[owner[param]].append(param)
        for ranks in devices.values():
            for params in ranks:
                params.sort(key=torch.Tensor.numel)
        return devices

    @property
    def _local_params(self) -> list[torch.Tensor]:
        owner = self._param_to_rank
        return [param for param in parameters_of(self) if owner[param] == self.rank and param.grad is not None]

    @property
    def _default_device(self) -> torch.device:
        return self.param_groups[0]["params"][0].device

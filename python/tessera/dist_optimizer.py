"""Optimizers on DistTensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch

from . import _C
from .optimizer import InnerOptimizer


class DistOptimizer(InnerOptimizer):
    """Steps an optimizer of `torch.optim` on parameters that are DistTensors.

    PyTorch's optimizers can step DistTensors by themselves, with state placed like the parameters. This class adds other
    placements of state (`place_state(name, param, state)` returns the state tensor as it is to lie), checkpoints, float32
    master weights (`master_dtype`), and, at `level` "os", "os_g" or "p_g_os", the sharding over one more mesh dim
    (`mesh_dim`, by name or number; None: the first along which all parameters are replicated). All functions are collective.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, level: str = "none", mesh_dim: int | str | None = None,
                 place_state: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
                 master_dtype: torch.dtype | None = None):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"DistOptimizer takes an optimizer of torch.optim; got {type(optimizer).__name__}")
        if isinstance(mesh_dim, str):
            mesh_dim = _mesh_of(optimizer).dim(mesh_dim)
        self._become(optimizer)
        self._dist = _C.DistOptimizer(optimizer, level, mesh_dim, place_state, master_dtype)

    def step(self, closure=None):
        """Updates the parameters. Evaluates `closure` first, if there is one, and returns its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._dist.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients."""
        if not set_to_none:
            raise NotImplementedError("[DistOptimizer] gradients are dropped, not set to zero")
        self._dist.zero_grad()

    def add_param_group(self, param_group: dict) -> None:
        raise NotImplementedError("[DistOptimizer] parameters can't be added later: give the optimizer all of them before")

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips as `torch.nn.utils.clip_grad_norm_` does; counts each element once, for any placements."""
        return torch.tensor(self._dist.clip_grad_norm_(float(max_norm), float(norm_type)))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the state by name, as DistTensors: "up.weight.exp_avg", "up.weight.step", "master_weights.up.weight",
        "LR_Scheduler"."""
        return self._dist.state_dict()

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Loads such a state: ordinary tensors, or DistTensors with any placements."""
        self._dist.load_state_dict(state_dict)


def _mesh_of(optimizer: torch.optim.Optimizer) -> _C.DeviceMesh:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if _C.is_dist(param):
                return _C.mesh_of(param)
    raise ValueError("[DistOptimizer] mesh_dim needs parameters that are DistTensors; none is")

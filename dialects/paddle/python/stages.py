"""`pp_config` of `parallelize`: ranges of layers on meshes of their own, one after the other."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..dist_tensor import Replicate, Shard, is_dist, mesh_of, placements_of, redistribute


class SplitPoint(enum.Enum):
    """Where a stage begins: before a layer, or after it."""

    BEGINNING = 0
    END = 1


def _moved(value: Any, mesh, is_whole: bool = False) -> Any:
    """Moves the DistTensors in `value` to `mesh`, with their placements along its dims, or all of them `Replicate`."""
    def move(tensor: torch.Tensor) -> torch.Tensor:
        if not is_dist(tensor) or mesh_of(tensor) == mesh:
            return tensor
        return redistribute(tensor, [Replicate()] * mesh.ndim if is_whole else placements_of(tensor)[-mesh.ndim:], mesh)

    return pytree.tree_map_only(torch.Tensor, move, value)


class Stages:
    """Which mesh each layer of a model is on. `mesh`: has a dim "pp", along which the stages lie."""

    def __init__(self, model: nn.Module, mesh, split_spec: str | list[str] | Mapping[str, SplitPoint],
                 global_spec: str | list[str] | None = None):
        count = mesh.size(mesh.dim("pp"))
        self._world = mesh.with_first("pp")
        self.meshes = [mesh.with_first("pp", stage) for stage in range(count)]
        self._names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
        self._places = {name: place for place, name in enumerate(self._names)}
        self._global = [global_spec] if isinstance(global_spec, str) else list(global_spec or [])
        self._evenly: list[str] = []  # layers that were split into equal ranges
        if isinstance(split_spec, Mapping):
            if self._global:
                raise ValueError(f"[parallelize] global_spec needs a split_spec of prefixes, whose layers take what all stages use; got "
                                 f"{dict(split_spec)}")
            self._splits = {name: SplitPoint(point) for name, point in split_spec.items()}
        else:
            self._splits = self._even(count, [split_spec] if isinstance(split_spec, str) else split_spec)
        for name in (*self._splits, *self._global):
            if name not in self._places:
                raise ValueError(f"[parallelize] pp_config names layers of the model; '{name}' is none of {self._names}")
        self._starts = [self._start(name, point) for name, point in self._splits.items()]
        if len(self._splits) != count - 1 or any(a >= b for a, b in pairwise(self._starts)):
            raise ValueError(f"[parallelize] split_spec must begin one stage after the other, {count - 1} besides the first; got "
                             f"{self._splits}")
        self._check_ties(model)

    def _even(self, count: int, prefixes: list[str]) -> dict[str, SplitPoint]:
        pattern = "|".join(rf"{re.escape(prefix)}\.\d+" for prefix in prefixes)
        self._evenly = [name for name in self._names if re.fullmatch(pattern, name)]
        if not self._evenly or len(self._evenly) % count:
            raise ValueError(f"[parallelize] the layers of split_spec must divide into {count} equal ranges; got {len(self._evenly)} "
                             f"layers named {prefixes} and a number")
        length = len(self._evenly) // count
        return {self._evenly[stage * length - 1]: SplitPoint.END for stage in range(1, count)}

    def _start(self, name: str, point: SplitPoint) -> int:
        at = self._places[name]
        if point is SplitPoint.BEGINNING:
            return at
        after = [i for i in range(at + 1, len(self._names)) if not self._names[i].startswith(f"{name}.")]
        if not after:
            raise ValueError(f"[parallelize] a stage must begin after '{name}', which is the last layer")
        return after[0]

    def _check_ties(self, model: nn.Module) -> None:
        first: dict[torch.Tensor, str] = {}
        for name, layer in model.named_modules(remove_duplicate=False):
            for key, tensor in layer.named_parameters(name, recurse=False):
                if self.of(first.setdefault(tensor, key).rpartition(".")[0]) != self.of(name):
                    raise ValueError(f"[parallelize] a parameter lies on one stage; '{key}' is '{first[tensor]}' of another: end the "
                                     f"stages elsewhere, or train them by tessera.Pipeline, which ties weights across stages")

    def of(self, name: str) -> int:
        """The stage of a layer."""
        return sum(start <= self._places.get(name, -1) for start in self._starts)

    def mesh(self, name: str):
        return self.meshes[self.of(name)]

    def shard_state(self, name: str, param: torch.Tensor, accumulator: torch.Tensor) -> torch.Tensor:
        """Cuts an accumulator along "dp", where the parameter is replicated."""
        placements, dim = placements_of(accumulator), mesh_of(param).dim("dp")
        if accumulator.dim() == 0 or placements[dim] != Replicate():
            return accumulator
        placements[dim] = Shard(0)
        return redistribute(accumulator, placements)

    def add_hooks(self, model: nn.Module, hooks: list) -> None:
        """Moves tensors where one stage ends and the next begins. To be called after hooks of the layers' plans were added."""
        def on_input(name: str):
            return lambda _, args, kwargs: _moved((args, kwargs), self.mesh(name))

        def on_output(mesh, is_whole: bool):
            return lambda _, __, output: _moved(output, mesh, is_whole)

        for name, point in self._splits.items():
            layer = model.get_submodule(name)
            if point is SplitPoint.BEGINNING:
                hooks.append(layer.register_forward_pre_hook(on_input(name), prepend=True, with_kwargs=True))
            else:
                hooks.append(layer.register_forward_hook(on_output(self.meshes[self.of(name) + 1], False)))
        for name in self._global:
            hooks.append(model.get_submodule(name).register_forward_hook(on_output(self._world, True)))
        for name in self._evenly:
            hooks.append(model.get_submodule(name).register_forward_pre_hook(on_input(name), prepend=True, with_kwargs=True))

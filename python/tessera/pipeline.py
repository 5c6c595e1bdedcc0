"""Pipelines: the stages of a model on ranks of their own, and the micro-batches of a batch on their way through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from . import _C
from .dist_tensor import DeviceMesh, _checked
from .sharded_module import ShardedModule

# For each place, its actions in their order: the part, the stage and the micro-batch, both from 0. Parts: "F" forward; "B"
# backward, of inputs and parameters; "I" of inputs alone, and "W" after it, of parameters.
Schedule = Sequence[Sequence[tuple[str, int, int]]]

_KINDS = ("gpipe", "1f1b", "interleaved", "zero_bubble")


def pipeline_schedule(kind: str, places: int, micro_batches: int, stages_per_place: int = 1) -> list:
    """Returns a schedule: "gpipe", "1f1b", "zero_bubble" (ZB-H1), or "interleaved" with several stages at each place.

    Raises `ValueError` for numbers below 1 and, if interleaved, unless `micro_batches` is a multiple of `places`.
    """
    if kind not in _KINDS or (stages_per_place != 1 and kind != "interleaved"):
        raise ValueError(f"[pipeline_schedule] kind must be one of {', '.join(_KINDS)}, and \"interleaved\" for several "
                         f"stages at a place; got {kind!r} and {stages_per_place} stages")
    return _C.pipeline_schedule(kind, places, micro_batches, stages_per_place)


def check_schedule(schedule: Schedule) -> list[dict[str, int]]:
    """Runs a schedule without tensors, and returns for each place `ticks` (a backward takes two, any other action one), those
    of them in which it is `busy`, and `peak_in_flight`, the micro-batches, by stage, whose backward was not finished.

    Raises `ValueError` unless each stage has F and either B or I and W of each micro-batch, once and at one place, and places
    don't wait for each other.
    """
    return _C.check_schedule([list(actions) for actions in schedule])


def stage_meshes(mesh: DeviceMesh, mesh_dim: str | int = 0) -> list:
    """Returns the places of a mesh: its ranks at each index along `mesh_dim`."""
    dim = _checked(mesh).dim(mesh_dim) if isinstance(mesh_dim, str) else mesh_dim
    return [mesh.select(dim, index) for index in range(mesh.size(dim))]


class _Stage(nn.Module):
    """Modules of a model under their full names, called one after the other."""

    def __init__(self, model: nn.Module, names: Sequence[str]):
        super().__init__()
        self._names, self.tied = list(names), {}
        for name in names:
            owner = self
            *path, last = name.split(".")
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner._modules[part]
            owner.add_module(last, model.get_submodule(name))

    def forward(self, *tensors):
        for name in self._names:
            tensors = self.get_submodule(name)(*(tensors if isinstance(tensors, (tuple, list)) else (tensors,)))
        return tensors


def cut_stages(model: nn.Module, names: Sequence[Sequence[str]]) -> list[nn.Module]:
    """Returns the stages of a model: modules that call the submodules of these names one after the other, each with what the
    one before returned, and have their parameters under the names that they have in `model`.

    A parameter that several stages have is in the attribute `tied` of each, under its first name. Raises `ValueError` for
    names that the model does not have, names twice or within another one, and for parameters and buffers of no stage.
    """
    given = [name for stage in names for name in stage]
    known = {name for name, _ in model.named_modules(remove_duplicate=False) if name}
    wrong = [name for name in given if name not in known or given.count(name) > 1
             or any(name.startswith(other + ".") for other in given)]
    if wrong or not all(names):
        raise ValueError(f"[cut_stages] each stage must have names of submodules, none twice or within another one; expected "
                         f"some of {sorted(known)}, got {wrong or 'a stage without names'}")
    stages = [_Stage(model, stage) for stage in names]
    owners: dict[torch.Tensor, list] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            owners.setdefault(parameter, [name]).append(number)
    held = {id(tensor) for stage in stages for tensor in (*stage.parameters(), *stage.buffers())}
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if id(tensor) not in held]
    if left:
        raise ValueError(f"[cut_stages] every parameter and buffer must be in a stage; got none for {left}")
    for parameter, (name, *numbers) in owners.items():
        for number in numbers if len(numbers) > 1 else ():
            stages[number].tied[name] = parameter
    return stages


class Pipeline:
    """Trains the stages of a model, each on a mesh of its own, on the micro-batches of a schedule.

    `stages`: all of them in order, modules, handles of `fully_shard()` or functions, from tensors to a tensor or a tuple; None
    where one does not run. `meshes`: the places, disjoint and of one shape (`stage_meshes()`): each rank sends to those that
    have its coordinate. `loss(*outputs, *targets)`: of a micro-batch, a mean over its rows; None: the last stage returns it.

    Gradients of sharded stages are reduced once in a step. Parameters in the attribute `tied` of several stages, under one
    name, get the sum of their gradients. Collective over the ranks of all meshes. Raises `ValueError` on all of them for a
    schedule that can't run (`check_schedule()`), is one for other stages or places, or differs between ranks.
    """

    def __init__(self, stages: Sequence, schedule: Schedule, meshes: Sequence[DeviceMesh], *, loss: Callable | None = None):
        bound = [_C.PipelineStage(*_stage(stage)) for stage in stages]
        of_lists = loss and (lambda outputs, targets: loss(*outputs, *targets))
        self._pipeline = _C.Pipeline(bound, [list(actions) for actions in schedule], [_checked(mesh) for mesh in meshes],
                                     of_lists)

    def step(self, *inputs: torch.Tensor, targets: torch.Tensor | Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Runs forward and backward of a batch, and returns its loss: the mean of those of the micro-batches, weighted by
        their rows. `inputs` are read where the first stage runs, `targets` where the last one does.

        If a rank raises, all do; set the gradients to zero then.
        """
        targets = [targets] if isinstance(targets, torch.Tensor) else list(targets)
        return self._pipeline.step(list(inputs), targets)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the forwards alone, without gradients, and returns the outputs of the last stage; () where it does not run."""
        return tuple(self._pipeline.forward(list(inputs)))

    @property
    def counts(self) -> Mapping[str, int]:
        """What this rank did in the last call, as `check_schedule()` counts it."""
        return self._pipeline.counts()


def _stage(stage) -> tuple:
    """Returns the function, the model that is sharded, and the tied parameters of a stage."""
    if stage is None:
        return None, None, {}
    module, model = (stage.module, stage._model) if isinstance(stage, ShardedModule) else (stage, None)

    def forward(tensors):
        out = module(*tensors)
        out = [out] if isinstance(out, torch.Tensor) else out
        if not isinstance(out, (tuple, list)) or not all(isinstance(each, torch.Tensor) for each in out):
            raise TypeError(f"[Pipeline] a stage must return a tensor or a tuple of tensors; got {type(out).__name__}")
        return list(out)

    return forward, model, getattr(module, "tied", {})

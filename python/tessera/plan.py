"""The memory and the traffic of a plan, from a model's sizes alone."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch import nn

from . import _C


class PlannedUnit(NamedTuple):
    """A unit: elements of its flat buffer with padding, and bytes of its whole parameters."""

    name: str
    numel: int
    nbytes: int
    trainable: bool


@dataclasses.dataclass
class PlannedRank:
    """One rank: `memory` is what `ShardedOptimizer.memory()` returns after a step, `kept` its bytes between steps, and
    `bytes_sent` those of a step where ranks send messages."""

    rank: int
    memory: dict[str, int]
    kept: int
    bytes_sent: int


@dataclasses.dataclass
class Plan:
    """The cost of a plan: `rank` is the one asked for, `fullest` keeps the most, `busiest` sends the most.
    `zero_paper_bytes`: by the formulas of the ZeRO paper."""

    parameters: int
    units: list[PlannedUnit]
    rank: PlannedRank
    fullest: PlannedRank
    busiest: PlannedRank
    zero_paper_bytes: float


def plan(module: nn.Module, *, ranks: int, level: str = "p_g_os", replicas: int = 1, rank: int = 0, state_tensors: int = 2,
         state_dtype: torch.dtype | None = None, shares_memory: bool = False, **fields: Any) -> Plan:
    """Computes what `fully_shard(module, level=level, **fields)` will cost on `ranks` ranks. Allocates nothing and contacts no
    rank; the module may be on the device "meta" or deferred.

    `state_tensors`: tensors of a parameter's size that the optimizer keeps: 2 for Adam and AdamW, 0 or 1 for SGD.
    `state_dtype`: their dtype, if it is not that which the optimizer updates; `CPUAdam`'s of that name.
    `shares_memory`: all ranks are on one host and share its memory. The figures are, to the byte, those that a job measures
    after its first step: see docs/guide/planning.md.
    """
    names: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), ([], parameter))[0].append(name)
    sizes = [(own, list(parameter.shape), parameter.dtype, parameter.requires_grad) for own, parameter in names.values()]
    report = _C.plan_report(sizes, dict(fields, level=level), ranks, replicas, rank, state_tensors, state_dtype,
                             shares_memory)
    units = [PlannedUnit(*unit) for unit in report.pop("units")]
    for which in ("rank", "fullest", "busiest"):
        report[which] = PlannedRank(**report[which])
    return Plan(units=units, **report)

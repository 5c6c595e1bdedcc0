"""Checkpoints of DeepSpeed as state dicts: directories of ZeRO stages 1 to 3, and universal ones.

A directory of ZeRO has, for each rank, flat tensors of float32 with its part of the parameters of each group, and likewise of
each state of the optimizer. In stages 1 and 2, the ranks' parts follow one another, and the parameters lie in them in their
order. In stage 3, each parameter is cut into as many equal parts as there are ranks, of which each rank has one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .foreign_files import Read, load_file, within

_STATES = "_optim_states.pt"


class _Values:
    """Stand-ins for tensors that are put together from parts when they are read."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def add(self, shape: torch.Size, parts: list[torch.Tensor]) -> torch.Tensor:
        value = torch.empty(shape, dtype=parts[0].dtype if parts else torch.float32, device="meta")
        self._parts[id(value)] = value, parts
        if sum(part.numel() for part in parts) < value.numel():
            raise ValueError(f"its files have {sum(part.numel() for part in parts)} elements of a tensor of {list(shape)}")
        return value

    def read(self, value: torch.Tensor) -> torch.Tensor:
        if not value.is_meta:
            return value
        parts = self._parts[id(value)][1]
        return torch.cat([part.reshape(-1) for part in parts])[:value.numel()].view(value.size())


class _Zero:
    """A directory of ZeRO."""

    def __init__(self, source: Path, files: list[Path]):
        self.values = _Values()
        self._states = [load_file(path)["optimizer_state_dict"] for path in files]
        self._is_cut = "fp32_flat_groups" in self._states[0]  # stage 3
        models = [load_file(path) for path in _model_files(source) if _is_first(path)]
        count = self._states[0]["partition_count"]
        count = max(count) if isinstance(count, list) else count
        if count != len(files) or not models or (self._is_cut and len(models) != count):
            raise ValueError(f"{count} ranks saved it; it has the files of {len(files)} optimizers and {len(models)} models")
        self._models = models
        shapes = models[0].get("param_shapes")
        if not isinstance(models[0].get("module"), Mapping) or not isinstance(shapes, list):
            raise ValueError("its files must have the names and shapes of the parameters, as DeepSpeed 0.4 and newer write them")
        self.groups: list[list[str]] = [list(group) for group in shapes]
        self._shapes = shapes

    def _flat(self, name: str) -> list[list[torch.Tensor]]:
        """The flat tensors of a state, or of the parameters, by group and rank."""
        key = "fp32_flat_groups" if self._is_cut else "single_partition_of_fp32_groups"
        by_rank = [states[key] if name == "fp32" else [group[name] for _, group in sorted(self._base(states)["state"].items())]
                   for states in self._states]
        return [list(group) for group in zip(*by_rank, strict=True)]

    def _base(self, states: Mapping[str, Any]) -> Mapping[str, Any]:
        base = states["optimizer_state_dict" if self._is_cut else "base_optimizer_state"]
        if not isinstance(base, Mapping):
            raise ValueError("an elastic checkpoint is not read: DeepSpeed's ds_to_universal makes a directory that is")
        return base

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        found = {}
        paddings = self._states[0].get("param_alignment_paddings") or [[0] * len(group) for group in self.groups]
        for shapes, flat, padding in zip(self._shapes, self._flat(name), paddings, strict=True):
            at = 0
            for (param, shape), extra in zip(shapes.items(), padding, strict=True):
                size = -(-shape.numel() // len(flat)) if self._is_cut else shape.numel()
                parts = [part[at:at + size] for part in flat] if self._is_cut else list(_range(flat, at, at + size))
                found[param] = self.values.add(shape, parts)
                at += size + extra
        return found

    def model(self) -> dict[str, torch.Tensor]:
        return _completed(self._tensors("fp32"), self._models, self.values)

    def optimizer(self) -> dict[str, Any]:
        base = self._base(self._states[0])
        groups = _named_groups(base["param_groups"], self.groups)
        states: dict[str, dict[str, Any]] = {name: {} for group in self.groups for name in group}
        first = next(iter(base["state"].values()), {})
        for key, value in first.items():
            if isinstance(value, torch.Tensor) and value.dim() == 1:
                for name, tensor in self._tensors(key).items():
                    states[name][key] = tensor
        for number, names in enumerate(self.groups):
            for name in names if "step" in base["state"].get(number, {}) else ():
                states[name]["step"] = base["state"][number]["step"]
        return _with_steps({"state": states, "param_groups": groups})


def _model_files(source: Path) -> list[Path]:
    return sorted(source.glob("*_model_states.pt"), key=_ranks_of)


def _is_first(path: Path) -> bool:
    """Whether a model's file is of the first tensor-parallel rank: in stages 1 and 2 one, in stage 3 one for each other rank."""
    return path.name.endswith("mp_rank_00_model_states.pt")


def _completed(found: dict[str, torch.Tensor], models: list[dict[str, Any]], values: _Values) -> dict[str, torch.Tensor]:
    """Adds frozen parameters, buffers and the further names of tied ones to the parameters that were trained."""
    first = models[0]
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        if name not in found:
            found[name] = values.add(shape, [model["frozen_param_fragments"][name].reshape(-1) for model in models])
    found |= {name: found[owner] for name, owner in (first.get("shared_params") or {}).items() if owner in found}
    buffers, module = first.get("buffer_names") or (), first["module"]
    found |= {name: value for name, value in module.items() if name not in found and (name in buffers or value.numel())}
    lost = module.keys() - found.keys()
    if lost:
        raise ValueError(f"no file has the values of '{min(lost)}'")
    return {name: found[name] for name in module}  # the model's order


def _range(flat: list[torch.Tensor], begin: int, end: int) -> Iterator[torch.Tensor]:
    """Yields the elements [begin, end) of tensors that follow one another."""
    at = 0
    for part in flat:
        if at < end and begin < at + len(part):
            yield part[max(begin - at, 0):end - at]
        at += len(part)


def _named_groups(groups: list[dict[str, Any]], names: list[list[str]]) -> list[dict[str, Any]]:
    """Returns param groups with the names of their parameters in place of numbers of `names`."""
    # Those of DeepSpeed's own Adam have no amsgrad.
    return [{"amsgrad": False, **group, "params": [name for number in group["params"] for name in names[number]]}
            for group in groups]


def _with_steps(optimizer: dict[str, Any]) -> dict[str, Any]:
    """FusedAdam counts steps in the groups."""
    for group in optimizer["param_groups"]:
        for name in group["params"] if "step" in group else ():
            optimizer["state"][name].setdefault("step", group["step"])
    return optimizer


def _open_universal(source: Path) -> tuple[Any, Read]:
    values, files = _Values(), {path: load_file(path) for path in _model_files(source)}
    models = [file for path, file in files.items() if _is_first(path)]
    shapes = {name: shape for first in models[:1] for group in first["param_shapes"] for name, shape in group.items()}
    model, states = {}, {}
    for path in sorted(source.glob("zero/*/*.pt")):
        value = load_file(path)
        value = value.get("param") if isinstance(value, Mapping) else value
        name, state = path.parent.name, path.stem
        if state == "step":
            states.setdefault(name, {})["step"] = value
        elif isinstance(value, torch.Tensor):
            shape = shapes.get(name, value.size())  # of stage 3, tensors are flat
            stand_in = values.add(shape if shape.numel() == value.numel() else value.size(), [value])
            if state == "fp32":
                model[name] = stand_in
            else:
                states.setdefault(name, {})[state] = stand_in
    found: dict[str, Any] = {"model": _completed(model, models, values) if models else model}
    record = source / "zero" / "optimizer_state.pt"
    if record.exists():
        record = load_file(record)
        groups = record["param_groups"]
        names: list[list[str]] = [[] for group in groups for _ in group["params"]]
        for file in files.values():
            for number, group in enumerate(file.get("param_shapes") or ()):
                names[number] += [name for name in group if name not in names[number]]
        if len(groups) == 1:
            names = [list(states)] + [[] for _ in names[1:]]
        unknown = states.keys() - {name for group in names for name in group}
        if unknown:
            raise ValueError(f"it does not say which param group '{min(unknown)}' is in: its *_model_states.pt are missing")
        for number, state in record.get("optimizer_state_dict", {}).get("state", {}).items():  # of stage 3
            for name in names[number]:
                states[name].setdefault("step", state["step"])
        found["optimizer"] = _with_steps({"state": states, "param_groups": _named_groups(groups, names)})
    return found, values.read


def _ranks_of(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]


def open_deepspeed(source: Path) -> tuple[Any, Read] | None:
    """Returns the state dict in a directory of DeepSpeed, with the keys "model" and "optimizer", and a function that reads one
    of its tensors; None for other directories. Of a directory with several steps, the one that it calls the latest."""
    if (source / "latest").is_file():
        source = within(source, (source / "latest").read_text().strip())
    if (source / "zero").is_dir():
        return _open_universal(source)
    files = sorted(source.glob("*" + _STATES), key=_ranks_of)
    if not files:
        return None
    if any("_mp_rank_00" + _STATES not in path.name for path in files):
        raise ValueError("ranks that were tensor- or pipeline-parallel saved it: DeepSpeed's ds_to_universal makes a directory "
                         "that is read")
    zero = _Zero(source, files)
    return {"model": zero.model(), "optimizer": zero.optimizer()}, zero.values.read

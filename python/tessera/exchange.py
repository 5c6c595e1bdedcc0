"""Checkpoints to and from the files of PyTorch's own tools, with the state of its optimizers.

    python -m tessera.exchange export CKPT FILE.pt|DIRECTORY [--optimizer KEY] ...
    python -m tessera.exchange import FILE|DIRECTORY CKPT [--optimizer KEY] ...

A file is one of `torch.save`, a directory one of `torch.distributed.checkpoint` (DCP), of DeepSpeed or of the Trainer of
transformers. Needs no ranks. Tensors are read and written one by one. See docs/guide/checkpoints.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import mmap
import os
import shutil
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.utils._pytree import tree_leaves

from . import _C
from .checkpoint import rules_of
from .foreign_files import LeftOut, open_files, plain_errors, value_at

Rename = Sequence[tuple[str, str] | Mapping[str, str]]
Progress = Callable[[int, int], None] | None

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
           "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn, "C64": torch.complex64, "BOOL": torch.bool,
           "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
           "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# The options, the tensors of state and the numbers of state that are in a checkpoint, of PyTorch's classes and LibTorch's. Checkpoints have `betas` as `beta1` and
# `beta2`.
_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad"), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_OPTIMIZERS = {
    "AdamW": _ADAM, "Adam": _ADAM,
    "SGD": (("lr", "momentum", "dampening", "weight_decay", "nesterov"), ("momentum_buffer",)),
    "Adagrad": (("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value"), ("sum",)),
    "NAdam": (("lr", "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay"), ("exp_avg", "exp_avg_sq")),
    "RMSprop": (("lr", "momentum", "alpha", "eps", "centered", "weight_decay"), ("square_avg", "momentum_buffer", "grad_avg")),
}
_KNOWN = "Adagrad, Adam, AdamW, NAdam, RMSprop or SGD"
_COUNTS = {"NAdam": ("step", "mu_product")}  # of others: step


# --- export ------------------------------------------------------------------------------------


class _Contents:
    """A checkpoint as the state dicts that PyTorch's tools write, with stand-ins for its tensors."""

    def __init__(self, path: Path, with_state: bool, rename: Rename, dtype: torch.dtype | None, progress: Progress):
        self._tensors = _C.CheckpointTensors(path, with_state, rules_of(rename), dtype, progress)
        self._index = json.loads(self._tensors.index())
        self._numbers: dict[int, int] = {}  # by the id of the stand-in
        self._number, self._value = -1, torch.empty(0)  # that was read last
        self.model: dict[str, torch.Tensor] = {}
        self.states: dict[str, dict[str, torch.Tensor]] = {}
        for number, tensor in enumerate(self._index["tensors"]):
            value = torch.empty(tensor["shape"], dtype=_DTYPES[tensor["dtype"]], device="cpu")
            self._numbers[id(value)] = number
            if tensor["kind"] == "state":
                self.states.setdefault(tensor["names"][0], {})[tensor["state"]] = value
            else:
                self.model.update(dict.fromkeys(tensor["names"], value))

    def value_of(self, value: Any) -> Any:
        """Returns the values of a stand-in, and other values as they are."""
        number = self._numbers.get(id(value))
        if number is None:
            return value
        if self._number != number:  # a tied tensor is asked for under each of its names
            self._value.untyped_storage().resize_(0)  # PyTorch's writer holds on to what it has written
            self._number, self._value = number, self._tensors.read(number)
        return self._value

    def optimizer(self, path: Path, numbered: bool) -> dict[str, Any]:
        """As `get_state_dict()` returns it, or, with numbers of the parameters, an optimizer's `state_dict()`."""
        record = self._index.get("optimizer")
        if record is None:
            raise ValueError("[export_checkpoint] optimizer_key needs a checkpoint with an optimizer; "
                             f"'{path}' was saved without one")
        states = self.states
        for name, counts in record["counts"].items():
            states.setdefault(name, {}).update({key: torch.tensor(float(count)) for key, count in counts.items()})
        groups = [{**_options_of(record["kind"], number, group["options"]), "param_names": group["params"],
                   "params": group["params"]} for number, group in enumerate(record["param_groups"])]
        if numbered:
            numbers = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
            states = {number: states[name] for name, number in numbers.items() if name in states}
            for group in groups:
                group["params"] = [numbers[name] for name in group["params"]]
        return {"state": states, "param_groups": groups}


def _options_of(kind: str, number: int, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a param group: those of PyTorch's class, with the stored values."""
    if kind not in _OPTIMIZERS:
        raise NotImplementedError("[export_checkpoint] optimizer state can be exported for Adagrad, Adam, AdamW, NAdam, RMSprop "
                                  f"and SGD; the checkpoint has that of {kind}")
    values = {name: float(value) for name, value in stored.items()}
    if "beta1" in values and "beta2" in values:
        values["betas"] = values["beta1"], values["beta2"]
    for name in _OPTIMIZERS[kind][0]:
        if name not in values:
            raise ValueError(f"[export_checkpoint] param group {number} lacks '{name}'")
    group = getattr(torch.optim, kind)([torch.nn.Parameter(torch.empty(0))]).param_groups[0]
    return {name: default if default is None or name not in values else
            bool(values[name]) if isinstance(default, bool) else values[name]
            for name, default in group.items() if name != "params"}


class _Planner(dcp.DefaultSavePlanner):
    def __init__(self, contents: _Contents):
        super().__init__()
        self._contents = contents

    def lookup_object(self, index: Any) -> Any:
        return self._contents.value_of(super().lookup_object(index))


def _sync(path: Path) -> None:
    """Returns when a file, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_dcp(state: dict[str, Any], contents: _Contents, draft: Path) -> None:
    writer = dcp.FileSystemWriter(draft, per_thread_copy_ahead=0)  # each tensor is written before the next is read
    with plain_errors():
        dcp.save(state, storage_writer=writer, planner=_Planner(contents), no_dist=True)


def _write_torch(state: dict[str, Any], contents: _Contents, draft: Path) -> None:
    with torch.serialization.skip_data():  # leaves room for the values, which are written through a mapping
        torch.save(state, draft)
    with open(draft, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, draft.stat().st_size)  # a full disk is found here, not by the mapping
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        written = torch.load(draft, mmap=True, weights_only=True)
    for value, place in zip(tree_leaves(state), tree_leaves(written), strict=True):
        if isinstance(value, torch.Tensor):
            place.copy_(contents.value_of(value))
    _sync(draft)


def export_checkpoint(path: str | os.PathLike, to: str | os.PathLike, *, format: str = "", dtype: torch.dtype | None = None,
                      rename: Rename = (), model_key: str = "", optimizer_key: str = "", progress: Progress = None) -> None:
    """Writes the model whole into a file for `torch.load(weights_only=True)` (`format="torch"`, or a path that ends with
    `.pt`, `.pth` or `.bin`), or a directory for `torch.distributed.checkpoint.load` (`format="dcp"`, or another path).

    `dtype`: of the model's floating tensors; None: as stored. `rename`: rules, in their order: pairs of a regular expression
    and its replacement, in which `$1` is a group, or dicts of whole names. `model_key`, `optimizer_key`: the keys of the two
    state dicts. Without `optimizer_key`, there is no optimizer, and without both, the model's tensors are the dict;
    `model_key` is `model` beside an optimizer. The optimizer's is for `load_state_dict()`, of Adagrad, Adam, AdamW, NAdam, RMSprop or
    SGD, with the parameters in the order of the param groups; in a directory, as `get_state_dict()` returns it.
    `progress(done, total)`: called with bytes. Memory: one tensor. The output appears when it is complete.
    """
    path, to = Path(path), Path(to)
    format = format or ("torch" if to.suffix in (".pt", ".pth", ".bin") else "dcp" if not to.suffix else "")
    if format not in ("torch", "dcp"):
        raise ValueError(f"[export_checkpoint] format must be 'torch' or 'dcp', and is needed for a name such as '{to.name}'. "
                         "`tessera ckpt export` writes safetensors files")
    if to.is_dir() if format == "torch" else to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ValueError(f"[export_checkpoint] '{to}' must not be there; a file of torch.save, or an empty directory, is "
                         "replaced")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"[export_checkpoint] dtype must be a floating one; got {dtype}")
    if optimizer_key and optimizer_key == (model_key or "model"):
        raise ValueError(f"[export_checkpoint] model_key and optimizer_key must differ; got '{optimizer_key}' for both")
    contents = _Contents(path, bool(optimizer_key), rename, dtype, progress)
    state: dict[str, Any] = contents.model
    if model_key or optimizer_key:
        state = {model_key or "model": state}
    if optimizer_key:
        state[optimizer_key] = contents.optimizer(path, numbered=format == "torch")
    draft = to.with_name(to.name + ".tmp")
    if draft.exists():
        raise ValueError(f"[export_checkpoint] '{draft}' must not be there: remove it, if an export that was killed left it")
    try:
        (_write_torch if format == "torch" else _write_dcp)(state, contents, draft)
        if draft.is_dir():
            _sync(draft)
        os.replace(draft, to)
        _sync(to.absolute().parent)
    except BaseException:
        shutil.rmtree(draft) if draft.is_dir() else draft.unlink(missing_ok=True)
        raise


# --- import ------------------------------------------------------------------------------------


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__name__}"


def _warn_of(name: str, value: LeftOut) -> None:
    warnings.warn(f"[import_checkpoint] '{name}' is left out: its class {_class_name(value)} is not one of PyTorch's", stacklevel=2)


def _tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested dicts and lists, by names with dots. Warns of objects of classes that are not known."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, LeftOut) and not value:
        _warn_of(name, value)
    elif isinstance(value, (Mapping, list, tuple)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors_in(item, f"{name}.{key}" if name else str(key))


def _tie_views(model: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Returns the names of each tensor, by the first. Equal views of one storage are one tensor."""
    names: dict[str, list[str]] = {}
    firsts: dict[Any, str] = {}
    for name, value in model.items():
        view = id(value) if value.is_meta else name if not value.numel() else (
            value.untyped_storage().data_ptr(), value.storage_offset(), value.dtype, value.size(), value.stride())
        names.setdefault(firsts.setdefault(view, name), []).append(name)
    return names


def _tie_copies(model: Mapping[str, torch.Tensor], read: Callable, names: dict[str, list[str]], optimized: list[str]) -> None:
    """Makes a tensor that no param group has, but that has the bits of one in a group, a further name of that: DCP stores a
    tied parameter under each of its names, and an optimizer has it once."""
    def bits(name: str) -> torch.Tensor:
        return read(model[name]).contiguous().view(-1).view(torch.uint8)

    @functools.cache
    def digest(name: str) -> int:
        return int(torch.hash_tensor(bits(name)))

    params: dict[Any, list[str]] = {}
    for name in optimized:
        params.setdefault((model[name].dtype, model[name].size()), []).append(name)
    others = names.keys() - set(optimized)
    for name in [name for name in names if name in others and model[name].is_floating_point() and model[name].numel()]:
        for param in params.get((model[name].dtype, model[name].size()), []):
            if digest(param) == digest(name) and torch.equal(bits(param), bits(name)):
                names[param] += names.pop(name)
                break


def _unflattened(optimizer: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes what `get_state_dict` does if asked to flatten the optimizer's state, which loses the param groups: parameters
    with equal options become one."""
    parts: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for name, value in optimizer.items():
        part, _, rest = name.partition(".")
        param, _, option = rest.rpartition(".")
        parts.setdefault(part, {}).setdefault(param, {})[option] = value
    groups: dict[str, dict[str, Any]] = {}
    for name, options in ((name, parts["param_groups"][name]) for name in model if name in parts["param_groups"]):
        groups.setdefault(repr(options), {**options, "params": []})["params"].append(name)
    return {"state": parts["state"], "param_groups": list(groups.values())}


def _parted(groups: list[dict[str, Any]], states: Mapping[Any, Any], ordered: Sequence[str],
            model: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns the names of all groups' parameters, if each group has its own in the order of `ordered`: the only ones whose
    shapes are those of the states."""
    def fits(number: Any, name: str) -> bool:
        values = (value for key, value in states.get(number, {}).items() if isinstance(value, torch.Tensor) and key != "step")
        return all(value.size() == model[name].size() for value in values)

    unknown = [name for name in ordered if name not in model]
    if unknown:
        raise ValueError(f"the model has not {', '.join(repr(name) for name in unknown[:4])} of model_params")
    numbers = [group["params"] for group in groups]
    begin, end = tuple(0 for _ in groups), tuple(len(own) for own in numbers)
    if sum(end) != len(ordered):
        raise ValueError(f"its optimizer has {sum(end)} parameters; model_params has {len(ordered)} names")
    # For each name, the places in the groups behind it, with the number of ways to them and the group of the last one.
    steps: list[dict[tuple[int, ...], tuple[int, int]]] = [{begin: (1, -1)}]
    for name in ordered:
        reached: dict[tuple[int, ...], tuple[int, int]] = {}
        for places, (ways, _) in steps[-1].items():
            for group, at in enumerate(places):
                if at < end[group] and fits(numbers[group][at], name):
                    after = places[:group] + (at + 1,) + places[group + 1:]
                    reached[after] = min(2, reached.get(after, (0, group))[0] + ways), group
        if not reached:
            raise ValueError(f"no group of its optimizer has '{name}', of shape {list(model[name].size())}, next, if each has the "
                             "order of model_params: give the names in the optimizer's order, as optimizer_params")
        steps.append(reached)
        if len(reached) > 4096:  # too many to follow them all
            break
    if len(steps) <= len(ordered) or steps[-1][end][0] > 1:
        raise ValueError("which group of its optimizer has which parameter can't be seen from their shapes: give the names in "
                         "the optimizer's order, as optimizer_params")
    names: dict[Any, str] = {}
    places = end
    for name, step in zip(reversed(ordered), reversed(steps)):
        group = step[places][1]
        places = places[:group] + (places[group] - 1,) + places[group + 1:]
        names[numbers[group][places[group]]] = name
    return [names[number] for own in numbers for number in own]


def _names_of(groups: list[dict[str, Any]], states: Mapping[Any, Any], given: Sequence[str], ordered: Sequence[str],
              model: Mapping[str, torch.Tensor]) -> dict[Any, str]:
    """Returns the names of an optimizer's parameters by what it calls them. PyTorch's `state_dict()` numbers them in the order
    in which the optimizer was given them, which need not be the model's; DCP directories have their names."""
    numbers = [number for group in groups for number in group["params"]]
    names = numbers if all(isinstance(number, str) for number in numbers) else [
        name for group in groups for name in group.get("param_names", [])]
    if names and (given or ordered):
        raise ValueError("it has the names of its optimizer's parameters: leave optimizer_params and model_params out")
    names = names or list(given) or (_parted(groups, states, ordered, model) if ordered else [])
    if numbers and not names:
        raise ValueError(
            "its optimizer numbers its parameters, and has no names of them: which number is which parameter can't be seen. "
            "Make the optimizer from named_parameters(), as PyTorch 2.6 and newer accept it, and save again; or pass "
            "model_params (--model-params), the names of model.named_parameters(), if each param group has its own in that "
            "order, or optimizer_params (--optimizer-params), the names in the order in which the optimizer was given them")
    if len(names) != len(numbers):
        raise ValueError(f"its optimizer has {len(numbers)} parameters and {len(names)} names")
    for name, uses in Counter(names).items():
        if name not in model or uses > 1:
            raise ValueError(f"its optimizer has the parameter '{name}'{' twice' if uses > 1 else ', which the model has not'}")
    return dict(zip(numbers, names))


def _numbers_in(value: Any) -> list[float]:
    return [float(item) for item in (value if isinstance(value, (tuple, list)) else [value])
            if isinstance(item, Real) or isinstance(item, torch.Tensor) and item.numel() == 1]


def _class_of(options: Mapping[str, list[float]]) -> str:
    kind = next((kind for kind, (needed, _) in _OPTIMIZERS.items() if all(name in options for name in needed)), None)
    if kind is None:
        raise ValueError(f"its optimizer must be {_KNOWN}; got one with the options {', '.join(options)}")
    if kind == "AdamW":  # has the options of Adam, and, since PyTorch 2.7, a flag
        if "decoupled_weight_decay" not in options:
            raise ValueError("its optimizer is Adam or AdamW, which PyTorch before 2.7 does not tell; give optimizer_class")
        return "AdamW" if options["decoupled_weight_decay"][0] else "Adam"
    return kind


def _json_number(number: float) -> float | str:
    """JSON has no infinities and no NaN: they are text."""
    return number if math.isfinite(number) else str(number)


def _stored_options(kind: str, options: Mapping[str, list[float]]) -> dict[str, float | str]:
    if any(options.get("maximize", [])):
        raise ValueError(f"its optimizer must not have 'maximize', which the checkpoint's {kind} has not")
    stored: dict[str, float | str] = {}
    for name in _OPTIMIZERS[kind][0]:
        values, names = options.get(name, []), ("beta1", "beta2") if name == "betas" else (name,)
        if len(values) != len(names):
            raise ValueError(f"the option '{name}' of {kind} must be {len(names)} number(s); got {len(values)}")
        stored |= zip(names, map(_json_number, values))
    return stored


def _import_optimizer(optimizer: Mapping[str, Any], model: Mapping[str, torch.Tensor], read: Callable, kind: str,
                      given: Sequence[str], ordered: Sequence[str]) -> tuple[dict[str, Any], dict[tuple[str, str], torch.Tensor]]:
    """Returns the record of the optimizer, and its tensors by parameter and state."""
    groups = optimizer["param_groups"]
    if not groups:
        raise ValueError("its optimizer must have param groups")
    saved = optimizer.get("state", {})  # that of SGD without momentum is not in a directory of DCP
    names = _names_of(groups, saved, given, ordered, model)
    options = [{name: _numbers_in(value) for name, value in group.items() if not name.startswith("param")} for group in groups]
    kind = kind or _class_of(options[0])
    if kind not in _OPTIMIZERS:
        raise ValueError(f"optimizer_class must be {_KNOWN}; got '{kind}'")
    groups = [{"options": _stored_options(kind, own), "params": [names[number] for number in group["params"]]}
              for own, group in zip(options, groups)]
    counts: dict[str, dict[str, float]] = {}
    states = {}
    for number, state, value in ((number, *item) for number, values in saved.items() for item in values.items()):
        if number not in names and number not in model:
            raise ValueError(f"its optimizer has state of '{number}', which the model has not")
        name = names.get(number, number)
        if state in _COUNTS.get(kind, ("step",)):
            count = _numbers_in(read(value) if isinstance(value, torch.Tensor) else value)
            if len(count) != 1 or not 0 <= count[0] <= 1 << 53 or (state == "step" and count[0] % 1):
                raise ValueError(f"the {state} of '{name}' must be a count; got {count}")
            counts.setdefault(name, {})[state] = count[0] if count[0] % 1 else int(count[0])
        elif isinstance(value, torch.Tensor):
            if state not in _OPTIMIZERS[kind][1]:
                raise ValueError(f"'{name}' has the state '{state}', which LibTorch's {kind} has not")
            if value.size() != model[name].size():
                raise ValueError(f"'{state}' of '{name}' must have its shape, {list(model[name].size())}; got {list(value.size())}"
                                 ". Is the optimizer that of another model, or were its parameters in another order?")
            states[name, state] = value
        elif isinstance(value, LeftOut):
            _warn_of(f"{state} of {name}", value)
    steps = int(max((count.get("step", 0) for count in counts.values()), default=0))
    return {"kind": kind, "param_groups": groups, "counts": counts, "steps": steps}, states


def _model_in(state: Mapping[str, Any], model_key: str, optimizer_key: str) -> tuple[str, dict[str, torch.Tensor]]:
    """Returns where the model is, as text, and its tensors."""
    if model_key or (optimizer_key and "model" in state):
        where = model_key or "model"
        values, text = value_at(state, where), f" under the key '{where}'"
    elif optimizer_key:
        values, text = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}, " at its top"
    else:
        values, text = state, ""
    return text, dict(_tensors_in(values))


def _import(source: Path, path: Path, rename: Rename, transpose: Sequence[str], model_key: str, optimizer_key: str, kind: str,
            given: Sequence[str], ordered: Sequence[str], progress: Progress) -> None:
    state, read = open_files(source)
    if not isinstance(state, Mapping) or (isinstance(state, LeftOut) and not state):
        raise ValueError(f"it must hold a dict of tensors, such as a state_dict(); got {_class_name(state)}")
    where, model = _model_in(state, model_key, optimizer_key)
    if not model:
        raise ValueError(f"it has no tensors{where}; it has the keys {', '.join(map(str, state))}")
    names = _tie_views(model)
    index: dict[str, Any] = {"format": "tessera checkpoint", "format_version": 2, "checksum_block_bytes": 1 << 20, "id": "",
                             "world_size": 1, "numbers": {}}
    states: dict[tuple[str, str], torch.Tensor] = {}
    if optimizer_key:
        optimizer = value_at(state, optimizer_key)
        if not isinstance(optimizer, Mapping):
            raise ValueError(f"it has no '{optimizer_key}'; it has the keys {', '.join(map(str, state))}")
        optimizer = optimizer if "param_groups" in optimizer else _unflattened(optimizer, model)
        index["optimizer"], states = _import_optimizer(optimizer, model, read, kind, given, ordered)
        if source.is_dir():
            _tie_copies(model, read, names, [name for group in index["optimizer"]["param_groups"] for name in group["params"]])
    all_names = {name: same for same in names.values() for name in same}
    stored = [("tensor", "", same, model[first]) for first, same in names.items()]
    stored += [("state", name, all_names[param], value) for (param, name), value in states.items()]
    index["tensors"] = [
        {"kind": kind, "state": state, "names": same, "dtype": _NAMES.get(value.dtype, str(value.dtype)), "shape": value.size(),
         "strides": torch.empty(value.size(), device="meta").stride(), "chunks": []} for kind, state, same, value in stored]
    _C.import_tensors(json.dumps(index), lambda number: read(stored[number][3]), path, rules_of(rename), list(transpose),
                      progress)


def import_checkpoint(source: str | os.PathLike, path: str | os.PathLike, *, rename: Rename = (), transpose: Sequence[str] = (),
                      model_key: str = "", optimizer_key: str = "", optimizer_class: str = "",
                      optimizer_params: Sequence[str] = (), model_params: Sequence[str] = (),
                      progress: Progress = None) -> None:
    """Makes a checkpoint of a file of `torch.save`, or of a directory of `torch.distributed.checkpoint`, of DeepSpeed (ZeRO
    stages 1 to 3, or a universal one) or of the Trainer of transformers, which `load_checkpoint()` then reads into a model with these names. Tensors that share
    memory in a file stay tied.

    `rename`: as for `export_checkpoint()`. `transpose`: regular expressions for whole new names of tensors to transpose.
    `model_key`: where the model is; empty: beside an optimizer `model` or, without that key, the tensors at the top, else all
    tensors, those of dicts in dicts with dots in their names. `optimizer_key`: where the state dict of an optimizer of
    `torch.optim` is; empty: none is imported. Both may have dots: `optimizer_states.0` is the first in a list. Directories
    of the Trainer and of DeepSpeed have `model` and `optimizer`. `optimizer_class`: Adagrad, Adam, AdamW,
    NAdam, RMSprop or SGD; empty: told from its options.

    A file without the names of the optimizer's parameters needs one of these: `optimizer_params`, the names in the order in
    which the optimizer was given them; `model_params`, those of `model.named_parameters()`, if each param group has its own
    in that order. Which group has which is then told from the shapes of the state, and an error if these allow two answers.

    Pickles run no code: classes that are not PyTorch's are left out, and a warning names what the model or the optimizer had
    of them. Memory: one tensor of a directory and 2.3 KB for each of its chunks; files are mapped.
    """
    if not optimizer_key and (optimizer_class or optimizer_params or model_params):
        raise ValueError("[import_checkpoint] optimizer_class, optimizer_params and model_params need optimizer_key")
    if optimizer_params and model_params:
        raise ValueError("[import_checkpoint] of optimizer_params and model_params, one may be given")
    try:
        _import(Path(source), Path(path), rename, transpose, model_key, optimizer_key, optimizer_class, optimizer_params,
                model_params, progress)
    except OSError as error:
        if error.filename is None:
            error.filename = str(source)
        raise
    except Exception as error:  # of any kind, for a damaged file
        raise ValueError(f"[import_checkpoint] '{source}': {error}") from error


# --- the command -------------------------------------------------------------------------------


def _progress(what: str) -> Progress:
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        tenth = done * 10 // total if total else 10
        if tenth != shown:
            print(f"{what}: {done / 1e6:.1f} of {total / 1e6:.1f} MB ({tenth * 10} %)", file=sys.stderr)
            shown = tenth
    return show


def _in_json(form: str, take: Callable[[Any], Any]) -> Callable[[str], Any]:
    """Returns a function that reads what a file of JSON has, which must be `form`."""
    def read(file: str) -> Any:
        try:
            return take(json.loads(Path(file).read_text()))
        except (OSError, TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"'{file}' must be {form}: {error}") from None
    return read


def _rule(text: str) -> tuple[str, str]:
    pattern, cut, replacement = text.rpartition("=")
    if not cut:
        raise argparse.ArgumentTypeError(f"must be PATTERN=REPLACEMENT; got '{text}'")
    return pattern, replacement


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tessera.exchange", description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    export = verbs.add_parser("export", help="writes a checkpoint's model whole")
    export.add_argument("path", metavar="CKPT")
    export.add_argument("to", metavar="TO", help="a file that ends with .pt, .pth or .bin; or a directory for DCP")
    export.add_argument("--format", choices=("torch", "dcp"), default="", help="default: by TO's name")
    export.add_argument("--dtype", type=lambda name: getattr(torch, name, name),
                        help="of floating tensors, such as bfloat16 (default: as stored)")
    load = verbs.add_parser("import", help="makes a checkpoint of a file of torch.save, a directory of DCP, DeepSpeed or a Trainer")
    load.add_argument("source", metavar="FROM")
    load.add_argument("path", metavar="CKPT")
    load.add_argument("--transpose", metavar="PATTERN", action="append", default=[], help="whole names of tensors to transpose")
    load.add_argument("--optimizer-class", metavar="CLASS", default="", help=f"{_KNOWN} (default: told from its options)")
    load.add_argument("--optimizer-params", metavar="FILE", default=(), type=_in_json("a JSON list of names", list),
                      help="JSON: a list of the names of its parameters, in its order, for a file without them")
    load.add_argument("--model-params", metavar="FILE", default=(), type=_in_json("a JSON list of names", list),
                      help="JSON: a list of the names of model.named_parameters(), of which each group has its own in order")
    for verb in (export, load):
        verb.add_argument("--rename", metavar="PATTERN=REPLACEMENT", action="append", default=[], type=_rule,
                          help="for names; may be repeated")
        verb.add_argument("--rename-file", metavar="FILE", default=[], type=_in_json(
                              "a JSON list of [PATTERN, REPLACEMENT], or an object of names",
                              lambda rules: [rules] if isinstance(rules, dict) else [(old, new) for old, new in rules]),
                          help='JSON: [["PATTERN", "REPLACEMENT"], ...], or an object of whole names')
        verb.add_argument("--model", metavar="KEY", dest="model_key", default="", help="of the model's state dict")
        verb.add_argument("--optimizer", metavar="KEY", dest="optimizer_key", default="",
                          help="of the optimizer's state dict (default: no optimizer)")
        verb.add_argument("--quiet", action="store_true", help="show no progress")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 if the work could not be done. An interrupt leaves nothing that was begun."""
    options = vars(_parser().parse_args(arguments))
    verb, quiet = options.pop("verb"), options.pop("quiet")
    options["rename"] = options.pop("rename_file") + options["rename"]
    call: Callable[..., None] = export_checkpoint if verb == "export" else import_checkpoint
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        warnings.showwarning = lambda message, *_: print(f"python -m tessera.exchange {verb}: {message}", file=sys.stderr)
        try:
            call(**options, progress=None if quiet else _progress(verb))
        except (NotImplementedError, OSError, RuntimeError, ValueError) as error:
            print(f"python -m tessera.exchange {verb}: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())

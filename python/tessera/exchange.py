"""Checkpoints to and from the files of PyTorch's own tools, with the state of its optimizers.

    python -m tessera.exchange export CKPT FILE.pt|DIRECTORY [--optimizer KEY] ...
    python -m tessera.exchange import FILE|DIRECTORY CKPT [--optimizer KEY] ...

A file is one of `torch.save`, a directory one of `torch.distributed.checkpoint` (DCP). Needs no ranks. Tensors are read and
written one by one. See docs/guide/checkpoints.md.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import mmap
import os
import shutil
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._pytree import tree_leaves

from . import _C

Rename = Sequence[tuple[str, str] | Mapping[str, str]]
Progress = Callable[[int, int], None] | None

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
           "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn, "C64": torch.complex64, "BOOL": torch.bool,
           "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
           "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# The options and the tensors of state that PyTorch's classes and LibTorch's have alike. Checkpoints have `betas` as `beta1` and
# `beta2`.
_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad"), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_OPTIMIZERS = {
    "AdamW": _ADAM, "Adam": _ADAM,
    "SGD": (("lr", "momentum", "dampening", "weight_decay", "nesterov"), ("momentum_buffer",)),
    "Adagrad": (("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value"), ("sum",)),
    "RMSprop": (("lr", "momentum", "alpha", "eps", "centered", "weight_decay"), ("square_avg", "momentum_buffer", "grad_avg")),
}
_KNOWN = "Adagrad, Adam, AdamW, RMSprop or SGD"


def _rules(rename: Rename) -> list[tuple[str, str, dict[str, str]]]:
    return [("", "", dict(rule)) if isinstance(rule, Mapping) else (*rule, {}) for rule in rename]


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except dcp.CheckpointException as error:  # of DCP: the errors of all ranks
        raise error.failures[0][0] from None


# --- export ------------------------------------------------------------------------------------


class _Contents:
    """A checkpoint as the state dicts that PyTorch's tools write, with stand-ins for its tensors."""

    def __init__(self, path: Path, with_state: bool, rename: Rename, dtype: torch.dtype | None, progress: Progress):
        self._tensors = _C.CheckpointTensors(path, with_state, _rules(rename), dtype, progress)
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
        raise NotImplementedError("[export_checkpoint] optimizer state can be exported for Adagrad, Adam, AdamW, RMSprop and "
                                  f"SGD; the checkpoint has that of {kind}")
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


def _write_dcp(state: dict[str, Any], contents: _Contents, draft: Path) -> None:
    writer = dcp.FileSystemWriter(draft, per_thread_copy_ahead=0)  # each tensor is written before the next is read
    with _plain_errors():
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
    with open(draft, "rb") as file:
        os.fsync(file.fileno())


def export_checkpoint(path: str | os.PathLike, to: str | os.PathLike, *, format: str = "", dtype: torch.dtype | None = None,
                      rename: Rename = (), model_key: str = "", optimizer_key: str = "", progress: Progress = None) -> None:
    """Writes the model whole into a file for `torch.load(weights_only=True)` (`format="torch"`, or a path that ends with
    `.pt`, `.pth` or `.bin`), or a directory for `torch.distributed.checkpoint.load` (`format="dcp"`, or another path).

    `dtype`: of the model's floating tensors; None: as stored. `rename`: rules, in their order: pairs of a regular expression
    and its replacement, in which `$1` is a group, or dicts of whole names. `model_key`, `optimizer_key`: the keys of the two
    state dicts. Without `optimizer_key`, there is no optimizer, and without both, the model's tensors are the dict;
    `model_key` is `model` beside an optimizer. The optimizer's is for `load_state_dict()`, of Adagrad, Adam, AdamW, RMSprop or
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
        os.replace(draft, to)
    except BaseException:
        shutil.rmtree(draft) if draft.is_dir() else draft.unlink(missing_ok=True)
        raise


# --- import ------------------------------------------------------------------------------------


class _Reader(dcp.FileSystemReader):
    read_metadata = functools.cache(dcp.FileSystemReader.read_metadata)  # once for many loads


def _open(source: Path) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    """Returns the state dict in a file or a directory, and a function that reads one of its tensors."""
    if not source.is_dir():
        return torch.load(source, map_location="cpu", mmap=True, weights_only=True), lambda value: value
    reader = _Reader(source)
    metadata = reader.read_metadata()
    flat = {name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            if isinstance(entry, TensorStorageMetadata) else None for name, entry in metadata.state_dict_metadata.items()}
    names = {id(value): name for name, value in flat.items() if value is not None}

    def load(state: dict[str, Any]) -> dict[str, Any]:
        with _plain_errors():
            dcp.load(state, storage_reader=reader, planner=dcp.DefaultLoadPlanner(False, False), no_dist=True)
        return state

    flat |= load({name: None for name, value in flat.items() if value is None})
    return (unflatten_state_dict(flat, metadata.planner_data or {name: (name,) for name in flat}),
            lambda value: load({names[id(value)]: torch.empty_like(value, device="cpu")})[names[id(value)]])


def _tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested dicts and lists, by names with dots."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors_in(item, f"{name}.{key}" if name else str(key))


def _tie_views(model: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Returns the names of each tensor, by the first. Equal views of one storage are one tensor."""
    names: dict[str, list[str]] = {}
    firsts: dict[Any, str] = {}
    for name, value in model.items():
        view = name if value.is_meta or not value.numel() else (
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


def _names_of(groups: list[dict[str, Any]], given: Sequence[str], model: Mapping[str, Any]) -> dict[Any, str]:
    """Returns the names of an optimizer's parameters by what it calls them. PyTorch's `state_dict()` numbers them in the order
    in which the optimizer was given them, which need not be the model's; DCP directories have their names."""
    numbers = [number for group in groups for number in group["params"]]
    names = numbers if all(isinstance(number, str) for number in numbers) else [
        name for group in groups for name in group.get("param_names", [])]
    if names and given:
        raise ValueError("it has the names of its optimizer's parameters: leave optimizer_params out")
    names = names or list(given)
    if numbers and not names:
        raise ValueError(
            "its optimizer numbers its parameters, and has no names of them: which number is which parameter can't be seen. "
            "Make the optimizer from named_parameters(), as PyTorch 2.6 and newer accept it, and save again; or pass "
            "optimizer_params (--optimizer-params), the names in the order in which the optimizer was given the parameters")
    if len(names) != len(numbers):
        raise ValueError(f"its optimizer has {len(numbers)} parameters and {len(names)} names")
    for name, uses in Counter(names).items():
        if name not in model or uses > 1:
            raise ValueError(f"its optimizer has the parameter '{name}'{' twice' if uses > 1 else ', which the model has not'}")
    return dict(zip(numbers, names))


def _numbers_in(value: Any) -> list[float]:
    return [float(item) for item in (value if isinstance(value, (tuple, list)) else [value])
            if isinstance(item, (bool, int, float)) or isinstance(item, torch.Tensor) and item.numel() == 1]


def _class_of(options: Mapping[str, list[float]]) -> str:
    kind = next((kind for kind, (needed, _) in _OPTIMIZERS.items() if all(name in options for name in needed)), None)
    if kind is None:
        raise ValueError(f"its optimizer must be {_KNOWN}; got one with the options {', '.join(options)}")
    if kind == "AdamW":  # has the options of Adam, and, since PyTorch 2.7, a flag
        if "decoupled_weight_decay" not in options:
            raise ValueError("its optimizer is Adam or AdamW, which PyTorch before 2.7 does not tell; give optimizer_class")
        return "AdamW" if options["decoupled_weight_decay"][0] else "Adam"
    return kind


def _stored_options(kind: str, options: Mapping[str, list[float]]) -> dict[str, float]:
    if any(options.get("maximize", [])):
        raise ValueError(f"its optimizer must not have 'maximize', which LibTorch's {kind} has not")
    stored: dict[str, float] = {}
    for name in _OPTIMIZERS[kind][0]:
        values, names = options.get(name, []), ("beta1", "beta2") if name == "betas" else (name,)
        if len(values) != len(names):
            raise ValueError(f"the option '{name}' of {kind} must be {len(names)} number(s); got {len(values)}")
        stored |= zip(names, values)
    return stored


def _import_optimizer(optimizer: Mapping[str, Any], model: Mapping[str, torch.Tensor], read: Callable, kind: str,
                      given: Sequence[str]) -> tuple[dict[str, Any], dict[tuple[str, str], torch.Tensor]]:
    """Returns the record of the optimizer, and its tensors by parameter and state."""
    groups = optimizer["param_groups"]
    if not groups:
        raise ValueError("its optimizer must have param groups")
    names = _names_of(groups, given, model)
    options = [{name: _numbers_in(value) for name, value in group.items() if not name.startswith("param")} for group in groups]
    kind = kind or _class_of(options[0])
    if kind not in _OPTIMIZERS:
        raise ValueError(f"optimizer_class must be {_KNOWN}; got '{kind}'")
    groups = [{"options": _stored_options(kind, own), "params": [names[number] for number in group["params"]]}
              for own, group in zip(options, groups)]
    counts: dict[str, dict[str, int]] = {}
    states = {}
    for number, state, value in ((number, *item) for number, values in optimizer["state"].items() for item in values.items()):
        if number not in names and number not in model:
            raise ValueError(f"its optimizer has state of '{number}', which the model has not")
        name = names.get(number, number)
        if state == "step":
            count = _numbers_in(read(value) if isinstance(value, torch.Tensor) else value)
            if len(count) != 1 or count[0] < 0 or count[0] % 1:
                raise ValueError(f"the step of '{name}' must be a count; got {count}")
            counts[name] = {"step": int(count[0])}
        elif isinstance(value, torch.Tensor):
            if state not in _OPTIMIZERS[kind][1]:
                raise ValueError(f"'{name}' has the state '{state}', which LibTorch's {kind} has not")
            if value.size() != model[name].size():
                raise ValueError(f"'{state}' of '{name}' must have its shape, {list(model[name].size())}; got {list(value.size())}"
                                 ". Is the optimizer that of another model, or were its parameters in another order?")
            states[name, state] = value
    steps = max((count["step"] for count in counts.values()), default=0)
    return {"kind": kind, "param_groups": groups, "counts": counts, "steps": steps}, states


def _import(source: Path, path: Path, rename: Rename, transpose: Sequence[str], model_key: str, optimizer_key: str, kind: str,
            given: Sequence[str], progress: Progress) -> None:
    if source.is_dir() and not (source / ".metadata").exists() or source.suffix in (".safetensors", ".json"):
        raise ValueError("it is neither a file of torch.save nor a directory of torch.distributed.checkpoint; "
                         "`tessera ckpt import` reads safetensors files and Hugging Face's directories")
    state, read = _open(source)
    if not isinstance(state, Mapping):
        raise ValueError("it must hold a dict of tensors")
    model_key = model_key or ("model" if optimizer_key else "")
    model = dict(_tensors_in(state.get(model_key) if model_key else state))
    if not model:
        where = f" under the key '{model_key}'" if model_key else ""
        raise ValueError(f"it has no tensors{where}")
    names = _tie_views(model)
    index: dict[str, Any] = {"format": "tessera checkpoint", "format_version": 2, "checksum_block_bytes": 1 << 20, "id": "",
                             "world_size": 1, "numbers": {}}
    states: dict[tuple[str, str], torch.Tensor] = {}
    if optimizer_key:
        if optimizer_key not in state:
            raise ValueError(f"it has no '{optimizer_key}'")
        optimizer = state[optimizer_key]
        optimizer = optimizer if "param_groups" in optimizer else _unflattened(optimizer, model)
        index["optimizer"], states = _import_optimizer(optimizer, model, read, kind, given)
        if source.is_dir():
            _tie_copies(model, read, names, [name for group in index["optimizer"]["param_groups"] for name in group["params"]])
    all_names = {name: same for same in names.values() for name in same}
    stored = [("tensor", "", same, model[first]) for first, same in names.items()]
    stored += [("state", name, all_names[param], value) for (param, name), value in states.items()]
    index["tensors"] = [
        {"kind": kind, "state": state, "names": same, "dtype": _NAMES.get(value.dtype, str(value.dtype)), "shape": value.size(),
         "strides": torch.empty(value.size(), device="meta").stride(), "chunks": []} for kind, state, same, value in stored]
    _C.import_tensors(json.dumps(index), lambda number: read(stored[number][3]), path, _rules(rename), list(transpose),
                      progress)


def import_checkpoint(source: str | os.PathLike, path: str | os.PathLike, *, rename: Rename = (), transpose: Sequence[str] = (),
                      model_key: str = "", optimizer_key: str = "", optimizer_class: str = "",
                      optimizer_params: Sequence[str] = (), progress: Progress = None) -> None:
    """Makes a checkpoint of a file of `torch.save`, or of a directory of `torch.distributed.checkpoint`, which
    `load_checkpoint()` then reads into a model with these names. Tensors that share memory in a file stay tied.

    `rename`: as for `export_checkpoint()`. `transpose`: regular expressions for whole new names of tensors to transpose.
    `model_key`: where the model is; empty: `model` beside an optimizer, else all tensors are imported, those of dicts in dicts
    with dots in their names. `optimizer_key`: where the state dict of an optimizer of `torch.optim` is; empty: none is
    imported. `optimizer_class`: Adagrad, Adam, AdamW, RMSprop or SGD; empty: told from its options. `optimizer_params`: the
    names of its parameters, in the order in which the optimizer was given them; only for a file that lacks them.

    Files are read with `weights_only=True`. PyTorch unpickles a directory's `.metadata`, which can run code: import only
    directories whose source you trust. Memory: one tensor of a directory; files are mapped.
    """
    if not optimizer_key and (optimizer_class or optimizer_params):
        raise ValueError("[import_checkpoint] optimizer_class and optimizer_params need optimizer_key")
    try:
        _import(Path(source), Path(path), rename, transpose, model_key, optimizer_key, optimizer_class, optimizer_params,
                progress)
    except OSError:
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
    load = verbs.add_parser("import", help="makes a checkpoint of a file of torch.save or a DCP directory")
    load.add_argument("source", metavar="FROM")
    load.add_argument("path", metavar="CKPT")
    load.add_argument("--transpose", metavar="PATTERN", action="append", default=[], help="whole names of tensors to transpose")
    load.add_argument("--optimizer-class", metavar="CLASS", default="", help=f"{_KNOWN} (default: told from its options)")
    load.add_argument("--optimizer-params", metavar="FILE", default=(), type=_in_json("a JSON list of names", list),
                      help="JSON: a list of the names of its parameters, in its order, for a file without them")
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
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    try:
        (export_checkpoint if verb == "export" else import_checkpoint)(**options, progress=None if quiet else _progress(verb))
    except (NotImplementedError, OSError, RuntimeError, ValueError) as error:
        print(f"python -m tessera.exchange {verb}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())

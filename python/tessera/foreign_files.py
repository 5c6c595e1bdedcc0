"""Files of other tools as state dicts. No code that a pickle names is run."""

from __future__ import annotations

import _compat_pickle
import contextlib
import dataclasses
import enum
import functools
import io
import json
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import _weights_only_unpickler as weights_only
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

Read = Callable[[torch.Tensor], torch.Tensor]

# Functions and classes of NumPy that make numbers, such as a learning rate; no arrays.
_NUMBERS = ("numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
# The names of a model and of an optimizer in a directory of the Trainer of transformers.
_SAFETENSORS, _PICKLED, _OPTIMIZER = "model.safetensors", "pytorch_model.bin", "optimizer.pt"


class LeftOut(dict):
    """An object of a class that a file names and that is not PyTorch's: of a dict its items, of others nothing."""

    def __new__(cls, *_, **__):
        return dict.__new__(cls)

    def __init__(self, *_, **__):
        super().__init__()

    def _ignore(self, *_):
        return self

    __setstate__ = __call__ = append = extend = add = _ignore


class _Unpickler(pickle.Unpickler):
    """Knows the functions and classes that `torch.load(weights_only=True)` knows, and the plain data of DCP's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (_compat_pickle.IMPORT_MAPPING.get(module, module), name))
        known = weights_only._get_allowed_globals() | weights_only._get_user_allowed_globals()
        full = f"{module}.{name}"
        if full in known:
            return known[full]
        if full in _NUMBERS:
            with contextlib.suppress(ImportError, AttributeError):
                return super().find_class(module, name)
        if module.startswith("torch.distributed.checkpoint.") and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)):
                return found
        return type(name, (LeftOut,), {"__module__": module})


class _Pickle:
    Unpickler = _Unpickler

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        return _Unpickler(file, **options).load()


def _load(file: Any, **options: Any) -> Any:
    return torch.load(file, map_location="cpu", weights_only=False, pickle_module=_Pickle, **options)


def load_file(path: Path) -> Any:
    """Returns what `torch.save` wrote, mapped where that can be."""
    return _load(path, mmap=zipfile.is_zipfile(path))  # PyTorch before 1.6 wrote other files


def within(source: Path, name: Any) -> Path:
    """Returns the path of a file or directory that one of the files in `source` names."""
    path = Path(str(name))
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"it names '{path}', which is not in it")
    return source / path


# --- directories of torch.distributed.checkpoint -----------------------------------------------


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    try:
        yield
    except dcp.CheckpointException as error:  # of DCP: the errors of all ranks
        raise error.failures[0][0] from None


class _Reader(dcp.FileSystemReader):
    @functools.cache  # once for many loads
    def read_metadata(self, *_: Any, **__: Any) -> Any:
        metadata = _Pickle.load(io.BytesIO((Path(self.path) / ".metadata").read_bytes()))
        if not isinstance(metadata, dcp.Metadata):
            raise ValueError(f"its .metadata must hold the metadata of DCP; got {type(metadata).__name__}")
        for name in {place.relative_path for place in metadata.storage_data.values()}:
            within(Path(self.path), name)
        metadata.storage_meta = dcp.metadata.StorageMeta(load_id=self.load_id)
        return metadata


class _Planner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = _load(value)


def _open_dcp(source: Path) -> tuple[Any, Read]:
    reader = _Reader(source)
    metadata = reader.read_metadata()
    flat = {name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            if isinstance(entry, TensorStorageMetadata) else None for name, entry in metadata.state_dict_metadata.items()}
    names = {id(value): name for name, value in flat.items() if value is not None}

    def load(state: dict[str, Any]) -> dict[str, Any]:
        with plain_errors():
            dcp.load(state, storage_reader=reader, planner=_Planner(False, False), no_dist=True)
        return state

    flat |= load({name: None for name, value in flat.items() if value is None})
    return (unflatten_state_dict(flat, metadata.planner_data or {name: (name,) for name in flat}),
            lambda value: load({names[id(value)]: torch.empty_like(value, device="cpu")})[names[id(value)]])


# --- directories of the Trainer of transformers ------------------------------------------------


def _open_safetensors(files: list[Path]) -> tuple[dict[str, torch.Tensor], Read]:
    try:
        from safetensors import safe_open
    except ImportError:
        raise ValueError("its model is in safetensors files, which need the package safetensors: pip install safetensors; "
                         "without the optimizer, `tessera ckpt import` reads them") from None
    model, places = {}, {}
    for path in files:
        file = safe_open(path, framework="pt")
        for name in file.keys():
            part = file.get_slice(name)
            dtype = (part[:0] if part.get_shape() else file.get_tensor(name)).dtype
            model[name] = value = torch.empty(part.get_shape(), dtype=dtype, device="meta")
            places[id(value)] = file, name
    return model, lambda value: places[id(value)][0].get_tensor(places[id(value)][1])


def _open_pickled(files: list[Path]) -> tuple[dict[str, torch.Tensor], Read]:
    return {name: value for path in files for name, value in load_file(path).items()}, lambda value: value


def _open_trainer(source: Path) -> tuple[Any, Read] | None:
    for name, read in ((_SAFETENSORS, _open_safetensors), (_PICKLED, _open_pickled)):
        index = source / f"{name}.index.json"
        files = [source / name]
        if not files[0].exists() and index.exists():
            files = [within(source, file) for file in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        if not files[0].exists():
            continue
        model, value_of = read(files)
        state: dict[str, Any] = {"model": model}
        if (source / _OPTIMIZER).exists():
            state["optimizer"] = load_file(source / _OPTIMIZER)
        return state, lambda value: value_of(value) if value.is_meta else value
    return None


def open_files(source: Path) -> tuple[Any, Read]:
    """Returns the state dict in a file or a directory, and a function that reads one of its tensors."""
    if source.is_dir() and (source / ".metadata").exists():
        return _open_dcp(source)
    if source.is_dir():
        from .deepspeed_files import open_deepspeed

        if found := open_deepspeed(source) or _open_trainer(source):
            return found
    if source.is_dir() or source.suffix in (".safetensors", ".json"):
        raise ValueError("it is neither a file of torch.save nor a directory of torch.distributed.checkpoint, DeepSpeed or a Trainer; "
                         "`tessera ckpt import` reads safetensors files and Hugging Face's directories")
    return load_file(source), lambda value: value


def _item(state: Any, key: str) -> Any:
    if isinstance(state, Mapping):
        return state.get(key)
    return state[int(key)] if isinstance(state, (list, tuple)) and key.isdigit() and int(key) < len(state) else None


def value_at(state: Any, key: str) -> Any:
    """Returns the value under a key, or under keys and numbers of lists with dots between them; None if there is none."""
    found = _item(state, key)
    for at in (at for at, letter in enumerate(key) if letter == "."):
        if found is None and (within := _item(state, key[:at])) is not None:
            found = value_at(within, key[at + 1:])
    return found

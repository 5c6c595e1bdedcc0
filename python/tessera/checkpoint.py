"""Checkpoints that load at any number of ranks."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from . import _C
from .grad_scaler import GradScaler
from .optimizer import ShardedOptimizer
from .sharded_module import ShardedModule

_SCHEDULERS = "python.schedulers"


@dataclasses.dataclass
class LoadedCheckpoint:
    """Values from a checkpoint for the caller."""

    numbers: dict[str, float]
    texts: dict[str, str]
    rank_state: dict[str, torch.Tensor]
    missing: list[str]
    unexpected: list[str]


def _as_text(schedulers: Sequence) -> torch.Tensor:
    try:
        text = json.dumps([scheduler.state_dict() for scheduler in schedulers])
    except TypeError as error:
        raise TypeError(f"[save_checkpoint] the state of a scheduler must consist of numbers, text and lists: {error}") from None
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _state(rank_state: Mapping[str, torch.Tensor] | None, schedulers: Sequence) -> dict[str, torch.Tensor]:
    state = dict(rank_state or {})
    if schedulers:
        state[_SCHEDULERS] = _as_text(schedulers)
    return state


def _inner(optimizer: ShardedOptimizer | None):
    return None if optimizer is None else optimizer._sharded


def _scaler(scaler: GradScaler | None):
    return None if scaler is None else scaler._scaler


def _keep(last: int, best: str | None, best_is_highest: bool):
    return last, None if best is None else (best, best_is_highest)


def save_checkpoint(path: str | os.PathLike, model: ShardedModule, optimizer: ShardedOptimizer | None = None, *,
                    numbers: Mapping[str, float] | None = None, texts: Mapping[str, str] | None = None,
                    rank_state: Mapping[str, torch.Tensor] | None = None,
                    scaler: GradScaler | None = None, schedulers: Sequence = (), whole_parameters: bool = False,
                    random_state: bool = True, keep_last: int = 0, keep_best: str | None = None,
                    best_is_highest: bool = False) -> None:
    """Writes the model, its buffers and the optimizer's state and options into the directory `path`.

    Collective, with the same arguments on all ranks. Each rank writes its own shards as safetensors files; `path` holds
    the old checkpoint or the new one, never a part. `numbers` and `texts`: the caller's own, equal on all ranks.
    `rank_state`: tensors of this rank alone. `whole_parameters`: stores each parameter in one piece. `keep_last`: of the
    series `step-100`, `step-200`..., so many stay; 0: all. `keep_best`: the name of one of `numbers`: the checkpoint with
    its lowest value, or the highest, stays, too.
    """
    _C.save_checkpoint(Path(path), model._model, _inner(optimizer), dict(numbers or {}), dict(texts or {}),
                       _state(rank_state, schedulers), _scaler(scaler), whole_parameters, random_state,
                       _keep(keep_last, keep_best, best_is_highest))


def load_checkpoint(path: str | os.PathLike, model: ShardedModule, optimizer: ShardedOptimizer | None = None, *,
                    scaler: GradScaler | None = None, schedulers: Sequence = (), random_state: bool = True,
                    allow_missing: bool = False, allow_unexpected: bool = False) -> LoadedCheckpoint:
    """Reads a checkpoint, at any number of ranks, level and partition. Collective. Checkpoints of the C++ library and of
    this package are the same."""
    numbers, texts, rank_state, missing, unexpected = _C.load_checkpoint(
        Path(path), model._model, _inner(optimizer), _scaler(scaler), random_state, allow_missing, allow_unexpected)
    text = rank_state.pop(_SCHEDULERS, None)
    if schedulers and text is not None:
        states = json.loads(bytes(text.tolist()).decode())
        if len(states) != len(schedulers):
            raise ValueError(f"[load_checkpoint] expected {len(schedulers)} schedulers; the checkpoint has {len(states)}")
        for scheduler, state in zip(schedulers, states):
            scheduler.load_state_dict(state)
    elif schedulers:
        raise ValueError("[load_checkpoint] the checkpoint has no schedulers of this rank")
    return LoadedCheckpoint(numbers, texts, rank_state, missing, unexpected)


def latest_checkpoint(directory: str | os.PathLike) -> Path | None:
    """Returns the checkpoint in `directory` whose name ends with the highest number; None if there is none."""
    return _C.latest_checkpoint(Path(directory))


def best_checkpoint(directory: str | os.PathLike, number: str, *, highest: bool = False) -> Path | None:
    """Returns the checkpoint in `directory` with the lowest value, or the highest, of a number that it was saved with."""
    return _C.best_checkpoint(Path(directory), number, highest)


def rules_of(rename: Sequence[tuple[str, str] | Mapping[str, str]]) -> list[tuple[str, str, dict[str, str]]]:
    return [("", "", dict(rule)) if isinstance(rule, Mapping) else (*rule, {}) for rule in rename]


def load_safetensors(path: str | os.PathLike, model: ShardedModule, *,
                     rename: Sequence[tuple[str, str] | Mapping[str, str]] = (), transpose: Sequence[str] = (),
                     allow_missing: bool = False, allow_unexpected: bool = False) -> tuple[list[str], list[str]]:
    """Reads parameters and buffers from a safetensors or `torch.save` file, or a directory of Hugging Face, each rank the bytes
    of its shards. Collective. `rename`: pairs of a regular expression and its replacement, in which `$1` is a group, or dicts of
    whole names; `transpose`: regular expressions for whole new names. Returns the names that the files lack, and those that
    the model lacks, which must be allowed."""
    return _C.load_safetensors(Path(path), model._model, rules_of(rename), list(transpose), allow_missing, allow_unexpected)


class AsyncCheckpointer:
    """Saves checkpoints in the background while training goes on. A save blocks while this rank's data is copied;
    errors of writing are raised by the next `save()` or `wait()`, on all ranks.

    `when_busy`: "wait" for an unfinished save, or "refuse". `bytes_per_second`: limit of writing; 0: none.
    """

    def __init__(self, *, when_busy: str = "wait", bytes_per_second: float = 0.0):
        if when_busy not in ("wait", "refuse"):
            raise ValueError(f"[AsyncCheckpointer] when_busy must be 'wait' or 'refuse'; got {when_busy!r}")
        self._checkpointer = _C.AsyncCheckpointer(when_busy == "refuse", bytes_per_second)

    def save(self, path: str | os.PathLike, model: ShardedModule, optimizer: ShardedOptimizer | None = None, *,
             numbers: Mapping[str, float] | None = None, texts: Mapping[str, str] | None = None,
             rank_state: Mapping[str, torch.Tensor] | None = None,
             scaler: GradScaler | None = None, schedulers: Sequence = (), random_state: bool = True,
             keep_last: int = 0, keep_best: str | None = None, best_is_highest: bool = False) -> None:
        """See `save_checkpoint()`. Collective."""
        self._checkpointer.save(Path(path), model._model, _inner(optimizer), dict(numbers or {}), dict(texts or {}),
                                _state(rank_state, schedulers), _scaler(scaler), random_state,
                                _keep(keep_last, keep_best, best_is_highest))

    def wait(self) -> None:
        """Waits until the last checkpoint is in its place. Collective."""
        self._checkpointer.wait()

    @property
    def is_busy(self) -> bool:
        return self._checkpointer.is_busy()


def _flattened(state_dict: Mapping, prefix: str = "") -> dict[str, torch.Tensor]:
    flat: dict[str, torch.Tensor] = {}
    for name, value in state_dict.items():
        items = _flattened(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
        if double := flat.keys() & items.keys():
            raise ValueError(f"the names {sorted(double)} are there twice, once in a nested dict")
        flat.update(items)
    return flat


def save_state_dict(state_dict: Mapping, path: str | os.PathLike) -> None:
    """Saves tensors by name, each rank its parts, in the directory `path`. Nested dicts are flattened with dots. Collective."""
    _C.save_state_dict(Path(path), _flattened(state_dict))


def load_state_dict(state_dict: Mapping, path: str | os.PathLike) -> list[str]:
    """Loads values into the tensors of `state_dict`, with any placements. Collective. Tensors that the
    files lack keep their values; a warning lists their names, and they are returned."""
    return _C.load_state_dict(Path(path), _flattened(state_dict))

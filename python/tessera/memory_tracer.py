"""Where the memory goes."""

from __future__ import annotations

import os

from . import _C
from .sharded_module import ShardedModule


class MemoryTracer:
    """Samples the memory of a sharded model on this rank, at every event of its units, while it lives. `pss`: also reads
    the process's memory, which is slow. `steps`: past steps whose samples are kept; 0: all.
    """

    def __init__(self, model: ShardedModule, *, pss: bool = False, steps: int = 16):
        self._tracer = _C.MemoryTracer(model._model, pss, steps)

    def start_step(self) -> None:
        """Begins the next step. An optimizer's `step()` calls this when it ends."""
        self._tracer.start_step()

    @property
    def peak_model_bytes(self) -> int:
        return self._tracer.peak_model_bytes()

    @property
    def peak_other_bytes(self) -> int:
        """Peak of activations and all other tensors that the process has made since; 0 if they are not known."""
        return self._tracer.peak_other_bytes()

    def __len__(self) -> int:
        return self._tracer.samples()

    def write_chrome_trace(self, path: str | os.PathLike) -> None:
        self._tracer.write_chrome_trace(os.fspath(path))

    def write_merged_chrome_trace(self, path: str | os.PathLike) -> None:
        """One file for all ranks, on rank 0. Collective."""
        self._tracer.write_merged_chrome_trace(os.fspath(path))

    def write_svg(self, path: str | os.PathLike) -> None:
        self._tracer.write_svg(os.fspath(path))

    def dump_memory_stats(self, path: str | os.PathLike) -> None:
        self._tracer.dump_memory_stats(os.fspath(path))

    def close(self) -> None:
        """Ends the sampling."""
        self._tracer = None

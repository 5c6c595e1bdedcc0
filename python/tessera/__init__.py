"""Trains models of PyTorch whose parameters, gradients and optimizer state are sharded over processes.

    import tessera

    tessera.init()
    sharded = tessera.fully_shard(model)                  # the module is changed in place
    optimizer = tessera.ShardedOptimizer(sharded, torch.optim.AdamW(model.parameters()))
    model(x).sum().backward()
    optimizer.step()

The engine is the C++ library Tessera. See docs/guide/python.md.
"""

import torch  # first: the process has one LibTorch

from . import _C
from .checkpoint import AsyncCheckpointer, latest_checkpoint, load_checkpoint, save_checkpoint
from .grad_scaler import GradScaler
from .memory_tracer import MemoryTracer
from .optimizer import ShardedOptimizer
from .sharded_module import ShardedModule, fully_shard
from .world import ProcessGroup, init, is_initialized, new_group, rank, shutdown, size, spawn

__version__ = _C.version

__all__ = [
    "AsyncCheckpointer", "GradScaler", "MemoryTracer", "ProcessGroup", "ShardedModule", "ShardedOptimizer",
    "fully_shard", "init", "is_initialized", "latest_checkpoint", "load_checkpoint", "new_group", "rank",
    "save_checkpoint", "shutdown", "size", "spawn", "use_page_heap",
]

use_page_heap = _C.use_page_heap

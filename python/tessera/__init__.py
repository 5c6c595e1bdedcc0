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
from .checkpoint import (AsyncCheckpointer, best_checkpoint, latest_checkpoint, load_checkpoint, load_state_dict, save_checkpoint,
                         save_state_dict)
from .cpu_adam import CPUAdam
from .deferred_init import DeferredInit, is_deferred, materialize
from .dist_optimizer import DistOptimizer
from .dist_tensor import (CommDebug, DeviceMesh, Partial, Placement, Replicate, Shard, StrictOperators, distribute,
                          distribute_, distribute_module, from_local, full_tensor, is_dist, mesh_of, placements_of,
                          redistribute, to_local, unwrap)
from .grad_scaler import GradScaler
from .memory_tracer import MemoryTracer
from .optimizer import ShardedOptimizer
from .plan import Plan, plan
from .sharded_module import ShardedModule, fully_shard
from .world import ProcessGroup, init, is_initialized, new_group, rank, shutdown, size, spawn

__version__ = _C.version

__all__ = [
    "AsyncCheckpointer", "CPUAdam", "CommDebug", "DeferredInit", "DeviceMesh", "DistOptimizer", "GradScaler",
    "MemoryTracer", "Partial", "Placement", "Plan", "ProcessGroup", "Replicate", "Shard", "ShardedModule", "ShardedOptimizer",
    "StrictOperators", "best_checkpoint", "distribute", "distribute_", "distribute_module", "from_local", "full_tensor", "fully_shard", "init",
    "is_deferred", "is_dist", "is_initialized", "latest_checkpoint", "load_checkpoint", "load_state_dict", "materialize",
    "mesh_of", "new_group", "placements_of", "plan", "rank", "redistribute", "save_checkpoint", "save_state_dict", "shutdown",
    "size", "spawn", "to_local", "unwrap", "use_page_heap",
]

use_page_heap = _C.use_page_heap

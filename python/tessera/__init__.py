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
from .checkpoint import (AsyncCheckpointer, best_checkpoint, latest_checkpoint, load_checkpoint, load_safetensors, load_state_dict,
                         save_checkpoint, save_state_dict)
from .compile import inductor
from .cpu_adam import CPUAdam
from .deferred_init import DeferredInit, is_deferred, materialize
from .dist_optimizer import DistOptimizer
from .dist_tensor import (CommDebug, DeviceMesh, Partial, Placement, Replicate, Shard, StrictOperators, distribute,
                          distribute_, distribute_module, from_local, full_tensor, is_dist, mesh_of, placements_of,
                          redistribute, to_local, unwrap)
from .grad_scaler import GradScaler
from .memory_tracer import MemoryTracer
from .muon import muon_cuts, muon_groups
from .optimizer import ShardedOptimizer
from .parallel import (ColwiseParallel, ContextParallel, PrepareModuleInput, PrepareModuleOutput, RowwiseParallel,
                       SequenceParallel, balance_sequence, dist_empty, dist_full, dist_ones, dist_rand, dist_randn, dist_zeros,
                       local_map, parallelize_module, register_rule, unbalance_sequence)
from .pipeline import Pipeline, check_schedule, cut_stages, pipeline_schedule, stage_meshes
from .plan import Plan, plan
from .sharded_module import ShardedModule, fully_shard
from .world import ProcessGroup, init, is_initialized, new_group, rank, shutdown, size, spawn

__version__ = _C.version

__all__ = [
    "AsyncCheckpointer", "CPUAdam", "ColwiseParallel", "CommDebug", "ContextParallel", "DeferredInit", "DeviceMesh",
    "DistOptimizer", "GradScaler", "MemoryTracer", "Partial", "Pipeline", "Placement", "Plan", "PrepareModuleInput",
    "PrepareModuleOutput", "ProcessGroup", "Replicate", "RowwiseParallel", "SequenceParallel", "Shard", "ShardedModule",
    "ShardedOptimizer", "StrictOperators", "balance_sequence", "best_checkpoint", "check_schedule", "cut_stages",
    "dist_empty", "dist_full", "dist_ones", "dist_rand", "dist_randn", "dist_zeros", "distribute", "distribute_",
    "distribute_module", "from_local", "full_tensor", "fully_shard", "inductor", "init", "is_deferred", "is_dist",
    "is_initialized", "latest_checkpoint", "load_checkpoint", "load_safetensors", "load_state_dict", "local_map", "materialize", "mesh_of",
    "muon_cuts", "muon_groups", "new_group", "parallelize_module",
    "pipeline_schedule", "placements_of", "plan", "rank", "redistribute", "register_rule", "save_checkpoint",
    "save_state_dict", "shutdown", "size", "spawn", "stage_meshes", "to_local", "unbalance_sequence", "unwrap",
    "use_page_heap",
]

use_page_heap = _C.use_page_heap

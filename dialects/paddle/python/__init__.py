"""Paddle's `group_sharded_parallel` and `shard_layer` on tensors of PyTorch, with their signatures. See
dialects/paddle/group_sharded.md and dialects/paddle/shard_layer.md.

    model, optimizer, scaler = tessera.paddle.group_sharded_parallel(model, optimizer, "p_g_os")

    mesh = tessera.paddle.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])
    layer = tessera.paddle.shard_layer(layer, mesh, shard_fn)
"""

from ..checkpoint import load_state_dict, save_state_dict
from ..dist_tensor import Partial, Replicate, Shard
from .group_sharded import (ClipGradByGlobalNorm, GroupShardedOptimizer, group_sharded_parallel, load_group_sharded_model,
                            save_group_sharded_model)
from .parallelize import (ColWiseParallel, PrepareLayerInput, PrepareLayerOutput, RowWiseParallel, SequenceParallelBegin,
                          SequenceParallelDisable, SequenceParallelEnable, SequenceParallelEnd, parallelize)
from .shard_layer import (ProcessMesh, ReduceType, ShardDataloader, ShardingStage1, ShardingStage2, ShardingStage3, ShardScaler,
                          dtensor_from_fn, dtensor_from_local, dtensor_from_local_list, dtensor_to_local, get_mesh,
                          local_tensor_list_from_dtensor, reshard, set_mesh, shard_dataloader, shard_layer, shard_optimizer,
                          shard_scaler, shard_tensor, unshard_dtensor)
from .stages import SplitPoint

__all__ = [
    "ClipGradByGlobalNorm", "ColWiseParallel", "GroupShardedOptimizer", "Partial", "PrepareLayerInput",
    "PrepareLayerOutput", "ProcessMesh", "ReduceType", "Replicate", "RowWiseParallel", "SequenceParallelBegin",
    "SequenceParallelDisable", "SequenceParallelEnable", "SequenceParallelEnd", "Shard", "ShardDataloader", "ShardScaler",
    "ShardingStage1", "ShardingStage2", "ShardingStage3", "SplitPoint", "dtensor_from_fn", "dtensor_from_local",
    "dtensor_from_local_list", "dtensor_to_local", "get_mesh", "group_sharded_parallel", "load_group_sharded_model",
    "load_state_dict", "local_tensor_list_from_dtensor", "parallelize", "reshard", "save_group_sharded_model",
    "save_state_dict", "set_mesh", "shard_dataloader", "shard_layer", "shard_optimizer", "shard_scaler", "shard_tensor",
    "unshard_dtensor",
]

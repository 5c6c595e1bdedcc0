"""Paddle's `group_sharded_parallel` on tensors of PyTorch, with its signature. See docs/dialects/group_sharded.md.

    model, optimizer, scaler = tessera.paddle.group_sharded_parallel(model, optimizer, "p_g_os")
"""

from .group_sharded import (ClipGradByGlobalNorm, GroupShardedOptimizer, group_sharded_parallel, load_group_sharded_model,
                            save_group_sharded_model)

__all__ = ["ClipGradByGlobalNorm", "GroupShardedOptimizer", "group_sharded_parallel", "load_group_sharded_model",
           "save_group_sharded_model"]

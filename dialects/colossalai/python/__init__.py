"""ColossalAI's ZeRO, with its signatures. See dialects/colossalai/README.md.

    strategy = TensorShardStrategy()
    with ZeroInitContext(target_device="cpu", shard_strategy=strategy, shard_param=True):
        net = Net()
    model = ShardedModelV2(net, strategy)
    optimizer = ShardedOptimizerV2(model, HybridAdam(model.parameters(), lr=1e-3))
    optimizer.backward(criterion(model(x), y))
    optimizer.step()
"""

from ..cpu_adam import CPUAdam, HybridAdam
from .shard_strategy import BaseShardStrategy, BucketTensorShardStrategy, TensorShardStrategy
from .sharded_model import ShardedModelV2, col_model_deepcopy
from .sharded_optimizer import ShardedOptimizerV2
from .zero_init import ZeroInitContext, no_shard_zero_context, no_shard_zero_decrator

__all__ = [
    "BaseShardStrategy", "BucketTensorShardStrategy", "CPUAdam", "HybridAdam", "ShardedModelV2", "ShardedOptimizerV2",
    "TensorShardStrategy", "ZeroInitContext", "col_model_deepcopy", "no_shard_zero_context", "no_shard_zero_decrator",
]

"""FairScale's sharded data parallel training, with its signatures. See dialects/fairscale/README.md.

    optimizer = tessera.fairscale.OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-3)
    model = tessera.fairscale.ShardedDataParallel(model, optimizer)
    model(x).sum().backward()
    optimizer.step()
"""

from .grad_scaler import ShardedGradScaler
from .oss import OSS
from .sharded_ddp import ShardedDataParallel

__all__ = ["OSS", "ShardedDataParallel", "ShardedGradScaler"]

"""Lightning's `Trainer(strategy="tessera")`, once this module is imported."""

from __future__ import annotations

import contextlib
from datetime import timedelta

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from .optimizer import ShardedOptimizer
from .sharded_module import ShardedModule, fully_shard


class TesseraStrategy(DDPStrategy):
    """Shards a LightningModule at the beginning of `fit()`, and its optimizers; at the end, the module is whole again on all
    ranks.

    `plan`: the arguments of `fully_shard()`. Clipping, accumulation, checkpoints and precision are Lightning's own. Buffers
    are each rank's own. `sync_batchnorm` needs an accelerator, as `torch.nn.SyncBatchNorm` does.
    """

    def __init__(self, accelerator=None, parallel_devices=None, cluster_environment=None, checkpoint_io=None,
                 precision_plugin=None, process_group_backend: str | None = None, timeout: timedelta = timedelta(minutes=30),
                 **plan):
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin,
                         process_group_backend=process_group_backend, timeout=timeout)
        self._plan = plan

    def setup(self, trainer) -> None:
        if self._layer_sync and self.root_device.type == "cpu" and trainer.state.fn == TrainerFn.FITTING:
            raise ValueError("[TesseraStrategy] sync_batchnorm=True needs an accelerator, as torch.nn.SyncBatchNorm has no "
                             "operators for the CPU; leave it out")
        super().setup(trainer)

    def configure_ddp(self) -> None:
        self.model = fully_shard(self.model, **self._plan)

    def setup_optimizers(self, trainer) -> None:
        super().setup_optimizers(trainer)
        self.optimizers = [ShardedOptimizer(self.model, optimizer, fused=False) for optimizer in self.optimizers]

    def block_backward_sync(self):
        return self.model.no_sync() if isinstance(self.model, ShardedModule) else contextlib.nullcontext()

    def load_model_state_dict(self, checkpoint, strict: bool = True) -> None:
        self.model.load_state_dict(checkpoint["state_dict"], strict=strict)

    def teardown(self) -> None:
        model, self.model = self.model, self.lightning_module
        # After an exception the other ranks may not be here.
        if isinstance(model, ShardedModule) and model.trainer.state.status != TrainerStatus.INTERRUPTED:
            self.optimizers = [optimizer.unwrap() for optimizer in self.optimizers]
            model.unwrap()
        super().teardown()


StrategyRegistry.register("tessera", TesseraStrategy, description="Shards parameters, gradients and optimizer state")

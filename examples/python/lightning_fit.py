"""Trains a LightningModule, sharded by the strategy "tessera"; then resumes from a checkpoint.

    torchrun --nproc-per-node 2 examples/python/lightning_fit.py runs/lightning

With `--strategy ddp` or `--strategy auto` (one process) the module is not sharded, with the same losses.
"""

import argparse
import json
import os

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tessera.lightning  # noqa: F401  registers the strategy


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 65), nn.GELU(), nn.Linear(65, 1))
        self.losses = []

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.log("validation", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def make_loader(count, seed):
    inputs = torch.randn(count, 12, generator=torch.Generator().manual_seed(seed))
    data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    return DataLoader(data, batch_size=8 // int(os.environ.get("WORLD_SIZE", 1)))


def fit(given, epochs, **options):
    lightning.seed_everything(0, verbose=False)
    module = Regression()
    checkpoints = ModelCheckpoint(given.folder, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 1)), strategy=given.strategy, precision=given.precision,
        max_epochs=epochs, accumulate_grad_batches=2, gradient_clip_val=1.0, callbacks=[checkpoints], logger=False,
        enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(module, make_loader(64, 1), make_loader(16, 2), **options)
    return module, trainer


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="for checkpoints")
    parser.add_argument("--strategy", default="tessera")
    parser.add_argument("--precision", default="32-true")
    given = parser.parse_args()
    module, trainer = fit(given, 3)
    resumed, _ = fit(given, 3, ckpt_path=f"{given.folder}/epoch=1.ckpt")
    for name, value in module.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    if trainer.is_global_zero:
        print(json.dumps({"losses": module.losses, "resumed": resumed.losses,
                          "validation": trainer.callback_metrics["validation"].item()}))


if __name__ == "__main__":
    main()

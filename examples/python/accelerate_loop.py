"""Trains a sharded model in a loop of accelerate, saves its state, and goes on from there.

    torchrun --nproc-per-node 2 examples/python/accelerate_loop.py runs/state

With `--plain` the model is not sharded: accelerate wraps it in DDP, or trains it in one process, with the same losses.
"""

import argparse
import json

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tessera


def make_data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 12, generator=generator)
    return TensorDataset(inputs, inputs.square().sum(1, keepdim=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="for the saved state")
    parser.add_argument("--plain", action="store_true", help="don't shard")
    parser.add_argument("--level", default="p_g_os")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    given = parser.parse_args()

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if given.bf16 else "no", gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 65), nn.GELU(), nn.Dropout(0.1), nn.Linear(65, 1))
    if not given.plain:
        model = tessera.fully_shard(model, level=given.level)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    if not given.plain:
        optimizer = tessera.ShardedOptimizer(model, optimizer, fused=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    loader = DataLoader(make_data(), batch_size=8 // accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    def epoch():
        losses = []
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        return losses

    losses = epoch()
    accelerator.save_state(given.folder)
    after = epoch()
    accelerator.load_state(given.folder)
    resumed = epoch()
    assert resumed == after, (resumed, after)
    if accelerator.is_main_process:
        print(json.dumps({"losses": losses + after, "resumed": resumed}))
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Ways to train a model on ranks. Each has `step(inputs, targets)`, which returns the loss, and `kept_bytes()`."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import tessera


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def _nbytes(tensor: torch.Tensor) -> int:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.numel() * tensor.element_size()


class _System:
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, inputs, targets) -> float:
        self.optimizer.zero_grad()
        loss = self.model(inputs, targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def kept_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state that this rank keeps between steps."""
        params = list(self.model.parameters())
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        return sum(map(_nbytes, [*params, *(param.grad for param in params if param.grad is not None), *state]))


class Tessera(_System):
    def __init__(self, model: nn.Module, level: str):
        self.model = tessera.fully_shard(model, level=level)
        self.optimizer = tessera.ShardedOptimizer(self.model, _adamw(model))

    def kept_bytes(self) -> int:
        memory = self.optimizer.memory()
        return sum(memory[kind] for kind in ("parameters", "gradients", "optimizer_state", "master_weights"))


class Ddp(_System):
    def __init__(self, model: nn.Module, level: str):
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = _adamw(model)


class Fsdp2(_System):
    def __init__(self, model: nn.Module, level: str):
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        # Parameters that are not resharded after forward are freed after backward.
        options = {"mesh": mesh, "reshard_after_forward": level == "p_g_os"}
        for block in model.blocks:
            fully_shard(block, **options)
        self.model = fully_shard(model, **options)
        self.optimizer = _adamw(model)


class FairScale(_System):
    """`ShardedDataParallel` with `OSS`: optimizer state and the work on gradients are divided, parameters are not."""

    def __init__(self, model: nn.Module, level: str):
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim import OSS

        self.optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-3, fused=True)
        self.model = ShardedDataParallel(model, self.optimizer)

    def kept_bytes(self) -> int:
        params = list(self.model.parameters())
        state = [value for values in self.optimizer.optim.state.values() for value in values.values()]
        return sum(map(_nbytes, [*params, *(param.grad for param in params if param.grad is not None), *state]))


class DeepSpeed(_System):
    """ZeRO of the stage that `level` is, with PyTorch's optimizer."""

    def __init__(self, model: nn.Module, level: str):
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": ("none", "os", "os_g", "p_g_os").index(level)},
            "zero_allow_untested_optimizer": True,
        }
        self.model, *_ = deepspeed.initialize(model=model, optimizer=_adamw(model), config=config)

    def step(self, inputs, targets) -> float:
        loss = self.model(inputs, targets)
        self.model.backward(loss)
        self.model.step()
        return loss.item()

    def kept_bytes(self) -> int:
        inner = self.model.optimizer.optimizer
        tensors = [param for group in inner.param_groups for param in group["params"]]
        tensors += [value for values in inner.state.values() for value in values.values() if torch.is_tensor(value)]
        tensors += [getattr(param, "ds_tensor", param) for param in self.model.module.parameters()]
        return sum(map(_nbytes, tensors))


SYSTEMS = {"tessera": Tessera, "ddp": Ddp, "fsdp2": Fsdp2, "fairscale": FairScale, "deepspeed": DeepSpeed}

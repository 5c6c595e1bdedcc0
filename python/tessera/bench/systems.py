"""Ways to train a model on ranks. Each has `step(inputs, targets)`, which returns the loss, and `kept_bytes()`."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

import tessera


def _adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


_NOT_MUON = ("tok.*", "pos.*", "head.*")  # matrices that AdamW steps


def _optimizers(model: nn.Module, optimizer: str, muon=torch.optim.Muon) -> list:
    if optimizer == "adamw":
        return [_adamw(model.parameters())]
    matrices, others = tessera.muon_groups(model, _NOT_MUON)
    return [muon(matrices, lr=1e-3), *([_adamw(others)] if others else [])]


class _GatheredMuon:
    """`torch.optim.Muon`, which takes no DTensors, on whole matrices: each rank gathers a parameter and its gradient, steps
    it, and keeps its own rows. Momentum is whole on each rank."""

    def __init__(self, params, lr: float):
        self.params = list(params)
        self.inner = [torch.optim.Muon([nn.Parameter(torch.empty(param.shape))], lr=lr) for param in self.params]

    @torch.no_grad()
    def step(self) -> None:
        for param, inner in zip(self.params, self.inner):
            (whole,) = inner.param_groups[0]["params"]
            whole.data, whole.grad = param.full_tensor(), param.grad.full_tensor()
            inner.step()
            stepped = DTensor.from_local(whole.data, param.device_mesh, [Replicate()], run_check=False)
            param.to_local().copy_(stepped.redistribute(placements=param.placements).to_local())
            whole.data, whole.grad = torch.empty(0), None

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    @property
    def state(self) -> dict:
        return {param: values for inner in self.inner for param, values in inner.state.items()}


def _nbytes(tensor: torch.Tensor) -> int:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.numel() * tensor.element_size()


class _System:
    model: nn.Module
    optimizers: list  # of parts of the parameters
    optimizer_seconds = 0.0  # in all steps so far; where gradients are still on their way, with the wait for them

    def step(self, inputs, targets) -> float:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.model(inputs, targets)
        loss.backward()
        start = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.step()
        self.optimizer_seconds += time.perf_counter() - start
        return loss.item()

    def kept_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state that this rank keeps between steps."""
        params = list(self.model.parameters())
        state = [value for optimizer in self.optimizers for values in optimizer.state.values() for value in values.values()
                 if torch.is_tensor(value)]
        return sum(map(_nbytes, [*params, *(param.grad for param in params if param.grad is not None), *state]))


class Tessera(_System):
    def __init__(self, model: nn.Module, level: str, optimizer: str = "adamw"):
        cuts = tessera.muon_cuts(model, _NOT_MUON) if optimizer == "muon" else []
        self.model = tessera.fully_shard(model, level=level, cuts=cuts)
        self.optimizers = [tessera.ShardedOptimizer(self.model, inner) for inner in _optimizers(model, optimizer)]

    def kept_bytes(self) -> int:
        memory = self.model.memory()
        state = sum(optimizer.memory()["optimizer_state"] for optimizer in self.optimizers)
        return state + sum(memory[kind] for kind in ("parameters", "gradients", "master_weights"))


class Ddp(_System):
    def __init__(self, model: nn.Module, level: str, optimizer: str = "adamw"):
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizers = _optimizers(model, optimizer)


class Fsdp2(_System):
    def __init__(self, model: nn.Module, level: str, optimizer: str = "adamw"):
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        # Parameters that are not resharded after forward are freed after backward.
        options = {"mesh": mesh, "reshard_after_forward": level == "p_g_os"}
        for block in model.blocks:
            fully_shard(block, **options)
        self.model = fully_shard(model, **options)
        self.optimizers = _optimizers(model, optimizer, muon=_GatheredMuon)


class FairScale(_System):
    """`ShardedDataParallel` with `OSS`: optimizer state and the work on gradients are divided, parameters are not."""

    def __init__(self, model: nn.Module, level: str):
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim import OSS

        self.optimizers = [OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-3, fused=True)]
        self.model = ShardedDataParallel(model, self.optimizers[0])

    def kept_bytes(self) -> int:
        params = list(self.model.parameters())
        state = [value for values in self.optimizers[0].optim.state.values() for value in values.values()]
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
        self.model, *_ = deepspeed.initialize(model=model, optimizer=_adamw(model.parameters()), config=config)

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


def make_system(name: str, model: nn.Module, level: str, optimizer: str) -> _System:
    return SYSTEMS[name](model, level, *([optimizer] if optimizer != "adamw" else []))

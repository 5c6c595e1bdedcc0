"""`ShardedModelV2`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from .. import _C, dcp
from ..sharded_module import ShardedModule, named_tensors
from ..world import resolve_group
from .shard_strategy import BaseShardStrategy, native


class ShardedModelV2(ShardedModule):
    """A model, built in a `ZeroInitContext`, whose parameters, gradients and optimizer state are sharded.

    Arguments are ColossalAI's. `reduce_scatter_bucket_size_mb`: gradients are reduced in buckets of about this many MiB; 0:
    unit by unit. `offload_config={"device": "cpu"}` is the same as `tensor_placement_policy="cpu"`: master weights and
    optimizer state are in host memory. `"auto"` keeps as many units unsharded as fit into `memory_budget` bytes.
    `gradient_predivide_factor`: None: a power of two near the square root of the number of ranks. `reuse_fp16_shard`: keeps
    no shard in `param_dtype` besides the one that the optimizer updates.

    `bf16`: states that the context has it, too.

    Not in ColossalAI: `memory_budget`; `sync_buffers`, which takes rank 0's buffers before every forward.

    Collective. Raises `ValueError` on every rank, and changes nothing, for a model that was built elsewhere, is sharded
    already, or has a module with sharded and unsharded parameters of its own.
    """

    _saves_masters = staticmethod(dcp.is_asking)  # else those are in the optimizer's

    def __init__(self, module: nn.Module, shard_strategy: BaseShardStrategy, process_group=None,
                 reduce_scatter_process_group=None, reduce_scatter_bucket_size_mb: float = 25,
                 fp32_reduce_scatter: bool = False, offload_config: Mapping[str, str] | None = None,
                 gradient_predivide_factor: float | None = 1.0, use_memory_tracer: bool = False,
                 reuse_fp16_shard: bool = False, *, tensor_placement_policy: str = "cuda",
                 memory_budget: int | None = None, sync_buffers: bool = False, bf16: bool = False):
        strategy = native(shard_strategy, "ShardedModelV2")
        made = [attributes for param in module.parameters() if (attributes := getattr(param, "colo_attr", None))]
        if bf16 and any(it.dtype != torch.bfloat16 for it in made):
            raise ValueError("[ShardedModelV2] bf16 needs a model that was built in a ZeroInitContext with bf16=True")
        group = process_group if process_group is not None else next(
            (it.dp_process_group for it in made if it.dp_process_group is not None), None)
        group = resolve_group(group)
        reduce_group = None if reduce_scatter_process_group is None else resolve_group(reduce_scatter_process_group)
        options = _C.ShardedModelV2Options(
            group, reduce_group, reduce_scatter_bucket_size_mb, fp32_reduce_scatter, dict(offload_config or {}),
            gradient_predivide_factor, use_memory_tracer, reuse_fp16_shard, tensor_placement_policy, memory_budget,
            sync_buffers)
        parameters, buffers = named_tensors(module)
        model = _C.ShardedModelV2(parameters, buffers, strategy, options)
        super().__init__(module, model.sharded(), {"group": group, "param_dtype": made[0].dtype if made else None})
        self._model_v2 = model
        self.shard_strategy = shard_strategy
        self.group = group
        for attributes in made:
            attributes.model = self

    def backward(self, loss: torch.Tensor) -> None:
        """Runs backward; reduces the gradients and adds them to those that are there. Collective."""
        self._model_v2.backward(loss)

    @property
    def overflow_counter(self) -> int:
        """The number of parameters whose reduced gradient is not finite on this rank. All ranks must read it."""
        parts = map(self.local_grad, self.parameters())
        return sum(not part.isfinite().all() for part in parts if part is not None)

    def backward_by_grad(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        """The same, starting from the gradient of `tensor`, as between the stages of a pipeline. Collective."""
        self._model_v2.backward_by_grad(tensor, grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._model_v2.zero_grad(set_to_none)

    def state_dict(self, *args, **kwargs):
        """Whole tensors in host memory, as of the module converted to the context's dtype; master weights if a function of
        `torch.distributed.checkpoint` calls this. Collective."""
        state = super().state_dict(*args, **kwargs)
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                state[name] = value.cpu()
        return state

    def dump_memory_stats(self, filename: str = "dump_mem_stats.log") -> None:
        """With `use_memory_tracer`: writes the memory of rank 0 at each event of the last steps to `filename`, a picture to
        `filename.svg`, and a trace for Chrome's viewer to `filename.json`. Not collective."""
        self._model_v2.dump_memory_stats(filename)

    def unwrap(self) -> nn.Module:
        """See `ShardedModule.unwrap()`; parameters have the context's dtype."""
        for param in self.module.parameters():
            if hasattr(param, "colo_attr"):
                del param.colo_attr
        self._model_v2.unwrap()
        return self._give_back()

    # For a ModuleList.

    def __getitem__(self, index):
        return self.module[index]

    def __len__(self) -> int:
        return len(self.module)

    def __iter__(self):
        return iter(self.module)

    def __bool__(self) -> bool:
        return True


def col_model_deepcopy(sharded_model: ShardedModelV2, other_model: nn.Module) -> None:
    """Copies the values of a sharded model's parameters to an ordinary model of the same structure. Collective."""
    for own, other in zip(sharded_model.parameters(), other_model.parameters(), strict=True):
        with torch.no_grad():
            other.data = own.detach().to(device=other.device, copy=True)

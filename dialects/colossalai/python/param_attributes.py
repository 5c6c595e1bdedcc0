"""`colo_attr`: ColossalAI's attribute of parameters."""

from __future__ import annotations

import weakref

import torch


class ColoAttributes:
    """What a parameter made in a `ZeroInitContext` is, as ColossalAI's attribute `colo_attr` shows it. Payloads are made
    when they are read, as copies; reading those of a wrapped model is collective."""

    belongs_to_one_parameter = True  # copies of the parameter have none

    def __init__(self, parameter: torch.Tensor, *, is_sharded: bool, is_replicated: bool, dtype: torch.dtype,
                 device: torch.device, group):
        self._parameter = weakref.ref(parameter)
        self.param_is_sharded = is_sharded
        self.is_replicated = is_replicated
        self.dtype = dtype
        self.device = device
        self.dp_process_group = group  # None: that of the model
        self.model = None  # once it is wrapped

    @property
    def sharded_data_tensor(self) -> "ShardedData":
        return ShardedData(self)

    @property
    def data_payload(self) -> torch.Tensor:
        """The values in the model's dtype: this rank's part, flat and padded, of a sharded parameter."""
        parameter = self._parameter()
        with torch.no_grad():
            return self._part(parameter.detach().to(self.device, self.dtype, copy=True))

    @property
    def grad_payload(self) -> torch.Tensor:
        """The reduced gradient in float32, likewise; flat and padded for every parameter that all ranks share."""
        if self.model is None or (grad := self.model.full_grad(self._parameter())) is None:
            raise AssertionError("[colo_attr] the parameter has no gradient")
        return self._part(grad.float(), cut=self.is_replicated)

    def _part(self, whole: torch.Tensor, cut: bool | None = None) -> torch.Tensor:
        cut = self.param_is_sharded if cut is None else cut
        if not cut or self.model is None:
            return whole
        rank, size = self.model.group.rank, self.model.group.size
        part = torch.zeros((whole.numel() + size - 1) // size, dtype=whole.dtype, device=whole.device)
        own = whole.flatten()[rank * part.numel():(rank + 1) * part.numel()]
        part[:own.numel()] = own
        return part


class ShardedData:
    """The values of a parameter, as ColossalAI's `ShardedTensor` shows them."""

    def __init__(self, attributes: ColoAttributes):
        self._attributes = attributes
        self.is_sharded = attributes.param_is_sharded
        self.dtype = attributes.dtype
        self.device = attributes.device
        self.origin_shape = attributes._parameter().shape
        self.origin_numel = attributes._parameter().numel()

    @property
    def payload(self) -> torch.Tensor:
        return self._attributes.data_payload

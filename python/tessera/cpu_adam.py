"""`CPUAdam`: Adam and AdamW in one pass over memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from . import _C


class CPUAdam(torch.optim.Optimizer):
    """Adam (`adamw_mode=False`) or AdamW with ColossalAI's arguments; moments are float32, for parameters of any dtype
    (float64 for float64).

    Results agree with `torch.optim.AdamW` and `Adam` to rounding, and do not depend on the number of threads or on how a
    parameter is sharded. Gradients have their parameter's dtype, or float32. `bias_correction`, `adamw_mode`, `lr`, `betas`,
    `eps` and `weight_decay` may differ between param groups. Parameters on other devices are stepped there.
    """

    num_fp32_shards_per_param = 4  # value, gradient and two moments
    elementwise = True

    def __init__(self, model_params: Iterable, lr: float = 1e-3, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0,
                 adamw_mode: bool = True):
        super().__init__(model_params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps,
                                            weight_decay=weight_decay, adamw_mode=adamw_mode))

    def add_param_group(self, param_group: dict) -> None:
        options = {**self.defaults, **param_group}
        for name in ("lr", "eps", "weight_decay"):
            if not options[name] >= 0:
                raise ValueError(f"[CPUAdam] {name} must not be negative; got {options[name]}")
        if not all(0 <= beta < 1 for beta in options["betas"]):
            raise ValueError(f"[CPUAdam] betas must be in [0, 1); got {options['betas']}")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            states = [self._state_of(param) for param in params]
            steps = [int(state["step"]) + 1 for state in states]
            _C.step_cpu_adam(params, [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states],
                             steps, float(group["lr"]), tuple(group["betas"]), group["eps"], group["weight_decay"],
                             group["bias_correction"], group["adamw_mode"])
            for state, step in zip(states, steps):
                state["step"] = step
        return loss

    def _state_of(self, param: torch.Tensor) -> dict:
        state = self.state[param]
        dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
        state.setdefault("step", 0)
        for name in ("exp_avg", "exp_avg_sq"):
            moment = state.get(name)
            if moment is None:
                state[name] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
            elif moment.dtype != dtype:  # the parameter was converted, or load_state_dict() has cast to its dtype
                state[name] = moment.to(dtype)
        return state


HybridAdam = CPUAdam
"""ColossalAI's name for the optimizer that also steps parameters on a GPU, as `CPUAdam` does."""

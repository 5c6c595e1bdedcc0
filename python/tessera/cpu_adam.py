"""`CPUAdam`: Adam and AdamW in one pass over memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from . import _C


_MOMENTS = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")


class CPUAdam(torch.optim.Optimizer):
    """Adam (`adamw_mode=False`) or AdamW with ColossalAI's arguments; moments are float32, for parameters of any dtype
    (float64 for float64), or, by `state_dtype`, take fewer bytes.

    Results agree with `torch.optim.AdamW` and `Adam` to rounding, and do not depend on the number of threads or on how a
    parameter is sharded. Gradients have their parameter's dtype, or float32. All options may differ between param groups.
    Parameters on other devices are stepped there.

    `state_dtype`: `torch.float32`; `torch.bfloat16`, 4 bytes an element, rounded stochastically by `seed`; or `torch.uint8`,
    2 + 8/256 bytes an element: 8-bit codes in blocks of 256 elements with a scale each, which ranks must not cut:
    `fully_shard(..., cuts=[("*", "elements", 256)])`. The two are for parameters in host memory other than float64. An
    optimizer keeps its own `state_dtype` when state is loaded, and converts that at the next step.
    """

    num_fp32_shards_per_param = 4  # value, gradient and two moments
    elementwise = True

    def __init__(self, model_params: Iterable, lr: float = 1e-3, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0,
                 adamw_mode: bool = True, *, state_dtype: torch.dtype = torch.float32, seed: int = 0):
        super().__init__(model_params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps,
                                            weight_decay=weight_decay, adamw_mode=adamw_mode, state_dtype=state_dtype,
                                            seed=seed))

    def add_param_group(self, param_group: dict) -> None:
        options = {**self.defaults, **param_group}
        for name in ("lr", "eps", "weight_decay"):
            if not options[name] >= 0:
                raise ValueError(f"[CPUAdam] {name} must not be negative; got {options[name]}")
        if not all(0 <= beta < 1 for beta in options["betas"]):
            raise ValueError(f"[CPUAdam] betas must be in [0, 1); got {options['betas']}")
        if options["state_dtype"] not in (torch.float32, torch.bfloat16, torch.uint8):
            raise ValueError("[CPUAdam] state_dtype must be torch.float32, torch.bfloat16 or torch.uint8; got "
                             f"{options['state_dtype']}")
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
            states = [self.state[param] for param in params]
            steps = [int(state.get("step", 0)) + 1 for state in states]
            moments = _C.step_cpu_adam(params, [[state.get(name) for name in _MOMENTS] for state in states], steps,
                                       float(group["lr"]), tuple(group["betas"]), group["eps"], group["weight_decay"],
                                       group["bias_correction"], group["adamw_mode"], group["state_dtype"], group["seed"])
            for state, step, own in zip(states, steps, moments):
                state["step"] = step
                for name, moment in zip(_MOMENTS, own):
                    if moment is None:
                        state.pop(name, None)
                    else:
                        state[name] = moment
        return loss

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # saved by an earlier version
            group.setdefault("state_dtype", torch.float32)
            group.setdefault("seed", 0)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        dtypes = [group["state_dtype"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params):
            given = state_dict["state"].get(number, {})
            for name in _MOMENTS:  # PyTorch has cast them to the parameter's dtype
                if torch.is_tensor(given.get(name)):
                    self.state[param][name] = given[name].to(param.device, copy=True)
        for group, dtype in zip(self.param_groups, dtypes):
            group["state_dtype"] = dtype


HybridAdam = CPUAdam
"""ColossalAI's name for the optimizer that also steps parameters on a GPU, as `CPUAdam` does."""

"""Optimizers of a user's own whose steps need whole parameters, and PyTorch's that are compared with them."""

import torch

import tessera


class Lamb(torch.optim.Optimizer):
    """Divides by norms of the parameter and of its update."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, self.state[param], group["lr"])

    def update(self, param, grad, state, lr):
        if not state:
            state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 0.1)
        state["exp_avg_sq"].lerp_(grad.square(), 0.01)
        update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6) + 0.01 * param
        param.sub_(update * (lr * param.norm() / (update.norm() + 1e-12)))


class Soap(Lamb):
    """Adam in the eigenbasis of Shampoo's preconditioners for matrices."""

    def update(self, param, grad, state, lr):
        is_matrix = param.dim() == 2
        if not state:
            state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
            if is_matrix:
                state.update(left=param.new_zeros(len(param), len(param)), right=param.new_zeros(param.shape[1], param.shape[1]))
        if is_matrix:
            for name, square in (("left", grad @ grad.T), ("right", grad.T @ grad)):
                state[name].lerp_(square, 0.05)
                basis = state.get(name + "_basis")
                state[name + "_basis"] = (torch.linalg.eigh(state[name]).eigenvectors if basis is None else
                                          torch.linalg.qr(state[name] @ basis).Q)
        turn = (lambda x: state["left_basis"].T @ x @ state["right_basis"]) if is_matrix else (lambda x: x)
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 0.1)
        state["exp_avg_sq"].lerp_(turn(grad).square(), 0.01)
        update = turn(state["exp_avg"]) / (state["exp_avg_sq"].sqrt() + 1e-8)
        param.sub_((state["left_basis"] @ update @ state["right_basis"].T if is_matrix else update) * lr)


EXCEPTIONS = ("embedding*",)
PLAIN = {"foreach": False}


def _muon(net):
    matrices, others = tessera.muon_groups(net, EXCEPTIONS)
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.003, **PLAIN)]


# By name: optimizers of a net, and the rules for the net's plan.
OPTIMIZERS = {
    "Muon": (_muon, lambda net: tessera.muon_cuts(net, EXCEPTIONS)),
    "Adafactor": (lambda net: [torch.optim.Adafactor(net.parameters(), lr=0.05, **PLAIN)], lambda net: [("*", "whole")]),
    "NAdam": (lambda net: [torch.optim.NAdam(net.parameters(), lr=0.01, **PLAIN)], lambda net: []),
    "RAdam": (lambda net: [torch.optim.RAdam(net.parameters(), lr=0.01, **PLAIN)], lambda net: []),
    "Rprop": (lambda net: [torch.optim.Rprop(net.parameters(), lr=0.01, **PLAIN)], lambda net: []),
    "LAMB": (lambda net: [Lamb(net.parameters())], lambda net: [("*", "whole")]),
    "SOAP": (lambda net: [Soap(net.parameters(), lr=0.01)], lambda net: [("*", "whole")]),
}

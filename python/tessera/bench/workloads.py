"""The models and batches of `tessera bench step`, and a model of 100 million parameters."""

from __future__ import annotations

import math

import torch
from torch import nn

VOCABULARY, LENGTH = 256, 128
GPTS = {"tiny": (2, 128, 2, 4), "small": (6, 384, 6, 4), "medium": (8, 768, 12, 2),  # layers, width, heads, batch
        "large": (14, 768, 12, 1)}
MLP_WIDTH, MLP_LAYERS, MLP_BATCH = 1024, 12, 64
NAMES = (*GPTS, "mlp")


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        rows, length, width = x.shape
        parts = [part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, 2)]
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.out(nn.functional.gelu(self.fc(self.ln2(x))))


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, batch: int):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, inputs, targets):
        x = self.tok(inputs) + self.pos(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.ln_f(x)).view(-1, VOCABULARY), targets.reshape(-1))


class Layer(nn.Linear):
    def forward(self, x):
        return nn.functional.gelu(super().forward(x))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Layer(MLP_WIDTH, MLP_WIDTH) for _ in range(MLP_LAYERS))

    def forward(self, inputs, targets):
        for block in self.blocks:
            inputs = block(inputs)
        return nn.functional.mse_loss(inputs, targets)


def make_model(name: str) -> nn.Module:
    """Returns the model, with the same values on every rank. Its forward returns the loss; `blocks` are its units."""
    model = Mlp() if name == "mlp" else Gpt(*GPTS[name])
    deviation = math.sqrt(2 / MLP_WIDTH) if name == "mlp" else 0.02
    generator = torch.Generator().manual_seed(1234)
    with torch.no_grad():
        for key, param in model.named_parameters():
            if param.dim() == 2:
                param.normal_(0, deviation, generator=generator)
            else:
                param.fill_(0 if key.endswith("bias") else 1)
    return model


def make_batch(name: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    if name == "mlp":
        return tuple(torch.randn(MLP_BATCH, MLP_WIDTH, generator=generator) for _ in range(2))
    tokens = torch.randint(0, VOCABULARY, (GPTS[name][3], LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]

"""Models of tensor parallelism, as their users write them, each with the dims along which its matrices are cut."""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.nn import functional as F

BATCH, LENGTH, WIDTH, HEADS, HIDDEN, VOCABULARY, LAYERS = 4, 16, 64, 4, 96, 32, 2


class RmsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, True) + 1e-5)).type_as(x) * self.weight


def by_halves(x):
    """Rotary embedding of halves by cosines and sines, as Hugging Face's models have it."""
    angles = torch.outer(torch.arange(x.size(2)), torch.arange(x.size(-1)) * 0.1)
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


def by_complex_numbers(x):
    """Rotary embedding of pairs as complex numbers, as Llama's own code has it."""
    angles = torch.outer(torch.arange(x.size(2)), torch.arange(x.size(-1) // 2) * 0.1)
    turn = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turn).flatten(3)


class Attention(nn.Module):
    def __init__(self, kv_heads, rotary):
        super().__init__()
        self.kv_heads, self.rotary = kv_heads, rotary
        kv = WIDTH // HEADS * kv_heads
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = nn.Linear(WIDTH, kv, bias=False), nn.Linear(WIDTH, kv, bias=False)

    def heads(self, x):
        return x.view(x.size(0), x.size(1), -1, WIDTH // HEADS).transpose(1, 2)

    def spread(self, x):
        if self.kv_heads == HEADS:
            return x
        batch, heads, length, width = x.shape
        return x[:, :, None].expand(batch, heads, HEADS // self.kv_heads, length, width).reshape(batch, -1, length, width)

    def forward(self, x):
        q, k, v = self.rotary(self.heads(self.wq(x))), self.rotary(self.heads(self.wk(x))), self.heads(self.wv(x))
        y = F.scaled_dot_product_attention(q, self.spread(k), self.spread(v), is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(x.size(0), x.size(1), -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, kv_heads, rotary):
        super().__init__()
        self.attention, self.feed_forward = Attention(kv_heads, rotary), FeedForward()
        self.attention_norm, self.ffn_norm = RmsNorm(), RmsNorm()

    def forward(self, x):
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    def __init__(self, kv_heads=HEADS, rotary=by_halves, tied=False):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(kv_heads, rotary) for _ in range(LAYERS))
        self.norm, self.output = RmsNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.output(self.norm(h)).view(-1, VOCABULARY), tokens.roll(1, 1).view(-1))


class VitBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        y = self.qkv(self.norm1(x)).reshape(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = y.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, WIDTH)
        x = x + self.proj(y)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Vit(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.ModuleList(VitBlock() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1)).square().mean()


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        conv = lambda a, b: nn.Conv2d(a, b, 3, padding=1)
        self.down1, self.down2, self.mid1, self.mid2 = conv(3, 16), conv(16, 16), conv(16, 32), conv(32, 16)
        self.up1, self.up2, self.last = conv(32, 16), conv(16, 16), nn.Conv2d(16, 3, 1)

    def forward(self, images):
        skip = torch.relu(self.down2(torch.relu(self.down1(images))))
        x = torch.relu(self.mid2(torch.relu(self.mid1(F.max_pool2d(skip, 2)))))
        x = torch.cat((F.interpolate(x, scale_factor=2.0), skip), 1)
        return self.last(torch.relu(self.up2(torch.relu(self.up1(x))))).square().mean()


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()


_LLAMA = {r"w[qkv13]\.weight": 0, r"w[o2]\.weight": 1}
_VIT = {r"fc1\.(weight|bias)": 0, r"(fc2|proj)\.weight": 1}
_UNET = {r"(down1|mid1|up1)\.(weight|bias)": 0, r"(down2|mid2|up2)\.weight": 1}
_MLP = {r"up\.(weight|bias)": 0, r"down\.weight": 1}
TOKENS = lambda: torch.randint(VOCABULARY, (BATCH, LENGTH))
IMAGES = lambda: torch.randn(BATCH, 3, 16, 16)

# By name: the model, its input, the dims by names of parameters, and the elements of the all-reduces of forward and of backward
# with explicit reductions (Megatron's) of the activations of the whole batch.
_BLOCKS = lambda: [2 * LAYERS * BATCH * LENGTH * WIDTH] * 2
_PLANE = BATCH * 16 * 16 * 16
MODELS = {
    "llama": (Llama, TOKENS, _LLAMA, _BLOCKS),
    "llama, GQA by expand": (lambda: Llama(kv_heads=2), TOKENS, _LLAMA, _BLOCKS),
    "llama, tied": (lambda: Llama(tied=True), TOKENS, _LLAMA, _BLOCKS),
    "llama, complex rotary": (lambda: Llama(rotary=by_complex_numbers), TOKENS, _LLAMA, _BLOCKS),
    # And a row of the embedding's sum, and a maximum, a sum and a loss of each token; the gradient of the last norm.
    "llama, cut vocabulary": (Llama, TOKENS, {**_LLAMA, r"(tok_embeddings|output)\.weight": 0},
                              lambda: [_BLOCKS()[0] + BATCH * LENGTH * (WIDTH + 3), _BLOCKS()[1] + BATCH * LENGTH * (WIDTH + 1)]),
    # qkv is one matrix, whose rows are those of q, k and v.
    "vit": (Vit, IMAGES, {**_VIT, r"qkv\.(weight|bias)": (0, 3)}, lambda: [2 * LAYERS * BATCH * 16 * WIDTH] * 2),
    "unet": (Unet, IMAGES, _UNET, lambda: [_PLANE + _PLANE // 4 + _PLANE, _PLANE // 4 + 2 * _PLANE]),
    "mlp": (Mlp, lambda: torch.randn(BATCH, WIDTH), _MLP, lambda: [BATCH * WIDTH, 0]),
}


def dim_of(dims: dict, name: str):
    """Returns the dim along which a parameter is cut, or it and a split factor; None: it is replicated."""
    for pattern, dim in dims.items():
        if re.search(rf"(^|\.){pattern}$", name):
            return dim
    return None

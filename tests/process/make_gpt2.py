"""Writes a small GPT-2 as Hugging Face's `save_pretrained` does, and tokens: make_gpt2.py DIRECTORY"""
import json
import pathlib
import sys

import torch
from safetensors.torch import save_file

WIDTH, HEADS, LAYERS, POSITIONS, TOKENS = 32, 2, 2, 64, 96


def main():
    directory = pathlib.Path(sys.argv[1])
    torch.manual_seed(0)
    state = {"wte.weight": torch.randn(TOKENS, WIDTH) * 0.02, "wpe.weight": torch.randn(POSITIONS, WIDTH) * 0.01}
    for layer in range(LAYERS):
        for name, (rows, columns) in {"attn.c_attn": (WIDTH, 3 * WIDTH), "attn.c_proj": (WIDTH, WIDTH),
                                      "mlp.c_fc": (WIDTH, 4 * WIDTH), "mlp.c_proj": (4 * WIDTH, WIDTH)}.items():
            state[f"h.{layer}.{name}.weight"] = torch.randn(rows, columns) * 0.02
            state[f"h.{layer}.{name}.bias"] = torch.zeros(columns)
        state[f"h.{layer}.attn.bias"] = torch.ones(1, 1, POSITIONS, POSITIONS).tril()
        for norm in ("ln_1", "ln_2"):
            state[f"h.{layer}.{norm}.weight"] = torch.ones(WIDTH)
            state[f"h.{layer}.{norm}.bias"] = torch.zeros(WIDTH)
    state["ln_f.weight"], state["ln_f.bias"] = torch.ones(WIDTH), torch.zeros(WIDTH)
    save_file({"transformer." + name: value for name, value in state.items()}, directory / "model.safetensors",
              metadata={"format": "pt"})
    config = {"model_type": "gpt2", "n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS, "n_positions": POSITIONS,
              "vocab_size": TOKENS}
    (directory / "config.json").write_text(json.dumps(config))
    tokens = (torch.arange(4000) * 7 % TOKENS).to(torch.int16)
    (directory / "tokens.bin").write_bytes(tokens.numpy().tobytes())


if __name__ == "__main__":
    main()

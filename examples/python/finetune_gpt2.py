"""Fine-tunes a GPT-2 of `transformers` on a text, sharded over the ranks that the launcher started.

    torchrun --nproc-per-node 2 examples/python/finetune_gpt2.py --weights DIR --text FILE --save OUT

`--weights` is a directory that `save_pretrained` has written; without it, a small model starts from random weights. Bytes of
the text are the tokens, so no tokenizer is needed. `--save` writes a directory that `from_pretrained` reads.
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tessera


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--text", type=Path, default=Path("data/corpus.txt"))
    parser.add_argument("--save", type=Path)
    parser.add_argument("--level", default="p_g_os")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8, help="rows of all ranks together")
    parser.add_argument("--length", type=int, default=128)
    return parser.parse_args()


def main():
    options = parse()
    tessera.init()
    torch.manual_seed(0)
    if options.weights:
        model = GPT2LMHeadModel.from_pretrained(options.weights)
    else:
        model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=256, n_positions=options.length))
    sharded = tessera.fully_shard(model, level=options.level)
    optimizer = tessera.ShardedOptimizer(sharded, torch.optim.AdamW(model.parameters(), lr=1e-3))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    data = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    for step in range(options.steps):
        starts = torch.randint(len(data) - options.length, (options.batch,), generator=generator)
        mine = starts[tessera.rank()::tessera.size()]
        rows = torch.stack([data[start:start + options.length] for start in mine])
        optimizer.zero_grad()
        loss = sharded(input_ids=rows, labels=rows).loss
        loss.backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        if tessera.rank() == 0 and step % 10 == 0:
            print(f"step {step:4}  loss {loss.item():.4f}", flush=True)
    if tessera.rank() == 0:
        kept = optimizer.memory()
        print(f"this rank keeps {(kept['parameters'] + kept['optimizer_state']) / 2**20:.1f} MiB")
    if options.save:
        state = sharded.full_state()  # collective; then one rank writes
        if tessera.rank() == 0:
            model.save_pretrained(options.save, state_dict={name: state[name] for name in model.state_dict(keep_vars=True)})


if __name__ == "__main__":
    main()

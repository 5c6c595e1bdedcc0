"""Trains a GPT-2 with Hugging Face's Trainer, sharded; then resumes from a checkpoint, and loads the best one.

    torchrun --nproc-per-node 2 examples/python/trainer_hf.py runs/trainer

Weights and tokens are random, so nothing is downloaded. With `--plain` the model is not sharded: Trainer wraps it in DDP, or
trains it in one process, with the same losses.
"""

import argparse
import json
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import tessera
from tessera.transformers import Trainer


def make_rows(count, seed):
    tokens = torch.randint(101, (count, 16), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def make_trainer(given):
    torch.manual_seed(0)
    options = TrainingArguments(
        given.folder, max_steps=8, per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", 1)), learning_rate=1e-2,
        gradient_accumulation_steps=2, max_grad_norm=0.5, bf16=given.bf16, logging_steps=1, eval_strategy="steps", eval_steps=4,
        save_steps=4, load_best_model_at_end=True, report_to="none", use_cpu=True, disable_tqdm=True)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=101, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    if not given.plain:
        model = tessera.fully_shard(model, level=given.level)
    return Trainer(model=model, args=options, train_dataset=make_rows(96, 1), eval_dataset=make_rows(16, 2))


def logged(trainer, name, after=0):
    return [entry[name] for entry in trainer.state.log_history if name in entry and entry["step"] > after]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="for checkpoints")
    parser.add_argument("--plain", action="store_true", help="don't shard")
    parser.add_argument("--level", default="p_g_os")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    given = parser.parse_args()
    trainer = make_trainer(given)
    trainer.train()
    resumed = make_trainer(given)
    resumed.train(resume_from_checkpoint=f"{given.folder}/checkpoint-4")
    if trainer.is_world_process_zero():
        print(json.dumps({"losses": logged(trainer, "loss"), "norms": logged(trainer, "grad_norm"),
                          "evaluations": logged(trainer, "eval_loss"), "resumed": logged(resumed, "loss", after=4)}))
    best = trainer.evaluate()["eval_loss"]
    assert best == trainer.state.best_metric, "the best checkpoint was not loaded"
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # at exit, its threads may else abort the process


if __name__ == "__main__":
    main()

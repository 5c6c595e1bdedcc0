"""Trainers of other packages train sharded models, with the losses that they have with their own wrappers."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python"


def _need(name):
    """Returns the package's version; skips the test where it is not installed."""
    pytest.importorskip(name, reason=f"{name} is not installed: ./dev clients installs it")
    return importlib.metadata.version(name)


def _run(script, size, *arguments):
    """Runs a script on `size` ranks of torchrun; returns its output, and its exit status."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TESSERA_TIMEOUT": "60"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command = [*launcher, str(script), *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    return run.stdout + run.stderr, run.returncode


def _numbers(script, size, *arguments):
    output, status = _run(EXAMPLES / script, size, *arguments)
    assert status == 0, output
    return json.loads(next(line for line in output.splitlines() if line.startswith('{"losses"')))


def _compare(script, size, folder, plain, *arguments):
    sharded = _numbers(script, size, str(folder / "sharded"), *arguments)
    expected = _numbers(script, size, str(folder / "plain"), *arguments, *plain)
    print(f"{script} on {size} ranks {' '.join(arguments)}: {json.dumps(sharded)}")
    assert sharded == expected
    assert sharded["resumed"] == sharded["losses"][-len(sharded["resumed"]):]
    assert len(set(sharded["losses"])) == len(sharded["losses"])


@pytest.mark.parametrize("size, arguments", [(1, []), (2, []), (2, ["--bf16"]), (2, ["--level", "os_g"])])
def test_trainer(tmp_path, size, arguments):
    print("transformers", _need("transformers"), "accelerate", _need("accelerate"))
    _compare("trainer_hf.py", size, tmp_path, ["--plain"], *arguments)
    assert (tmp_path / "sharded" / "checkpoint-8" / "config.json").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["GPT-2", "Llama", "Qwen2", "Gemma", "BERT", "T5", "Mixtral"])
def test_models_come_and_go(tmp_path, kind, dtype):
    _need("transformers")
    from hugging_face_models import convert

    assert convert(os.environ["TESSERA_CLI"], kind, getattr(torch, dtype), tmp_path) > 1


@pytest.mark.parametrize("size, arguments", [(1, []), (2, []), (2, ["--bf16"]), (2, ["--level", "os"])])
def test_accelerate(tmp_path, size, arguments):
    print("accelerate", _need("accelerate"))
    _compare("accelerate_loop.py", size, tmp_path, ["--plain"], *arguments)


@pytest.mark.parametrize("size, arguments", [(1, []), (2, []), (2, ["--precision", "bf16-mixed"])])
def test_lightning(tmp_path, size, arguments):
    print("lightning", _need("lightning"))
    _compare("lightning_fit.py", size, tmp_path, ["--strategy", "ddp"], *arguments)


TRAINER_ALONE = """
import sys, torch, tessera
sys.path.insert(0, {examples!r})
import trainer_hf, transformers
trainer_hf.Trainer = transformers.Trainer
class Given: folder, plain, level, bf16 = sys.argv[1], False, "p_g_os", False
trainer = trainer_hf.make_trainer(Given)
if sys.argv[2] == "saves": trainer.train()
trainer.args.eval_strategy = trainer.args.save_strategy = "no"
trainer.args.load_best_model_at_end = False
if sys.argv[2] == "sharded":
    optimizer = torch.optim.AdamW(trainer.model.parameters(), 1e-2, weight_decay=0.0, fused=True)
    trainer.optimizer = tessera.ShardedOptimizer(trainer.model, optimizer, fused=False)
trainer.train()
if trainer.is_world_process_zero(): print("losses", trainer_hf.logged(trainer, "loss"))
"""


def test_transformers_own_trainer(tmp_path):
    _need("transformers")
    script = tmp_path / "alone.py"
    script.write_text(TRAINER_ALONE.format(examples=str(EXAMPLES)))
    # Until the first evaluation: that takes numbers from the generator of the dropout.
    expected = f'losses {_numbers("trainer_hf.py", 2, str(tmp_path / "expected"))["losses"][:4]}'[:-1]
    for optimizer in ("plain", "sharded"):
        output, status = _run(script, 2, str(tmp_path / optimizer), optimizer)
        assert status == 0 and expected in output, output
    output, status = _run(script, 2, str(tmp_path / "saves"), "saves")
    assert status != 0 and "saves on rank 0 alone what all ranks have parts of: use tessera.transformers.Trainer" in output


LIGHTNING_REFUSED = """
import sys, lightning
sys.path.insert(0, {examples!r})
import lightning_fit
trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy="tessera", sync_batchnorm=True, logger=False, max_epochs=1)
trainer.fit(lightning_fit.Regression(), lightning_fit.make_loader(16, 1))
"""


def test_sync_batchnorm_on_the_cpu_is_refused(tmp_path):
    _need("lightning")
    script = tmp_path / "refused.py"
    script.write_text(LIGHTNING_REFUSED.format(examples=str(EXAMPLES)))
    output, status = _run(script, 1)
    assert status != 0 and "sync_batchnorm=True needs an accelerator" in output, output


ACCELERATE_COMPILES = """
import accelerate, torch, tessera
accelerator = accelerate.Accelerator(cpu=True, dynamo_backend="eager")
accelerator.prepare(tessera.fully_shard(torch.nn.Linear(5, 3)))
"""


def test_options_of_accelerate_that_would_not_be_obeyed_are_refused(tmp_path):
    _need("accelerate")
    script = tmp_path / "refused.py"
    script.write_text(ACCELERATE_COMPILES)
    output, status = _run(script, 1)
    assert status != 0 and "accelerate can't turn on fp8 or torch.compile for a sharded module" in output, output

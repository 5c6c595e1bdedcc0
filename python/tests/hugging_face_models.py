"""Models of transformers to checkpoints and back: `save_pretrained`, import, training on 2 ranks, export, `from_pretrained`.

    hugging_face_models.py TESSERA [NAME ...]      prints a line for each; TESSERA is the command-line tool
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers as tf

import tessera
from ranks import run_ranks

_SMALL = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}
_GROUPED = {**_SMALL, "num_key_value_heads": 1, "head_dim": 12}
MODELS = {
    "GPT-2": (tf.GPT2LMHeadModel, lambda: tf.GPT2Config(vocab_size=61, n_embd=24, n_layer=2, n_head=2, n_positions=32)),
    "Llama": (tf.LlamaForCausalLM, lambda: tf.LlamaConfig(**_GROUPED)),
    "Qwen2": (tf.Qwen2ForCausalLM, lambda: tf.Qwen2Config(**_SMALL, num_key_value_heads=1, tie_word_embeddings=True)),
    "Gemma": (tf.GemmaForCausalLM, lambda: tf.GemmaConfig(**_GROUPED)),
    "BERT": (tf.BertForMaskedLM, lambda: tf.BertConfig(**_SMALL, max_position_embeddings=32)),
    "T5": (tf.T5ForConditionalGeneration, lambda: tf.T5Config(vocab_size=61, d_model=24, d_kv=12, d_ff=20, num_layers=2, num_heads=2,
                                                              decoder_start_token_id=0)),
    "Mixtral": (tf.MixtralForCausalLM, lambda: tf.MixtralConfig(**_SMALL, num_key_value_heads=1, num_local_experts=3)),
}


def _logits(model):
    tokens = torch.arange(18).view(2, 9) % 61
    arguments = {"decoder_input_ids": tokens[:, :5]} if isinstance(model, tf.T5ForConditionalGeneration) else {}
    with torch.no_grad():
        return model.eval()(input_ids=tokens, **arguments).logits


def _train(source, checkpoint, trained, kind):
    """Loads the imported checkpoint, which must be the model of `source`, trains and saves; returns the logits. Mixtral's files
    have each expert apart, its module has all in one tensor."""
    model = MODELS[kind][0].from_pretrained(source)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    as_in_files = kind != "Mixtral"
    with torch.no_grad():
        for value in model.parameters() if as_in_files else ():
            value.fill_(3)
    sharded = tessera.fully_shard(model, unit_bytes=4000)
    if as_in_files:  # which have a tied parameter under one name
        assert not tessera.load_checkpoint(checkpoint, sharded, allow_missing=True).unexpected
    for name, value in sharded.state_dict().items():
        assert torch.equal(value, values[name]), name
    tessera.save_checkpoint(Path(str(trained) + "-same"), sharded)
    optimizer = tessera.ShardedOptimizer(sharded, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.arange(18).view(2, 9) % 61
    sharded(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    tessera.save_checkpoint(trained, sharded)
    optimizer.unwrap()
    return _logits(sharded.unwrap())


def convert(command, kind, dtype, folder):
    """Returns the number of files that were written; raises if a value is lost."""
    torch.manual_seed(3)
    cls, config = MODELS[kind]
    model = cls(config()).to(dtype)
    source = folder / "source"
    model.save_pretrained(source, max_shard_size="6kB")
    logits = _logits(cls.from_pretrained(source))  # which computes rotary angles anew, in float

    def tool(*arguments):
        subprocess.run([command, "ckpt", *map(str, arguments), "--quiet"], check=True)

    def loaded(checkpoint, name, *options):
        target = folder / name
        target.mkdir()
        tool("export", checkpoint, target, *options)
        shutil.copy(source / "config.json", target)
        again = cls.from_pretrained(target)
        assert all(value.dtype == dtype for value in again.parameters())
        return _logits(again)

    tool("import", source, folder / "imported")
    assert torch.equal(loaded(folder / "imported", "one"), logits)
    assert torch.equal(loaded(folder / "imported", "cut", "--max-shard-size", "6kB"), logits)
    trained = run_ranks(2, _train, source, folder / "imported", folder / "trained", kind)[0]
    assert torch.equal(loaded(folder / "trained-same", "same"), logits)
    assert torch.equal(loaded(folder / "trained", "back"), trained) and not torch.equal(trained, logits)
    return len(list((folder / "cut").glob("*.safetensors")))


def main():
    for kind in sys.argv[2:] or MODELS:
        for dtype in (torch.float32, torch.bfloat16):
            with tempfile.TemporaryDirectory() as folder:
                files = convert(sys.argv[1], kind, dtype, Path(folder))
                print(f"{kind:8} {str(dtype)[6:]:9} in {files} files: equal logits", flush=True)


if __name__ == "__main__":
    main()

"""Checkpoints of the layouts that trainers write: torchtitan, Lightning, the Trainer of transformers; and pickles that call functions."""

import io
import json
import os
import pickle
import warnings
from collections import defaultdict

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import foreign_fuzz
import tessera
from foreign_layouts import Block, train_block, write_trainer
from tessera.exchange import import_checkpoint, main

numpy = pytest.importorskip("numpy")


class Note(dict):
    """A dict of another tool, as AttributeDict of Lightning."""


def _contents(checkpoint):
    tensors = tessera._C.CheckpointTensors(checkpoint, True, [], None, None)
    index = json.loads(tensors.index())
    return {(entry["kind"], entry.get("state"), *entry["names"]): tensors.read(number)
            for number, entry in enumerate(index["tensors"])}, index["optimizer"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The contents of a checkpoint of the model and its optimizer."""
    folder = tmp_path_factory.mktemp("plain")
    model, optimizer = train_block(names=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "one.pt")
    import_checkpoint(folder / "one.pt", folder / "one", optimizer_key="optimizer")
    return _contents(folder / "one")


def _assert_same(checkpoint, plain):
    (tensors, optimizer), (others, other) = _contents(checkpoint), plain
    assert tensors.keys() == others.keys() and optimizer == other
    for name, value in tensors.items():
        assert torch.equal(value, others[name]), name


NAMES = [name for name, _ in Block().named_parameters()]


def test_megatron(tmp_path):
    """A directory of the format torch_dist: names with dots, all layers in one tensor, bytes and lists beside them."""
    layers = {"decoder.layers.mlp.linear_fc1.weight": torch.rand(3, 8, 4), "embedding.word_embeddings.weight": torch.rand(8, 4)}
    state = {f"optimizer.state.{key}.{name}": value + 1 for key in ("fp32_param", "exp_avg") for name, value in layers.items()}
    state |= {"rng_state/shard_0_1": [{"random_rng_state": (1, (2, 3), None)}], "iteration": 5,
              "decoder.layers.mlp.linear_fc1._extra_state/shard_0_3": io.BytesIO(b"x")}
    dcp.save({**layers, **state}, checkpoint_id=tmp_path / "iter", no_dist=True)
    torch.save({"args": None}, tmp_path / "iter" / "common.pt")
    (tmp_path / "iter" / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    for rename, offset in (([(r"^optimizer\..*", "")], 0), ([(r"^optimizer\.state\.fp32_param\.(.*)", "masters.$1"), (r"^(?!masters).*", ""),
                                                            (r"^masters\.", "")], 1)):
        import_checkpoint(tmp_path / "iter", tmp_path / "one", rename=rename)
        tensors = tessera._C.CheckpointTensors(tmp_path / "one", False, [], None, None)
        values = {entry["names"][0]: tensors.read(number) for number, entry in enumerate(json.loads(tensors.index())["tensors"])}
        assert values.keys() == layers.keys()
        assert all(torch.equal(value, layers[name] + offset) for name, value in values.items())


def test_torchtitan(plain, tmp_path):
    """The model at the top, beside the flattened optimizer and the state of training."""
    model, optimizer = train_block(names=False)
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    beside = {"train_state": {"step": torch.tensor(2), "time": numpy.float64(1.5), "order": numpy.arange(3)},
              "lr_scheduler": {"last_epoch": 2}}
    dcp.save({**weights, "optimizer": states, **beside}, checkpoint_id=tmp_path / "titan", no_dist=True)
    import_checkpoint(tmp_path / "titan", tmp_path / "one", optimizer_key="optimizer")
    _assert_same(tmp_path / "one", plain)


@pytest.mark.parametrize("wraps", [dict, Note, lambda items: defaultdict(list, items)])
def test_lightning(plain, tmp_path, wraps):
    """Optimizers in a list, whose groups have no names, and a learning rate of NumPy's."""
    model, optimizer = train_block(names=False)
    for group in optimizer.param_groups:
        group["lr"] = numpy.float64(group["lr"])
    torch.save({"state_dict": model.state_dict(), "optimizer_states": [wraps(optimizer.state_dict())], "epoch": 1,
                "hyper_parameters": Note(width=8), "callbacks": {Note: object}, "rng": numpy.arange(3)}, tmp_path / "last.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing that is needed is left out
        import_checkpoint(tmp_path / "last.ckpt", tmp_path / "one", model_key="state_dict", optimizer_key="optimizer_states.0",
                          model_params=NAMES)
    _assert_same(tmp_path / "one", plain)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_directory_of_the_trainer(plain, tmp_path, capsys, form, sharded):
    model, optimizer = train_block(names=False)
    folder = tmp_path / "checkpoint-2"
    write_trainer(folder, model, optimizer, form, sharded)
    (tmp_path / "names.json").write_text(json.dumps(NAMES))
    assert main(["import", str(folder), str(tmp_path / "one"), "--optimizer", "optimizer", "--quiet", "--model-params",
                 str(tmp_path / "names.json")]) == 0
    assert capsys.readouterr().err == ""
    tensors, record = _contents(tmp_path / "one")
    others, other = plain
    assert tensors.keys() == others.keys() and record == other
    assert all(torch.equal(value, others[name]) for name, value in tensors.items())


def test_groups_that_shapes_do_not_show_are_refused(tmp_path):
    def error(**options):
        with pytest.raises(ValueError) as caught:
            import_checkpoint(tmp_path / "one.pt", tmp_path / "one", optimizer_key="optimizer", **options)
        return str(caught.value)

    model, optimizer = train_block(names=False, alike=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "one.pt")
    assert "can't be seen from their shapes" in error(model_params=NAMES)
    assert "'gone' of model_params" in error(model_params=[*NAMES[:-1], "gone"])
    assert "has 6 parameters; model_params has 5 names" in error(model_params=NAMES[:-1])
    assert "no group of its optimizer has 'last.bias', of shape [4], next" in error(model_params=NAMES[::-1])
    assert "one may be given" in error(model_params=NAMES, optimizer_params=NAMES)
    assert not (tmp_path / "one").exists()
    last = "norm.bias"
    import_checkpoint(tmp_path / "one.pt", tmp_path / "one", optimizer_key="optimizer",
                      optimizer_params=[name for name in NAMES if name != last] + [last])


class Bomb:
    """Pickled, it makes a file when it is read."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def test_pickles_run_no_code(tmp_path):
    bomb = Bomb(tmp_path / "mark")
    torch.save({"a": torch.ones(2), "bomb": bomb}, tmp_path / "one.pt")
    torch.save({"a": torch.ones(2), "bomb": bomb}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    dcp.save({"a": torch.ones(2), "bomb": bomb}, checkpoint_id=tmp_path / "values", no_dist=True)
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "index", no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path / "index").read_metadata()
    metadata.planner_data = {"a": bomb}
    (tmp_path / "index" / ".metadata").write_bytes(pickle.dumps(metadata))
    for name in ("one.pt", "old.pt", "values"):
        with pytest.warns(UserWarning, match="'bomb' is left out: its class posix.mkdir"):
            import_checkpoint(tmp_path / name, tmp_path / ("from_" + name))
    with pytest.raises(ValueError):
        import_checkpoint(tmp_path / "index", tmp_path / "from_index")
    assert not (tmp_path / "mark").exists()


def test_files_elsewhere_are_not_read(tmp_path):
    model, optimizer = train_block(names=True)
    torch.save(model.state_dict(), tmp_path / "secret.bin")
    for name in ("trainer", "zero", "dcp"):
        (tmp_path / name).mkdir()
    index = {"weight_map": dict.fromkeys(NAMES, "../secret.bin")}
    (tmp_path / "trainer" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (tmp_path / "zero" / "latest").write_text(str(tmp_path))
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path / "dcp").read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = "../dcp/" + place.relative_path
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    for name in ("trainer", "zero", "dcp"):
        with pytest.raises(ValueError, match="which is not in it"):
            import_checkpoint(tmp_path / name, tmp_path / "one")
    assert not (tmp_path / "one").exists()


def test_damaged_files_give_errors():
    pytest.importorskip("safetensors")
    assert foreign_fuzz.main(150) == 0

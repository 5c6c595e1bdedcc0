"""Checkpoints to and from files of torch.save and directories of torch.distributed.checkpoint."""

import ctypes
import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard as fully_shard_2
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import tessera
from models import batch, loss_of, make_net, my_rows
from tessera.exchange import export_checkpoint, import_checkpoint, main

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "interop" / "tests"))
from exchange import DTYPES, Picture  # noqa: E402
from exchange_optimizer import IN_DIRECTORY, IN_FILE, NAMELESS, ORDER, save, train  # noqa: E402


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files of exchange_optimizer.py."""
    folder = tmp_path_factory.mktemp("files")
    save(str(folder))
    return folder


def _contents(checkpoint):
    """A checkpoint's tensors with their kinds and names, and its optimizer."""
    tensors = tessera._C.CheckpointTensors(checkpoint, True, [], None, None)
    index = json.loads(tensors.index())
    return {(entry["kind"], entry.get("state"), *entry["names"]): tensors.read(number)
            for number, entry in enumerate(index["tensors"])}, index.get("optimizer")


def _assert_same(one, other):
    (tensors, optimizer), (others, other_optimizer) = _contents(one), _contents(other)
    assert tensors.keys() == others.keys() and optimizer == other_optimizer
    for name, value in tensors.items():
        assert value.dtype == others[name].dtype and torch.equal(value, others[name]), name


def _error(call, *args, **options):
    with pytest.raises((ValueError, NotImplementedError, OSError, RuntimeError)) as caught:
        call(*args, **options)
    return str(caught.value)


# --- the model -----------------------------------------------------------------------------------


def test_a_state_dict_of_every_kind_comes_back(tmp_path):
    """Ties, views, empty and scalar tensors, and every dtype."""
    state = Picture().state_dict()
    base = torch.arange(24.).view(4, 6)
    state |= {"row": base[2], "again": base[2], "turned": base.t(), "wide": base[1, 2].expand(3, 2)}
    state |= {str(dtype): (torch.arange(-3, 4) * 1.25).to(dtype) for dtype in DTYPES}
    state |= {"float8": torch.ones(3).to(torch.float8_e4m3fn), "word": torch.ones(3, dtype=torch.uint16)}
    torch.save(state, tmp_path / "one.pt")
    import_checkpoint(tmp_path / "one.pt", tmp_path / "one")
    names = {key[2:] for key in _contents(tmp_path / "one")[0]}
    assert ("encode.weight", "decode") in names or ("decode", "encode.weight") in names
    assert ("row", "again") in names
    for name in ("two.pt", "two.pth", "two.bin", "two"):
        export_checkpoint(tmp_path / "one", tmp_path / name)
        if name == "two":
            loaded = {name: torch.empty(value.size(), dtype=value.dtype) for name, value in state.items()}
            dcp.load(loaded, checkpoint_id=tmp_path / name, no_dist=True)
        else:
            loaded = torch.load(tmp_path / name, weights_only=True)
            assert loaded["decode"].data_ptr() == loaded["encode.weight"].data_ptr()
        assert loaded.keys() == state.keys()
        for key, value in state.items():
            assert loaded[key].dtype == value.dtype and loaded[key].tolist() == value.tolist(), key
        assert not (tmp_path / (name + ".tmp")).exists()
    import_checkpoint(tmp_path / "two.pt", tmp_path / "three")
    _assert_same(tmp_path / "one", tmp_path / "three")


def test_names_keys_transposition_and_dtype(tmp_path):
    state = {"net.a": torch.rand(2, 3), "net.b": torch.rand(1, 4), "net.mask": torch.ones(2), "net.n": torch.tensor(3)}
    torch.save({"ema": {"x": torch.ones(1)}, "net": {"deep": state, "note": "text"}}, tmp_path / "one.pt")
    import_checkpoint(tmp_path / "one.pt", tmp_path / "one", model_key="net", transpose=[r".*\.[ab]"],
                      rename=[(r"^deep\.net\.(.)$", "w.$1"), (r".*mask$", ""), {"w.a": "w.b", "w.b": "w.a"}])
    tensors = {key[2]: value for key, value in _contents(tmp_path / "one")[0].items()}
    assert tensors.keys() == {"w.a", "w.b", "w.n"}
    assert torch.equal(tensors["w.b"], state["net.a"].t()) and torch.equal(tensors["w.a"], state["net.b"].t())
    export_checkpoint(tmp_path / "one", tmp_path / "two.pt", model_key="m", dtype=torch.bfloat16, rename=[("^w", "v")])
    written = torch.load(tmp_path / "two.pt", weights_only=True)["m"]
    assert written["v.n"].dtype == torch.int64 and torch.equal(written["v.b"], state["net.a"].t().bfloat16())


def _watch_memory(most):
    while True:
        kib = int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])  # without mapped files
        most[0] = max(most[0], kib)
        time.sleep(0.002)


def _convert(folder):
    """In a process of its own."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: malloc keeps no memory of tensors
    most = [0]
    threading.Thread(target=_watch_memory, args=(most,), daemon=True).start()
    grown = []
    for verb, source, target in (("import", "one.pt", "one"), ("export", "one", "two.pt"), ("export", "one", "dcp"),
                                 ("import", "dcp", "two")):
        time.sleep(0.1)
        before, most[0] = most[0], 0
        assert main([verb, str(folder / source), str(folder / target), "--quiet"]) == 0
        grown.append(most[0] - before)
    return grown


def test_memory_is_that_of_a_tensor(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_PAGE_HEAP", "0")
    torch.save({f"w{i}": torch.full((10 << 20,), float(i)) for i in range(6)}, tmp_path / "one.pt")  # 40 MiB each
    for grown in ranks(1, _convert, tmp_path, joins=False)[0]:
        assert grown < 130 << 10, f"{grown} KiB"
    _assert_same(tmp_path / "one", tmp_path / "two")


# --- the optimizer -------------------------------------------------------------------------------


def test_exports_are_imported_again(files, tmp_path):
    for kind in ("AdamW", "SGD"):
        one = files / f"{kind}.pt.ckpt"
        export_checkpoint(one, tmp_path / "a.pt", model_key="net", optimizer_key="opt", rename=[("^first", "1st")])
        import_checkpoint(tmp_path / "a.pt", tmp_path / "two", model_key="net", optimizer_key="opt", rename=[("^1st", "first")])
        _assert_same(one, tmp_path / "two")
        export_checkpoint(one, tmp_path / kind, optimizer_key="opt")
        import_checkpoint(tmp_path / kind, tmp_path / "three", optimizer_key="opt")
        _assert_same(one, tmp_path / "three")
        export_checkpoint(one, tmp_path / "model.pt")
        assert torch.load(tmp_path / "model.pt", weights_only=True).keys() == torch.load(files / f"{kind}.after.pt").keys()


def test_param_groups_are_kept(files, tmp_path):
    export_checkpoint(files / "groups.pt.ckpt", tmp_path / "again.pt", optimizer_key="optimizer")
    want = torch.load(files / "groups.pt", weights_only=True)["optimizer"]
    got = torch.load(tmp_path / "again.pt", weights_only=True)["optimizer"]
    assert got["param_groups"] == want["param_groups"] and got["state"].keys() == want["state"].keys()
    for number, values in want["state"].items():
        assert values.keys() == got["state"][number].keys()
        assert all(torch.equal(value, got["state"][number][name]) for name, value in values.items())


def test_what_is_not_known_for_sure_is_refused(files, tmp_path):
    def error(name, **options):
        text = _error(import_checkpoint, files / name, tmp_path / "one", **options)
        assert "[import_checkpoint]" in text and (name in text or "need optimizer_key" in text)
        return text

    for name in ("order.pt", "nameless.pt", "frozen.pt"):
        text = error(name, **IN_FILE)
        assert "no names of them" in text and "named_parameters()" in text and "--optimizer-params" in text
    assert "2 parameters and 1 names" in error("frozen.pt", **IN_FILE, optimizer_params=["first.weight"])
    assert "2 parameters and 3 names" in error("frozen.pt", **IN_FILE,
                                               optimizer_params=["first.weight", "last.weight", "norm.bias"])
    assert "'last', which the model has not" in error("frozen.pt", **IN_FILE, optimizer_params=["first.weight", "last"])
    assert "'first.weight' twice" in error("frozen.pt", **IN_FILE, optimizer_params=["first.weight"] * 2)
    assert ("'last.weight' must have its shape, [4, 8]; got [8, 6]"
            in error("frozen.pt", **IN_FILE, optimizer_params=["last.weight", "first.weight"]))
    assert "leave optimizer_params and model_params out" in error("groups.pt", **IN_FILE, optimizer_params=ORDER)
    assert "leave optimizer_params and model_params out" in error("SGD.dcp", **IN_DIRECTORY, optimizer_params=NAMELESS)
    assert "need optimizer_key" in error("AdamW.pt", optimizer_params=ORDER)
    assert "need optimizer_key" in error("AdamW.pt", optimizer_class="SGD")
    assert "Adagrad, Adam, AdamW, NAdam, RMSprop or SGD" in (text := error("adamax.pt", **IN_FILE)) and "eps" in text
    assert "Adam or AdamW" in (text := error("old.pt", **IN_FILE)) and "optimizer_class" in text
    assert "it has no 'optim'" in error("AdamW.pt", optimizer_key="optim")
    assert "no tensors under the key 'net'" in error("AdamW.pt", model_key="net")
    assert "'momentum' of SGD" in error("AdamW.pt", **IN_FILE, optimizer_class="SGD")
    assert "optimizer_class must be" in error("AdamW.pt", **IN_FILE, optimizer_class="Adamax")
    state = torch.load(files / "SGD.pt", weights_only=True)
    state["optimizer"]["param_groups"][0]["maximize"] = True
    torch.save(state, tmp_path / "maximize.pt")
    assert "'maximize'" in _error(import_checkpoint, tmp_path / "maximize.pt", tmp_path / "one", **IN_FILE)
    assert sorted(os.listdir(tmp_path)) == ["maximize.pt"]


def test_files_that_can_not_be_read_are_named(files, tmp_path):
    (tmp_path / "text.pt").write_text("text")
    (tmp_path / "cut.pt").write_bytes((files / "SGD.pt").read_bytes()[:2000])
    (tmp_path / "cut").mkdir()
    for name in (".metadata", "__0_0.distcp"):
        (tmp_path / "cut" / name).write_bytes((files / "SGD.dcp" / name).read_bytes()[:2000])
    (tmp_path / "other").mkdir()
    (tmp_path / "a.safetensors").write_bytes(b"")
    torch.save({"a": 1}, tmp_path / "nothing.pt")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "module.pt")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    for name, part in (("text.pt", ""), ("cut.pt", ""), ("cut", ""), ("other", "neither a file of torch.save nor"),
                       ("a.safetensors", "`tessera ckpt import`"), ("nothing.pt", "it has no tensors"),
                       ("none.pt", "No such file"), ("list.pt", "must hold a dict"), ("module.pt", "got torch.nn.modules.linear.Linear")):
        text = _error(import_checkpoint, tmp_path / name, tmp_path / "one")
        assert str(tmp_path / name) in text and part in text, text
    assert not (tmp_path / "one").exists()


def test_what_can_not_be_exported_is_refused_and_the_file_stays(files, tmp_path):
    def error(to, checkpoint=files / "SGD.pt.ckpt", **options):
        text = _error(export_checkpoint, checkpoint, to, **options)
        return text

    (tmp_path / "old.pt").write_text("old")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("notes")
    tessera.save_state_dict({"a": torch.ones(2)}, tmp_path / "plain")
    assert "`tessera ckpt export`" in error(tmp_path / "a.safetensors")
    assert "format must be 'torch' or 'dcp'" in error(tmp_path / "a.onnx")
    assert "'torch' or 'dcp'" in error(tmp_path / "a.pt", format="onnx")
    assert "/full' must not be there" in error(tmp_path / "full")
    assert "/full' must not be there" in error(tmp_path / "full", format="torch")
    assert "/old.pt' must not be there" in error(tmp_path / "old.pt", format="dcp")
    assert "a floating one; got torch.int64" in error(tmp_path / "old.pt", dtype=torch.int64)
    assert "must differ" in error(tmp_path / "old.pt", model_key="a", optimizer_key="a")
    assert "must differ" in error(tmp_path / "old.pt", optimizer_key="model")
    assert "saved without one" in error(tmp_path / "old.pt", tmp_path / "plain", optimizer_key="optimizer")
    assert "/none" in error(tmp_path / "old.pt", tmp_path / "none")
    assert "get the name" in error(tmp_path / "old.pt", rename=[(".*", "a")])
    (tmp_path / "a.pt.tmp").write_text("")
    assert "an export that was killed" in error(tmp_path / "a.pt")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for entry in (files / "SGD.pt.ckpt").iterdir():
        data = entry.read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        (damaged / entry.name).write_bytes(data if entry.suffix == ".json" else data[:header] + bytes(len(data) - header))
    for name in ("old.pt", "new.pt", "new"):
        assert "is damaged" in error(tmp_path / name, damaged)
    assert (tmp_path / "old.pt").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["a.pt.tmp", "damaged", "full", "old.pt", "plain"]


def test_an_interrupt_leaves_nothing(files, tmp_path):
    def stop(done, total):
        if done > 0:
            raise KeyboardInterrupt

    for call, source, target in ((export_checkpoint, "SGD.pt.ckpt", "a.pt"), (export_checkpoint, "SGD.pt.ckpt", "a"),
                                 (import_checkpoint, "SGD.pt", "one"), (import_checkpoint, "SGD.dcp", "one")):
        with pytest.raises(KeyboardInterrupt):
            call(files / source, tmp_path / target, progress=stop)
        assert os.listdir(tmp_path) == []


def test_the_command(files, tmp_path, capsys):
    (tmp_path / "names.json").write_text(json.dumps(ORDER))
    (tmp_path / "rules.json").write_text(json.dumps([["^first", "1st"]]))
    (tmp_path / "map.json").write_text(json.dumps({"2nd.weight": "first.weight", "2nd.bias": "first.bias"}))
    assert main(["import", str(files / "order.pt"), str(tmp_path / "one"), "--optimizer", "optimizer",
                 "--optimizer-params", str(tmp_path / "names.json")]) == 0
    assert "import: " in capsys.readouterr().err
    assert main(["export", str(tmp_path / "one"), str(tmp_path / "dcp"), "--optimizer", "optim", "--quiet",
                 "--rename", "^1st=2nd", "--rename-file", str(tmp_path / "rules.json")]) == 0
    assert main(["import", str(tmp_path / "dcp"), str(tmp_path / "two"), "--optimizer", "optim", "--quiet",
                 "--rename-file", str(tmp_path / "map.json")]) == 0
    assert capsys.readouterr().err == ""
    _assert_same(files / "order.pt.ckpt", tmp_path / "two")
    assert main(["export", str(tmp_path / "one"), str(tmp_path / "a"), "--format", "torch", "--dtype", "float16", "--quiet"]) == 0
    assert {value.dtype for value in torch.load(tmp_path / "a").values()} == {torch.float16, torch.int64}
    for arguments in (["export", str(tmp_path / "none"), str(tmp_path / "b.pt")],
                      ["import", str(tmp_path / "none"), str(tmp_path / "b")],
                      ["export", str(tmp_path / "one"), str(tmp_path / "b.pt"), "--dtype", "float9"]):
        assert main([*arguments, "--quiet"]) == 2
        assert capsys.readouterr().err.startswith(f"python -m tessera.exchange {arguments[0]}: ")
    for arguments in (["--rename", "net"], ["--rename-file", str(tmp_path / "names.json")],
                      ["--rename-file", str(tmp_path / "none")]):
        with pytest.raises(SystemExit, match="2"):
            main(["import", str(files / "SGD.pt"), str(tmp_path / "b"), *arguments])


# --- FSDP2 ---------------------------------------------------------------------------------------


class Small(torch.nn.Module):
    """Fewer rows than ranks, so that some ranks have empty parts; a parameter is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(6, 2)
        self.scale = torch.nn.Parameter(torch.rand(1))
        self.last = torch.nn.Linear(2, 4, bias=False)
        self.frozen = torch.nn.Parameter(torch.rand(5, 3), requires_grad=False)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) * self.scale)


def _groups(net):
    params = list(net.named_parameters())
    return [{"params": [item for item in params if item[0] in ("first.bias", "scale")], "weight_decay": 0.0, "lr": 0.03},
            {"params": [item for item in params if item[0] in ("last.weight", "first.weight")]}]


def _fsdp2_job():
    net = Small()
    fully_shard_2(net)
    return net, torch.optim.AdamW(_groups(net), lr=0.02, weight_decay=0.1)


def _fsdp2_rank(size, folder, resumes):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting{size}{resumes}", rank=rank, world_size=size)
    net, optimizer = _fsdp2_job()
    if resumes:
        model, optim = get_state_dict(net, optimizer)
        state = {"model": model, "optim": optim}
        dcp.load(state, checkpoint_id=folder / "exported")
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    else:
        train(net, optimizer, 0, 3)
        model, optim = get_state_dict(net, optimizer)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=folder / "saved")
    train(net, optimizer, 3, 6)
    whole = {name: value.full_tensor() for name, value in net.state_dict().items()}
    if rank == 0:
        torch.save(whole, folder / f"after_{size}_{resumes}.pt")
    dist.destroy_process_group()


def _resume_here(folder):
    net = Small()
    sharded = tessera.fully_shard(net, unit_bytes=64)
    groups = [{**group, "params": [value for _, value in group["params"]]} for group in _groups(net)]
    optimizer = tessera.ShardedOptimizer(sharded, torch.optim.AdamW(groups, lr=1.0), fused=False)
    tessera.load_checkpoint(folder / "imported", sharded, optimizer)
    tessera.save_checkpoint(folder / "ours", sharded, optimizer)
    train(sharded, optimizer, 3, 6)
    return sharded.full_state()


def test_fsdp2_goes_on_from_ours_and_we_from_fsdp2(ranks, tmp_path):
    ranks(3, _fsdp2_rank, 3, tmp_path, False, joins=False)
    import_checkpoint(tmp_path / "saved", tmp_path / "imported", **IN_DIRECTORY)
    want = torch.load(tmp_path / "after_3_False.pt")
    for state in ranks(2, _resume_here, tmp_path):
        assert state.keys() == want.keys()
        for name, value in want.items():
            torch.testing.assert_close(state[name], value)
    export_checkpoint(tmp_path / "ours", tmp_path / "exported", **IN_DIRECTORY)
    for size in (2, 3):
        ranks(size, _fsdp2_rank, size, tmp_path, True, joins=False)
        for name, value in torch.load(tmp_path / f"after_{size}_True.pt").items():
            torch.testing.assert_close(value, want[name])


def _save_cut(folder):
    """Saves a model with its large tensors cut over two ranks, along their last dim."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=int(os.environ["RANK"]), world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state = torch.load(folder / "state.pt", weights_only=True)
    cut = {name: distribute_tensor(value.contiguous(), mesh, [Shard(value.dim() - 1)]) if value.dim() else value
           for name, value in state.items() if value.numel()}
    cut.update({name: value for name, value in state.items() if not value.numel()})
    dcp.save(cut, checkpoint_id=folder / "cut")
    dist.destroy_process_group()


def test_directories_of_whole_and_of_cut_tensors(ranks, tmp_path):
    state = Picture().state_dict()
    torch.save(state, tmp_path / "state.pt")
    dcp.save(state, checkpoint_id=tmp_path / "whole", no_dist=True)
    ranks(2, _save_cut, tmp_path, joins=False)
    for name in ("whole", "cut"):
        import_checkpoint(tmp_path / name, tmp_path / "one")
        tensors = {key[2]: value for key, value in _contents(tmp_path / "one")[0].items()}
        assert tensors.keys() == state.keys()
        assert all(torch.equal(value, state[key]) for key, value in tensors.items())


def _train_and_save(path):
    net = make_net()
    sharded = tessera.fully_shard(net)
    optimizer = tessera.ShardedOptimizer(sharded, torch.optim.AdamW(net.parameters(), lr=1e-2), fused=False)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(sharded, my_rows(batch(step))).backward()
        optimizer.step()
    tessera.save_checkpoint(path, sharded, optimizer)
    return sharded.full_state()


def test_an_export_of_a_sharded_run_with_ties(ranks, tmp_path):
    want = ranks(2, _train_and_save, tmp_path / "one")[0]
    export_checkpoint(tmp_path / "one", tmp_path / "one.pt", **IN_FILE)
    saved = torch.load(tmp_path / "one.pt", weights_only=True)
    net = make_net()
    net.load_state_dict(saved["model"])
    assert all(torch.equal(value, want[name]) for name, value in net.state_dict().items())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0)
    optimizer.load_state_dict(saved["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 1e-2 and optimizer.state[net.embedding.weight]["step"] == 2

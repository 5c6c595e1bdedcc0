"""Checkpoints in the layouts of DeepSpeed, written here as its files are: ZeRO stages 1 to 3 on 1 to 3 ranks, and universal ones."""

import json

import pytest
import torch

import tessera
from foreign_layouts import train_net, write_universal, write_zero
from tessera.exchange import import_checkpoint


@pytest.fixture(scope="module")
def trained():
    return train_net()


def _assert_is(checkpoint, trained):
    net, optimizer, names = trained
    tensors = tessera._C.CheckpointTensors(checkpoint, True, [], None, None)
    index = json.loads(tensors.index())
    assert [group["params"] for group in index["optimizer"]["param_groups"]] == names
    assert [group["options"]["weight_decay"] for group in index["optimizer"]["param_groups"]] == [0.1, 0]
    assert index["optimizer"]["kind"] == "AdamW" and set(map(str, index["optimizer"]["counts"].values())) == {"{'step': 3}"}
    want = {("tensor", ("embed.weight", "head.weight")): net.embed.weight}
    want |= {("tensor", (name,)): value for name, value in net.state_dict(keep_vars=True).items()
             if name not in ("embed.weight", "head.weight")}
    for name, value in net.named_parameters():
        owners = ("embed.weight", "head.weight") if name == "embed.weight" else (name,)
        want |= {(key, owners): tensor for key, tensor in optimizer.state.get(value, {}).items() if key != "step"}
    assert {(entry.get("state") or "tensor", tuple(entry["names"])) for entry in index["tensors"]} == want.keys()
    for number, entry in enumerate(index["tensors"]):
        value = want[entry.get("state") or "tensor", tuple(entry["names"])]
        assert torch.equal(tensors.read(number), value.detach()), entry


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_directories(tmp_path, trained, stage, ranks):
    write_zero(tmp_path / "zero", trained, stage, ranks)
    import_checkpoint(tmp_path / "zero", tmp_path / "one", optimizer_key="optimizer")
    _assert_is(tmp_path / "one", trained)
    import_checkpoint(tmp_path / "zero" / "step3", tmp_path / "model", model_key="model")


@pytest.mark.parametrize("stage", [2, 3])
def test_universal_directories(tmp_path, trained, stage):
    write_universal(tmp_path / "universal", trained, stage)
    import_checkpoint(tmp_path / "universal", tmp_path / "one", optimizer_key="optimizer")
    _assert_is(tmp_path / "one", trained)


def test_what_is_not_whole_is_refused(tmp_path, trained):
    def error(folder):
        with pytest.raises(ValueError) as caught:
            import_checkpoint(folder, tmp_path / "one", optimizer_key="optimizer")
        assert str(folder) in str(caught.value) and not (tmp_path / "one").exists()
        return str(caught.value)

    def states(folder, change):
        path = folder / "step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        value = torch.load(path)
        change(value["optimizer_state_dict"])
        torch.save(value, path)

    for name, ranks, stage in (("gone", 2, 2), ("parallel", 1, 2), ("elastic", 1, 2), ("short", 1, 2), ("model", 2, 3)):
        write_zero(tmp_path / name, trained, stage, ranks)
    (tmp_path / "gone" / "step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert "2 ranks saved it; it has the files of 1 optimizers" in error(tmp_path / "gone")
    own = tmp_path / "parallel" / "step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    own.with_name("zero_pp_rank_0_mp_rank_01_optim_states.pt").write_bytes(own.read_bytes())
    assert "ds_to_universal" in error(tmp_path / "parallel")
    states(tmp_path / "elastic", lambda value: value.update(base_optimizer_state=[]))
    assert "elastic" in error(tmp_path / "elastic")
    states(tmp_path / "short", lambda value: value["single_partition_of_fp32_groups"][0].resize_(5))
    assert "5 elements of a tensor of [11, 6]" in error(tmp_path / "short")
    (tmp_path / "model" / "step3" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    assert "2 optimizers and 1 models" in error(tmp_path / "model")

"""Checkpoints in the layouts of DeepSpeed, written here as its files are: ZeRO stages 1 to 3 on 1 to 3 ranks, and universal ones."""

import json
from collections import OrderedDict

import pytest
import torch

import tessera
from tessera.exchange import import_checkpoint


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.first, self.norm = torch.nn.Linear(6, 7), torch.nn.LayerNorm(7)
        self.frozen = torch.nn.Linear(7, 6, bias=False)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("scale", torch.full((7,), 0.5))

    def forward(self, x):
        return self.head(self.frozen(self.norm(self.first(self.embed(x))) * self.scale))


@pytest.fixture(scope="module")
def trained():
    """A model, its optimizer, and the names in each param group."""
    torch.manual_seed(1)
    net = Net()
    named = [(name, value) for name, value in net.named_parameters() if value.requires_grad]
    groups = [[item for item in named if (item[1].dim() > 1) == decays] for decays in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0))])
    for step in range(3):
        x = (torch.arange(4) * 3 + step) % 11
        torch.nn.functional.cross_entropy(net(x), (x + 1) % 11).backward()
        optimizer.step()
    return net, optimizer, [[name for name, _ in group] for group in groups]


def _flat(values, stage, ranks):
    """The flat tensors of the ranks: one after the other, filled up; or (stage 3) of each tensor an equal part for each."""
    if stage < 3:
        whole = torch.cat([value.flatten() for value in values])
        size = -(-len(whole) // (2 * ranks)) * 2
        return list(torch.nn.functional.pad(whole, (0, size * ranks - len(whole))).view(ranks, size))
    parts = [torch.nn.functional.pad(value.flatten(), (0, -value.numel() % ranks)).view(ranks, -1) for value in values]
    return [torch.cat([part[rank] for part in parts]) for rank in range(ranks)]


def _write(folder, trained, stage, ranks, tied=True):
    net, optimizer, names = trained
    values = dict(net.named_parameters())
    subgroups, owners = names, [[0], [1]]
    if stage == 3:  # those of many elements are cut into several
        subgroups, owners = [names[0][:1], names[0][1:], names[1]], [[0, 1], [2]]
    state = lambda key: [_flat([optimizer.state[values[name]][key] for name in group], stage, ranks) for group in subgroups]
    flat = {"fp32": [_flat([values[name].detach() for name in group], stage, ranks) for group in subgroups],
            "exp_avg": state("exp_avg"), "exp_avg_sq": state("exp_avg_sq")}
    groups = [{**{key: value for key, value in group.items() if key not in ("params", "param_names")}, "params": owner}
              for group, owner in zip(optimizer.param_groups, owners)]
    (folder / "step3").mkdir(parents=True)
    (folder / "latest").write_text("step3")
    module = OrderedDict((name, value.to(torch.bfloat16) if value.requires_grad else value) for name, value in
                         net.state_dict(keep_vars=True).items())
    for rank in range(ranks):
        base = {"param_groups": groups, "state": {
            number: {"step": torch.tensor(3.), **{key: flat[key][number][rank] for key in ("exp_avg", "exp_avg_sq")}}
            for number in range(len(subgroups))}}
        fp32 = [parts[rank] for parts in flat["fp32"]]
        own = {"zero_stage": stage, "partition_count": ranks}
        own |= ({"fp32_flat_groups": fp32, "optimizer_state_dict": base} if stage == 3 else
                {"single_partition_of_fp32_groups": fp32, "base_optimizer_state": base})
        torch.save({"optimizer_state_dict": own}, folder / "step3" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if rank and stage < 3:
            continue
        frozen = values["frozen.weight"].detach()
        shown = module if stage < 3 else {name: value if name == "scale" else value.new_empty(0) for name, value in module.items()}
        model = {"module": shown, "buffer_names": ["scale"], "shared_params": {"head.weight": "embed.weight"} if tied else {},
                 "param_shapes": [OrderedDict((name, values[name].shape) for name in group) for group in subgroups],
                 "frozen_param_shapes": {"frozen.weight": frozen.shape},
                 "frozen_param_fragments": {"frozen.weight": _flat([frozen], 3, ranks)[rank] if stage == 3 else frozen}}
        torch.save(model, folder / "step3" / f"{f'zero_pp_rank_{rank}_' if stage == 3 else ''}mp_rank_00_model_states.pt")


def _write_universal(folder, trained, stage):
    net, optimizer, _ = trained
    _write(folder, trained, stage, 1)
    for path in (folder / "step3").glob("*_model_states.pt"):
        path.rename(folder / path.name)
    states = torch.load(folder / "step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    base = states["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    (folder / "latest").unlink()
    for name, value in net.named_parameters():
        if stage == 3 and not value.requires_grad:  # such are in the files of the models alone
            continue
        (folder / "zero" / name).mkdir(parents=True)
        tensors = {"fp32": value.detach(), **optimizer.state.get(value, {})}
        for key, tensor in tensors.items():
            if key == "step":
                if stage < 3:
                    torch.save(tensor, folder / "zero" / name / "step.pt")
            else:
                torch.save({"param": tensor.flatten() if stage == 3 else tensor, "cat_dim": 0}, folder / "zero" / name / f"{key}.pt")
    extra = {"optimizer_state_dict": base} if stage == 3 else {}
    torch.save({"param_groups": base["param_groups"], **extra}, folder / "zero" / "optimizer_state.pt")


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
    _write(tmp_path / "zero", trained, stage, ranks)
    import_checkpoint(tmp_path / "zero", tmp_path / "one", optimizer_key="optimizer")
    _assert_is(tmp_path / "one", trained)
    import_checkpoint(tmp_path / "zero" / "step3", tmp_path / "model", model_key="model")


@pytest.mark.parametrize("stage", [2, 3])
def test_universal_directories(tmp_path, trained, stage):
    _write_universal(tmp_path / "universal", trained, stage)
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
        _write(tmp_path / name, trained, stage, ranks)
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

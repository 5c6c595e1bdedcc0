"""Writes checkpoints in the layouts of other tools, as their files are."""

import json
from collections import OrderedDict

import torch


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


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def train_block(names: bool, alike: bool = False):
    """A model with an optimizer of two param groups, weights that decay and others that don't."""
    torch.manual_seed(1)
    model = Block()
    named = list(model.named_parameters())
    parts = [[item for item in named if (item[1].dim() == 2) == decays] for decays in (True, False)]
    if alike:  # norm.weight and norm.bias are apart, and have one shape
        parts = [[item for item in named if (item[0] == "norm.bias") == last] for last in (False, True)]
    groups = [{"params": part if names else [value for _, value in part], "weight_decay": decay}
              for part, decay in zip(parts, (0.1, 0.0))]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.sin(torch.arange(18.).view(3, 6) + step)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def write_trainer(folder, model, optimizer, form="safetensors", sharded=False):
    """A directory of the Trainer of transformers."""
    folder.mkdir()
    state = model.state_dict()
    name, write = "pytorch_model.bin", torch.save
    if form == "safetensors":
        from safetensors.torch import save_file

        name, write = "model.safetensors", save_file
    if sharded:
        parts = {f"part-{at}.{form}": dict(list(state.items())[at::2]) for at in range(2)}
        for file, part in parts.items():
            write(part, folder / file)
        places = {key: file for file, part in parts.items() for key in part}
        (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": places}))
    else:
        write(state, folder / name)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save({"python": [1, 2]}, folder / "rng_state.pth")
    (folder / "trainer_state.json").write_text("{}")


def train_net():
    """Returns a model, its optimizer, and the names in each param group."""
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


def write_zero(folder, trained, stage, ranks):
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
        model = {"module": shown, "buffer_names": ["scale"], "shared_params": {"head.weight": "embed.weight"},
                 "param_shapes": [OrderedDict((name, values[name].shape) for name in group) for group in subgroups],
                 "frozen_param_shapes": {"frozen.weight": frozen.shape},
                 "frozen_param_fragments": {"frozen.weight": _flat([frozen], 3, ranks)[rank] if stage == 3 else frozen}}
        torch.save(model, folder / "step3" / f"{f'zero_pp_rank_{rank}_' if stage == 3 else ''}mp_rank_00_model_states.pt")


def write_universal(folder, trained, stage):
    net, optimizer, _ = trained
    write_zero(folder, trained, stage, 1)
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

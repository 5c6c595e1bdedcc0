"""Optimizers that need whole parameters, PyTorch's and one's own: the bits of one process at every level, and checkpoints."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tessera
from models import LEVELS, batch, loss_of, make_net
from ranks import in_process_group
from whole_optimizers import OPTIMIZERS, PLAIN, Lamb, Soap


def _loss(model, step, rank, size):
    return loss_of(model, batch(step).view(size, -1, 6)[rank])


def _alone(kind, size, replicas=1, dtype=torch.float32):
    """One process that keeps float values, uses them rounded to `dtype`, and adds up the gradients of each replica's ranks,
    then those of replicas, in float."""
    masters, used = make_net().to(dtype).float(), make_net().to(dtype)
    optimizers = OPTIMIZERS[kind][0](masters)
    for step in range(3):
        totals = {}
        for replica in range(replicas):
            sums = {}
            for rank in range(replica * size // replicas, (replica + 1) * size // replicas):
                used.zero_grad()
                _loss(used, step, rank, size).backward()
                for name, param in used.named_parameters():
                    if param.grad is not None:
                        sums[name] = sums[name] + param.grad.float() if name in sums else param.grad.float()
            for name, value in sums.items():
                totals[name] = totals[name] + value if name in totals else value
        for name, param in masters.named_parameters():
            param.grad = totals.get(name)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for to, value in zip(used.parameters(), masters.parameters()):
                to.copy_(value)
    return used.state_dict()


def _job(kind, dtype=torch.float32, uses_all=False, **plan):
    net = make_net().to(dtype)
    net.unused.requires_grad_(not uses_all)
    if dtype != torch.float32:
        plan["master_dtype"] = torch.float32
    if "partition" not in plan:
        plan["cuts"] = OPTIMIZERS[kind][1](net)
    optimizers = OPTIMIZERS[kind][0](net)
    sharded = tessera.fully_shard(net, average=False, **plan)
    return sharded, [tessera.ShardedOptimizer(sharded, optimizer, fused=False) for optimizer in optimizers]


def _train(sharded, optimizers, steps, first_alone=False):
    for step in steps:
        sharded.zero_grad()
        if first_alone:  # so that gradients are those of any number of ranks
            (_loss(sharded, step, 0, 1) * (tessera.rank() == 0)).backward()
        else:
            _loss(sharded, step, tessera.rank(), tessera.size()).backward()
        for optimizer in optimizers:
            optimizer.step()


def _trained(kinds):
    results = {}
    for kind in kinds:
        for dtype in (torch.float32, torch.bfloat16):
            for plan in [{"level": level, "unit_bytes": 2000} for level in LEVELS] + [{"partition": "whole_param"}]:
                sharded, optimizers = _job(kind, dtype, **plan)
                _train(sharded, optimizers, range(3))
                results[kind, dtype, str(plan)] = sharded.full_state()
    return results


@pytest.mark.parametrize("size, transport", [(1, ""), (2, "gloo"), (3, "gloo"), (3, "arena"), (4, "arena")])
def test_steps_have_the_bits_of_one_process(ranks, size, transport):
    alone = {(kind, dtype): _alone(kind, size, dtype=dtype) for kind in OPTIMIZERS for dtype in (torch.float32, torch.bfloat16)}
    for results in ranks(size, _trained, tuple(OPTIMIZERS), transport=transport):
        for (kind, dtype, plan), state in results.items():
            for name, value in alone[kind, dtype].items():
                assert torch.equal(state[name], value), (kind, dtype, plan, name)


def _replicas():
    rank = tessera.rank()
    shards, across = ([tessera.new_group(group) for group in groups] for groups in (([0, 1], [2, 3]), ([0, 2], [1, 3])))
    results = {}
    for kind in OPTIMIZERS:
        for level in LEVELS:
            sharded, optimizers = _job(kind, level=level, group=shards[rank // 2], replicate_group=across[rank % 2])
            _train(sharded, optimizers, range(3))
            results[kind, level] = sharded.full_state()
    return results


def test_replicas_have_the_bits_of_one_process(ranks):
    alone = {kind: _alone(kind, 4, replicas=2) for kind in OPTIMIZERS}
    for results in ranks(4, _replicas):
        for (kind, level), state in results.items():
            for name, value in alone[kind].items():
                assert torch.equal(state[name], value), (kind, level, name)


# --- checkpoints -------------------------------------------------------------------------------

def _save(folder):
    states = {}
    for kind in OPTIMIZERS:
        sharded, optimizers = _job(kind, level="p_g_os", unit_bytes=2000)
        _train(sharded, optimizers, range(2), first_alone=True)
        whole = [optimizer.state_dict() for optimizer in optimizers]
        model = sharded.full_state()
        for number, optimizer in enumerate(optimizers):
            tessera.save_checkpoint(folder / f"{kind}-{number}", sharded, optimizer)
        _train(sharded, optimizers, range(2, 4), first_alone=True)
        states[kind] = model, whole, sharded.full_state()
    return states


def _resume(folder, saved):
    for kind, (model, whole, later) in saved.items():
        for by_dict in (False, True):
            for plan in ({"level": "os", "partition": "whole_param"}, {"level": "p_g_os", "unit_bytes": 900}, {"level": "none"}):
                sharded, optimizers = _job(kind, **plan)
                _train(sharded, optimizers, range(5, 6), first_alone=True)
                sharded.load_full_state(model)
                for number, optimizer in enumerate(optimizers):
                    if by_dict:
                        optimizer.load_state_dict(whole[number])
                    else:
                        tessera.load_checkpoint(folder / f"{kind}-{number}", sharded, optimizer)
                _train(sharded, optimizers, range(2, 4), first_alone=True)
                for name, value in sharded.full_state().items():
                    assert torch.equal(value, later[name]), (kind, by_dict, plan, name)


def test_they_go_on_at_any_number_of_ranks(ranks, tmp_path):
    saved = ranks(2, _save, tmp_path)[0]
    for size in (1, 3, 4):
        ranks(size, _resume, tmp_path, saved)


def _other_class(folder):
    sharded, (optimizer,) = _job("LAMB")
    _train(sharded, [optimizer], range(1))
    tessera.save_checkpoint(folder / "one", sharded, optimizer)
    other = tessera.ShardedOptimizer(sharded, Soap(sharded.module.parameters()))
    with pytest.raises(ValueError, match=r"Soap \(the checkpoint's: Lamb\)"):
        tessera.load_checkpoint(folder / "one", sharded, other)


def test_a_checkpoint_is_that_of_a_class(ranks, tmp_path):
    ranks(2, _other_class, tmp_path)


@in_process_group
def _save_by_dcp(folder):
    results = {}
    for kind in OPTIMIZERS:
        # PyTorch can't load state of a parameter that was never used.
        sharded, optimizers = _job(kind, uses_all=True, level="p_g_os", unit_bytes=2000)
        _train(sharded, optimizers, range(2), first_alone=True)
        state, optimizer_state = get_state_dict(sharded, optimizers)
        dcp.save({"model": state, "optim": optimizer_state}, checkpoint_id=folder / kind)
        _train(sharded, optimizers, range(2, 4), first_alone=True)
        results[kind] = sharded.full_state()
    return results


@in_process_group
def _load_by_dcp(folder, later):
    for kind in OPTIMIZERS:
        # PyTorch can't load state of a parameter that was never used.
        sharded, optimizers = _job(kind, uses_all=True, level="p_g_os", unit_bytes=2000)
        state, optimizer_state = get_state_dict(sharded, optimizers)
        dcp.load({"model": state, "optim": optimizer_state}, checkpoint_id=folder / kind)
        set_state_dict(sharded, optimizers, model_state_dict=state, optim_state_dict=optimizer_state)
        _train(sharded, optimizers, range(2, 4), first_alone=True)
        for name, value in sharded.full_state().items():
            assert torch.equal(value, later[kind][name]), (kind, name)


def test_torchs_checkpoints_load_at_another_number_of_ranks(ranks, tmp_path):
    later = ranks(2, _save_by_dcp, tmp_path)[0]
    for size in (1, 3):
        ranks(size, _load_by_dcp, tmp_path, later)


# --- rules -------------------------------------------------------------------------------------


def _refused():
    for make in (lambda net: torch.optim.Muon(tessera.muon_groups(net, ["embedding*"])[0]), lambda net: Lamb(net.parameters())):
        net = make_net()
        sharded = tessera.fully_shard(net)
        with pytest.raises(NotImplementedError, match=r'is cut.*cuts=\[\("\*", "whole"\)\], or partition="whole_param"'):
            tessera.ShardedOptimizer(sharded, make(net))
    net = make_net()
    sharded = tessera.fully_shard(net, cuts=[("*", "whole")])
    with pytest.raises(NotImplementedError, match="LBFGS, whose step needs products over all parameters"):
        tessera.ShardedOptimizer(sharded, torch.optim.LBFGS(list(net.parameters())))


def test_errors_name_the_rule(ranks):
    ranks(2, _refused)


def test_groups_and_cuts_of_muon():
    net = make_net()  # head.weight is embedding.weight
    matrices, others = tessera.muon_groups(net, ["head*"])
    assert [id(param) for param in matrices] == [id(net.block[0].weight), id(net.block[2].weight)]
    assert sorted(map(id, matrices + others)) == sorted(map(id, net.parameters()))
    assert tessera.muon_cuts(net, ["head*"]) == [("block.0.weight", "whole"), ("block.2.weight", "whole")]
    assert len(tessera.muon_cuts(net)) == 3 and tessera.muon_cuts(net, ["*"]) == []
    assert tessera.muon_cuts(net, ["block.?.weight"]) == tessera.muon_cuts(net)  # only * is special


# --- docs/guide/optimizers.md ------------------------------------------------------------------


def _page():
    lines = [line for line in (Path(__file__).resolve().parents[2] / "docs/guide/optimizers.md").read_text().splitlines()
             if line.startswith("| ")]
    heads, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("| ---")]
    return {row[0]: dict(zip(heads, row, strict=True)) for row in rows}


class Signs(torch.optim.SGD):
    elementwise = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    average = self.state[param].setdefault("average", torch.zeros_like(param))
                    param.sub_(average.lerp_(param.grad, 0.1).sign(), alpha=group["lr"])


ROWS = {"one's own, such as LAMB": (Lamb, {}), "one's own that steps each element": (Signs, {}), "`CPUAdam`": (tessera.CPUAdam, {}),
        "`CPUAdam` in bfloat16": (tessera.CPUAdam, {"state_dtype": torch.bfloat16}),
        "`CPUAdam` in 8 bits": (tessera.CPUAdam, {"state_dtype": torch.uint8}),
        "`SGD` with momentum": (torch.optim.SGD, {"momentum": 0.9, **PLAIN}), "`torch.optim.Muon`": (torch.optim.Muon, {}),
        "`LBFGS`": (torch.optim.LBFGS, {}), "`SparseAdam`": (torch.optim.SparseAdam, {})}
for _kind in ("AdamW", "Adam", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "ASGD", "RAdam", "Rprop", "Adafactor"):
    ROWS[f"`{_kind}`"] = (getattr(torch.optim, _kind), PLAIN)


def _params(name, net):
    return tessera.muon_groups(net, ["head*"])[0] if name == "`torch.optim.Muon`" else list(net.parameters())


def _run_row(name, row, alone, folder):
    kind, options = ROWS[name]
    plan = {"average": False, "unit_bytes": 900}
    if row["placement"] != "any":
        net = make_net()
        sharded = tessera.fully_shard(net, **plan)
        with pytest.raises(NotImplementedError, match="must be elementwise|must take dense gradients|needs blocks of"):
            tessera.ShardedOptimizer(sharded, kind(_params(name, net), **options))
        if row["placement"] == "refused":
            return
    net = make_net()
    if rule := row["rule in Python"].strip("`"):
        plan["cuts"] = eval(rule, {"muon_cuts": tessera.muon_cuts, "model": net})
    sharded = tessera.fully_shard(net, **plan)
    optimizer = tessera.ShardedOptimizer(sharded, kind(_params(name, net), **options), fused=False)
    _train(sharded, [optimizer], range(3), first_alone=True)
    for key, value in sharded.full_state().items():
        if row["exact"] == "bits":
            assert torch.equal(value, alone[key]), (name, key)
        else:
            torch.testing.assert_close(value, alone[key], rtol=1e-5, atol=1e-6, msg=f"{name} {key}")
    number = [id(param) for param in _params(name, net)].index(id(net.block[0].weight))
    numel = sum(value.numel() for key, value in optimizer.state_dict()["state"][number].items()
                if torch.is_tensor(value) and value.numel() > 1 and not key.endswith("_scale"))
    rows, columns = net.block[0].weight.shape
    wanted = {"its own": numel, "rows + columns": rows + columns}
    assert numel == wanted.get(row["state per element"]) or numel == int(row["state per element"]) * rows * columns, name
    assert row["checkpoint"] == "yes"
    tessera.save_checkpoint(folder / name.strip("`").replace(" ", "_"), sharded, optimizer)


def _run_rows(rows, alone, folder):
    for name, row in rows.items():
        _run_row(name, row, alone.get(name), folder)


def test_each_row_of_the_page_is_run(ranks, tmp_path):
    rows = {name: row for name, row in _page().items() if "Python" in row["language"]}
    assert rows.keys() == ROWS.keys()
    alone = {}
    for name, row in rows.items():
        if row["placement"] != "refused":
            net = make_net()
            kind, options = ROWS[name]
            optimizer = kind(_params(name, net), **options)
            for step in range(3):
                net.zero_grad()
                _loss(net, step, 0, 1).backward()
                optimizer.step()
            alone[name] = net.state_dict()
    ranks(3, _run_rows, rows, alone, tmp_path)

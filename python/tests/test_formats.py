"""Checkpoints of each format that was released load: docs/guide/checkpoints.md promises it."""

import sys
from pathlib import Path

import pytest
import torch

import tessera

_FORMATS = Path(__file__).resolve().parents[2] / "core" / "checkpoint" / "tests" / "formats"
sys.path.insert(0, str(_FORMATS))
from save import make_job, make_net  # noqa: E402


def _load(path, level):
    net, sharded, optimizer = make_job(level)
    with torch.no_grad():
        for value in net.parameters():
            value.fill_(-1)
    loaded = tessera.load_checkpoint(path, sharded, optimizer)
    position = loaded.rank_state["position"].tolist() if loaded.rank_state else None
    return sharded.full_state(), optimizer.state_dict(), loaded.numbers, loaded.texts, position


@pytest.mark.parametrize("path", sorted(path for path in _FORMATS.iterdir() if path.is_dir() and path.name.isdigit()), ids=str)
@pytest.mark.parametrize("count, level", [(1, "none"), (2, "p_g_os"), (3, "os_g")])
def test_each_released_format_loads(ranks, path, count, level):
    net = make_net()
    for rank, (state, optimizer, numbers, texts, position) in enumerate(ranks(count, _load, path, level)):
        for name, value in net.state_dict().items():
            assert name in state and torch.equal(state[name], value), name
        assert (numbers, texts) == ({"step": 1, "loss": 0.5}, {"note": "größer"})
        assert position == ([rank + 10] if rank < 2 else None)
        kept = [values for values in optimizer["state"].values()]
        assert len(kept) == 5
        for values in kept:
            assert values["step"] == 1
            assert (values["exp_avg"] == 2).all() and (values["exp_avg_sq"] == 8).all()
        assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.25]

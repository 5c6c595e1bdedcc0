"""Jobs of FSDP2, tensor parallelism and DDP go on with Tessera, and back: a part of what torch_layouts.py tries."""

import pytest
import torch

from torch_layouts import go_on


@pytest.mark.parametrize("system, size, kinds", [("fsdp2", 4, ["AdamW", "SGD"]), ("tp", 2, ["NAdam"]), ("ddp", 2, ["momentum"])])
def test_they_have_its_values(tmp_path, system, size, kinds):
    for kind, dtype, distances, differing in go_on(tmp_path, system, size, kinds):
        assert not any(differing.values()), (kind, dtype, differing)
        if dtype == torch.float32:
            # Means of a few hundred numbers that 4 ranks add in another order; one step follows.
            assert max(distances.values()) <= 1e-5, (kind, distances)

"""The package's types, as checkers of users' programs see them."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tessera

_RIGHT = """
import torch
import tessera
from tessera import ColwiseParallel, DeviceMesh, Partial, Placement, Replicate, Shard


def train() -> float:
    tessera.init(timeout=60.0)
    model = torch.nn.Linear(3, 4)
    sharded = tessera.fully_shard(model, level="os_g", unit_bytes=1 << 20)
    optimizer = tessera.ShardedOptimizer(sharded, torch.optim.AdamW(model.parameters()))
    loss: torch.Tensor = sharded(torch.ones(2, 3)).sum()
    loss.backward()
    optimizer.step()
    norm: torch.Tensor = sharded.clip_grad_norm_(1.0)
    return float(norm) + tessera.rank()


def place(weight: torch.Tensor) -> list[Placement]:
    mesh = DeviceMesh([[0, 1], [2, 3]], ["dp", "tp"])
    placed = tessera.distribute(weight, mesh, [Shard(0), Replicate()])
    tessera.parallelize_module(torch.nn.Linear(2, 2), mesh, {"": ColwiseParallel(output=Partial("sum"))}, mesh_dim="tp")
    group: tessera.ProcessGroup = mesh.process_group(0)
    print(group.size, mesh.size(1), tessera.dist_zeros([2], mesh, [Shard(0)]).shape)
    return tessera.placements_of(tessera.redistribute(placed, [Replicate(), Replicate()]))
"""
_WRONG = """
import tessera

tessera.init(timeout="soon")
tessera.Shard("rows")
"""


def _check(checker, folder, text):
    program = folder / "program.py"
    program.write_text(text)
    path = folder / "path"
    path.mkdir(exist_ok=True)
    if not (path / "tessera").exists():
        (path / "tessera").symlink_to(Path(tessera.__file__).resolve().parent)  # a checker leaves out installed packages
    if checker == "mypy":
        command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", folder / "cache", program]
    else:
        (folder / "pyrightconfig.json").write_text('{"extraPaths": ["path"], "include": ["program.py"]}')
        command = ["pyright", "--pythonpath", sys.executable, "-p", folder]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**os.environ, "MYPYPATH": str(path)})


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_types(tmp_path, checker):
    if not (importlib.util.find_spec("mypy") if checker == "mypy" else shutil.which("pyright")):
        pytest.skip(f"{checker} is not installed")
    right = _check(checker, tmp_path, _RIGHT)
    assert right.returncode == 0, right.stdout + right.stderr
    wrong = _check(checker, tmp_path, _WRONG)
    assert wrong.returncode == 1 and '"timeout"' in wrong.stdout and wrong.stdout.count("error:") == 2, wrong.stdout


def test_the_stub_is_of_the_extension():
    stub = (Path(tessera.__file__).resolve().parent / "_C.pyi").read_text()
    known, owner = [], None
    for line in stub.splitlines():
        name = line.strip().removeprefix("def ").removeprefix("class ").split("(")[0].rstrip(":")
        if line.startswith("class "):
            owner = getattr(tessera._C, name)
        elif line.startswith("    def "):
            assert hasattr(owner, name), (owner, name)
            known.append(name)
        elif line.startswith("def ") and name != "__getattr__":
            assert hasattr(tessera._C, name), name
    assert len(known) > 20

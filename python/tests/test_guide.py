"""The programs of the documents run as written."""

import os
import re
from pathlib import Path

import pytest

import tessera

ROOT = Path(__file__).resolve().parents[2]


def _programs(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def _run(program, folder):
    os.chdir(folder)
    exec(compile(program, "guide", "exec"), {"__name__": "__main__"})
    return tessera.size()


@pytest.mark.parametrize("size", [1, 2])
def test_the_program_of_muon(ranks, tmp_path, size):
    assert ranks(size, _run, _programs("docs/guide/optimizers.md")[0], tmp_path, joins=False) == [size] * size


@pytest.mark.parametrize("size", [1, 2])
def test_the_guides_program(ranks, tmp_path, size):
    program = _programs("docs/guide/python.md")[0]
    assert ranks(size, _run, program, tmp_path, joins=False) == [size] * size
    assert (tmp_path / "runs" / "step-3" / "index.json").exists()


def test_the_imports_of_the_dialects(ranks, tmp_path):
    for name in ("dialects/fairscale/README.md", "dialects/paddle/group_sharded.md"):
        imports = "\n".join(line for line in _programs(name)[0].splitlines() if "import" in line)
        ranks(1, _run, imports, tmp_path)

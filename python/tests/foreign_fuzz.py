"""Imports files of other tools with a few bytes changed, each of which must give an error or a checkpoint.

    foreign_fuzz.py COUNT [SEED]

Prints each input that gives another exception, an error that does not name the file, takes longer than 10 s, or leaves something
behind; and the most memory. The exit status is then 1, also above 1 GiB.
"""

import random
import resource
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import foreign_layouts
from tessera.exchange import import_checkpoint

_PIECES = [b"", b"\x00", b"\xff" * 8, b"-1", b"[" * 300, b"{", b"null", b"18446744073709551615", b"c__builtin__\neval\n(S'1'\ntR.",
           b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"PK\x05\x06"]


def _changed(data: bytes, draw: random.Random) -> bytes:
    # The ends of files have the lists of what is in them.
    for _ in range(1 + draw.randrange(3)):
        at = draw.choice([draw.randrange(len(data) + 1), draw.randrange(min(len(data), 300) + 1),
                          len(data) - draw.randrange(min(len(data), 300) + 1)])
        kind, length = draw.randrange(6), 1 + draw.randrange(12)
        if kind == 0 and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1:]
        elif kind == 1:
            data = data[:at] + data[at + length:]
        elif kind == 2:
            data = data[:at]
        elif kind == 3:
            data = data[:at] + data[at:at + length] * 2 + data[at + length:]
        elif kind == 4:
            data = data[:at] + draw.choice(_PIECES) + data[at:]
        else:
            data = data[:at] + bytes(draw.randrange(256) for _ in range(length)) + data[at + length:]
    return data


def _write_all(folder: Path) -> None:
    model, optimizer = foreign_layouts.train_block(names=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / "one.pt")
    torch.save(state, folder / "old.pt", _use_new_zipfile_serialization=False)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / "dcp", no_dist=True)
    foreign_layouts.write_trainer(folder / "trainer", model, optimizer)
    trained = foreign_layouts.train_net()
    for stage in (2, 3):
        foreign_layouts.write_zero(folder / f"zero{stage}", trained, stage, ranks=2)
        foreign_layouts.write_universal(folder / f"universal{stage}", trained, stage)


def change_files(folder: Path, count: int, seed: int) -> int:
    warnings.simplefilter("ignore")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    failures, errors = 0, 0
    for number in range(seed, seed + count):
        draw = random.Random(number)
        path = draw.choice(files)
        source = next(above for above in (path, *path.parents) if above.parent == folder)
        options = {} if draw.random() < 0.2 else {"optimizer_key": "optimizer"}
        before, out = path.read_bytes(), folder.with_name("out")
        path.write_bytes(_changed(before, draw))
        start, problem = time.monotonic(), ""
        try:
            import_checkpoint(source, out, **options)
        except (ValueError, OSError) as error:
            errors += 1
            problem = "" if str(source) in str(error) or path.name in str(error) else f"does not name the file: {error}"
            problem = "something is left behind" if out.exists() else problem
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
        if time.monotonic() - start > 10:
            problem = f"took {time.monotonic() - start:.1f} s"
        shutil.rmtree(out, ignore_errors=True)
        path.write_bytes(before)
        if problem:
            failures += 1
            print(f"{number}: {path.relative_to(folder)}: {problem}", flush=True)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{count} inputs, {errors} errors, {failures} failures, at most {most} MiB")
    return int(failures > 0 or most > 1024)


def main(count: int, seed: int = 0) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "files"
        folder.mkdir()
        _write_all(folder)
        return change_files(folder, count, seed)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))

"""The PyTorch that a wheel is built against, which is the one that it needs."""

import re
import sysconfig
from pathlib import Path


def find_torch() -> Path:
    """Returns the folder of the package torch. pip builds in an environment of its own, which lacks it: so it is looked
    for where this Python's packages are installed."""
    for scheme in ("purelib", "platlib"):
        folder = Path(sysconfig.get_path(scheme)) / "torch"
        if (folder / "share" / "cmake" / "Torch" / "TorchConfig.cmake").exists():
            return folder
    raise SystemExit("Tessera is built against the PyTorch that will use it, and this Python has none: install it first "
                     "(pip install torch, or for the CPU alone with --index-url https://download.pytorch.org/whl/cpu)")


def dynamic_metadata(field, settings=None):
    if field != "dependencies":
        raise ValueError(f"no dynamic metadata for {field}")
    text = (find_torch() / "version.py").read_text()
    major, minor = re.search(r"__version__ = '(\d+)\.(\d+)", text).groups()
    return [f"torch=={major}.{minor}.*"]

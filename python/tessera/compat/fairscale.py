"""Lets `from fairscale.optim import OSS` and the like give Tessera's classes.

    import tessera.compat.fairscale  # before any import of fairscale

After it, `fairscale.optim` (`OSS`), `fairscale.optim.oss`, `fairscale.optim.grad_scaler` (`ShardedGradScaler`),
`fairscale.nn.data_parallel` and `fairscale.nn` (`ShardedDataParallel`) are Tessera's. Other modules of FairScale are
imported from FairScale, where it is installed.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

from .. import fairscale as _own

_MODULES = {
    "fairscale.optim": ("OSS", "ShardedGradScaler"),
    "fairscale.optim.oss": ("OSS",),
    "fairscale.optim.grad_scaler": ("ShardedGradScaler",),
    "fairscale.nn": ("ShardedDataParallel",),
    "fairscale.nn.data_parallel": ("ShardedDataParallel",),
    "fairscale.nn.data_parallel.sharded_ddp": ("ShardedDataParallel",),
}


def install() -> None:
    """Puts the modules in place. Raises `ImportError` if FairScale's own were imported before."""
    for name in _MODULES:
        if name in sys.modules and not hasattr(sys.modules[name], "_of_tessera"):
            raise ImportError(f"import tessera.compat.fairscale before {name}, whose classes are in use already")
    if "fairscale" not in sys.modules:
        spec = importlib.util.find_spec("fairscale")
        package = types.ModuleType("fairscale")
        package.__path__ = list(spec.submodule_search_locations) if spec else []
        sys.modules["fairscale"] = package
    for name, classes in _MODULES.items():
        module = types.ModuleType(name)
        module._of_tessera = True
        # Other submodules are FairScale's own.
        module.__path__ = [str(Path(root, *name.split(".")[1:])) for root in sys.modules["fairscale"].__path__]
        for entry in classes:
            setattr(module, entry, getattr(_own, entry))
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        setattr(sys.modules[parent], last, module)


install()

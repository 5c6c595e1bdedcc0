"""Builds the wheel by scikit-build-core, against the PyTorch of the environment that asks for it.

A wheel works with one minor version of PyTorch. So this one is not downloaded for the build: it is the one that will be
used.
"""

import functools
import os

import scikit_build_core.build
import torch_pin
from scikit_build_core.build import *  # noqa: F401,F403


def _against_torch(build):
    @functools.wraps(build)
    def call(*args, **kwargs):
        os.environ.setdefault("Torch_DIR", str(torch_pin.find_torch() / "share" / "cmake" / "Torch"))
        return build(*args, **kwargs)

    return call


build_wheel = _against_torch(scikit_build_core.build.build_wheel)
build_editable = _against_torch(scikit_build_core.build.build_editable)

"""Builds the wheel by scikit-build-core, against the PyTorch of the environment that asks for it.

A wheel works with one minor version of PyTorch. So this one is not downloaded for the build: it is the one that will be
used.
"""

import os

import torch_pin
from scikit_build_core.build import *  # noqa: F401,F403
from scikit_build_core.build import build_editable as _build_editable
from scikit_build_core.build import build_wheel as _build_wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    os.environ.setdefault("Torch_DIR", str(torch_pin.find_torch() / "share" / "cmake" / "Torch"))
    return _build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    os.environ.setdefault("Torch_DIR", str(torch_pin.find_torch() / "share" / "cmake" / "Torch"))
    return _build_editable(wheel_directory, config_settings, metadata_directory)

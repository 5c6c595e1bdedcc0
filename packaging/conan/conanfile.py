"""Recipe for Conan 2: `conan create packaging/conan`. See docs/guide/getting_started.md.

ConanCenter's libtorch is built without its distributed part and Gloo, so that LibTorch is taken from the folder that the
configuration user.tessera:torch_dir or the environment variable Torch_DIR names: the one with TorchConfig.cmake.
"""
import os
import pathlib
import re

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load
from conan.tools.scm import Version

required_conan_version = ">=2.4"


class TesseraConan(ConanFile):
    name = "tessera"
    description = "Sharded training for LibTorch: library, headers and command-line tool"
    license = "BSD-3-Clause"
    topics = ("deep-learning", "distributed-training", "libtorch", "fsdp")
    settings = "os", "arch", "compiler", "build_type"
    # Operators are registered once in a process, so that there is no static library, nor an option for it.
    package_type = "shared-library"
    # `libtorch` is the version of LibTorch, which is part of the binary interface; it is found, unless it is given to ask for a
    # package that exists.
    options = {"tools": [True, False], "libtorch": [None, "ANY"]}
    default_options = {"tools": True, "libtorch": None, "fmt/*:header_only": True, "mbedtls/*:shared": False}

    @property
    def _root(self):
        return os.path.join(self.recipe_folder, "..", "..")

    @property
    def _torch_dir(self):
        return self.conf.get("user.tessera:torch_dir", check_type=str) or os.environ.get("Torch_DIR")

    def _torch_version(self):
        path = os.path.join(self._torch_dir or "", "TorchConfigVersion.cmake")
        found = os.path.exists(path) and re.search(r'PACKAGE_VERSION "?([0-9.]+)', load(self, path))
        return found[1] if found else None

    def set_version(self):
        header = load(self, os.path.join(self._root, "include", "tessera", "version.h"))
        self.version = ".".join(re.findall(r"TESSERA_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))

    def export_sources(self):
        root = pathlib.Path(self._root)
        built = {path.relative_to(root).parts[0] for depth in ("*", "*/*") for path in root.glob(depth + "/CMakeLists.txt")}
        for folder in sorted(built - {"build", "examples", "packaging", "python", "tests"} | {"cmake", "command", "include"}):
            copy(self, folder + "/*", self._root, self.export_sources_folder, excludes=("*/tests/*", "*/__pycache__/*"))
        for file in ("CMakeLists.txt", "LICENSE"):
            copy(self, file, self._root, self.export_sources_folder)

    def config_options(self):
        self.options.libtorch = self._torch_version()

    def layout(self):
        cmake_layout(self)

    def requirements(self):
        # Compiled in: programs don't see them.
        self.requires("fmt/[>=9.1 <13]", visible=False)
        self.requires("nlohmann_json/[>=3.11 <4]", visible=False)
        self.requires("xxhash/[>=0.8 <1]", visible=False)
        self.requires("mbedtls/[>=2.28 <4]", visible=False)
        if self.options.tools:
            self.requires("cli11/[>=2.1 <3]", visible=False)

    def validate(self):
        check_min_cppstd(self, 20)
        if self.settings.os != "Linux":
            raise ConanInvalidConfiguration("Tessera needs Linux")
        least = {"gcc": "12", "clang": "16"}.get(str(self.settings.compiler))
        if least and Version(self.settings.compiler.version) < least:
            raise ConanInvalidConfiguration(f"Tessera needs {self.settings.compiler} {least} or newer")
        if not self.options.libtorch:
            raise ConanInvalidConfiguration("LibTorch was not found: set -c user.tessera:torch_dir=DIR or the environment "
                                            "variable Torch_DIR to the folder with its TorchConfig.cmake")

    def validate_build(self):
        if self._torch_version() != str(self.options.libtorch):
            raise ConanInvalidConfiguration(f"to build with LibTorch {self.options.libtorch}, set user.tessera:torch_dir to "
                                            f"its folder; {self._torch_version()} is in {self._torch_dir}")

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        toolchain.user_presets_path = False
        toolchain.cache_variables["Torch_DIR"] = self._torch_dir
        toolchain.cache_variables["TESSERA_TORCH_RPATH"] = "/opt/libtorch/lib"  # not a folder of the machine that builds
        toolchain.cache_variables["TESSERA_BUILD_TOOLS"] = bool(self.options.tools)
        toolchain.cache_variables["TESSERA_BUILD_TESTS"] = False
        toolchain.cache_variables["TESSERA_BUILD_EXAMPLES"] = False
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        CMake(self).install(component="tessera")

    def package_info(self):
        # The package's own CMake files, as they also find LibTorch.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [os.path.join("lib", "cmake", "Tessera")]
        self.cpp_info.libs = ["tessera"]
        if self._torch_dir:  # of the machine that uses the package
            self.buildenv_info.define_path("Torch_DIR", self._torch_dir)
            self.runenv_info.append_path("LD_LIBRARY_PATH", os.path.abspath(os.path.join(self._torch_dir, "../../../lib")))

"""./dev takes LibTorch's wheel without CUDA if there is one, with a pip that nobody has configured.

Wheels that hold nothing but a name come from indexes on this machine: of pip itself and of PyTorch.
"""
import functools
import http.server
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import threading
import unittest
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERSION = re.search(r"torch_version=([\d.]+)", (ROOT / "dev").read_text())[1]


def add_wheel(index, version):
    """Puts a wheel of torch into an index, a folder."""
    folder = index / "torch"
    folder.mkdir(parents=True, exist_ok=True)
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch/share/cmake/Torch/TorchConfig.cmake", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *arguments):
        self.server.asked.append(self.path)


class LibTorchWheel(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.indexes = self.folder / "indexes"
        self.indexes.mkdir()
        self.server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(Handler, directory=self.indexes))
        self.server.asked = []
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)

    def installed(self):
        """Lets ./dev set up LibTorch; returns the version that it took, and what it said."""
        tree, commands = self.folder / "tree", self.folder / "commands"
        tree.mkdir()
        commands.mkdir()
        shutil.copy(ROOT / "dev", tree)
        (commands / "cmake").write_text("#!/bin/sh\nexit 1\n")  # the set-up ends before it
        (commands / "cmake").chmod(0o755)
        host = f"http://127.0.0.1:{self.server.server_address[1]}"
        environment = {name: value for name, value in os.environ.items()
                       if not name.startswith(("PIP_", "TESSERA_")) and name not in ("Torch_DIR", "LIBTORCH", "CMAKE_PREFIX_PATH")}
        result = subprocess.run([tree / "dev", "build"], capture_output=True, text=True, timeout=100, env={
            **environment, "PATH": f"{commands}:{os.environ['PATH']}", "PIP_CONFIG_FILE": "/dev/null",
            "PIP_INDEX_URL": f"{host}/pip", "TESSERA_CPU_WHEELS": f"{host}/pytorch"})
        found = [path.name for path in tree.glob(".venv/lib/python3*/site-packages/torch-*.dist-info")]
        self.assertEqual(len(found), 1, result.stderr)
        return found[0].removeprefix("torch-").removesuffix(".dist-info"), result.stderr

    def asked_pytorch(self):
        return any(path.startswith("/pytorch") for path in self.server.asked)

    def test_comes_without_cuda_from_the_index_of_pytorch(self):
        add_wheel(self.indexes / "pip", VERSION)
        add_wheel(self.indexes / "pytorch", VERSION + "+cpu")
        version, said = self.installed()
        self.assertEqual(version, VERSION + "+cpu", said)

    def test_comes_from_the_index_that_pip_knows_if_it_is_there(self):
        add_wheel(self.indexes / "pip", VERSION)
        add_wheel(self.indexes / "pip", VERSION + "+cpu")
        version, said = self.installed()
        self.assertEqual(version, VERSION + "+cpu", said)
        self.assertFalse(self.asked_pytorch())

    def test_comes_with_cuda_if_there_is_no_other(self):
        add_wheel(self.indexes / "pip", VERSION)
        version, said = self.installed()
        self.assertEqual(version, VERSION)
        self.assertTrue(self.asked_pytorch())
        self.assertIn("taking the plain wheel, with CUDA", said)


if __name__ == "__main__":
    unittest.main()

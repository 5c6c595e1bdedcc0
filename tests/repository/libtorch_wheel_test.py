"""./dev takes LibTorch's wheel without CUDA if there is one, with a pip that nobody has configured.

Wheels that hold nothing but a name come from indexes on this machine: of pip itself and of PyTorch.
"""
import functools
import http.server
import os
import pathlib
import re
import shutil
import socket
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
    @classmethod
    def setUpClass(cls):
        cls.venv = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory())) / "venv"
        subprocess.run(["python3", "-m", "venv", cls.venv], check=True)

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

    def set_up(self, *, makes_venv=False, **variables):
        """Lets ./dev set up LibTorch; returns the versions that it has taken, and what it said."""
        tree, commands = self.folder / "tree", self.folder / "commands"
        tree.mkdir()
        if not makes_venv:
            shutil.copytree(self.venv, tree / ".venv", symlinks=True)
        commands.mkdir()
        shutil.copy(ROOT / "dev", tree)
        (commands / "cmake").write_text("#!/bin/sh\nexit 1\n")  # the set-up ends before it
        (commands / "cmake").chmod(0o755)
        host = f"http://127.0.0.1:{self.server.server_address[1]}"
        environment = {name: value for name, value in os.environ.items()
                       if not name.startswith(("PIP_", "TESSERA_")) and name not in ("Torch_DIR", "LIBTORCH", "CMAKE_PREFIX_PATH")}
        result = subprocess.run([tree / "dev", "build"], capture_output=True, text=True, timeout=100, env={
            **environment, "PATH": f"{commands}:{os.environ['PATH']}", "PIP_CONFIG_FILE": "/dev/null",
            "PIP_INDEX_URL": f"{host}/pip", "TESSERA_CPU_WHEELS": f"{host}/pytorch", **variables})
        found = tree.glob(".venv/lib/python3*/site-packages/torch-*.dist-info")
        return [path.name.removeprefix("torch-").removesuffix(".dist-info") for path in found], result.stderr

    def asked_pytorch(self):
        return any(path.startswith("/pytorch") for path in self.server.asked)

    def test_comes_without_cuda_from_the_index_of_pytorch(self):
        add_wheel(self.indexes / "pip", VERSION)
        add_wheel(self.indexes / "pytorch", VERSION + "+cpu")
        versions, said = self.set_up(makes_venv=True)
        self.assertEqual(versions, [VERSION + "+cpu"], said)

    def test_comes_from_the_index_that_pip_knows_if_it_is_there(self):
        add_wheel(self.indexes / "pip", VERSION)
        add_wheel(self.indexes / "pip", VERSION + "+cpu")
        versions, said = self.set_up()
        self.assertEqual(versions, [VERSION + "+cpu"], said)
        self.assertFalse(self.asked_pytorch())

    def test_comes_with_cuda_if_there_is_no_other_and_the_user_says_so(self):
        add_wheel(self.indexes / "pip", VERSION)
        versions, said = self.set_up(TESSERA_ALLOW_CUDA_WHEEL="1")
        self.assertEqual(versions, [VERSION])
        self.assertTrue(self.asked_pytorch())
        self.assertIn("taking the plain wheel, with CUDA", said)

    def test_never_comes_with_cuda_unasked(self):
        add_wheel(self.indexes / "pip", VERSION)
        versions, said = self.set_up()
        self.assertEqual(versions, [])
        self.assertIn("have one for this machine", said)
        for remedy in ("TESSERA_ALLOW_CUDA_WHEEL=1", "TESSERA_CPU_WHEELS=", "Torch_DIR="):
            self.assertIn(remedy, said)

    def test_an_index_that_cannot_be_reached_is_called_that(self):
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
            versions, said = self.set_up(PIP_INDEX_URL=nowhere, PIP_RETRIES="0", TESSERA_CPU_WHEELS=nowhere)
        self.assertEqual(versions, [])
        self.assertIn("an index of packages can't be reached", said)
        self.assertNotIn("have one for this machine", said)


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
"""Tests of sdk-with-sterna.py, with a wheel of their own and a server on this machine.

scripts/test-sdk-with-sterna.py
"""

import http.server
import importlib.util
import io
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import unittest
import zipfile

SCRIPT = pathlib.Path(__file__).with_name("sdk-with-sterna.py")
SPEC = importlib.util.spec_from_file_location("sdk_with_sterna", SCRIPT)
setup = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(setup)

METADATA = """\
Name: trillim
Requires-Dist: fastapi==0.128.0
Requires-Dist: uvicorn[standard]==0.40.0
Requires-Dist: numpy==2.4.2; extra == 'voice'

Requires-Dist: a word in the description
"""
PROGRAM = bytes(range(256)) * 64
FILES = {
    "trillim/__init__.py": b"",
    "trillim/_bin/.gitignore": b"*",
    "trillim/_bin/trillim-inference": PROGRAM,
    "trillim/_bin/helper.py": b"not this either",
    "trillim/cli.py": b"print('hello')\n",
    "trillim/docs/cli.md": b"# docs",
    "trillim-1.0.dist-info/METADATA": METADATA.encode(),
    "trillim-1.0.dist-info/licenses/LICENSE": b"MIT",
    "trillim-1.0.dist-info/RECORD": b"",
    "../outside.py": b"",
}
WANTED = {
    "trillim/__init__.py",
    "trillim/cli.py",
    "trillim-1.0.dist-info/METADATA",
    "trillim-1.0.dist-info/licenses/LICENSE",
}


def wheel():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
    return file.getvalue()


class Server(http.server.HTTPServer):
    """Serves one file by byte ranges, or, with `ranges` false, only whole."""

    def __init__(self, content, ranges=True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.ranges, self.sent = content, ranges, []
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}/some.whl"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        content = self.server.content
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, last = (int(asked[1]), int(asked[2])) if asked else (0, len(content) - 1)
        if self.server.ranges:
            content = content[start : last + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{last}/{len(self.server.content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.server.sent.append(content)
        self.wfile.write(content)

    def log_message(self, *_):
        pass


class SetupTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def serve(self, **options):
        server = Server(wheel(), **options)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        return server

    def run_script(self, *arguments):
        command = [sys.executable, SCRIPT, self.folder / "sdk", "--sterna", sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    def check_folder(self):
        sdk = self.folder / "sdk"
        found = {path.relative_to(sdk).as_posix() for path in sdk.rglob("*") if path.is_file()}
        programs = {path.relative_to(sdk).as_posix() for path in (sdk / "trillim" / "_bin").iterdir()}
        self.assertEqual(found - programs, WANTED | {"requirements.txt"})
        self.assertEqual({pathlib.Path(name).stem for name in programs}, set(setup.PROGRAMS))
        for name in programs:
            self.assertNotEqual((sdk / name).read_bytes(), PROGRAM)
        needs = (sdk / "requirements.txt").read_text()
        self.assertEqual(needs, "fastapi==0.128.0\nuvicorn[standard]==0.40.0\n")

    def test_no_byte_of_a_program_is_fetched(self):
        server = self.serve()
        files, left = setup.from_wheel(setup.RemoteFile(server.url, len(server.content)))
        self.assertEqual(files, {name: FILES[name] for name in WANTED})
        self.assertEqual(set(left), set(FILES) - WANTED)
        fetched = b"".join(server.sent)
        self.assertLess(len(fetched), len(PROGRAM))
        self.assertNotIn(PROGRAM[:64], fetched)
        self.assertNotIn(b"not this either", fetched)

    def test_a_server_that_sends_everything_is_refused(self):
        server = self.serve(ranges=False)
        with self.assertRaisesRegex(SystemExit, "status 200"):
            setup.from_wheel(setup.RemoteFile(server.url, len(server.content)))

    def test_from_a_wheel(self):
        path = self.folder / "some.whl"
        path.write_bytes(wheel())
        done = self.run_script("--from", path)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("left out: trillim/_bin/trillim-inference", done.stdout)
        self.check_folder()
        self.assertIn("exists", self.run_script("--from", path).stderr)

    def test_from_a_folder(self):
        with zipfile.ZipFile(io.BytesIO(wheel())) as archive:
            archive.extractall(self.folder / "site-packages")
        done = self.run_script("--from", self.folder / "site-packages")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.check_folder()

    def test_what_cannot_be_set_up(self):
        (self.folder / "empty").mkdir()
        self.assertIn("expected a folder `trillim`", self.run_script("--from", self.folder / "empty").stderr)
        done = self.run_script("--from", self.folder / "empty", "--sterna", "no-such-program")
        self.assertIn("no-such-program: no such program", done.stderr)
        self.assertFalse((self.folder / "sdk").exists())


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
"""Sets up the Python SDK that speaks the engine protocol (`trillim` on PyPI) with `sterna` as its programs.

    scripts/sdk-with-sterna.py sdk                      # fetches the SDK's Python files from PyPI
    scripts/sdk-with-sterna.py sdk --from some.whl      # or takes them from a wheel
    scripts/sdk-with-sterna.py sdk --from site-packages # or from a folder that holds the package

The SDK's Python files are under the MIT licence; the compiled programs in its wheel are not, and their
licence forbids what this project does. So they are never unpacked, and where the wheel is on a server
never fetched: only the byte ranges of the files that are wanted are asked for.

The folder that is written holds the package, its licence and metadata, `requirements.txt` with what the
package depends on, and in `trillim/_bin` two links to the `sterna` program (copies on Windows).
docs/sdk.md says how to go on.
"""

import argparse
import io
import json
import os
import pathlib
import re
import shutil
import sys
import urllib.request
import zipfile

PACKAGE = "trillim"
VERSION = "0.12.2"
PROGRAMS = ("trillim-inference", "trillim-quantize")
MAX_FILE_BYTES = 4 << 20


def is_wanted(name):
    """Whether a file of the package is Python source, licence or metadata; nothing of `_bin` is."""
    path = pathlib.PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "_bin" in path.parts:
        return False
    top = path.parts[0]
    if top == PACKAGE:
        return path.suffix == ".py"
    is_metadata = top.startswith(f"{PACKAGE}-") and top.endswith(".dist-info")
    # The list of installed files would be wrong.
    return is_metadata and len(path.parts) > 1 and path.name != "RECORD"


class RemoteFile(io.RawIOBase):
    """A file on a server, of which exactly the bytes that are read are fetched."""

    def __init__(self, url, size):
        self.url, self.size, self.pos = url, size, 0
        self.pieces = []

    def seekable(self):
        return True

    def readable(self):
        return True

    def seek(self, offset, whence=os.SEEK_SET):
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.pos, os.SEEK_END: self.size}[whence]
        self.pos = base + offset
        return self.pos

    def tell(self):
        return self.pos

    def readinto(self, buffer):
        end = min(self.pos + len(buffer), self.size)
        if end <= self.pos:
            return 0
        piece_start, piece = next(
            (held for held in self.pieces if held[0] <= self.pos and end <= held[0] + len(held[1])),
            None,
        ) or (self.pos, self.fetch(self.pos, end))
        buffer[: end - self.pos] = piece[self.pos - piece_start : end - piece_start]
        n_bytes, self.pos = end - self.pos, end
        return n_bytes

    def fetch(self, start, end):
        """The bytes from `start` to before `end`."""
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={start}-{end - 1}"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            expected = f"bytes {start}-{end - 1}/{self.size}"
            found = reply.headers.get("Content-Range")
            if reply.status != 206 or found != expected:
                raise SystemExit(f"{self.url}: expected `{expected}`, found status {reply.status}, `{found}`")
            data = reply.read(end - start)
        if len(data) != end - start:
            raise SystemExit(f"{self.url}: expected {end - start} bytes at {start}, found {len(data)}")
        return data

    def hold(self, start, end):
        """Fetches a range at once, to be read in parts."""
        self.pieces.append((start, self.fetch(start, end)))


def wheel_on_pypi(version):
    """The wheel of a version: its name, address and size."""
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    request = urllib.request.Request(f"https://pypi.org/simple/{PACKAGE}/", headers=accept)
    with urllib.request.urlopen(request, timeout=60) as reply:
        files = json.load(reply)["files"]
    prefix = f"{PACKAGE}-{version}-"
    wheels = [file for file in files if file["filename"].startswith(prefix)]
    if not wheels:
        raise SystemExit(f"{PACKAGE} {version}: PyPI has no wheel")
    # There is one for each platform; what differs are the programs.
    wheel = min(wheels, key=lambda file: file["filename"])
    return wheel["filename"], wheel["url"], wheel["size"]


def from_wheel(file):
    """Names and contents of the wanted files of a wheel, and the names of the others."""
    with zipfile.ZipFile(file) as wheel:
        members = sorted(wheel.infolist(), key=lambda member: member.header_offset)
        wanted = [member for member in members if is_wanted(member.filename) and not member.is_dir()]
        for member in wanted:
            if member.file_size > MAX_FILE_BYTES:
                raise SystemExit(f"{member.filename}: {member.file_size} bytes are no source file")
        if isinstance(file, RemoteFile):
            for start, end in runs(members, wanted, wheel.start_dir):
                file.hold(start, end)
        left = [member.filename for member in members if member not in wanted]
        # A checksum of each is compared on reading.
        return {member.filename: wheel.read(member) for member in wanted}, left


def runs(members, wanted, end_of_last):
    """The byte ranges of the wanted members, those that adjoin in one; `members` are in order."""
    ends = [member.header_offset for member in members[1:]] + [end_of_last]
    ranges = []
    for member, end in zip(members, ends, strict=True):
        if member not in wanted:
            continue
        if ranges and ranges[-1][1] == member.header_offset:
            ranges[-1][1] = end
        else:
            ranges.append([member.header_offset, end])
    return ranges


def from_folder(folder):
    """The same of a folder that holds the package."""
    if not (folder / PACKAGE / "__init__.py").is_file():
        raise SystemExit(f"{folder}: expected a folder `{PACKAGE}` with the package in it")
    tops = [folder / PACKAGE, *folder.glob(f"{PACKAGE}-*.dist-info")]
    files, left = {}, []
    for path in sorted(path for top in tops for path in top.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if is_wanted(name):
            files[name] = path.read_bytes()
        elif "__pycache__" not in path.parts:
            left.append(name)
    return files, left


def requirements(files):
    """What the package's metadata says it depends on, optional features left out."""
    metadata = next((files[name] for name in files if name.endswith(".dist-info/METADATA")), b"")
    header = metadata.decode().split("\n\n")[0]
    needs = re.findall(r"^Requires-Dist: ([^;\n]+?) *(;[^\n]*)?$", header, re.MULTILINE)
    return [need for need, condition in needs if "extra ==" not in condition]


def install_programs(folder, sterna):
    """Puts `sterna` where the SDK looks for its programs."""
    folder.mkdir()
    for program in PROGRAMS:
        if os.name == "nt":
            shutil.copy2(sterna, folder / f"{program}.exe")
        else:
            (folder / program).symlink_to(sterna)


def main():
    parser = argparse.ArgumentParser(description="Sets up the Python SDK with sterna as its programs.")
    parser.add_argument("target", type=pathlib.Path, help="folder to write; it must not exist")
    parser.add_argument(
        "--from", dest="source", type=pathlib.Path, help="wheel, or folder that holds the package"
    )
    parser.add_argument("--version", default=VERSION, help=f"version to fetch (default: {VERSION})")
    parser.add_argument("--sterna", default="sterna", help="the program (default: on the search path)")
    args = parser.parse_args()

    found = shutil.which(args.sterna)
    if found is None:
        raise SystemExit(f"{args.sterna}: no such program; name it with --sterna")
    if args.target.exists():
        raise SystemExit(f"{args.target} exists")
    if args.source is None:
        name, url, size = wheel_on_pypi(args.version)
        print(f"{name}: fetching its Python files only")
        files, left = from_wheel(RemoteFile(url, size))
    elif args.source.is_dir():
        files, left = from_folder(args.source)
    else:
        files, left = from_wheel(args.source)
    if f"{PACKAGE}/__init__.py" not in files:
        raise SystemExit(f"{args.source or PACKAGE}: no package `{PACKAGE}` in it")

    for name, content in files.items():
        path = args.target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    needs = requirements(files)
    if needs:
        (args.target / "requirements.txt").write_text("\n".join(needs) + "\n", encoding="utf-8")
    install_programs(args.target / PACKAGE / "_bin", pathlib.Path(found).resolve())
    print(f"{args.target}: {len(files)} files, programs: {found}")
    for name in left:
        print(f"  left out: {name}")


if __name__ == "__main__":
    sys.exit(main())

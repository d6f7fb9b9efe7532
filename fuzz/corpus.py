"""Packs the fuzzers' corpora into archives, one a target, and unpacks them.

Run anywhere: python3 fuzz/corpus.py unpack [TARGET...] before fuzzing, python3 fuzz/corpus.py pack [TARGET...]
afterwards. fuzz/corpora/TARGET.tar.gz is part of the repository, fuzz/corpus/TARGET/ is not. The same inputs
make the same archive.
"""

import gzip
import io
import os
import sys
import tarfile

FUZZ = os.path.dirname(os.path.abspath(__file__))
CORPORA = os.path.join(FUZZ, "corpora")
CORPUS = os.path.join(FUZZ, "corpus")
SUFFIX = ".tar.gz"


def pack(target):
    folder = os.path.join(CORPUS, target)
    archive = io.BytesIO()
    names = sorted(os.listdir(folder))
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in names:
            with open(os.path.join(folder, name), "rb") as f:
                data = f.read()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    os.makedirs(CORPORA, exist_ok=True)
    packed = gzip.compress(archive.getvalue(), 9, mtime=0)
    with open(os.path.join(CORPORA, target + SUFFIX), "wb") as f:
        f.write(packed)
    print(f"{target}: {len(names)} inputs, {len(packed)} bytes")


def unpack(target):
    """Inputs that are in the folder already stay."""
    folder = os.path.join(CORPUS, target)
    os.makedirs(folder, exist_ok=True)
    n = 0
    with tarfile.open(os.path.join(CORPORA, target + SUFFIX)) as tar:
        for entry in tar:
            if not entry.isfile() or os.path.basename(entry.name) != entry.name:
                sys.exit(f"{target}{SUFFIX}: expected plain files, found {entry.name}")
            with open(os.path.join(folder, entry.name), "wb") as f:
                f.write(tar.extractfile(entry).read())
            n += 1
    print(f"{target}: {n} inputs")


def main(verb=None, *targets):
    if verb == "pack":
        for target in targets or sorted(os.listdir(CORPUS)):
            pack(target)
    elif verb == "unpack":
        archives = sorted(os.listdir(CORPORA))
        for target in targets or [name.removesuffix(SUFFIX) for name in archives]:
            unpack(target)
    else:
        sys.exit(__doc__)


main(*sys.argv[1:])

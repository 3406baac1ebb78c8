"""Prints place, name, size and digest of each file below some directories, read in ways that must agree."""

import errno
import hashlib
import mmap
import os
import sys


def by_reading(path, size):
    with open(path, "rb") as file:
        return file.read()


def by_mapping(path, size):
    with open(path, "rb") as file:
        if size == 0:
            return b""
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
            return bytes(memory)


def backwards(path, size):
    file = os.open(path, os.O_RDONLY)
    starts = range(0, size, 30_011)
    pieces = [os.pread(file, 30_011, at) for at in reversed(starts)]
    os.close(file)
    return b"".join(reversed(pieces))


def directly(path, size):
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return by_reading(path, size)
    found = b""
    with mmap.mmap(-1, 256 << 10) as buffer:
        while count := os.preadv(file, [buffer], len(found)):
            found += buffer[:count]
            if count % 4_096:
                break
    os.close(file)
    return found


for place, root in enumerate(sys.argv[1:]):
    for directory, _, names in os.walk(root):
        for name in names:
            path = os.path.join(directory, name)
            size = os.stat(path).st_size
            whole = by_reading(path, size)
            for way in (by_mapping, backwards, directly):
                if way(path, size) != whole:
                    sys.exit(f"{path}: read {way.__name__} it is different")
            digest = hashlib.sha256(whole).hexdigest()
            print(place, os.path.relpath(path, root), size, len(whole), digest)

"""Writes files in the ways that programs do, all from one seed. A second run goes over what is there."""

import errno
import mmap
import os
import random
import sys

os.chdir(sys.argv[1])
dice = random.Random(int(sys.argv[2]))


def opened(name, more=0):
    return os.open(name, os.O_RDWR | os.O_CREAT | more, 0o644)


def put(file, data, at):
    while data:
        count = os.pwrite(file, data, at)
        data, at = data[count:], at + count


def sequential(name, bytes_each, count):
    file = opened(name)
    for _ in range(count):
        data = dice.randbytes(bytes_each)
        while data:
            data = data[os.write(file, data):]
    os.close(file)


def scattered(name, reach):
    file = opened(name)
    for _ in range(150):
        put(file, dice.randbytes(dice.randrange(1, 9_000)), dice.randrange(reach))
    os.fsync(file)
    for _ in range(20):
        put(file, dice.randbytes(1), dice.randrange(reach))
    os.close(file)


def sparse(name):
    file = opened(name)
    for _ in range(9):
        put(file, dice.randbytes(5_000), dice.randrange(3 << 20))
    os.ftruncate(file, dice.randrange(2 << 20, 3 << 20))
    os.ftruncate(file, (4 << 20) + 77)
    os.close(file)


def appended(name):
    files = [opened(name, os.O_APPEND) for _ in range(2)]
    for number in range(80):
        os.write(files[number % 2], dice.randbytes(dice.randrange(1, 7_000)))
    for file in files:
        os.close(file)


def mapped(name, size):
    file = opened(name)
    os.ftruncate(file, size)
    with mmap.mmap(file, size) as memory:
        for _ in range(60):
            data = dice.randbytes(dice.randrange(1, 6_000))
            at = dice.randrange(size - len(data))
            memory[at : at + len(data)] = data
            # What is written beside it goes to other places of the same pages.
            put(file, dice.randbytes(10), dice.randrange(size - 10))
        memory.flush()
    os.close(file)


def direct(name):
    try:
        file = opened(name, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        file = opened(name)
    with mmap.mmap(-1, 64 << 10) as buffer:
        for _ in range(24):
            buffer[:] = dice.randbytes(len(buffer))
            at = dice.randrange(20) * len(buffer)
            if os.pwritev(file, [buffer], at) != len(buffer):
                raise OSError("a direct write was short")
    os.close(file)


def replaced(name):
    sequential("new", 70_001, 18)
    os.rename("new", name)


def small():
    os.makedirs("d", exist_ok=True)
    for number in range(6):
        sequential(f"d/{number}", dice.randrange(1, 20_000), 1)
    os.unlink(f"d/{dice.randrange(6)}")


sequential("sequential", 100_003, 16)
scattered("scattered", 1_400_000)
sparse("sparse")
appended("appended")
mapped("mapped", (1 << 20) + 12_345)
direct("direct")
replaced("replaced")
small()

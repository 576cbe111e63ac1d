"""Compile every module below the given folders that has no bytecode yet.

The image's root is read-only, so that importing torch would compile it again in every process
(2.0 s against 0.8 s). The bytecode holds no time (unchecked-hash), and each fixed share of the
files is compiled by a process of its own, forked from the same state: marshal's bytes depend on
what a process holds, and so may not depend on how many cores there are.
"""

import importlib.util
import os
import pathlib
import py_compile
import sys

SHARES = 16


def compile_share(files: list[str]) -> None:
    """Compile some files, leaving out those written for other Python versions."""
    for file in files:
        try:
            py_compile.compile(
                file, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
            )
        except py_compile.PyCompileError:
            continue


def main(folders: list[str]) -> int:
    """Compile the files of all folders; 1 if a share failed."""
    files = sorted(
        str(path)
        for folder in folders
        for path in pathlib.Path(folder).rglob("*.py")
        if not pathlib.Path(importlib.util.cache_from_source(path)).exists()
    )
    running = 0
    failed = 0
    for share in range(SHARES):
        if running == len(os.sched_getaffinity(0)):
            failed |= os.wait()[1]
            running -= 1
        if os.fork() == 0:
            compile_share(files[share::SHARES])
            os._exit(0)
        running += 1
    while running:
        failed |= os.wait()[1]
        running -= 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs one Snakemake job on a node. A file of its own: the node needs no BAFS for Python.

It runs the command of `job.json`, which lies beside it. Its standard output is an archive of the
job's logs, benchmarks and directories, also if the job fails: BAFS sends that file home. If there
are none, it is empty.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile


def main() -> int:
    """Runs the job and returns its exit code."""
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "job.json"), encoding="utf-8") as file:
        spec = json.load(file)
    # Messages of Snakemake and the program go to standard error, where BAFS keeps them as logs.
    code = subprocess.run(["sh", "-c", spec["command"]], stdout=sys.stderr).returncode
    packed = list(spec["logs"])
    if code == 0:
        packed += spec["directories"]
        for path in spec["outputs"]:
            replace_link(path)
        for path in spec["stored"]:
            # A log that the rule did not write: BAFS is to send a file.
            if not os.path.exists(path):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                open(path, "x").close()
    packed = [path for path in packed if os.path.lexists(path)]
    if packed:
        with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
            for path in packed:
                archive.add(path, arcname=os.path.relpath(path, spec["root"]))
    return code if code >= 0 else 128 - code


def replace_link(path: str) -> None:
    """Replaces a symbolic link by what it leads to, as that may be no part of the volume."""
    if os.path.islink(path):
        copy = f"{path}.bafs-copy"
        shutil.copy2(path, copy)
        os.replace(copy, path)


if __name__ == "__main__":
    sys.exit(main())

"""A Parsl program as a user writes it: four tasks on two workers, with files of a home."""

import sys

import parsl
from bafs.parsl_staging import BafsStaging
from parsl.config import Config
from parsl.data_provider.files import File
from parsl.executors import HighThroughputExecutor


@parsl.bash_app
def count_bytes(inputs=(), outputs=()):
    """Counts the bytes of a file."""
    return f"wc -c < {inputs[0].filepath} > {outputs[0].filepath}"


if __name__ == "__main__":
    executor = HighThroughputExecutor(
        label="here",
        address="127.0.0.1",
        max_workers_per_node=2,
        working_dir=f"{sys.argv[1]}/work",
        storage_access=[BafsStaging()],
    )
    with parsl.load(Config(executors=[executor], run_dir=f"{sys.argv[1]}/runinfo")):
        words = File("bafs://home/parsl/words")
        outputs = [File(f"bafs://home/parsl/count.{number}") for number in range(4)]
        tasks = [count_bytes(inputs=[words], outputs=[output]) for output in outputs]
        for task in tasks:
            task.outputs[0].result()

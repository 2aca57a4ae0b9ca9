"""An exported model under several clients at once: errors, answers, memory, times.

    python benchmarks/load.py --export_dir=runs/demo_enfr/export --minutes=10

Each client asks, without a pause, for 1 to 8 texts of mixed lengths at a time. First every text is
asked for alone; each answer under load is compared with that. Memory is the process's resident set
(model, server and clients are one process) and, of it, the bytes that malloc has handed out and not
got back, read at the start of the load and after each tenth of the time. A leak shows in the second
figure; the first also has what malloc keeps for later.
Exit code 1: an error, or an answer that differs.
"""

import argparse
import ctypes
import json
import os
import random
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contender import print_table  # noqa: E402


def demo_texts(count):
    """Sentences of the demo's test split, some of them joined: 1 to 4 sentences long."""
    import tasks  # noqa: F401 (registers the demo)
    from tf_teaforn.task import get_task

    pairs = get_task("demo_enfr").source.dataset("test").take(4 * count).as_numpy_iterator()
    sentences = [source.decode() for source, _ in pairs]
    return [" ".join(sentences[4 * i : 4 * i + 1 + i % 4]) for i in range(count)]


class _Mallinfo2(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks".split()
    ] + [("keepcost", ctypes.c_size_t)]


def memory_megabytes():
    """(resident set of this process, what malloc has handed out); the second needs glibc."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    used = info.uordblks + info.hblkhd
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, used / 2**20


class Load:
    """Clients that ask `answer`, a function of a list of str, until a deadline.

    Args:
        answer: texts -> list of str.
        expected: {text: answer to it alone}.

    Attributes:
        seconds: list of float, of each request.
        errors: list of str.
        different: dict, text -> answer under load, where that is not the expected one.
    """

    def __init__(self, answer, expected):
        self.answer = answer
        self.expected = expected
        self.seconds, self.errors, self.different = [], [], {}

    def run(self, clients, seconds):
        """Runs for so many seconds; returns what `_memory` says at the start and at each tenth."""
        start = time.monotonic()
        threads = [
            threading.Thread(target=self._client, args=(seed, start + seconds))
            for seed in range(clients)
        ]
        memory = [self._memory()]
        for thread in threads:
            thread.start()
        for tenth in range(1, 11):
            time.sleep(max(start + seconds * tenth / 10 - time.monotonic(), 0))
            memory.append(self._memory())
        for thread in threads:
            thread.join()
        return memory

    def _memory(self):
        resident, allocated = memory_megabytes()
        requests = len(self.seconds)
        return {"requests": requests, "resident MB": resident, "allocated MB": allocated}

    def _client(self, seed, deadline):
        generator, texts = random.Random(seed), list(self.expected)
        while time.monotonic() < deadline:
            asked = generator.choices(texts, k=generator.randint(1, 8))
            start = time.perf_counter()
            try:
                answers = self.answer(asked)
            except Exception as error:
                self.errors.append(repr(error))
                # What is down now will not be up at once.
                time.sleep(0.1)
                continue
            self.seconds.append(time.perf_counter() - start)
            for text, found in zip(asked, answers, strict=True):
                if found != self.expected[text]:
                    self.different[text] = found


def signature_of(export_dir):
    """The newest version's `serving_default` as a function of a list of str."""
    import tensorflow as tf
    import tensorflow_text  # noqa: F401 (its operators)

    versions = [path for path in Path(export_dir).iterdir() if path.name.isdigit()]
    model = tf.saved_model.load(str(max(versions, key=lambda path: int(path.name))))
    signature = model.signatures["serving_default"]

    def answer(texts):
        outputs = signature(inputs=tf.constant(texts))["outputs"].numpy()
        return [output.decode() for output in outputs]

    # The signature holds its variables weakly.
    answer.model = model
    return answer


def main():
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--export_dir", required=True, help="what bin/export wrote")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--texts", type=int, default=64, help="number of different texts")
    parser.add_argument("--input", help="file of texts, one a line; default: the demo's sentences")
    parser.add_argument("--output", default="load.json")
    options = parser.parse_args()

    lines = Path(options.input).read_text().split("\n") if options.input else []
    texts = [line for line in lines if line][: options.texts] or demo_texts(options.texts)
    answer = signature_of(options.export_dir)
    expected = {text: answer([text])[0] for text in texts}
    load = Load(answer, expected)
    memory = load.run(options.clients, 60 * options.minutes)

    result = {
        "clients": options.clients,
        "minutes": options.minutes,
        "texts": len(expected),
        "longest_text": max(map(len, expected)),
        "requests": len(load.seconds),
        "requests_per_second": len(load.seconds) / (60 * options.minutes),
        "memory": memory,
        "errors": load.errors,
        "different_answers": load.different,
    }
    # Where nearly all failed there is nothing to take them of.
    if len(load.seconds) > 1:
        percentiles = statistics.quantiles(load.seconds, n=20)
        result |= {"p50_seconds": percentiles[9], "p95_seconds": percentiles[18]}
    Path(options.output).write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    rows = [
        {"": name, "value": len(value) if isinstance(value, list | dict) else round(value, 3)}
        for name, value in result.items()
        if name != "memory"
    ]
    print_table(rows)
    print_table([{name: f"{value:.1f}" for name, value in row.items()} for row in memory])
    sys.exit(1 if load.errors or load.different else 0)


if __name__ == "__main__":
    main()

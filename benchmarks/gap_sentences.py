"""Documents a second from text to gap-sentence pair, beside scoring them with rouge-score.

    python benchmarks/gap_sentences.py --documents=documents.txt.gz

A line is a document. The peer does what ours does in one process, but scores every sentence by
rouge-score's `RougeScorer` (no stemmer), on the first --peer_documents; the scores are compared.
Ours is measured in one process and in one a core. The contenders take turns; medians.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contender import print_table  # noqa: E402
from tf_teaforn.cores import usable_cores  # noqa: E402
from tf_teaforn.data import gaps  # noqa: E402
from tf_teaforn.data.documents import DocumentFiles, GapSource  # noqa: E402


def rouge_scores(sentences):
    """The peer's `gaps.sentence_scores`."""
    from rouge_score import rouge_scorer

    scorer = rouge_scorer.RougeScorer(["rouge1"], use_stemmer=False)
    return [
        scorer.score(" ".join(sentences[:i] + sentences[i + 1 :]), sentence)["rouge1"].fmeasure
        for i, sentence in enumerate(sentences)
    ]


def with_rouge_score(documents):
    """Pairs of documents, scored by the peer."""
    ours = gaps.sentence_scores
    gaps.sentence_scores = rouge_scores
    try:
        return gaps.gap_examples(documents, gaps.GapSettings())
    finally:
        gaps.sentence_scores = ours


def main():
    """Prints the table, then the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", required=True, help="file or pattern, a document a line")
    parser.add_argument("--peer_documents", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    source = GapSource(DocumentFiles(options.documents), gaps.GapSettings(), workers=1)
    documents = list(source.source.documents("train"))
    some = documents[: options.peer_documents]
    for sentences in map(gaps.split_sentences, some):
        # Where ours are equal, the peer's may differ in the last digit.
        pairs = zip(gaps.sentence_scores(sentences), rouge_scores(sentences), strict=True)
        if any(abs(our - peer) > 1e-9 for our, peer in pairs):
            raise SystemExit("the peer's scores are others")
    cores = usable_cores()
    everywhere = dataclasses.replace(source, workers=cores)
    contenders = {
        "rouge-score, 1 process": (len(some), lambda: with_rouge_score(some)),
        "ours, 1 process": (len(documents), lambda: list(source.pairs("train"))),
        f"ours, {cores} processes": (len(documents), lambda: list(everywhere.pairs("train"))),
    }
    speeds = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, (count, work) in contenders.items():
            start = time.perf_counter()
            work()
            speeds[name].append(count / (time.perf_counter() - start))
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    peer = next(iter(medians.values()))
    rows = [
        {"contender": name, "documents/s": speed, "ratio": speed / peer}
        for name, speed in medians.items()
    ]
    sentences = sum(len(gaps.split_sentences(document)) for document in some) / len(some)
    print(f"{len(documents)} documents of {sentences:.1f} sentences")
    print_table(rows)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()

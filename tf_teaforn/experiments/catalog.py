"""The paper's experiments as values: what is trained, what is scored, what the paper reports.

To add one, add an `Experiment` to `_EXPERIMENTS`: `bin/sweep` and `bin/report` know it then. A task
that no other has needs what stands for it at `--scale=small`, in `SMALL_TASKS`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tf_teaforn.errors import UserError, did_you_mean
from tf_teaforn.experiments import paper

# k of top-k that masks nothing.
ALL = "V"


@dataclasses.dataclass(frozen=True)
class Arm:
    """A column of a grid: the method's settings. N = 1 is teacher forcing.

    Attributes:
        n: number of decoders.
        discount: λ; without effect where n is 1.
        shared: whether one set of weights serves all decoders.
        top_k: k of the top-k stage input, or ALL; None: the decoder's own outputs.
        word_drop: probability of zeroing a ground-truth input embedding.
        steps: times the experiment's number of updates.
    """

    n: int = 1
    discount: float | None = None
    shared: bool = True
    top_k: int | str | None = None
    word_drop: float = 0.0
    steps: float = 1.0

    @property
    def name(self) -> str:
        """Part of a run's name: "n2-discount0.5-unshared"."""
        parts = [f"n{self.n}"]
        parts += [f"discount{self.discount:g}"] if self.discount is not None else []
        parts += [] if self.shared else ["unshared"]
        parts += [f"top_k{self.top_k}"] if self.top_k else []
        parts += [f"word_drop{self.word_drop:g}"] if self.word_drop else []
        parts += [f"steps{self.steps:g}x"] if self.steps != 1 else []
        return "-".join(parts)

    @property
    def label(self) -> str:
        """For tables and legends: "TeaFor2 (λ = .5, own decoders)"."""
        details = [f"λ = {short(self.discount)}"] if self.discount is not None else []
        details += [] if self.shared else ["own decoders"]
        details += [f"top-{self.top_k}"] if self.top_k else []
        details += [f"word drop {short(self.word_drop)}"] if self.word_drop else []
        details += [f"{self.steps:g}x steps"] if self.steps != 1 else []
        name = "Teacher forcing" if self.n == 1 else f"TeaFor{self.n}"
        return f"{name} ({', '.join(details)})" if details else name

    def settings(self, train_steps: int, vocab_size: int) -> dict[str, Any]:
        """Settings of `RunConfig` by name, for that base number of updates and vocabulary."""
        settings: dict[str, Any] = {"n": self.n, "train_steps": round(train_steps * self.steps)}
        if self.discount is not None:
            settings["discount"] = self.discount
        if not self.shared:
            settings["shared"] = False
        if self.top_k:
            settings["stage_input"] = "top_k"
            settings["top_k"] = vocab_size if self.top_k == ALL else self.top_k
        if self.word_drop:
            settings["word_drop"] = self.word_drop
        return settings


@dataclasses.dataclass(frozen=True)
class Score:
    """What the paper reports: a mean, and its standard error where it gives one."""

    mean: float
    error: float | None = None


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A grid of runs and what is read off it.

    Attributes:
        name: what --experiment takes.
        title, description: for the report.
        tasks: what the paper trains on.
        model: architecture, by name.
        arms: settings of the method; the first is what the others are compared with.
        seeds: runs of every arm, with seeds 1 to this.
        steps: updates by task.
        settings: settings of all runs, where they differ from the task's.
        beam_sizes: widths to decode with.
        checkpoints: what --checkpoint takes; the first is what tables show.
        sets: role ("test", "dev") -> flag of bin/evaluate that names the set.
        metrics: of bin/evaluate; none: its default.
        pretrained: whether its runs start from a model to be named by --init_from.
        layouts: which tables the report draws, by name.
        reported: the paper's value by (task, role, arm's name, beam width, metric).
        notes: what to know when comparing, above all where the paper contradicts itself.
    """

    name: str
    title: str
    description: str
    tasks: tuple[str, ...]
    model: str
    arms: tuple[Arm, ...]
    seeds: int
    steps: Mapping[str, int]
    beam_sizes: tuple[int, ...]
    checkpoints: tuple[str, ...]
    sets: Mapping[str, str]
    layouts: tuple[str, ...] = ("beams",)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    pretrained: bool = False
    reported: Mapping[tuple, Score] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def scaled_down(self) -> "Experiment":
        """The same shape for one CPU: short runs of a tiny model on the demo's sentences."""
        checkpoints = (
            "average:5" if name.startswith("average") else name for name in self.checkpoints
        )
        # The demo's best checkpoint is that of the best BLEU, which runs are compared by.
        metrics = dict.fromkeys((*self.metrics, "bleu")) if self.metrics else ()
        return dataclasses.replace(
            self,
            model="transformer_tiny",
            steps={task: min(1000, steps) for task, steps in self.steps.items()},
            settings={},
            checkpoints=tuple(checkpoints),
            sets={role: SMALL_SETS[role] for role in self.sets},
            metrics=tuple(metrics),
            pretrained=False,
        )


# What stands for a task at small scale, and for a test set.
SMALL_TASKS = {
    "wmt14_ende": "demo_ende",
    "wmt14_enfr": "demo_enfr",
    "cnn_dailymail": "demo_ende",
    "gigaword": "demo_enfr",
    "text": "demo_ende",
}
SMALL_SETS = {"test": "--split=test", "dev": "--split=validation"}
# Settings of the task text at that scale.
SMALL_TEXT = {
    "vocab_size": 4000,
    "batch_tokens": 2048,
    "max_source_length": 64,
    "max_target_length": 64,
    "schedule": "linear",
    "learning_rate": 2e-3,
    "warmup_steps": 200,
}


def short(number: float) -> str:
    """As the paper prints it: .5, 1."""
    return f"{number:g}".removeprefix("0") or "0"


def _by_beam(task, role, arm, scores):
    """{key of `Experiment.reported`: `Score`} of one column of the paper's tables."""
    return {(task, role, arm.name, k, "bleu"): Score(*score) for k, score in scores.items()}


def _reported(arms, table):
    """Joins the columns of {task: one {k: score} for each of `arms`}, scores of test sets."""
    joined = {}
    for task, columns in table.items():
        for arm, scores in zip(arms, columns, strict=True):
            joined |= _by_beam(task, "test", arm, scores)
    return joined


_TEACHER = Arm()
_WMT = ("wmt14_ende", "wmt14_enfr")
_WMT_TEST = {"test": "--test_set=wmt14"}
_BEAMS = (1, 2, 3, 4, 5, 6, 7, 8)
# What the experiments with Transformer big have in common.
_BIG_GRID = {
    "tasks": _WMT,
    "model": "transformer_big",
    "seeds": 3,
    "steps": {"wmt14_ende": 500_000, "wmt14_enfr": 1_000_000},
    # The peak of Tensor2Tensor's schedule at width 1,024: 2 / sqrt(1024 · 8000).
    "settings": {"learning_rate": 7e-4, "keep": 20},
    "beam_sizes": _BEAMS,
    "checkpoints": ("average:20",),
}
_WMT_NOTES = (
    "The paper names neither batch size, optimizer, learning rate, warm-up, vocabulary nor length "
    "penalty: most follow Tensor2Tensor, and tasks/wmt.py says which do not. Nor does it say how "
    "far the averaged checkpoints are apart: here 1,000 steps. TFDS' English-French data are some "
    "40 million pairs, the paper's 36.",
)
_BIG_NOTES = (
    "Transformer big has dropout .3 for both languages, as the paper's Table 2 has it; Vaswani et "
    "al. (2017) had .1 for English-French (--model=transformer_big_enfr).",
    *_WMT_NOTES,
    "The appendix's ± is the population deviation / √n; here it is the sample deviation / √n, for "
    "the same three scores 1.22 times as large.",
)

# What the experiments with Multi30k have in common.
_MULTI30K_GRID = {
    "tasks": ("text",),
    "model": "transformer_multi30k",
    "seeds": 3,
    "settings": {
        "vocab_size": 6000,
        "max_source_length": 64,
        "max_target_length": 64,
        "batch_tokens": 1024,
        "schedule": "linear",
        "learning_rate": 4e-3,
        "warmup_steps": 400,
        "dropout": 0.2,
        "eval_every": 1200,
        "checkpoint_every": 200,
        "keep": 20,
    },
    "beam_sizes": (1, 2, 4, 8),
    "checkpoints": ("average:5", "best"),
    "sets": {"test": "--split=test"},
    "metrics": ("bleu", "bleu_lc", "chrf", "ter"),
    "layouts": ("beams", "curves"),
    "notes": (
        "The paper has no Multi30k. On WMT14 (Table 1, Transformer base, shared decoders, λ = .5) "
        "its TeaFor2 less teacher forcing is +.20 greedily and -.06 with beam 4 for "
        "English-German, +.12 and -.02 for English-French; own decoders: +.06 and -.08, +.12 and "
        "+.02.",
        "Published text-only scores are BLEU of tokenised, often lower-cased text: bleu_lc is "
        "sacreBLEU's nearest to it, within .1 for German, .8 to 1.0 below for French, as Moses "
        "sets words with an apostrophe apart.",
    ),
}

_BASE_ARMS = (_TEACHER, Arm(2, 0.5, shared=False), Arm(2, 0.5))
_BIG_ARMS = (_TEACHER, *(Arm(n, discount) for n in (2, 3) for discount in paper.DISCOUNTS))
_TOP_K_ARMS = (_TEACHER, Arm(2, 0.2), Arm(2, 0.2, top_k=4), Arm(2, 0.2, top_k=ALL))
_WORD_DROP_ARMS = (_TEACHER, *(Arm(word_drop=p) for p in (0.1, 0.2, 0.3)))
# The R-L of the paper and of PEGASUS: on CNN/DailyMail that of whole summaries.
_SUMMARY_METRICS = {
    "cnn_dailymail": ("rouge1", "rouge2", "rougeLsum"),
    "gigaword": ("rouge1", "rouge2", "rougeL"),
}


def _big_reported():
    joined = {}
    for (task, role, n), (teacher, *columns) in paper.BIG.items():
        joined |= _by_beam(task, role, _TEACHER, teacher)
        for discount, scores in zip(paper.DISCOUNTS, columns, strict=True):
            joined |= _by_beam(task, role, Arm(n, discount), scores)
    return joined


def _summaries_reported():
    arms = {"pegasus": _TEACHER, "teafor3": Arm(3, 0.5)}
    return {
        (task, "test", arms[row].name, k, metric): Score(value)
        for task, rows in paper.SUMMARIES.items()
        for row, widths in rows.items()
        for k, values in widths.items()
        for metric, value in zip(_SUMMARY_METRICS[task], values, strict=True)
    }


_EXPERIMENTS = (
    Experiment(
        name="base",
        title="Transformer base, shared and own decoders (Table 1)",
        description="Does TeaForN help greedy decoding of a small model, and must decoders share "
        "their weights?",
        tasks=_WMT,
        model="transformer_base",
        arms=_BASE_ARMS,
        seeds=5,
        steps={task: 1_000_000 for task in _WMT},
        beam_sizes=(1, 4),
        checkpoints=("average:5",),
        sets=_WMT_TEST,
        layouts=("shared", "beams"),
        reported=_reported(_BASE_ARMS, paper.BASE),
        notes=_WMT_NOTES,
    ),
    Experiment(
        name="big",
        title="Transformer big: N, λ and beam width (Figures 2 and 3, Table 3, appendix)",
        description="λ is chosen on WMT12 at beam 8, and scored on WMT14.",
        **_BIG_GRID,
        arms=_BIG_ARMS,
        sets={**_WMT_TEST, "dev": "--test_set=wmt12"},
        layouts=("chosen", "beams", "curves"),
        reported=_big_reported(),
        notes=(
            *_BIG_NOTES,
            "The paper's English-German Figure 3 and appendix differ by up to .08, for example "
            "28.08 and 28.10 greedily for teacher forcing; the appendix is taken here.",
            "The paper's section 4.1.2 says 29.0 for English-German, its Table 3 29.2 to 29.3; it "
            "says 29.2 at the most for teacher forcing, where the appendix has 29.30 with beam 6.",
            "It says that .2 or .4 is always the best λ, where the appendix has .6 for TeaFor3, "
            "English-French, with beams 1 and 2, and for TeaFor2, English-German, with beams 1, 2 "
            "and 3; and that every λ beats teacher forcing on English-French at every width, where "
            "TeaFor3 with λ = .4 has 42.37 with beams 3 and 4, teacher forcing 42.37 and 42.40.",
            "The gain with beam search is .5 in its introduction and .4 in section 4.1.2.",
        ),
    ),
    Experiment(
        name="top_k",
        title="Transformer big: what the next decoder reads (Figure 4, appendix)",
        description="The decoder's output, or the expected embedding of its 4 best or of all "
        "words.",
        **_BIG_GRID,
        arms=_TOP_K_ARMS,
        sets=_WMT_TEST,
        layouts=("beams", "curves"),
        reported=_reported(_TOP_K_ARMS, paper.TOP_K),
        notes=(
            *_BIG_NOTES,
            "The paper's text says N = 2 and 3 were tried; it reports N = 2 alone.",
        ),
    ),
    Experiment(
        name="word_drop",
        title="Transformer big: word drop (Figure 5, appendix)",
        description="Is it regularization? Teacher forcing with some input words blanked.",
        **_BIG_GRID,
        arms=_WORD_DROP_ARMS,
        sets=_WMT_TEST,
        layouts=("beams", "curves"),
        reported=_reported(_WORD_DROP_ARMS, paper.WORD_DROP),
        notes=(
            *_BIG_NOTES,
            "The paper contradicts itself on the rates: .1, .2 and .3 in the text and the figure, "
            ".01, .02 and .03 at the head of the appendix's tables. The text's are run here.",
            "English-French with rate .3 and beam 7 is 41.93 in its figure, 41.97 in the appendix, "
            "which is taken here.",
        ),
    ),
    Experiment(
        name="equal_compute",
        title="Transformer big: equal compute (Table 4)",
        description="Teacher forcing for 1.5 times as many steps takes about as long as TeaFor2.",
        **_BIG_GRID,
        arms=(_TEACHER, Arm(steps=1.5), Arm(2, 0.2)),
        sets=_WMT_TEST,
        layouts=("compute", "beams"),
        reported=_reported(
            (_TEACHER, Arm(2, 0.2)), {task: paper.BIG[task, "test", 2][:2] for task in _WMT}
        ),
        notes=(
            *_BIG_NOTES,
            "Table 4's beam column does not say its width. Its means are those of the appendix's "
            "best one (English-German beam 6, English-French beam 4); its standard errors are "
            "other ones (English-German .20 and .12, greedily .12 and .08).",
            "The paper gives 4.5 it/s for Transformer big and 6.8 it/s for TeaFor2. The two look "
            "swapped: the ratio is the 1.5 by which teacher forcing was made to run longer.",
            "Table 4 has teacher forcing alone; TeaFor2 is here with lambda = .2 for both pairs, "
            "though Table 3 chooses .4 for English-German.",
        ),
    ),
    Experiment(
        name="summarization",
        title="PEGASUS large: news summaries (Table 5)",
        description="TeaFor3 from the pretrained model; the best checkpoint by validation ROUGE-L.",
        tasks=("cnn_dailymail", "gigaword"),
        model="pegasus_large",
        arms=(_TEACHER, Arm(3, 0.5)),
        seeds=1,
        steps={"cnn_dailymail": 400_000, "gigaword": 160_000},
        settings={"eval_every": 1000, "keep": 2},
        beam_sizes=(1, 8),
        checkpoints=("best",),
        sets={"test": "--split=test"},
        metrics=("rouge",),
        pretrained=True,
        layouts=("summaries",),
        reported=_summaries_reported(),
        notes=(
            "The paper starts from a PEGASUS large pretrained on HugeNews, which is not public; "
            "its teacher forcing row is that of Zhang et al. (2020). It gives no standard errors. "
            "Batch size, learning rate and length penalty are PEGASUS'.",
            "Section 4.2 says that pretraining used teacher forcing; Table 6 is headed TeaForN "
            "during pretraining.",
            "The paper's R-L of CNN/DailyMail is taken for ROUGE-Lsum, as PEGASUS reports it.",
            "The best checkpoint is chosen by the first 1,000 validation examples, decoded "
            "greedily (--eval_examples=0: by all, which the paper seems to have done).",
        ),
    ),
    Experiment(
        name="cost",
        title="Cost of N: steps a second and memory (Table 6)",
        description="Short runs for their speed alone.",
        tasks=("gigaword",),
        model="pegasus_large",
        arms=(_TEACHER, Arm(2, 0.5), Arm(3, 0.5)),
        seeds=1,
        steps={"gigaword": 500},
        settings={
            # The shape of PEGASUS' pretraining, which is what Table 6 is about.
            "max_source_length": 512,
            "max_target_length": 256,
            "batching": "fixed",
            "eval_every": 500,
            "eval_examples": 8,
            "checkpoint_every": 500,
            "log_every": 50,
            "keep": 1,
        },
        beam_sizes=(),
        checkpoints=(),
        sets={},
        layouts=(),
        notes=(
            "The paper measured pretraining on TPUs; what one device does here is compared by the "
            "ratios to N = 1. Which documents are read makes no difference: all are padded to "
            "pretraining's 512 and 256 tokens.",
            "The paper's model has 96,103 subwords, which --init_from of a PEGASUS large brings. "
            "Gigaword alone is unlikely to yield so many: its 32,000 make every stage cheaper.",
            "That N = 2 and 3 take the paper only .3 and 1.7 GB more suggests that it computed "
            "activations again in the backward pass: add --remat=stage to do so.",
            "Its text gives 4.5 it/s for Transformer big and 6.8 it/s for TeaFor2, which look "
            "swapped.",
        ),
    ),
    Experiment(
        name="multi30k",
        title="Multi30k, test 2016",
        description="The base comparison on a recognised small benchmark: image descriptions, "
        "29,000 training sentences.",
        **_MULTI30K_GRID,
        arms=(
            _TEACHER,
            Arm(2, 0.2),
            Arm(2, 0.5),
            Arm(3, 0.5),
            Arm(2, 0.5, shared=False),
            Arm(2, 0.5, top_k=4),
        ),
        steps={"text": 4800},
    ),
    Experiment(
        name="multi30k_long",
        title="Multi30k, test 2016, more than three times as many steps",
        description="Is the gain better translations in the end, or faster learning?",
        **_MULTI30K_GRID,
        arms=(_TEACHER, Arm(2, 0.5)),
        steps={"text": 16_000},
    ),
    Experiment(
        name="multi30k_converged",
        title="Multi30k, test 2016, close to convergence",
        description="Is teacher forcing as good as it is reported, and what is left of the gain?",
        **{
            **_MULTI30K_GRID,
            # About 26 million target tokens. Wu et al. 2021 have at most 8,000 updates of 4,096
            # tokens on each of two GPUs (github.com/LividWo/Revisit-MMT, README-baseline.md).
            "settings": {
                **_MULTI30K_GRID["settings"],
                "batch_tokens": 2048,
                "learning_rate": 5e-3,
                "warmup_steps": 1000,
                "dropout": 0.3,
                "eval_every": 2000,
            },
            "beam_sizes": (1, 2, 4, 5, 8),
            "checkpoints": ("average:10", "best"),
        },
        arms=(_TEACHER, Arm(2, 0.5)),
        steps={"text": 16_000},
    ),
)


def experiment_names() -> tuple[str, ...]:
    """Names that `get_experiment` knows."""
    return tuple(experiment.name for experiment in _EXPERIMENTS)


def get_experiment(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        UserError: there is none; says which there are.
    """
    for experiment in _EXPERIMENTS:
        if experiment.name == name:
            return experiment
    raise UserError(
        f"Unknown --experiment={name}.{did_you_mean(name, experiment_names())} Write one of: "
        f"{', '.join(experiment_names())}."
    )

"""WMT 2014 English-German and English-French, from TFDS.

    python -c "import tensorflow_datasets as tfds
    tfds.builder('wmt14_translate/de-en').download_and_prepare()"
    bin/train --task=wmt14_ende --model_dir=DIR

Expected (paper, Table 1; shared decoders, sacreBLEU, mean of five runs, last five checkpoints
averaged), Transformer base, greedy / beam 4:

    wmt14_ende  n=1 26.96 / 27.96   n=2 27.16 / 27.90   (the 2,737 sentences of sacreBLEU's wmt14)
    wmt14_enfr  n=1 40.20 / 40.86   n=2 40.32 / 40.84   (3,003 sentences)

Transformer big (paper, Table 3; last twenty checkpoints averaged, beam 8), with T2T's peak rate:

    --task=wmt14_ende --model=transformer_big --discount=.4 --train_steps=500000
    --learning_rate=7e-4    n=1 29.20   n=2 29.30
    --task=wmt14_enfr --model=transformer_big --discount=.2 --learning_rate=7e-4
                            n=1 42.33   n=2 42.73
    (transformer_big_enfr has dropout .1, as Vaswani et al. had for English-French; the paper's
    Table 2 gives .3 for both pairs.)

TFDS' English-French data are some 40 million pairs, UN texts and web crawl among them; beyond what
is longer than 256 subwords nothing is left out. TFDS validates on newstest2013 and tests on the
full newstest2014 (3,003 sentences); the paper tuned on newstest2012 and tested English-German on
sacreBLEU's filtered set.

What the paper leaves open follows Tensor2Tensor's `transformer_base_v3`: Adam, linear warm-up over
8,000 steps, then the inverse square root of the step, at most 256 tokens a side, 25k tokens of the
longer side a batch, padding included (Vaswani et al. 2017 have some 25k source tokens and as many
of the target), one vocabulary of 32k for both languages. It differs in these points: β2 of Adam is
OpenNMT-tf's .998 (v3: .997); dropout is that of Vaswani et al. alone (v3: .1 inside attention and
feed-forward too); sinusoids have the divisor D/2 (v3: D/2 - 1); ε of the layer norms is 1e-5 (v3:
1e-6); label smoothing spreads over all classes (v3: over all but the right one).
"""

from tf_teaforn.data.sources import TfdsSource
from tf_teaforn.task import Task, register_task


def _wmt14(name, language_code, language):
    return Task(
        name=name,
        description=f"WMT 2014 English-{language} translation (TFDS)",
        source=TfdsSource(f"wmt14_translate/{language_code}-en", "en", language_code),
        metrics=("bleu",),
        headline_metric="bleu",
        defaults={
            "model": "transformer_base",
            "n": 2,
            "discount": 0.5,
            "shared": True,
            "train_steps": 1_000_000,
            "eval_every": 10_000,
            "batch_tokens": 25_000,
            "vocab_size": 32_000,
            "max_source_length": 256,
            "max_target_length": 256,
            "optimizer": "adam",
            "schedule": "inverse_sqrt",
            "warmup_steps": 8_000,
            # The peak, reached after warm-up: 2 / sqrt(512 · 8000).
            "learning_rate": 9.9e-4,
            "label_smoothing": 0.1,
            "beam_size": 4,
            "beam_alpha": 0.6,
        },
    )


register_task(_wmt14("wmt14_ende", "de", "German"))
register_task(_wmt14("wmt14_enfr", "fr", "French"))

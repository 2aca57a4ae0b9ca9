"""Makes the models of PEGASUS, BART, T5, Marian here, and what Hugging Face computes with them.

    python -m venv peers
    peers/bin/pip install torch==2.13.0 transformers==5.24.0 sentencepiece protobuf
    peers/bin/python -m tests.testdata.make_families pegasus bart t5 t5_v1_1 marian

Each folder holds what `save_pretrained` wrote, `spiece.model` compressed, and `expected.npz`:

    source_ids, target_ids      int [B, S], [B, T], padded with the family's padding id
    logits                      float32 [B, T, V], teacher-forced
    loss                        mean cross-entropy of the targets
    greedy, beam                int [B, L] outputs of `generate` without the start, 4 beams,
                                length_penalty 0; beam_scores float32 [B], sums of log probabilities
    curve                       float32 [20], losses of as many steps of Adam that learn to copy
    line_ids, line_lengths      ids of `lines.text_lines`, end of sentence included

and `lines.json.gz`, what those ids are decoded to. t5_v1_1 has the tokenizer of t5. For PEGASUS the
lines have <n> for a newline, and the texts <unk> for what is unknown. The models are trained for
some seconds on reversing lists, so that they end their outputs.
"""

import gzip
import json
import lzma
import pathlib
import sys

import numpy as np
import sentencepiece
import torch
import transformers
from tokenizers import ByteLevelBPETokenizer
from torch import nn

from tests.testdata.lines import plain_lines, text_lines

HERE = pathlib.Path(__file__).parent
WIDTH, INNER, HEADS, LAYERS = 16, 24, 2, 2
STEPS = {"marian": 2500}
LEARNING_RATE = 1e-4


def sizes(**names):
    """Sizes of encoder and decoder in a config of BART's layout."""
    return {
        "d_model": WIDTH,
        **{
            f"{part}_{name}": value
            for part in ("encoder", "decoder")
            for name, value in {
                "layers": LAYERS,
                "ffn_dim": INNER,
                "attention_heads": HEADS,
            }.items()
        },
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        **names,
    }


def train_spm(path, vocabulary_size, lines=None, normalization="identity", **settings):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines or plain_lines()),
        model_prefix=str(path.with_suffix("")),
        vocab_size=vocabulary_size,
        normalization_rule_name=normalization,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    path.with_suffix(".vocab").unlink()
    if path.suffix != ".model":
        path.with_suffix(".model").rename(path)


def make_bart(folder):
    trainer = ByteLevelBPETokenizer()
    trainer.train_from_iterator(
        plain_lines(),
        vocab_size=420,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        show_progress=False,
    )
    trainer.save_model(str(folder))
    tokenizer = transformers.BartTokenizer(
        vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt")
    )
    config = transformers.BartConfig(
        vocab_size=trainer.get_vocab_size(),
        max_position_embeddings=64,
        forced_eos_token_id=None,
        **sizes(),
    )
    return transformers.BartForConditionalGeneration(config), tokenizer


def make_t5(folder, **settings):
    special = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    train_spm(folder / "spiece.model", 300, normalization="nmt_nfkc", **special)
    tokenizer = transformers.T5Tokenizer.from_pretrained(folder, extra_ids=5)
    config = transformers.T5Config(
        vocab_size=312,
        d_model=WIDTH,
        d_kv=6,
        d_ff=INNER,
        num_layers=LAYERS,
        num_heads=HEADS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        **settings,
    )
    return transformers.T5ForConditionalGeneration(config), tokenizer


def make_t5_v1_1(folder):
    return make_t5(folder, feed_forward_proj="gated-gelu", tie_word_embeddings=False)


def make_marian(folder):
    lines = plain_lines()
    special = {"eos_id": 0, "unk_id": 1, "bos_id": -1, "pad_id": -1}
    train_spm(folder / "source.spm", 250, lines[:500], **special)
    train_spm(folder / "target.spm", 250, lines[500:], **special)
    vocabulary = ["</s>", "<unk>"]
    for name in ("source.spm", "target.spm"):
        processor = sentencepiece.SentencePieceProcessor(str(folder / name))
        pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
        vocabulary += [piece for piece in pieces if piece not in vocabulary]
    vocabulary.remove(vocabulary[17])
    vocabulary.append("<pad>")
    ids = {piece: i for i, piece in enumerate(vocabulary)}
    (folder / "vocab.json").write_text(json.dumps(ids, ensure_ascii=False, indent=1))
    tokenizer = transformers.MarianTokenizer(
        source_spm=str(folder / "source.spm"),
        target_spm=str(folder / "target.spm"),
        vocab=str(folder / "vocab.json"),
        source_lang="en",
        target_lang="fr",
        separate_vocabs=False,
    )
    pad = ids["<pad>"]
    config = transformers.MarianConfig(
        vocab_size=len(ids),
        max_position_embeddings=64,
        pad_token_id=pad,
        decoder_start_token_id=pad,
        eos_token_id=0,
        bos_token_id=0,
        forced_eos_token_id=None,
        scale_embedding=True,
        activation_function="swish",
        static_position_embeddings=True,
        **sizes(),
    )
    model = transformers.MarianMTModel(config)
    model.final_logits_bias.normal_(std=0.3)
    return model, tokenizer


def make_pegasus(folder):
    path = folder / "spiece.model"
    special = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    train_spm(path, 280, None, "nmt_nfkc", user_defined_symbols=["<n>"], **special)
    tokenizer = transformers.PegasusTokenizer.from_pretrained(folder)
    config = transformers.PegasusConfig(
        vocab_size=103 + sentencepiece.SentencePieceProcessor(str(path)).get_piece_size(),
        max_position_embeddings=64,
        forced_eos_token_id=None,
        scale_embedding=True,
        activation_function="relu",
        **sizes(),
    )
    return transformers.PegasusForConditionalGeneration(config), tokenizer


FAMILIES = {
    "pegasus": make_pegasus,
    "bart": make_bart,
    "t5": make_t5,
    "t5_v1_1": make_t5_v1_1,
    "marian": make_marian,
}


def batch_of(model, draw, rows, start=()):
    """Lists of ids and the same reversed, ended in end of sentence, padded."""
    config = model.config
    special = [config.pad_token_id, config.eos_token_id, *start]
    words = [i for i in range(30, 90) if i not in special]
    sources, targets = [], []
    for _ in range(rows):
        words_in = draw.choice(words, size=draw.integers(1, 6)).tolist()
        sources.append([*start, *words_in, config.eos_token_id])
        targets.append([*start, *words_in[::-1], config.eos_token_id])

    def padded(lists):
        width = max(map(len, lists))
        return torch.tensor([x + [config.pad_token_id] * (width - len(x)) for x in lists])

    return padded(sources), padded(targets)


def loss_of(model, sources, targets):
    pad = model.config.pad_token_id
    start = torch.full_like(targets[:, :1], model.config.decoder_start_token_id)
    output = model(
        input_ids=sources,
        attention_mask=sources != pad,
        decoder_input_ids=torch.cat([start, targets[:, :-1]], dim=1),
    )
    loss = nn.functional.cross_entropy(
        output.logits.flatten(0, 1), targets.flatten(), ignore_index=pad
    )
    return output.logits, loss


def train(model, batches, learning_rate, zero_row=None):
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    losses = []
    for sources, targets in batches:
        _, loss = loss_of(model, sources, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if zero_row is not None:
            model.get_input_embeddings().weight.data[zero_row] = 0.0
        losses.append(loss.item())
    return losses


def make(name):
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    draw = np.random.default_rng(0)
    model, tokenizer = FAMILIES[name](folder)
    start = (model.config.bos_token_id,) if name == "bart" else ()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    # The published models of these two start from a zero vector, the row of padding. The tied
    # softmax would move it.
    zero_row = model.config.pad_token_id if name in ("marian", "pegasus") else None
    batches = (batch_of(model, draw, 32, start) for _ in range(STEPS.get(name, 900)))
    losses = train(model, batches, 4e-3, zero_row)
    print(name, "loss", losses[0], losses[-1])
    model.eval()
    sources, targets = batch_of(model, draw, 6, start)
    pad = model.config.pad_token_id
    found = {}
    with torch.no_grad():
        logits, loss = loss_of(model, sources, targets)
        for kind, beams in (("greedy", 1), ("beam", 4)):
            output = model.generate(
                input_ids=sources,
                attention_mask=sources != pad,
                num_beams=beams,
                do_sample=False,
                length_penalty=0.0,
                max_new_tokens=12,
                bad_words_ids=[[pad]],
                return_dict_in_generate=True,
                output_scores=True,
            )
            found[kind] = output.sequences[:, 1:].numpy()
            if beams > 1:
                found["beam_scores"] = output.sequences_scores.numpy()
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    curve = train(model, [(sources, sources)] * 20, LEARNING_RATE, zero_row)
    lines = text_lines() if name != "t5_v1_1" else []
    if name == "pegasus":
        lines = [line.replace("\n", "<n>") for line in lines]
    ids = [tokenizer(line).input_ids for line in lines]
    texts = [
        tokenizer.decode(
            # Without its end of sentence.
            row[:-1] if name == "pegasus" else row,
            skip_special_tokens=name != "pegasus",
            clean_up_tokenization_spaces=False,
        )
        for row in ids
    ]
    np.savez_compressed(
        folder / "expected.npz",
        source_ids=sources.numpy(),
        target_ids=targets.numpy(),
        logits=logits.numpy(),
        loss=loss.numpy(),
        curve=np.array(curve, "float32"),
        line_ids=np.array(sum(ids, []), "int16"),
        line_lengths=np.array([len(row) for row in ids], "int16"),
        **found,
    )
    if lines:
        with gzip.GzipFile(folder / "lines.json.gz", "wb", mtime=0) as file:
            file.write(json.dumps(texts).encode())
    # The same as vocab.json, merges.txt and spiece.model.
    (folder / "tokenizer.json").unlink(missing_ok=True)
    vocabulary = folder / "spiece.model"
    if vocabulary.exists():
        if lines:
            packed = lzma.compress(vocabulary.read_bytes())
            vocabulary.with_name("spiece.model.xz").write_bytes(packed)
        vocabulary.unlink()
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size:8} {path.name}")
    print(found, curve[0], curve[-1])


if __name__ == "__main__":
    for family in sys.argv[1:]:
        make(family)

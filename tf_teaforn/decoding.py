"""Search over the decoder contract: greedy, sampling and beam search.

Shapes: B sentences, S source positions, K hypotheses a sentence, N hypotheses returned, L room for
target tokens, V vocabulary, D width. Lengths count the end-of-sentence token.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from tf_teaforn.errors import UserError
from tf_teaforn.models.decoder import batch_gather

PAD_ID = 0
# Of lengths, widths and the like: more is a mistake, and overflows sizes of arrays.
_MOST = 100_000


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """What to search for.

    Args:
        beam_size: K; 1 is greedy search, or sampling if `temperature` is positive.
        alpha: exponent of the length penalty ((5 + length) / 6)^alpha (Wu et al. 2016, section 7).
        n_best: hypotheses returned; when sampling, independent samples.
        max_length: longest output. None: the source's length plus `max_length_offset`.
        max_length_offset: see `max_length`; Vaswani et al. 2017, section 6.1, have 50.
        min_length: shortest output.
        no_repeat_ngram: length of the n-grams that may occur once only; 0 allows all repetition.
        temperature: 0 is deterministic; otherwise logits are divided by it and one token is drawn.
        sample_top_k: draw from the k most probable tokens; 0 draws from all.
        sample_top_p: draw from the smallest set of most probable tokens of at least this mass
            (Holtzman et al. 2020, section 3.1).
        seed: of the samples. A sample depends on the seed and its sentence, not on the batch.

    Raises:
        UserError: impossible value or combination.
    """

    beam_size: int = 4
    alpha: float = 0.6
    n_best: int = 1
    max_length: int | None = None
    max_length_offset: int = 50
    min_length: int = 0
    no_repeat_ngram: int = 0
    temperature: float = 0.0
    sample_top_k: int = 0
    sample_top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        def require(condition, message):
            if not condition:
                raise UserError(message)

        for name, least in (
            ("beam_size", 1),
            ("n_best", 1),
            ("max_length_offset", 0),
            ("min_length", 0),
            ("no_repeat_ngram", 0),
            ("sample_top_k", 0),
        ):
            value = getattr(self, name)
            require(value >= least, f"--{name}={value}: write {least} or more.")
            require(value <= _MOST, f"--{name}={value}: write {_MOST} or less.")
        require(
            self.max_length is None or 1 <= self.max_length <= _MOST,
            f"--max_length={self.max_length}: write a number from 1 to {_MOST}, or leave it out "
            "for a maximum relative to the source.",
        )
        require(math.isfinite(self.alpha), f"--beam_alpha={self.alpha}: write a finite number.")
        require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            f"--temperature={self.temperature}: write 0 for deterministic search or a positive "
            "number to sample.",
        )
        require(
            0 < self.sample_top_p <= 1,
            f"--sample_top_p={self.sample_top_p}: write a number above 0 and at most 1.",
        )
        if self.temperature > 0:
            require(
                self.beam_size == 1,
                f"--temperature={self.temperature} samples, --beam_size={self.beam_size} searches: "
                "write --beam_size=1 to sample or --temperature=0 to search.",
            )
        else:
            require(
                self.sample_top_k == 0 and self.sample_top_p == 1,
                "--sample_top_k and --sample_top_p have no effect at --temperature=0: write "
                "--temperature=1 --beam_size=1 to sample, or leave them out.",
            )
            require(
                self.n_best <= self.beam_size,
                f"--n_best={self.n_best} exceeds --beam_size={self.beam_size}: write "
                f"--beam_size={self.n_best} or more, or --n_best={self.beam_size} or less.",
            )
        # A source is at least its end-of-sentence token.
        shortest_maximum = self.max_length or self.max_length_offset + 1
        require(
            self.min_length <= shortest_maximum,
            f"--min_length={self.min_length} exceeds the maximum, {shortest_maximum} for the "
            f"shortest source: write --min_length={shortest_maximum} or less, or "
            f"--max_length={self.min_length} or more.",
        )


class SearchResult(NamedTuple):
    """Hypotheses of each sentence, best penalised score first.

    Attributes:
        token_ids: int32 [B, N, L], end-of-sentence included, 0-padded.
        scores: float32 [B, N], natural-log probability of the tokens, end-of-sentence included.
        penalized: float32 [B, N], `scores` divided by the length penalty.

    Where fewer than N hypotheses exist the last rows hold no tokens and -inf.
    """

    token_ids: Any
    scores: Any
    penalized: Any


def search(seq2seq, inputs, config):
    """Decodes a batch of sentences.

    A sentence's result depends neither on the sentences beside it nor on padding. A hypothesis
    without end-of-sentence, cut at the maximum length, is returned only if none finished. Id 0 is
    never produced, but its logit stays in the softmax. A source of padding alone, such as fills up
    a batch, costs no step and gives no tokens.

    Args:
        seq2seq: `Seq2Seq`, or any object with its `encode`, `embed`, `logits_function`,
            `decoder`, `start_id` and `eos_id`.
        inputs: {"encoder_token_ids": int32 [B, S]}, end-of-sentence included, 0-padded. B and S
            may be dynamic in a `tf.function`; XLA and JAX need them static.
        config: `SearchConfig`.

    Returns:
        `SearchResult`; L is `config.max_length`, or S + `config.max_length_offset`.
    """
    source_ids = ops.convert_to_tensor(inputs["encoder_token_ids"], "int32")
    source_lengths = ops.sum(ops.cast(source_ids != PAD_ID, "int32"), axis=-1)
    source_room = ops.shape(source_ids)[1]
    if config.max_length is None:
        room = source_room + config.max_length_offset
        limits = source_lengths + config.max_length_offset
    else:
        # Dynamic where shapes are.
        room = source_room * 0 + config.max_length
        limits = ops.full_like(source_lengths, config.max_length)
    limits = ops.where(source_lengths > 0, limits, 0)

    memory, memory_mask = seq2seq.encode(inputs, training=False)
    prepared = seq2seq.decoder.prepare(memory, memory_mask)
    if config.beam_size > 1:
        return beam_search(seq2seq, prepared, limits, room, config)
    sentence_keys = _sentence_keys(source_ids) if config.temperature > 0 else None
    return token_by_token(seq2seq, prepared, limits, room, config, sentence_keys)


def _stepper(seq2seq, prepared):
    """Returns a function: what to decode from -> (float32 logits [B, K, V], decoder state)."""
    logits = seq2seq.logits_function()

    def step(last_tokens_BxK, decoder_state, position):
        x = seq2seq.embed(last_tokens_BxK)
        hidden, decoder_state = seq2seq.decoder.step(x, decoder_state, prepared, position)
        return logits(hidden), decoder_state

    return step


def _allowed(logits_BxKxV, tokens_BxKxL, position, config, eos_id):
    """Returns the logits with -inf for tokens that may not come next."""
    ids = ops.arange(ops.shape(logits_BxKxV)[-1], dtype="int32")
    too_early = ops.logical_and(ids == eos_id, position + 1 < config.min_length)
    # Adding is one pass over B K V numbers, selecting more.
    allowed = logits_BxKxV + ops.where(ops.logical_or(ids == PAD_ID, too_early), -np.inf, 0.0)
    if config.no_repeat_ngram:
        repeats = _repeats(tokens_BxKxL, position, config.no_repeat_ngram, ops.shape(logits_BxKxV))
        allowed = ops.where(repeats, -np.inf, allowed)
    return allowed


def _repeats(tokens_BxKxL, position, n, shape_BxKxV):
    """Returns bool [B, K, V]: tokens that would complete an n-gram of `tokens` once more."""
    start = ops.arange(ops.shape(tokens_BxKxL)[-1], dtype="int32")
    match = ops.broadcast_to(start + n <= position, ops.shape(tokens_BxKxL))
    for i in range(n - 1):
        newest = ops.take(tokens_BxKxL, ops.maximum(position - (n - 1) + i, 0), axis=-1)
        match = ops.logical_and(match, ops.roll(tokens_BxKxL, -i, axis=-1) == newest[..., None])
    completions = ops.where(match, ops.roll(tokens_BxKxL, 1 - n, axis=-1), PAD_ID)
    batch, width, vocabulary_size = shape_BxKxV
    rows = ops.arange(batch * width, dtype="int32")[:, None]
    columns = ops.reshape(completions, (batch * width, -1))
    rows = ops.broadcast_to(rows, ops.shape(columns))
    indices = ops.reshape(ops.stack([rows, columns], axis=-1), (-1, 2))
    ones = ops.reshape(ops.ones_like(columns), (-1,))
    counts = ops.scatter(indices, ones, (batch * width, vocabulary_size))
    return ops.reshape(counts > 0, shape_BxKxV)


def _write(tokens_BxKxL, position, new_BxK):
    here = ops.arange(ops.shape(tokens_BxKxL)[-1], dtype="int32") == position
    return ops.where(here, new_BxK[..., None], tokens_BxKxL)


def _penalty(length, alpha):
    """((5 + length) / 6)^alpha (Wu et al. 2016, equation 14), float32."""
    return ops.power((5.0 + ops.cast(length, "float32")) / 6.0, alpha)


class _Hypotheses(NamedTuple):
    """State of `token_by_token`: K hypotheses that never meet.

    Attributes:
        position: int32 [], tokens produced so far.
        tokens: int32 [B, K, L], 0 beyond the end.
        last_tokens: int32 [B, K], the next step's input.
        log_probs: float32 [B, K], sums over `tokens`.
        done: bool [B, K].
        decoder_state: leading dimensions [B, K].
    """

    position: Any
    tokens: Any
    last_tokens: Any
    log_probs: Any
    done: Any
    decoder_state: Any


def token_by_token(seq2seq, prepared, limits_B, room, config, sentence_keys_B=None):
    """Greedy search; with `sentence_keys` (see `_sentence_keys`) `config.n_best` samples each.

    Args:
        prepared: from the decoder's `prepare`.
        limits_B: int32 [B], longest output of each sentence.
        room: L, int or scalar tensor, at least the largest limit.

    Returns:
        `SearchResult`.
    """
    batch, width = ops.shape(limits_B)[0], config.n_best
    eos_id = seq2seq.eos_id
    step = _stepper(seq2seq, prepared)

    def body(*state):
        now = _Hypotheses(*state)
        logits, decoder_state = step(now.last_tokens, now.decoder_state, now.position)
        allowed = _allowed(logits, now.tokens, now.position, config, eos_id)
        if sentence_keys_B is None:
            best_logits, best_tokens = ops.top_k(allowed, 1)
            chosen_logits, chosen = best_logits[..., 0], best_tokens[..., 0]
        else:
            uniform = _uniform(sentence_keys_B, width, now.position, config.seed)
            chosen_logits, chosen = _sample(allowed, uniform, config)
        log_probs = chosen_logits - ops.logsumexp(logits, axis=-1)
        chosen = ops.where(now.done, PAD_ID, chosen)
        at_limit = (now.position + 1 >= limits_B)[:, None]
        # Padding is chosen where nothing is allowed.
        stopped = ops.logical_or(chosen == eos_id, chosen == PAD_ID)
        return (
            now.position + 1,
            _write(now.tokens, now.position, chosen),
            chosen,
            now.log_probs + ops.where(now.done, 0.0, log_probs),
            ops.logical_or(at_limit, stopped),
            decoder_state,
        )

    start = _Hypotheses(
        position=ops.zeros((), "int32"),
        tokens=ops.zeros((batch, width, room), "int32"),
        last_tokens=ops.full((batch, width), seq2seq.start_id, "int32"),
        log_probs=ops.zeros((batch, width), "float32"),
        done=ops.broadcast_to((limits_B <= 0)[:, None], (batch, width)),
        decoder_state=None,
    )
    end = _Hypotheses(*_loop(seq2seq.decoder, prepared, body, start, room))
    lengths = ops.sum(ops.cast(end.tokens != PAD_ID, "int32"), axis=-1)
    penalized, order = ops.top_k(end.log_probs / _penalty(lengths, config.alpha), width)
    return _result(batch_gather(end.tokens, order), batch_gather(end.log_probs, order), penalized)


class _Beams(NamedTuple):
    """State of `beam_search`: K alive hypotheses and the N best finished ones, apart.

    Attributes:
        position: int32 [], tokens produced so far.
        tokens: int32 [B, K, L], alive hypotheses, 0 beyond the end, best first.
        last_tokens: int32 [B, K], the next step's input.
        log_probs: float32 [B, K], sums over `tokens`; -inf: no hypothesis.
        finished_tokens: int32 [B, N, L], best penalised score first.
        finished_log_probs: float32 [B, N].
        finished_scores: float32 [B, N], penalised; -inf: no hypothesis.
        done: bool [B]; nothing of a done sentence changes any more.
        decoder_state: leading dimensions [B, K].
    """

    position: Any
    tokens: Any
    last_tokens: Any
    log_probs: Any
    finished_tokens: Any
    finished_log_probs: Any
    finished_scores: Any
    done: Any
    decoder_state: Any


def beam_search(seq2seq, prepared, limits_B, room, config):
    """Beam search with 2K candidates a step, so that K alive ones remain if K end.

    A sentence stops when no alive hypothesis can still beat the worst of N finished ones. Takes the
    arguments of `token_by_token` without the keys, and returns the same.
    """
    batch, width = ops.shape(limits_B)[0], config.beam_size
    eos_id = seq2seq.eos_id
    limit_penalties = _penalty(limits_B, config.alpha)
    step = _stepper(seq2seq, prepared)

    def body(*state):
        now = _Beams(*state)
        logits, decoder_state = step(now.last_tokens, now.decoder_state, now.position)
        allowed = _allowed(logits, now.tokens, now.position, config, eos_id)

        # The 2K best of a sentence are among the 2K best of each hypothesis.
        per_hypothesis = min(2 * width, ops.shape(logits)[-1])
        top_logits, top_tokens = _top_k(allowed, per_hypothesis)
        log_probs = top_logits - ops.logsumexp(logits, axis=-1, keepdims=True)
        log_probs = now.log_probs[..., None] + log_probs
        flat = (batch, width * per_hypothesis)
        candidate_log_probs, picks = ops.top_k(ops.reshape(log_probs, flat), 2 * width)
        candidate_tokens = batch_gather(ops.reshape(top_tokens, flat), picks)
        parents = picks // per_hypothesis
        candidates = _write(batch_gather(now.tokens, parents), now.position, candidate_tokens)
        ends = candidate_tokens == eos_id

        ended_log_probs = ops.where(
            ops.logical_and(ends, ops.logical_not(now.done)[:, None]), candidate_log_probs, -np.inf
        )
        ended_scores = ended_log_probs / _penalty(now.position + 1, config.alpha)
        finished_scores, kept = ops.top_k(
            ops.concatenate([now.finished_scores, ended_scores], axis=1), config.n_best
        )
        finished_tokens = batch_gather(
            ops.concatenate([now.finished_tokens, candidates], axis=1), kept
        )
        finished_log_probs = batch_gather(
            ops.concatenate([now.finished_log_probs, ended_log_probs], axis=1), kept
        )

        alive_log_probs, kept = ops.top_k(ops.where(ends, -np.inf, candidate_log_probs), width)
        alive_parents = batch_gather(parents, kept)
        decoder_state = seq2seq.decoder.reorder_state(decoder_state, alive_parents)
        alive_log_probs = ops.where(now.done[:, None], now.log_probs, alive_log_probs)
        alive = ops.where(now.done[:, None, None], now.tokens, batch_gather(candidates, kept))

        # A sum of log probabilities only falls: the best score still possible is that of the best
        # alive hypothesis ending next or, with alpha > 0, at the limit.
        best_penalty = ops.maximum(_penalty(now.position + 2, config.alpha), limit_penalties)
        can_improve = alive_log_probs[:, 0] / best_penalty > finished_scores[:, -1]
        at_limit = now.position + 1 >= limits_B
        return (
            now.position + 1,
            alive,
            batch_gather(candidate_tokens, kept),
            alive_log_probs,
            finished_tokens,
            finished_log_probs,
            finished_scores,
            ops.logical_or(now.done, ops.logical_or(at_limit, ops.logical_not(can_improve))),
            decoder_state,
        )

    # One hypothesis to begin with, or the beam would hold K equal ones.
    first_only = ops.where(ops.arange(width) == 0, 0.0, -np.inf)
    no_scores = ops.full((batch, config.n_best), -np.inf, "float32")
    start = _Beams(
        position=ops.zeros((), "int32"),
        tokens=ops.zeros((batch, width, room), "int32"),
        last_tokens=ops.full((batch, width), seq2seq.start_id, "int32"),
        log_probs=ops.broadcast_to(ops.cast(first_only, "float32"), (batch, width)),
        finished_tokens=ops.zeros((batch, config.n_best, room), "int32"),
        finished_log_probs=no_scores,
        finished_scores=no_scores,
        done=limits_B <= 0,
        decoder_state=None,
    )
    end = _Beams(*_loop(seq2seq.decoder, prepared, body, start, room))

    unfinished_log_probs = end.log_probs[:, : config.n_best]
    none_finished = ops.isneginf(end.finished_scores[:, :1])
    return _result(
        ops.where(none_finished[..., None], end.tokens[:, : config.n_best], end.finished_tokens),
        ops.where(none_finished, unfinished_log_probs, end.finished_log_probs),
        ops.where(
            none_finished, unfinished_log_probs / limit_penalties[:, None], end.finished_scores
        ),
    )


# Steps that a growing state gets room for at once.
_SEGMENT = 16


def _loop(decoder, prepared, body, start, room):
    """Repeats `body` until all is done; makes the decoder's state, the last part of `start`."""
    width = ops.shape(start.last_tokens)[1]
    growing = None if isinstance(room, int) else decoder.growing_state(prepared, width)
    if growing is None:
        decoder_state = decoder.initial_state(prepared, width, room)
        return ops.while_loop(_any_open, body, tuple(start._replace(decoder_state=decoder_state)))

    def segment(*state):
        end = ops.minimum(state[0] + _SEGMENT, room)
        decoder_state = decoder.grow_state(state[-1], _SEGMENT)

        def any_open(*state):
            return ops.logical_and(_any_open(*state), state[0] < end)

        return ops.while_loop(any_open, body, (*state[:-1], decoder_state))

    return ops.while_loop(_any_open, segment, tuple(start._replace(decoder_state=growing)))


def _any_open(*state):
    return ops.logical_not(ops.all(state[-2]))


def _result(tokens, log_probs, penalized):
    no_hypothesis = ops.isneginf(log_probs)[..., None]
    return SearchResult(ops.where(no_hypothesis, PAD_ID, tokens), log_probs, penalized)


# Values that one maximum stands for at first.
_BLOCK = 128


def _top_k(x, k):
    """`ops.top_k`, several times faster for k much smaller than the last axis.

    The k best are in the k blocks of the largest maxima, and a maximum is cheaper than a selection.
    """
    *leading, size = ops.shape(x)
    blocks = -(-size // _BLOCK)
    if blocks <= 2 * k:
        return ops.top_k(x, k)
    rows = ops.reshape(x, (-1, size))
    if size % _BLOCK:
        rows = ops.pad(rows, ((0, 0), (0, blocks * _BLOCK - size)), constant_values=-np.inf)
    rows = ops.reshape(rows, (-1, blocks, _BLOCK))
    # In order, so that of equal values the first comes first.
    best = ops.sort(ops.top_k(ops.max(rows, axis=-1), k)[1], axis=-1)
    values, picks = ops.top_k(ops.reshape(batch_gather(rows, best), (-1, k * _BLOCK)), k)
    indices = batch_gather(best, picks // _BLOCK) * _BLOCK + picks % _BLOCK
    return ops.reshape(values, (*leading, k)), ops.reshape(indices, (*leading, k))


def _mix(x):
    """Spreads the bits of uint32 numbers (MurmurHash3's finaliser, Appleby, public domain)."""
    x = ops.bitwise_xor(x, ops.right_shift(x, 16)) * np.uint32(0x85EBCA6B)
    x = ops.bitwise_xor(x, ops.right_shift(x, 13)) * np.uint32(0xC2B2AE35)
    return ops.bitwise_xor(x, ops.right_shift(x, 16))


def _sentence_keys(source_ids_BxS):
    """Returns uint32 [B], a hash of each sentence that padding does not change."""
    ids = ops.cast(source_ids_BxS, "uint32")
    positions = ops.cast(ops.arange(ops.shape(ids)[1], dtype="int32"), "uint32")
    hashes = ops.where(source_ids_BxS != PAD_ID, _mix(_mix(positions + np.uint32(1)) + ids), 0)
    return ops.sum(ops.cast(hashes, "uint32"), axis=1)


def _uniform(sentence_keys_B, width, position, seed):
    """Returns float32 [B, K] in [0, 1), one number for each seed, sentence, sample and position.

    Counter-based, because `keras.random` has no seeds per row: numbers drawn for a whole batch
    would depend on a sentence's place in it.
    """
    keys = _mix(sentence_keys_B + np.uint32(seed % 2**32))[:, None]
    keys = _mix(keys + np.arange(width, dtype="uint32"))
    bits = _mix(keys + ops.cast(position, "uint32"))
    # 23 bits: u times a float32 mass stays below that mass.
    return ops.cast(ops.right_shift(bits, 9), "float32") * 2.0**-23


def _sample(logits_BxKxV, uniform_BxK, config):
    """Draws one token each by inverting the cumulative distribution.

    Returns:
        (logits of the drawn tokens [B, K], token ids int32 [B, K]).
    """
    vocabulary_size = ops.shape(logits_BxKxV)[-1]
    filtered = config.sample_top_k or config.sample_top_p < 1
    if filtered:
        k = min(config.sample_top_k or vocabulary_size, vocabulary_size)
        logits, ids = _top_k(logits_BxKxV, k)
    else:
        logits = logits_BxKxV
    scaled = logits / config.temperature
    # Keras' softmax warns where there is one to choose from.
    probabilities = ops.exp(scaled - ops.logsumexp(scaled, axis=-1, keepdims=True))
    cumulative = ops.cumsum(probabilities, axis=-1)
    kept = cumulative - probabilities < config.sample_top_p
    mass = ops.max(ops.where(kept, cumulative, 0.0), axis=-1)
    below = cumulative <= (uniform_BxK * mass)[..., None]
    index = ops.sum(ops.cast(below, "int32"), axis=-1, keepdims=True)
    index = ops.minimum(index, ops.shape(logits)[-1] - 1)
    drawn_logits = ops.take_along_axis(logits, index, axis=-1)[..., 0]
    return drawn_logits, (ops.take_along_axis(ids, index, axis=-1) if filtered else index)[..., 0]


def score(seq2seq, inputs, targets_BxT):
    """Teacher-forced log probabilities.

    Args:
        seq2seq: `Seq2Seq`.
        inputs: {"encoder_token_ids": int32 [B, S]}, end-of-sentence included, 0-padded.
        targets_BxT: int32, end-of-sentence included, 0-padded.

    Returns:
        float32 [B], natural-log sums over the target tokens, end-of-sentence included.
    """
    decoder_ids = ops.pad(targets_BxT, ((0, 0), (1, 0)), constant_values=seq2seq.start_id)[:, :-1]
    logits = seq2seq({**inputs, "decoder_token_ids": decoder_ids})
    chosen = ops.take_along_axis(logits, targets_BxT[..., None], axis=-1)[..., 0]
    log_probs = chosen - ops.logsumexp(logits, axis=-1)
    return ops.sum(ops.where(targets_BxT != PAD_ID, log_probs, 0.0), axis=-1)

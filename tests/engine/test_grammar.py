"""Grammars in the engine: compiled within limits, kept by every way of serving, ended in time."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.errors import NOTHING_LEFT, GrammarError
from engine.grammar import GrammarCompiler, num_words, unpack
from engine.grammar_rows import GrammarRows
from engine.loading import LoadedModel, load_weights, open_model
from engine.torch_engine import TorchEngine
from engine.vocabulary import Vocabulary
from scheduler.types import Admission, FinishReason, KVCapacity, Request, SamplingParams
from tests.engine.test_torch_engine import GREEDY, random_prompt, serve
from tests.support.models import VOCAB_SIZE, save_tiny_model

CPU = torch.device("cpu")
EOS = 2
# One token a byte, as far as the tiny model's vocabulary goes, and one token of two.
TWO = VOCAB_SIZE - 1
VOCABULARY = Vocabulary(
    (*(bytes([index]) for index in range(TWO)), b"ab"),
    special_ids=(0, 1, EOS),
    eos_token_ids=(EOS,),
)
HOT = SamplingParams(temperature=1.5, seed=5)


def lark(text: str) -> bytes:
    return json.dumps({"grammars": [{"lark_grammar": text}]}).encode()


LETTERS = lark("start: /[a-c]{3,30}/ /[x-z]/")
OPEN_END = lark("start: /[a-c]+/")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tmp_path_factory.mktemp("grammar")
    save_tiny_model("llama", directory)
    return load_weights(open_model(directory), dtype=torch.float32, device=CPU)


def make_engine(model: LoadedModel, **changes: int) -> TorchEngine:
    sizes = {"num_blocks": 128, "block_size": 8, "num_slots": 16, "max_model_len": 256, **changes}
    compiler = GrammarCompiler(VOCABULARY)
    capacity = KVCapacity(**sizes)
    return TorchEngine(model, device=CPU, dtype=torch.float32, capacity=capacity, grammars=compiler)


def text_of(token_ids: list[int]) -> str:
    return b"".join(VOCABULARY.tokens[token] for token in token_ids if token != EOS).decode()


def mixed_requests() -> list[Request]:
    """With and without a grammar, greedy and drawn, in one batch."""
    grammars = [LETTERS, b"", OPEN_END]
    samplings = [GREEDY, HOT, replace(HOT, top_p=0.9, seed=9), replace(HOT, num_logprobs=2)]
    return [
        Request(
            id=f"r{index}",
            prompt=random_prompt(5 + 7 * (index % 3), seed=index),
            max_tokens=40,
            stop_token_ids=(EOS,),
            sampling=samplings[index % 4],
            grammar=grammars[index % 3],
        )
        for index in range(12)
    ]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_blocks", [128, 20], ids=["roomy", "preempted"])
def test_grammar_holds_and_the_answer_is_the_same_however_it_is_served(
    model: LoadedModel, num_blocks: int, depth: int
) -> None:
    """B035 B073: alone, in a mixed batch, at depth 1, and replayed after a preemption."""
    requests = mixed_requests()
    served = serve(
        make_engine(model, num_blocks=num_blocks), requests, depth=depth, watermark_blocks=0
    )
    assert num_blocks == 128 or any(a.num_preemptions for a in served.answers.values())
    for request in requests:
        answer = served.answers[request.id]
        alone = serve(make_engine(model), [request]).answers[request.id]
        assert answer.token_ids == alone.token_ids
        assert answer.message == ""
        if request.grammar == LETTERS and answer.reason is FinishReason.STOP:
            assert re.fullmatch(r"[a-c]{3,30}[x-z]", text_of(answer.token_ids))
        elif request.grammar:
            assert re.fullmatch(r"[a-c]+[x-z]?", text_of(answer.token_ids))
    assert any(served.answers[f"r{i}"].reason is FinishReason.STOP for i in range(0, 12, 3))


@pytest.mark.parametrize("depth", [0, 1])
def test_end_of_the_grammar_is_the_end_whatever_else_was_asked(
    model: LoadedModel, depth: int
) -> None:
    """B073: min_tokens beyond the grammar, and no stop token at all (ignore_eos)."""
    request = Request(
        id="a",
        prompt=(5, 6),
        max_tokens=100,
        sampling=replace(HOT, min_tokens=50),
        grammar=lark('start: "aba"'),
    )
    answer = serve(make_engine(model), [request], depth=depth).answers["a"]
    assert text_of(answer.token_ids) == "aba"
    assert answer.reason is FinishReason.STOP


def test_min_tokens_delays_the_end_where_the_grammar_lets_it(model: LoadedModel) -> None:
    request = Request(
        id="a",
        prompt=(5, 6),
        max_tokens=100,
        stop_token_ids=(EOS,),
        sampling=replace(HOT, min_tokens=30, logit_bias=((EOS, 100.0),)),
        grammar=OPEN_END,
    )
    answer = serve(make_engine(model), [request]).answers["a"]
    assert len(answer.token_ids) == 31
    assert answer.token_ids[-1] == EOS


def test_masked_logprobs_are_minus_infinity_and_never_nan(model: LoadedModel) -> None:
    """B035 B077."""
    request = Request(
        id="a",
        prompt=(5, 6),
        max_tokens=9,
        sampling=replace(HOT, num_logprobs=5),
        grammar=lark('start: "aba" | "abb"'),
    )
    answer = serve(make_engine(model), [request]).answers["a"]
    values = [value for entry in answer.logprobs for _, value in entry.top]
    assert float("-inf") in values
    assert not any(value != value for value in values)  # NaN


def test_fields_that_leave_the_grammar_no_token_end_the_request_with_that_reason(
    model: LoadedModel,
) -> None:
    """B073: no token of another kind is let out, and no neighbour notices."""
    words = ((ord("a"),), (ord("b"),), (ord("c"),), (TWO,))
    bad = Request(
        id="bad",
        prompt=(5, 6),
        max_tokens=9,
        sampling=replace(HOT, bad_words=words),
        grammar=LETTERS,
    )
    good = replace(bad, id="good", sampling=GREEDY)
    served = serve(make_engine(model), [bad, good])
    assert served.answers["bad"].reason is FinishReason.ERROR
    assert served.answers["bad"].message == NOTHING_LEFT
    assert not served.answers["bad"].token_ids
    assert served.answers["good"].reason is not FinishReason.ERROR


def test_contradicting_token_rules_without_a_grammar_say_the_same(model: LoadedModel) -> None:
    sampling = replace(HOT, allowed_token_ids=(7,), bad_words=((7,),))
    request = Request(id="a", prompt=(5, 6), max_tokens=9, sampling=sampling)
    assert serve(make_engine(model), [request]).answers["a"].message == NOTHING_LEFT


def test_bad_grammar_ends_its_own_request_only(model: LoadedModel) -> None:
    """B059: what reaches the engine unchecked, by a bug of ours, fails alone."""
    good = Request(id="good", prompt=(5, 6), max_tokens=9, sampling=GREEDY)
    bad = replace(good, id="bad", grammar=b"start: nothing")
    served = serve(make_engine(model), [good, bad])
    assert served.answers["bad"].reason is FinishReason.ERROR
    assert "grammar" in served.answers["bad"].message
    assert len(served.answers["good"].token_ids) == 9


def grammar_rows(vocabulary: Vocabulary = VOCABULARY) -> GrammarRows:
    return GrammarRows(GrammarCompiler(vocabulary), CPU, num_slots=4, vocab_limit=VOCAB_SIZE)


def test_refused_token_is_an_error_of_its_row() -> None:
    """B073: a token from outside the grammar, sampled by force, is never passed over."""
    rows = grammar_rows()
    admission = Admission(0, (5, 6), 2, HOT, (EOS,), OPEN_END)
    assert rows.admit(admission) == ""
    _, states, errors = rows.masks(np.array([0]), {})
    step = rows.watch(states, errors, torch.tensor([ord("q")]))
    assert step is not None
    step.settle()
    assert step.errors == {0: f"token {ord('q')} is outside the grammar"}


def test_replayed_tokens_outside_the_grammar_are_a_fault() -> None:
    rows = grammar_rows()
    fault = rows.admit(Admission(0, (5, 6, ord("q")), 2, HOT, (EOS,), OPEN_END))
    assert "outside the grammar" in fault


# --- the compiler ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        b"",
        b"\xff\xfe",
        lark("start: unknown"),
        lark('start: "a"\nstart: "b"'),
        lark("start: /(/"),
        lark("start: /(?=a)b/"),
        lark('start: ""'),
        lark("start: start"),
        lark("start: " + "(" * 5000 + '"a"' + ")" * 5000),
        lark("start: /" + "(" * 5000 + "a" + ")" * 5000 + "/"),
        lark("start: %json {" + '"type": "not-a-type"}'),
        b"x" * (2 << 20),
    ],
    ids=lambda spec: spec[:40].decode("latin-1"),
)
def test_bad_specification_is_refused(spec: bytes) -> None:
    """B061 B062 B064 B065."""
    with pytest.raises(GrammarError):
        GrammarCompiler(VOCABULARY).start(spec)


def test_refusal_does_not_depend_on_what_came_before() -> None:
    """B062: bad after good, good after bad."""
    compiler = GrammarCompiler(VOCABULARY)
    for _ in range(2):
        compiler.start(LETTERS)
        with pytest.raises(GrammarError):
            compiler.start(lark("start: unknown"))


def test_left_recursion_is_handled() -> None:
    """B064."""
    state = GrammarCompiler(VOCABULARY).start(lark('start: start "a" | "b"'))
    state.accept(list(b"baa"))
    assert state.allowed()[EOS]


def test_cache_is_bounded_by_bytes_and_keeps_the_newest() -> None:
    """B158: thousands of distinct grammars."""
    limit = 1 << 20
    compiler = GrammarCompiler(VOCABULARY, max_cache_bytes=limit)
    specs = [lark(f'start: "a{number}"') for number in range(100)]
    for spec in specs:
        compiler.start(spec)
        assert compiler.cache_bytes <= limit
    assert 0 < compiler.num_cached < len(specs)
    assert compiler.knows(specs[-1])
    assert not compiler.knows(specs[0])


def test_two_sequences_of_one_grammar_do_not_share_their_progress() -> None:
    compiler = GrammarCompiler(VOCABULARY)
    first, second = compiler.start(LETTERS), compiler.start(LETTERS)
    first.accept(list(b"abcx"))
    assert first.ended
    assert not second.ended
    assert second.allowed()[ord("a")]
    assert not second.allowed()[ord("x")]


WORDS = [
    r"start: /[a-z]{2,12}( [a-z]{1,9}){3}/",
    r"start: /[a-z0-9-]{20,60}/",
    r'start: /"[A-Z][a-z]+( [a-z]*)*"/ | /[ab]{9}/',
    'start: %json {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}}',
    'start: %json {"type": "object", "additionalProperties": {"type": "string", "maxLength": 14}}',
]


@pytest.mark.parametrize("text", WORDS)
def test_kinds_of_tokens_do_not_change_what_is_allowed(text: str) -> None:
    """Many tokens are allowed at once where a grammar lets in a whole kind of them."""
    pick = random.Random(text)
    letters = [*"abcdefgaabbccABC019", " ", "-", *'"{}[]:,\\\n']
    words = {
        "".join(pick.choices(letters[:7] if pick.random() < 0.5 else letters, k=k))
        for k in range(1, 16)
        for _ in range(60)
    }
    tokens = (*(bytes([byte]) for byte in range(256)), *sorted(w.encode() for w in words))
    vocabulary = Vocabulary((*tokens, b"<end>"), (len(tokens),), (len(tokens),))
    by_kinds = GrammarCompiler(vocabulary).start(lark(text))
    compiler = GrammarCompiler(vocabulary)
    compiler._tokenizer = compiler._tables().with_slices([])
    one_by_one = compiler.start(lark(text))
    for _ in range(40):
        allowed = one_by_one.allowed()
        np.testing.assert_array_equal(by_kinds.allowed(), allowed)
        ids = np.flatnonzero(allowed[:-1])
        if not len(ids):
            break
        token = int(pick.choice(ids))
        by_kinds.accept([token])
        one_by_one.accept([token])


def test_ids_behind_the_grammars_vocabulary_are_masked_in_its_rows_alone() -> None:
    """A model may have more ids than its tokenizer has tokens."""
    small = Vocabulary(VOCABULARY.tokens[:120], special_ids=(0, 1, EOS), eos_token_ids=(EOS,))
    rows = grammar_rows(small)
    admission = Admission(3, (5, 6), 2, GREEDY, (EOS,), grammar=LETTERS)
    assert rows.admit(admission) == ""
    masks, states, errors = rows.masks(np.array([1, 3, 0]), {})
    assert set(states) == {1}
    assert errors == {}
    assert masks is not None
    assert masks.rows.tolist() == [1]
    allowed = unpack(masks.words, VOCAB_SIZE)
    assert allowed[0].nonzero()[0].tolist() == [ord(c) for c in "abc"]


def test_ids_that_are_unwanted_are_left_out_unless_nothing_else_is_left() -> None:
    rows = grammar_rows()
    grammars = [lark('start: "a" | "b"'), lark('start: "a" "b"'), LETTERS]
    for slot, grammar in enumerate(grammars):
        assert rows.admit(Admission(slot, (5, 6), 2, GREEDY, (), grammar)) == ""
    beyond = 32 * num_words(VOCAB_SIZE)
    ids = np.array([ord("a"), TWO, beyond])
    masks, _, errors = rows.masks(np.array([0, 3, 1, 2]), {0: ids, 1: ids, 2: ids, 3: ids[:0]})
    assert errors == {}
    assert masks is not None
    assert masks.rows.tolist() == [0, 2, 3]
    allowed = [set(np.flatnonzero(mask).tolist()) for mask in unpack(masks.words, VOCAB_SIZE)]
    assert allowed == [{ord("b")}, {TWO}, {*b"abc", TWO}]


def test_row_with_a_fault_has_no_mask_and_the_others_keep_theirs() -> None:
    """B073: a limit of work that was passed, or no token left, ends its own row."""
    rows = grammar_rows()
    thoughts = {"budget": 1, "opening": "", "closing": "no letter"}
    nothing = json.dumps({**json.loads(OPEN_END), "thoughts": thoughts}).encode()
    for slot, grammar in enumerate([OPEN_END, OPEN_END, nothing, lark('start: "a" /[xy]/')]):
        assert rows.admit(Admission(slot, (5, 6, ord("a")), 2, GREEDY, (), grammar)) == ""
    rows._states[1]._seconds_behind = 1.0
    masks, states, errors = rows.masks(np.array([2, 0, 1, 3]), {})
    assert list(states) == [0, 1, 2, 3]
    assert errors == {
        0: "the grammar leaves no token",
        2: "it needs too much work for a token",
    }
    assert masks is not None
    assert masks.rows.tolist() == [1, 3]
    allowed = [set(np.flatnonzero(mask).tolist()) for mask in unpack(masks.words, VOCAB_SIZE)]
    assert allowed == [{*b"abc", TWO, EOS}, {*b"xy"}]
    assert rows.masks(np.array([2]), {}) == (None, {0: states[0]}, {0: errors[0]})

"""From tokens to text: the same whatever the chunks, stop strings at the first token that completes one, templates that append."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.environments.byte_tokenizer import ByteTokenizer
from services.environments.guess_number import GuessTokenizer
from services.environments.loading import FolderTokenizer
from services.jobfile import ConfigError, EnvironmentSection, GatewaySection, JobFile
from services.router.gateway.errors import ApiError
from services.router.gateway.sessions import chat_digests
from services.router.gateway.text import TextStream
from services.router.gateway.tool_calls import Call, ToolText, parse
from services.router.gateway.vocabulary import Vocabulary

BYTES = ByteTokenizer()


def pieces(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(tokens) + 1) for cut in cuts), len(tokens)]
    return [tokens[a:b] for a, b in itertools.pairwise(edges)]


@given(st.text(max_size=40), st.lists(st.integers(0, 200), max_size=8))
def test_pieces_of_any_size_make_the_whole_text(text: str, cuts: list[int]) -> None:
    stream = TextStream(BYTES.decode)
    sent = "".join(stream.feed(each) for each in pieces(BYTES.encode(text), cuts)) + stream.end()
    assert sent == stream.text == BYTES.decode(BYTES.encode(text))


@given(st.lists(st.integers(0, 15), max_size=20), st.lists(st.integers(0, 200), max_size=8))
def test_a_tokenizer_that_puts_spaces_between(ids: list[int], cuts: list[int]) -> None:
    tokenizer = GuessTokenizer()
    stream = TextStream(tokenizer.decode)
    sent = "".join(stream.feed(each) for each in pieces(ids, cuts)) + stream.end()
    assert sent == stream.text == tokenizer.decode(ids)


@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_a_stop_string_ends_at_the_token_that_completes_the_first(text: str, stops: list[str], cuts: list[int]) -> None:
    stream = TextStream(BYTES.decode, stops)
    sent = ""
    for each in pieces(BYTES.encode(text), cuts):
        sent += stream.feed(each)
        assert not any(stop in sent for stop in stops), "what may be a stop string is held back"
    sent += stream.end()
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert stream.enough is None and sent == text
        return
    kept = text[: min(ends)]
    assert stream.enough == len(kept)
    assert sent == kept[: min(kept.find(stop) for stop in stops if stop in kept)]


@given(st.text(alphabet='<tol_ca>/{"name:1}', max_size=60), st.lists(st.integers(0, 80), max_size=8))
def test_content_beside_tool_calls_streams_to_the_same(text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    splitter = ToolText()
    sent = "".join(splitter.feed(text[a:b]) for a, b in itertools.pairwise(edges))
    rest, calls = splitter.end()
    whole, expected = parse(text)
    assert calls == expected
    assert (sent + rest).strip() == whole.strip()


def test_tool_calls_that_are_none_stay_text() -> None:
    assert parse('a<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>b') == ("ab", (Call("f", '{"x":1}'),))
    assert parse('<tool_call>{"name": "f"}') == ("", (Call("f", "{}"),))  # cut short, and whole all the same
    for text in ("<tool_call>no json</tool_call>", '<tool_call>{"name": 1}</tool_call>', "<tool_call>[1]</tool_call>"):
        assert parse(text) == (text, ())


# --- templates

QWEN_LIKE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def hugging_face(folder: Path, template: str | None = QWEN_LIKE) -> FolderTokenizer:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the quick brown fox jumps over the lazy dog and tells of pearls"] * 3, trainer)
    made.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {"eos_token": {"content": "<|im_end|>"}, "bos_token": None}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return FolderTokenizer(folder)


def test_a_hugging_face_folder_renders_as_transformers_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    hugging_face(tmp_path)
    job = JobFile(environment=EnvironmentSection(tokenizer=str(tmp_path)))
    vocabulary = Vocabulary.load(job)
    messages = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"}]
    messages += [{"role": "user", "content": "over <what>?\n"}]
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    oracle.chat_template = QWEN_LIKE
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    text = vocabulary.render(messages, None, {})
    assert text == expected
    ids = vocabulary.encode(text, "messages")
    assert ids == oracle(expected, add_special_tokens=False).input_ids
    # What follows a reply is what the whole chat has after it.
    reply = "jumps<|im_end|>"
    before = vocabulary.render(messages[:1], None, {})
    after = vocabulary.continuation(messages[2:], None, {}, ended=True)
    assert after is not None and before + reply + after == text
    cut_short = vocabulary.continuation(messages[2:], None, {}, ended=False)
    assert cut_short == "<|im_end|>" + after
    stream = TextStream(vocabulary.decode, silent=frozenset((vocabulary.eos_id,)))
    assert "".join(stream.feed([token]) for token in vocabulary.encode(reply, "x")) + stream.end() == "jumps"
    assert vocabulary.piece(vocabulary.eos_id) == "<|im_end|>"


def test_a_folder_without_a_template_and_a_file_instead(tmp_path: Path) -> None:
    hugging_face(tmp_path, template=None)
    job = JobFile(environment=EnvironmentSection(tokenizer=str(tmp_path)))
    with pytest.raises(ApiError, match="no chat template"):
        Vocabulary.load(job).render([], None, {})
    file = tmp_path / "mine.jinja"
    file.write_text("{{ raise_exception('never mind') }}")
    mine = Vocabulary.load(
        JobFile(
            environment=EnvironmentSection(tokenizer=str(tmp_path)), gateway=GatewaySection(chat_template=str(file))
        )
    )
    with pytest.raises(ApiError, match="never mind"):
        mine.render([{"role": "user", "content": "x"}], None, {})
    file.write_text("{% for %}")
    with pytest.raises(ConfigError, match="no Jinja template"):
        Vocabulary.load(
            JobFile(
                environment=EnvironmentSection(tokenizer=str(tmp_path)), gateway=GatewaySection(chat_template=str(file))
            )
        )


def test_a_template_that_rewrites_history_is_not_continued() -> None:
    template = "{% for message in messages %}{{ loop.length }}{{ message.content }}{% endfor %}"
    vocabulary = Vocabulary(ByteTokenizer(), template)
    assert vocabulary.continuation([{"role": "user", "content": "x"}], None, {}, ended=False) is None


def test_digests_tell_chats_apart_and_forgive_what_harnesses_do() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": 2}}}
    same = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"b": 2, "a": 1}'}}

    def last(*messages: dict, tools: object = None) -> bytes:
        return chat_digests(messages, tools)[-1]

    said = {"role": "assistant", "content": "Hi"}
    assert last(said) == last({**said, "content": " Hi\n", "refusal": None, "tool_calls": []})
    assert last({"role": "assistant", "content": None, "tool_calls": [call]}) == last(
        {"role": "assistant", "content": "", "tool_calls": [same]}
    )
    assert last(said) != last({**said, "content": "Hi!"}) != last({**said, "role": "user"})
    assert last({"role": "user", "content": "Hi"}) != last({"role": "user", "content": " Hi"})
    assert last(said) != last(said, tools=[1])

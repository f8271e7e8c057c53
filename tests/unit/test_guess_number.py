"""The built-in environment, the user's example, and how a job file's names become objects."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import msgspec
import pytest

from services import jobfile
from services.environments.guess_number import (
    GuessNumber,
    GuessTokenizer,
    best_reward,
    blind_reward,
)
from services.environments.loading import environment_factory, load_tokenizer, stop_ids_of
from services.jobfile import ConfigError, EnvironmentSection, JobFile

ROOT = Path(__file__).parents[2]


async def play(environment, seed, choose):
    """Reward and observations of one episode; `choose` sees the observations."""
    seen = [await environment.reset(seed)]
    reward = 0.0
    while True:
        result = await environment.step(choose(seen))
        seen.append(result.observation)
        reward += result.reward
        if result.done:
            return reward, seen


def halving(seen):
    low, high = 1, 8
    for answer in seen[1:]:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if answer == "higher" else (low, middle - 1)
    return str((low + high) // 2)


async def test_halving_finds_every_number():
    rewards = [(await play(GuessNumber(), seed, halving))[0] for seed in range(200)]
    assert rewards == [1.0] * 200
    assert best_reward({}) == 1.0
    assert best_reward({"guesses": 3}) == 7 / 8


async def test_blind_reward_is_that_of_the_best_sequence_of_guesses():
    options = {"numbers": 5, "guesses": 2}
    seeds = {}
    for seed in itertools.count():  # one seed for each secret
        environment = GuessNumber(**options)
        await environment.reset(seed)
        seeds.setdefault(environment._secret, seed)
        if len(seeds) == 5:
            break
    best = 0.0
    for guesses in itertools.product("12345", repeat=2):
        rewards = [
            (await play(GuessNumber(**options), seed, lambda seen, g=guesses: g[len(seen) - 1]))[0]
            for seed in seeds.values()
        ]
        best = max(best, sum(rewards) / 5)
    assert best == blind_reward(options)
    assert blind_reward({}) == 0.5


async def test_numbers_are_equally_likely():
    environment = GuessNumber()
    counts = dict.fromkeys(range(1, 9), 0)
    for seed in range(4000):
        await environment.reset(seed)
        counts[environment._secret] += 1
    assert all(400 < count < 600 for count in counts.values()), counts


async def test_the_same_actions_lead_to_the_same_answers():
    for seed in range(20):
        first, second = [await play(GuessNumber(), seed, lambda seen: str(len(seen))) for _ in range(2)]
        assert first == second


async def test_a_bad_action_costs_a_guess_and_is_never_an_exception():
    environment = GuessNumber(guesses=3)
    await environment.reset(0)
    assert (await environment.step("")).observation == "invalid"
    assert (await environment.step("higher lower")).observation == "invalid"
    last = await environment.step("99")
    assert last.done and last.reward == 0.0 and last.observation == "wrong"


def test_the_tokenizer_knows_all_that_is_said():
    tokenizer = GuessTokenizer()
    for text in ("<bos>", "higher", "lower", "correct", "wrong", "invalid", "8", "<bos> 3 lower 1"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 16
    assert set(tokenizer.encode("1 2 3 4 5 6 7 8")) | {tokenizer.eos_id} == set(stop_ids_of(tokenizer))
    assert tokenizer.decode([99]) == "<pad>"


def job(**environment) -> JobFile:
    return JobFile(environment=EnvironmentSection(**environment))


def test_options_reach_environment_and_tokenizer():
    made = job(options={"numbers": 4, "guesses": 2})
    environment_factory(made)()
    assert load_tokenizer(made).vocab_size == 12


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"entry": "GuessNumber"}, "module:Class"),
        ({"entry": "no.such.module:X"}, "cannot be imported"),
        ({"entry": "services.environments.guess_number:Nothing"}, "no class Nothing"),
        ({"entry": "services.environments.guess_number:GuessTokenizer"}, "has no replayable"),
        ({"entry": "examples/no_such_file.py:X"}, "no file"),
        ({"options": {"colour": 3}}, "takes no colour"),
        ({"options": {"guesses": 0}}, "guesses = 0"),
    ],
)
def test_a_wrong_environment_is_a_configuration_error(section, words):
    with pytest.raises(ConfigError, match=words):
        environment_factory(job(**section))


def test_a_module_that_breaks_is_a_configuration_error(tmp_path):
    (tmp_path / "broken.py").write_text("raise ValueError('half done')")
    with pytest.raises(ConfigError, match="ValueError: half done"):
        environment_factory(job(entry=f"{tmp_path / 'broken.py'}:X"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no-such-folder", "no tokenizer.json"),
        ("services.environments.guess_number:Nothing", "no class"),
        ("services.environments.guess_number:GuessNumber", "has no eos_id"),
    ],
)
def test_a_wrong_tokenizer_is_a_configuration_error(name, words):
    with pytest.raises(ConfigError, match=words):
        load_tokenizer(job(tokenizer=name))


def test_a_tokenizer_folder(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<unk>": 0, "<eos>": 1, "hello": 2, "world": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<eos>"])
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="eos_token"):
        load_tokenizer(job(tokenizer=str(tmp_path)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    tokenizer = load_tokenizer(job(tokenizer=str(tmp_path)))
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (1, 4)
    assert tokenizer.encode("hello world <eos>") == [2, 3, 1]
    assert tokenizer.decode([2, 3]).split() == ["hello", "world"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    with pytest.raises(ConfigError, match="not a token"):
        load_tokenizer(job(tokenizer=str(tmp_path)))


async def test_the_example_of_an_own_environment(monkeypatch):
    monkeypatch.chdir(ROOT)
    example = jobfile.load("examples/my_environment/job.toml")
    make, tokenizer = environment_factory(example), load_tokenizer(example)
    assert tokenizer.vocab_size == 8 + 9
    for seed in range(30):
        environment = make()
        prompt = await environment.reset(seed)
        assert tokenizer.decode(tokenizer.encode(prompt)) == prompt
        a, _, b, _ = prompt.split()
        assert (await environment.step(str(int(a) + int(b)))).reward == 1.0
        assert await environment.reset(seed) == prompt
        hint = await environment.step("0")
        if not hint.done:
            assert tokenizer.encode(hint.observation)
            right = await environment.step(str(int(a) + int(b)))
            assert (right.reward, right.done) == (0.5, True)
        await environment.close()


def test_options_are_only_what_the_environment_takes():
    unknown = msgspec.structs.replace(job(), environment=EnvironmentSection(options={"numbers": "many"}))
    with pytest.raises(ConfigError, match="cannot be made"):
        environment_factory(unknown)


async def test_options_for_the_load_leave_the_task_as_it_is() -> None:
    game, tokenizer = GuessNumber(preamble_tokens=3, chatter_tokens=1), GuessTokenizer(chatter_tokens=1)
    assert len(tokenizer.encode(await game.reset(2))) == 4  # the secret is 3
    assert stop_ids_of(tokenizer) == []  # only pipeline.max_new_tokens ends a turn
    assert (await game.step("<pad> 3")).observation == "invalid"  # the first word is the guess
    assert (await game.step("2 3")).observation == "higher"
    last = await game.step("3 lower")
    assert last.done and last.reward == 1.0
    with pytest.raises(ConfigError, match="chatter_tokens"):
        GuessNumber(chatter_tokens=-1)

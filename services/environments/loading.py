"""Find the environment and the tokenizer that a job file names. What is wrong with them is said before anything runs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from services.environments.base import Environment, Tokenizer
from services.jobfile import ConfigError, JobFile
from services.runtime.foreign import ForeignError, foreign_code


def environment_factory(job: JobFile) -> Callable[[], Environment]:
    """What makes one environment an episode, from `environment.entry` and `environment.options`. Raises ConfigError.

    One whose constructor names `time_scale` is given `environment.time_scale`.
    """
    entry, options = job.environment.entry, job.environment.options
    cls = load_class(entry, "environment.entry")
    if "time_scale" in inspect.signature(cls).parameters:
        options = {"time_scale": job.environment.time_scale, **options}
    _check_members(cls, ("replayable", "reset", "step", "close"), entry, "environment.entry")
    _check_options(cls, options, entry)

    def make() -> Environment:
        return cast(Environment, cls(**options))

    _made(make, f"environment.options: {entry} cannot be made with {options}")
    return make


def load_tokenizer(job: JobFile) -> Tokenizer:
    """The tokenizer of `environment.tokenizer`: a class, or a folder with `tokenizer.json`. Raises ConfigError.

    A class is given those of `environment.options` that its constructor names, so that its vocabulary can follow them.
    """
    name = job.environment.tokenizer
    if Path(name).is_dir() or ":" not in name:
        return FolderTokenizer(Path(name))
    cls = load_class(name, "environment.tokenizer")
    named = inspect.signature(cls).parameters
    given = {key: value for key, value in job.environment.options.items() if key in named}
    tokenizer = _made(lambda: cls(**given), f"environment.tokenizer: {name} cannot be made")
    _check_members(tokenizer, ("eos_id", "vocab_size", "encode", "decode"), name, "environment.tokenizer")
    return cast(Tokenizer, tokenizer)


def _made(make: Callable[[], Any], otherwise: str) -> Any:
    """What the user's code makes; whatever it raises is a ConfigError (its own ones as they are)."""
    try:
        with foreign_code():
            return make()
    except ForeignError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"{otherwise}: {error}") from error


def stop_ids_of(tokenizer: Tokenizer) -> list[int]:
    """The ids that end a turn: the tokenizer's `stop_ids` if it has such a list (it may be empty), else `eos_id`."""
    found = getattr(tokenizer, "stop_ids", None)
    return [tokenizer.eos_id] if found is None else list(found)


def load_class(entry: str, key: str) -> type[Any]:
    """The class that "module:Class" or "path/to/file.py:Class" names. Raises ConfigError naming the key."""
    source, _, name = entry.rpartition(":")
    if not source or not name:
        raise ConfigError(f'{key} = {entry!r}: write "module:Class" or "path/to/file.py:Class"')
    try:
        with foreign_code():  # the user's module runs here, and may raise anything
            module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except ForeignError as error:
        if not isinstance(error.__cause__, ImportError):
            raise ConfigError(f"{key} = {entry!r}: importing {source} raised {error}") from error
        raise ConfigError(
            f"{key} = {entry!r}: {source} cannot be imported ({error.__cause__}); install it in PEARL's environment, or put its "
            "folder on PYTHONPATH"
        ) from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise ConfigError(f"{key} = {entry!r}: {source} has no class {name}")
    return found


def _load_file(path: Path) -> Any:
    name = f"pearl_user_{path.stem}"
    resolved = path.resolve()
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(resolved):
        return known
    spec = importlib.util.spec_from_file_location(name, resolved)
    if not resolved.is_file() or spec is None or spec.loader is None:
        raise ImportError(f"no file {resolved}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and the like look their module up while it is executed
    whole = False
    try:
        spec.loader.exec_module(module)
        whole = True
    finally:
        if not whole:
            del sys.modules[name]
    return module


def _check_members(found: object, members: Sequence[str], entry: str, key: str) -> None:
    missing = [member for member in members if not hasattr(found, member)]
    if missing:
        raise ConfigError(
            f"{key} = {entry!r}: has no {', '.join(missing)}; the interface is in services/environments/base.py"
        )


def _check_options(cls: type[Any], options: dict[str, object], entry: str) -> None:
    named = inspect.signature(cls).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values()):
        return
    unknown = sorted(set(options) - set(named))
    if unknown:
        raise ConfigError(f"environment.options: {entry} takes no {', '.join(unknown)}; it takes {', '.join(named)}")


class FolderTokenizer:
    """A Hugging Face tokenizer folder: `tokenizer.json`, and `eos_token` from `tokenizer_config.json`.

    `chat_template` (None if the folder has none) and `special_tokens` (`eos_token`, `bos_token`, ...) are for chats.
    """

    def __init__(self, folder: Path) -> None:
        key = "environment.tokenizer"
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f'{key} = {str(folder)!r}: has no tokenizer.json; give such a folder, or "module:Class"')
        try:
            tokenizers = importlib.import_module("tokenizers")
        except ImportError as error:
            raise ConfigError(
                f"{key} = {str(folder)!r}: reading it needs the package 'tokenizers': pip install tokenizers"
            ) from error
        try:
            with foreign_code():  # the library raises plain Exception for a file it cannot read
                self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
        except ForeignError as error:
            raise ConfigError(f"{file}: not a tokenizer: {error}") from error
        self.vocab_size = int(self._tokenizer.get_vocab_size())
        file = folder / "tokenizer_config.json"
        try:
            config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{file}: needed for eos_token: {error}") from error
        named = {key: _content(value) for key, value in config.items() if key.endswith("_token")}
        self.special_tokens = {key: value for key, value in named.items() if value is not None}
        self.chat_template = _chat_template(folder, config)
        self.eos_id = self._eos(file)

    def _eos(self, file: Path) -> int:
        token = self.special_tokens.get("eos_token")
        index = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
        if index is None:
            raise ConfigError(f"{file}: eos_token = {token!r} is not a token of tokenizer.json")
        return int(index)

    def encode(self, text: str) -> list[int]:
        """Ids, special tokens in the text recognised and none added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text, special tokens left out."""
        return str(self._tokenizer.decode(list(ids)))


def _content(token: object) -> str | None:
    """A special token's text, given as such or as an object with `content`."""
    if isinstance(token, dict):
        token = cast("dict[str, Any]", token).get("content")
    return token if isinstance(token, str) else None


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """Of `chat_template.jinja`, or of the configuration, where it may be one of several: then the one named "default"."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = cast("list[dict[str, Any]]", found)
        found = next((each.get("template") for each in named if each.get("name") == "default"), None)
    return found if isinstance(found, str) else None

"""Text to tokens and back for HTTP clients: the job's tokenizer and its chat template.

The template is, in this order: the file `gateway.chat_template`; a tokenizer folder's `chat_template.jinja`, or that in its
`tokenizer_config.json`; the attribute `chat_template` of a tokenizer class. It is rendered as Hugging Face does: sandboxed
Jinja with `messages`, `tools`, `add_generation_prompt`, `raise_exception` and the special tokens.

History is never tokenized again: a session's next prompt is what was, token by token, and the tokens of `continuation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.sandbox
import msgspec

from services.environments.base import Tokenizer
from services.environments.loading import load_tokenizer, stop_ids_of
from services.jobfile import ConfigError, JobFile
from services.router.gateway.errors import ApiError
from services.runtime.foreign import ForeignError, call_foreign

Message = Mapping[str, Any]  # Any: a chat message as JSON

_SENTINEL: Final = "pearl sentinel"
"""An assistant's words in a rendering that shows what a template puts after them."""


class Vocabulary:
    """One job's tokenizer and template. Raises ConfigError from `load`, ApiError from the rest."""

    def __init__(self, tokenizer: Tokenizer, template: str | None, special: Mapping[str, str] | None = None) -> None:
        self.eos_id = tokenizer.eos_id
        self.stop_ids = stop_ids_of(tokenizer)
        self.size = tokenizer.vocab_size
        self._tokenizer = tokenizer
        self._special = dict(special or {})
        self._eos_text = self._special.get("eos_token", "")
        self._template = None if template is None else _compiled(template)

    @staticmethod
    def load(job: JobFile) -> Vocabulary:
        """The vocabulary of a job. Raises ConfigError."""
        tokenizer = load_tokenizer(job)
        template: str | None = getattr(tokenizer, "chat_template", None)
        special: dict[str, str] = dict(getattr(tokenizer, "special_tokens", {}))
        eos = getattr(tokenizer, "eos_text", None)
        if isinstance(eos, str):
            special.setdefault("eos_token", eos)
        if job.gateway.chat_template:
            file = Path(job.gateway.chat_template)
            try:
                template = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"gateway.chat_template = {str(file)!r}: cannot be read ({error})") from error
        try:
            return Vocabulary(tokenizer, template, special)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is no Jinja template: {error}") from error

    @property
    def has_template(self) -> bool:
        """Whether chats can be rendered."""
        return self._template is not None

    def encode(self, text: str, param: str) -> list[int]:
        """Ids of a text. `param` names it in the error."""
        try:
            return call_foreign(self._tokenizer.encode, text)
        except ForeignError as error:
            raise ApiError(
                400,
                f"{param} cannot be tokenized by this model's tokenizer: {error}",
                code="untokenizable",
                param=param,
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; what the tokenizer cannot decode reads as U+FFFD."""
        try:
            return call_foreign(self._tokenizer.decode, ids)
        except ForeignError:
            return "\ufffd"

    def piece(self, token: int) -> str:
        """One token for people. The end of a turn is shown as the template writes it."""
        return self._eos_text or self.decode([token]) if token == self.eos_id else self.decode([token])

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        options: Mapping[str, Any],
        *,
        prompt: bool = True,
    ) -> str:
        """The text of a chat; with `prompt`, the model is to speak next."""
        if self._template is None:
            raise ApiError(
                400,
                "this model has no chat template: use /v1/completions, or set gateway.chat_template",
                code="no_chat_template",
            )
        try:
            return self._template.render(
                {
                    **self._special,
                    **options,
                    "messages": list(messages),
                    "tools": list(tools) if tools else None,
                    "documents": None,
                    "add_generation_prompt": prompt,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise ApiError(
                400,
                f"the model's chat template refuses these messages: {error}",
                code="template_error",
                param="messages",
            ) from error

    def continuation(
        self, new: Sequence[Message], tools: Sequence[Message] | None, options: Mapping[str, Any], *, ended: bool
    ) -> str | None:
        """The text between a reply, as the model made it, and the model's next words, where `new` was said in between.

        `ended`: the reply ends with the end-of-turn token. None if the template does not only append.
        """
        base: list[Message] = [{"role": "user", "content": "."}, {"role": "assistant", "content": _SENTINEL}]
        try:
            before = self.render(base, tools, options, prompt=False)
            after = self.render([*base, *new], tools, options)
        except ApiError:
            return None
        _, mark, closing = before.rpartition(_SENTINEL)
        if not mark or not after.startswith(before):
            return None
        if ended and self._eos_text and closing.startswith(self._eos_text):
            closing = closing[len(self._eos_text) :]
        return closing + after[len(before) :]


def _compiled(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise, strftime_now=_now)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return environment.from_string(source)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:  # Any: whatever a template passes
    text = msgspec.json.encode(value)
    return (msgspec.json.format(text, indent=indent) if indent else _spaced(text)).decode()


def _spaced(text: bytes) -> bytes:
    """With a space after ':' and ',', as Python's json writes it and models are trained on."""
    return msgspec.json.format(text, indent=0)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)

"""Nkey seeds: one file a user, readable by its owner only. The server's configuration holds public keys alone."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nkeys  # has no type annotations; what is used of it is wrapped in two functions here


class KeyFileError(Exception):
    """A seed file is missing or damaged; says which and what to do."""


def seed_path(keys_dir: Path, user: str) -> Path:
    """Where the seed of `user` is kept."""
    return keys_dir / f"{user}.nk"


def ensure_keys(keys_dir: Path, users: Iterable[str]) -> dict[str, str]:
    """Make the missing seeds; return each user's public key. Seeds that exist are kept."""
    keys_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    public: dict[str, str] = {}
    for user in users:
        path = seed_path(keys_dir, user)
        if not path.exists():
            _write_new(path, _new_seed())
        public[user] = _public_key(path)
    return public


def ensure_secret(keys_dir: Path, name: str) -> str:
    """A random word in a file of its own, made if it is missing: what servers of a cluster know each other by."""
    keys_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = keys_dir / f"{name}.secret"
    if not path.exists():
        _write_new(path, secrets.token_hex(16).encode())
    secret = path.read_text(encoding="ascii", errors="replace").strip()
    if not re.fullmatch(r"[A-Za-z0-9]{16,}", secret):
        raise KeyFileError(
            f"{path} is not a secret of at least 16 letters and digits: delete it on every node, or copy it"
        )
    return secret


def _write_new(path: Path, seed: bytes) -> None:
    """A seed appears whole and with mode 0600, or not at all; another process that was faster wins."""
    part = path.with_suffix(f".{os.getpid()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(seed)
        with contextlib.suppress(FileExistsError):
            os.link(part, path)
    finally:
        part.unlink(missing_ok=True)


def _new_seed() -> bytes:
    return nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)  # pyright: ignore[reportUnknownMemberType]


def _public_key(path: Path) -> str:
    try:
        pair: Any = nkeys.from_seed(bytearray(path.read_bytes().strip()))  # pyright: ignore[reportUnknownMemberType]
    except (nkeys.NkeysError, ValueError) as error:
        raise KeyFileError(
            f"{path} is not an nkey seed ({error}): delete it, and restart the server so that it is made anew"
        ) from error
    return str(pair.public_key.decode())

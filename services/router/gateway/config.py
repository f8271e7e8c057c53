"""What a gateway reads of the job file."""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path

import msgspec

from services.jobfile import ConfigError, JobFile, parse_bind


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in tokens and bytes, times as named. Empty `keys`: none is asked for."""

    job: str
    address: str
    port: int
    model: str
    keys: frozenset[bytes]  # SHA-256 of each
    tls: tuple[str, str] | None  # certificate, key
    max_context_tokens: int
    max_new_tokens: int  # of a turn of a session that is trained on
    max_body_bytes: int
    max_requests: int
    queue_s: float
    receive_s: float
    send_s: float
    max_sessions: int
    session_idle_ms: int
    silence_ms: int
    ack_wait_s: float
    max_ack_pending: int
    newest_version: int  # the policy after the last train step

    @staticmethod
    def of(job: JobFile, index: int = 0) -> Config:
        """The configuration of gateway `index`. Raises ConfigError."""
        gateway = job.gateway
        address, port = parse_bind(gateway.bind)
        return Config(
            job=job.job.name,
            address=address,
            port=port + index if port else 0,
            model=gateway.model or job.model.path.rstrip("/").replace(":", "/").rpartition("/")[2],
            keys=_keys(gateway.api_keys_file),
            tls=(gateway.tls_certificate, gateway.tls_key) if gateway.tls_certificate else None,
            max_context_tokens=gateway.max_context_tokens or job.pipeline.max_context_tokens,
            max_new_tokens=job.pipeline.max_new_tokens,
            max_body_bytes=gateway.max_body_bytes,
            max_requests=gateway.max_requests,
            queue_s=gateway.queue_ms / 1000,
            receive_s=gateway.receive_ms / 1000,
            send_s=gateway.send_ms / 1000,
            max_sessions=gateway.max_sessions,
            session_idle_ms=gateway.session_idle_ms,
            silence_ms=job.agent.silence_ms,
            ack_wait_s=job.agent.task_ack_wait_ms / 1000,
            max_ack_pending=max(1000, job.agent.processes * job.agent.concurrency),
            newest_version=job.pipeline.train_steps,
        )


def digest_of(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _keys(path: str) -> frozenset[bytes]:
    if not path:
        return frozenset()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"gateway.api_keys_file = {path!r}: cannot be read ({error})") from error
    keys = frozenset(digest_of(line.strip()) for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"gateway.api_keys_file = {path!r}: has no key; write one a line")
    return keys


def tls_context(config: Config) -> ssl.SSLContext | None:
    """For the server's sockets. Raises ConfigError."""
    if config.tls is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    certificate, key = config.tls
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"gateway.tls_certificate = {certificate!r}, gateway.tls_key = {key!r}: {error}") from error
    return context

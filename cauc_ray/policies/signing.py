"""Signed policies: an Ed25519 signature next to a policy's file, and the dates that it covers."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cauc_ray.errors import ConfigError, PolicyError, require_packages
from cauc_ray.files.documents import atomic_file
from cauc_ray.files.paths import AnyPath
from cauc_ray.policies.policy import Policy

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

# The signature of the very bytes of a file `policy.json` is `policy.json.sig`: so many bytes, as they are.
SIGNATURE, SIGNATURE_BYTES = ".sig", 64


class SignatureError(PolicyError):
    """A signature is not one of these bytes with this key."""


def signature_of(file: AnyPath) -> AnyPath:
    """Return where the signature of a policy's file is."""
    return file.parent / f"{file.name}{SIGNATURE}"


def sign(file: AnyPath, key: str | Path, days: float | None) -> Policy:
    """Sign a policy's file: write it again with the dates, and its signature next to it.

    key: file of the private key.   days: that it may be taken from now on, None for no end. Each file is replaced at
    once, one right after the other. Returns the policy. Raises PolicyError and ConfigError.
    """
    private, now = _key(key, "private"), datetime.now(UTC)
    expires_at = None if days is None else now + timedelta(days=days)
    policy = Policy.load(file).model_copy(update={"issued_at": now, "expires_at": expires_at})
    content = policy.to_json().encode()
    with atomic_file(signature_of(file)) as signature, atomic_file(file) as signed:
        signature.write_bytes(private.sign(content))
        signed.write_bytes(content)
    return policy


def public_key(path: str | Path) -> Ed25519PublicKey:
    """Return the public key of a PEM file. Raises ConfigError."""
    key: Ed25519PublicKey = _key(path, "public")
    return key


def verified(content: bytes, signature: bytes, key: Ed25519PublicKey, source: str) -> Policy:
    """Return the policy of a signed file's bytes; source names it in messages.

    Raises SignatureError where the signature is of other bytes or with another key, PolicyError for what is not a
    policy or has no date of issue.
    """
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, content)
    except InvalidSignature:
        raise SignatureError(
            f"{source}: its signature is not of these bytes with the configured key; it was changed, or signed with "
            "another key"
        ) from None
    try:
        policy = Policy.of(json.loads(content), source)
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{source} is signed, but not JSON: {error}") from error
    if policy.issued_at is None:
        raise PolicyError(f"{source} is signed, but has no issued_at; sign it with `cauc policy sign`")
    return policy


def require_signed(file: Path, key: str | Path) -> None:
    """Raise PolicyError or ConfigError unless the signature next to a policy's file is valid."""
    try:
        verified(file.read_bytes(), signature_of(file).read_bytes(), public_key(key), str(file))
    except OSError as error:
        raise PolicyError(f"{error.filename} cannot be read: {error.strerror}") from error


def _key(path: str | Path, kind: Literal["public", "private"]) -> Any:
    """Return an Ed25519 key of a PEM file. Raises ConfigError."""
    require_packages("a signed policy", "fleet", "cryptography")
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ed25519
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

    is_private, key = kind == "private", None
    try:
        pem = Path(path).read_bytes()
        key = load_pem_private_key(pem, None) if is_private else load_pem_public_key(pem)
    except OSError as error:
        raise ConfigError(f"the {kind} key {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it is encrypted
        pass
    if not isinstance(key, ed25519.Ed25519PrivateKey if is_private else ed25519.Ed25519PublicKey):
        raise ConfigError(f"{path} is not the PEM file of an unencrypted Ed25519 {kind} key; see docs/how-to/fleet.md")
    return key

"""A public key as a user names it: a file, an artifact, or a known key's name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attnrepro import resources
from attnrepro.artifact.budget import Budget, read_once
from attnrepro.artifact.public_key import parse_public_key
from attnrepro.artifact.trust import TrustStore
from attnrepro.artifact.verify import verify
from attnrepro.errors import Rejected, UsageError

if TYPE_CHECKING:
    from attnrepro.artifact.public_key import PublicKey


def find_key(text: str) -> PublicKey:
    """The key that `text` names.

    Args:
        text: path of a public key (PEM, DER or OpenSSH) or of an artifact, which is verified
            first; else the name of a key that ships with the package.

    Raises:
        UsageError: nothing of that name, or no public key that is taken.
        Rejected: an artifact that does not verify.
    """
    path = Path(text)
    if not text or path.is_dir():
        message = f'"{text}" is a folder' if text else "no key is named"
        raise UsageError(message, hint="name a file, or a known key: attnrepro trust list")
    if not path.exists():
        known = resources.manifests_dir() / "keys" / f"{path.name}.pub"
        if path.name != text or not known.exists():
            message = f"{text} is no file and no known key"
            raise UsageError(message, hint="known keys: attnrepro trust list")
        path = known
    data = read_once(path, Budget())
    if data.startswith(b"PK"):
        return verify(data, trust=TrustStore()).signer
    try:
        return parse_public_key(data)
    except Rejected as error:
        message = f"{path}: {error.message}"
        hint = "give a public key: PEM (attnrepro keygen prints one) or an OpenSSH .pub file"
        raise UsageError(message, hint=hint, rule=error.rule) from None

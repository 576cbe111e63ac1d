"""The signer's own key: made on first use, kept under `files.state_dir()`.

`$ATTNREPRO_KEY` names another key file: PKCS#8 PEM or an OpenSSH private key, Ed25519 or P-256.
A passphrase comes from `$ATTNREPRO_KEY_PASSPHRASE` or from the callback that the caller gives.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnrepro import files
from attnrepro.artifact import trust
from attnrepro.artifact.public_key import Algorithm, PublicKey, checked, low_s
from attnrepro.errors import Rejected, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

KEY_VARIABLE: Final = "ATTNREPRO_KEY"
PASSPHRASE_VARIABLE: Final = "ATTNREPRO_KEY_PASSPHRASE"


@dataclass(frozen=True, kw_only=True)
class Signer:
    """A private key that signs; its repr shows the fingerprint only."""

    public: PublicKey
    private: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey

    def __repr__(self) -> str:
        return f"Signer({self.public.algorithm}, {self.public.fingerprint[:16]}…)"

    def sign(self, message: bytes) -> bytes:
        """Ed25519: 64 bytes, deterministic. P-256: DER with low S over SHA-256."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        if isinstance(self.private, ec.EllipticCurvePrivateKey):
            return low_s(self.private.sign(message, ec.ECDSA(hashes.SHA256())))
        return self.private.sign(message)


def key_path() -> Path:
    """Where the signing key is: `$ATTNREPRO_KEY`, else `signing-key.pem` in the state folder."""
    if path := os.environ.get(KEY_VARIABLE):
        return Path(path)
    return files.state_dir() / "signing-key.pem"


def load_or_create_signer(
    passphrase: Callable[[], str] | None = None,
) -> tuple[Signer, bool]:
    """The user's signer, and whether it was made just now.

    A key that is made here enters the user's trust file as owner `self`.

    Args:
        passphrase: asked only where the key is encrypted and the variable is not set.

    Raises UsageError: unreadable, readable by others, wrong passphrase, or an algorithm not taken.
    """
    path = key_path()
    if path.exists():
        return load_signer(path, passphrase), False
    if os.environ.get(KEY_VARIABLE):
        message = f"the key file {path} of ${KEY_VARIABLE} is not there"
        raise UsageError(message, hint=f"mend or unset ${KEY_VARIABLE}")
    signer = generate(Algorithm.ED25519)
    if not store_signer(signer, path, passphrase=os.environ.get(PASSPHRASE_VARIABLE)):
        return load_signer(path, passphrase), False  # another process was faster
    trust_self(signer.public)
    return signer, True


def trust_self(key: PublicKey) -> None:
    """Enter a key into the user's trust file as owner `self`. Raises UsageError."""
    entry = trust.TrustedKey(
        owner=trust.SELF, key=key, added=datetime.now(UTC).replace(microsecond=0)
    )
    trust.save(trust.load().with_key(entry))


def create(algorithm: Algorithm, *, passphrase: str | None) -> Signer:
    """Make the user's key and trust it as `self`. Raises UsageError where there is one already."""
    signer, path = generate(algorithm), key_path()
    if not store_signer(signer, path, passphrase=passphrase):
        message = f"there is a key already: {path}"
        hint = (
            f"to replace it, move it away first; old artifacts stay valid; or set ${KEY_VARIABLE}"
        )
        raise UsageError(message, hint=hint)
    trust_self(signer.public)
    return signer


def adopt(path: Path, passphrase: Callable[[], str] | None = None) -> Signer:
    """Use an existing private key (by a link to it) and trust it as `self`. Raises UsageError."""
    signer, own = load_signer(path, passphrase), key_path()
    try:
        own.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        own.symlink_to(path.resolve())
    except FileExistsError:
        message = f"there is a key already: {own}"
        raise UsageError(message, hint="move it away first") from None
    except OSError as error:
        message = f"cannot link {own} to {path}: {error.strerror}"
        raise UsageError(message, hint=f"set ${KEY_VARIABLE}={path} instead") from None
    trust_self(signer.public)
    return signer


def generate(algorithm: Algorithm) -> Signer:
    """A fresh key, held in memory only."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    private: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey
    if algorithm is Algorithm.P256:
        private = ec.generate_private_key(ec.SECP256R1())
    else:
        private = ed25519.Ed25519PrivateKey.generate()
    return Signer(public=checked(private.public_key()), private=private)


def store_signer(signer: Signer, path: Path, *, passphrase: str | None) -> bool:
    """Write PKCS#8 PEM of mode 0600; False, and nothing written, where the file exists.

    Raises UsageError where the folder cannot be written.
    """
    from cryptography.hazmat.primitives import serialization

    protection: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase:
        protection = serialization.BestAvailableEncryption(passphrase.encode())
    pem = signer.private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection
    )
    return _create_private(path, pem)


def load_signer(path: Path, passphrase: Callable[[], str] | None = None) -> Signer:
    """Read a private key from PKCS#8 PEM or OpenSSH form. Raises UsageError."""
    data = _read_private(path)
    key = _parse_private(data, None, path)
    if key is None:
        secret = os.environ.get(PASSPHRASE_VARIABLE) or (passphrase() if passphrase else None)
        if not secret:
            message = f"the key {path} is protected by a passphrase"
            raise UsageError(message, hint=f"set ${PASSPHRASE_VARIABLE}, or run in a terminal")
        key = _parse_private(data, secret.encode(), path)
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    if not isinstance(key, (ed25519.Ed25519PrivateKey, ec.EllipticCurvePrivateKey)):
        raise _not_taken(path)
    try:
        public = checked(key.public_key())
    except Rejected:
        raise _not_taken(path) from None
    return Signer(public=public, private=key)


def device_identity(uuid: str, serial: str) -> str:
    """Pseudonym of a device: HMAC-SHA-256 of `uuid NUL serial` under a secret of this user.

    The same owner can show that two artifacts came from one device or from two; nobody can guess
    the serial number from the digest.
    """
    path = files.state_dir() / "device-identity.key"
    if not path.exists():
        _create_private(path, secrets.token_hex(32).encode())
    secret = bytes.fromhex(_read_private(path).decode("ascii"))
    return hmac.new(secret, f"{uuid}\0{serial}".encode(), hashlib.sha256).hexdigest()


def _parse_private(data: bytes, secret: bytes | None, path: Path) -> object | None:
    """The private key; None where it needs a passphrase and none was given."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    openssh = b"-----BEGIN OPENSSH PRIVATE KEY-----" in data
    load = serialization.load_ssh_private_key if openssh else serialization.load_pem_private_key
    try:
        return load(data, password=secret)
    except TypeError:
        return None
    except ValueError:
        found = "wrong passphrase, or a damaged key" if secret else "not a private key"
        message = f"cannot read the key {path}: {found}"
        raise UsageError(message, hint="PKCS#8 PEM and OpenSSH private keys are taken") from None
    except UnsupportedAlgorithm as error:
        message = f"cannot read the key {path}: {error}"
        hint = "protected OpenSSH keys need the package bcrypt: pip install bcrypt"
        raise UsageError(message, hint=hint) from None


def _read_private(path: Path) -> bytes:
    try:
        data = files.read_regular(path, limit=1 << 16)
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        message = f"cannot read {path}: {error.strerror}"
        raise UsageError(message, hint="check its owner and mode (0600)") from None
    if os.name == "posix" and mode & 0o077:
        message = f"{path} can be read by others (mode {mode:04o})"
        raise UsageError(message, hint=f"chmod 600 {path}")
    return data


def _create_private(path: Path, data: bytes) -> bool:
    """Create a file of mode 0600 whole or not at all; False where it exists already."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.atomic_write(temporary, data, mode=0o600)
        # A link, unlike a rename, fails where the name is taken, so that of two processes that
        # make a first key at once both end with the same one.
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}"
        hint = "make the folder writable, or set ATTNREPRO_HOME to one that is"
        raise UsageError(message, hint=hint) from None
    finally:
        with suppress(OSError):
            temporary.unlink()
    files.sync_folder(path.parent)
    return True


def _not_taken(path: Path) -> UsageError:
    message = f"the key {path} is neither Ed25519 nor ECDSA P-256"
    return UsageError(message, hint="attnrepro keygen makes an Ed25519 key", rule="key.algorithm")

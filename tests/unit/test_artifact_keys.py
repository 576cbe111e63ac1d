from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path  # noqa: TC003 - fixtures are annotated with it
from shutil import which

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from attnrepro.artifact import edwards, keys, trust
from attnrepro.artifact.public_key import Algorithm, parse_public_key
from attnrepro.errors import Rejected, UsageError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTNREPRO_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(keys.KEY_VARIABLE, raising=False)
    monkeypatch.delenv(keys.PASSPHRASE_VARIABLE, raising=False)
    return tmp_path / "home"


def test_first_use_makes_a_key_and_trusts_it(home: Path) -> None:
    signer, created = keys.load_or_create_signer()
    again, created_again = keys.load_or_create_signer()
    assert (created, created_again) == (True, False)
    assert again.public == signer.public
    assert stat.S_IMODE((home / "signing-key.pem").stat().st_mode) == 0o600
    entry = trust.load().find(signer.public.fingerprint)
    assert entry is not None
    assert entry.owner == trust.SELF
    assert sorted(path.name for path in home.iterdir()) == ["signing-key.pem", "trust.json"]


def test_signatures_are_deterministic_and_verify() -> None:
    signer = keys.generate(Algorithm.ED25519)
    signature = signer.sign(b"message")
    assert signature == signer.sign(b"message")
    signer.public.verify(signature, b"message")
    with pytest.raises(Rejected):
        signer.public.verify(signature, b"another")


def test_p256_is_low_s() -> None:
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

    from attnrepro.artifact.public_key import P256_ORDER

    signer = keys.generate(Algorithm.P256)
    for number in range(16):
        signature = signer.sign(bytes([number]))
        assert decode_dss_signature(signature)[1] <= P256_ORDER // 2
        signer.public.verify(signature, bytes([number]))


def test_repr_shows_no_secret() -> None:
    signer = keys.generate(Algorithm.ED25519)
    assert "private" not in repr(signer)


def test_passphrase(monkeypatch: pytest.MonkeyPatch) -> None:
    made = keys.create(Algorithm.ED25519, passphrase="correct horse")
    assert b"ENCRYPTED" in keys.key_path().read_bytes()
    with pytest.raises(UsageError, match="passphrase"):
        keys.load_or_create_signer()
    with pytest.raises(UsageError, match="wrong passphrase"):
        keys.load_or_create_signer(lambda: "battery staple")
    assert keys.load_or_create_signer(lambda: "correct horse")[0].public == made.public
    monkeypatch.setenv(keys.PASSPHRASE_VARIABLE, "correct horse")
    assert keys.load_or_create_signer()[0].public == made.public


def test_a_second_key_is_not_made() -> None:
    keys.create(Algorithm.ED25519, passphrase=None)
    with pytest.raises(UsageError, match="already"):
        keys.create(Algorithm.P256, passphrase=None)


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_key_that_others_can_read() -> None:
    keys.create(Algorithm.ED25519, passphrase=None)
    keys.key_path().chmod(0o644)
    with pytest.raises(UsageError, match="0644") as caught:
        keys.load_or_create_signer()
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("chmod 600")


def test_variable_that_names_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(keys.KEY_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(UsageError, match="not there"):
        keys.load_or_create_signer()


@pytest.mark.parametrize(
    "data", [b"", b"-----BEGIN PRIVATE KEY-----\n", b"\x00" * 99, b"ssh-ed25519 AAAA x\n"]
)
def test_damaged_key(home: Path, data: bytes) -> None:
    home.mkdir()
    (home / "signing-key.pem").write_bytes(data)
    (home / "signing-key.pem").chmod(0o600)
    with pytest.raises(UsageError):
        keys.load_or_create_signer()


def _store(path: Path, key: object, form: PrivateFormat) -> Path:
    assert isinstance(
        key, (ed25519.Ed25519PrivateKey, ec.EllipticCurvePrivateKey, rsa.RSAPrivateKey)
    )
    path.write_bytes(key.private_bytes(Encoding.PEM, form, NoEncryption()))
    path.chmod(0o600)
    return path


def test_openssh_key_is_used_directly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    private = ed25519.Ed25519PrivateKey.generate()
    path = _store(tmp_path / "id_ed25519", private, PrivateFormat.OpenSSH)
    monkeypatch.setenv(keys.KEY_VARIABLE, str(path))
    signer, created = keys.load_or_create_signer()
    assert not created
    line = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    assert parse_public_key(line + b" me@host\n") == signer.public


def test_adopting_a_key_links_and_trusts_it(tmp_path: Path, home: Path) -> None:
    path = _store(tmp_path / "id", ed25519.Ed25519PrivateKey.generate(), PrivateFormat.OpenSSH)
    signer = keys.adopt(path)
    assert (home / "signing-key.pem").is_symlink()
    assert keys.load_or_create_signer() == (signer, False) or (
        keys.load_or_create_signer()[0].public == signer.public
    )
    assert trust.load().find(signer.public.fingerprint) is not None
    with pytest.raises(UsageError, match="already"):
        keys.adopt(path)


@pytest.mark.skipif(which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_key_of_ssh_keygen(tmp_path: Path) -> None:
    path = tmp_path / "id"
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path), "-C", "x"]
    subprocess.run(command, check=True, timeout=20)
    signer = keys.load_signer(path)
    assert parse_public_key(path.with_suffix(".pub").read_bytes()) == signer.public


@pytest.mark.parametrize("make", [lambda: ec.generate_private_key(ec.SECP384R1())])
def test_other_curves_are_refused(tmp_path: Path, make: object) -> None:
    assert callable(make)
    path = _store(tmp_path / "key", make(), PrivateFormat.PKCS8)
    with pytest.raises(UsageError) as caught:
        keys.load_signer(path)
    assert caught.value.rule == "key.algorithm"


def test_device_identity_is_stable_and_secret() -> None:
    first = keys.device_identity("GPU-1", "serial")
    assert first == keys.device_identity("GPU-1", "serial")
    assert first != keys.device_identity("GPU-1seria", "l")
    import hashlib

    assert first != hashlib.sha256(b"GPU-1\0serial").hexdigest()


def test_two_first_uses_at_once_end_with_one_key(home: Path) -> None:
    """The slower process finds the file taken and uses the key that is there."""
    home.mkdir()
    first = keys.generate(Algorithm.ED25519)
    assert keys.store_signer(first, keys.key_path(), passphrase=None)
    assert not keys.store_signer(keys.generate(Algorithm.ED25519), keys.key_path(), passphrase=None)
    assert keys.load_or_create_signer()[0].public == first.public
    assert [path.name for path in home.iterdir()] == ["signing-key.pem"]


def test_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("ATTNREPRO_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(UsageError):
        keys.load_or_create_signer()


def test_rfc_8032_keys_are_sound() -> None:
    for text in (
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
    ):
        assert edwards.is_sound_key(bytes.fromhex(text))
    assert not edwards.is_sound_key(b"")
    assert not edwards.is_sound_key((2).to_bytes(32, "little"))  # no point has y = 2

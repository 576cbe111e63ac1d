"""`attnrepro keygen`: the signing key."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import Annotated

import typer

from attnrepro.artifact import keys, trust
from attnrepro.artifact.public_key import Algorithm
from attnrepro.cli.output import emit
from attnrepro.errors import UsageError


def keygen(
    algorithm: Annotated[Algorithm, typer.Option(help="Algorithm.")] = Algorithm.ED25519,
    passphrase: Annotated[
        bool, typer.Option("--passphrase", help="Ask for a passphrase that protects the key.")
    ] = False,
    use: Annotated[
        Path | None,
        typer.Option(help="Use this key (PKCS#8 PEM or OpenSSH) instead of making one."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Make a signing key, or name one you have; its public half enters your trust file as `self`.

    The key lies in the state folder with mode 0600. $ATTNREPRO_KEY names another one.
    """
    if use is not None:
        signer = keys.adopt(use, lambda: str(typer.prompt("passphrase", hide_input=True, err=True)))
    else:
        secret = _new_passphrase() if passphrase else None
        signer = keys.create(algorithm, passphrase=secret)
    found = {
        "key": str(keys.key_path()),
        "algorithm": signer.public.algorithm.value,
        "fingerprint": signer.public.fingerprint,
        "public_key": signer.public.pem.decode("ascii"),
        "trust_file": str(trust.trust_path()),
    }
    emit(
        found,
        as_json=as_json,
        text=lambda: (
            f"key         {found['key']} ({found['algorithm']})\n"
            f"fingerprint sha256:{found['fingerprint']}\n"
            f"trusted     as owner self in {found['trust_file']}\n"
            f"give this to those who verify your artifacts:\n{found['public_key']}"
        ),
    )


def _new_passphrase() -> str:
    if not sys.stdin.isatty():
        message = "--passphrase asks for one, and there is no terminal"
        raise UsageError(message, hint="set $ATTNREPRO_KEY_PASSPHRASE only to use such a key")
    return str(typer.prompt("passphrase", hide_input=True, confirmation_prompt=True, err=True))

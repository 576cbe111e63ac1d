"""verify, show, attach, keygen and trust as they are typed."""

from __future__ import annotations

import csv
import io
import json
import struct
from dataclasses import replace
from pathlib import Path  # noqa: TC003 - fixtures are annotated with it
from typing import Any

import pytest

from attnrepro import resources
from attnrepro.artifact.sign import Original
from attnrepro.artifact.trust import TrustStore
from attnrepro.artifact.verify import Verified, verify
from attnrepro.cli.main import run
from attnrepro.report import attach, export
from support import example


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTNREPRO_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ATTNREPRO_KEY", raising=False)
    monkeypatch.delenv("ATTNREPRO_KEY_PASSPHRASE", raising=False)
    return tmp_path / "home"


@pytest.fixture
def file(tmp_path: Path, home: Path) -> Path:
    path = tmp_path / "example.attnrepro"
    path.write_bytes(example.artifact())
    return path


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert run(list(words)) == code
    return capsys.readouterr().out


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    return json.loads(said(capsys, *words, "--json", code=code))


def test_unknown_then_trusted_then_revoked(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "verify", str(file), code=3)
    assert "not trusted" in text
    assert "cosign verify-blob-attestation --trusted-root root.json" in text
    found = told(capsys, "verify", str(file), code=3)
    assert (found["rule"], found["exit_code"]) == ("signer.unknown", 3)
    fingerprint = found["signer"]["fingerprint"]
    told(capsys, "trust", "add", str(file), "--owner", "alice")
    found = told(capsys, "verify", str(file))
    assert (found["rule"], found["signer"]["owner"]) == (None, "alice")
    assert "trusted: signed by alice" in said(capsys, "verify", str(file))
    told(capsys, "trust", "revoke", fingerprint[:12], "--reason", "laptop lost")
    found = told(capsys, "verify", str(file), code=1)
    assert found["error"]["rule"] == "trust.revoked"
    assert "laptop lost" in found["error"]["message"]
    told(capsys, "trust", "add", str(file), "--owner", "alice", code=2)
    listed = told(capsys, "trust", "list")
    assert [(key["owner"], key["standing"]) for key in listed["keys"]] == [("alice", "revoked")]


def test_a_key_is_revoked_by_what_names_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, "trust", "add", str(file), "--owner", "alice")
    told(capsys, "trust", "add", "attnrepro-reference", "--owner", "attnrepro")
    told(capsys, "trust", "revoke", "attnrepro-reference", "--reason", "replaced")
    told(capsys, "trust", "revoke", str(file), "--reason", "laptop lost")
    listed = told(capsys, "trust", "list")
    assert [key["standing"] for key in listed["keys"]] == ["revoked", "revoked"]
    told(capsys, "trust", "revoke", "nobody", "--reason", "x", code=2)
    told(capsys, "trust", "revoke", str(file), "--reason", "another", code=2)
    listed = told(capsys, "trust", "list")
    assert [key["reason"] for key in listed["keys"]] == ["laptop lost", "replaced"]


def test_a_key_is_revoked_by_its_owners_name(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told(capsys, "trust", "add", str(file), "--owner", "alice")
    told(capsys, "trust", "add", "attnrepro-reference", "--owner", "carol")
    told(capsys, "trust", "add", "attnrepro-reference-2", "--owner", "carol")
    # Two keys of one owner: which one is for the user to say.
    found = told(capsys, "trust", "revoke", "carol", "--reason", "left", code=2)
    assert "carol names 2 keys" in found["error"]["message"]
    told(capsys, "trust", "revoke", "alice", "--reason", "laptop lost")
    listed = told(capsys, "trust", "list")["keys"]
    assert [k["owner"] for k in listed if k["standing"] == "revoked"] == ["alice"]


def test_an_owner_whose_name_is_of_hex_letters_is_an_owner(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told(capsys, "trust", "add", str(file), "--owner", "Ada")
    # A damaged file of that name does not stand in the way.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Ada").write_bytes(b"PK damaged")
    told(capsys, "trust", "revoke", "Ada", "--reason", "lost")
    assert told(capsys, "trust", "list")["keys"][0]["standing"] == "revoked"


def test_what_is_no_rerun_of_the_file_is_refused(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told(capsys, "trust", "add", str(file), "--owner", "alice")
    headline = resources.manifests_dir() / "hopper-headline"
    for other in (file, headline / "second-host.rerun.attnrepro"):
        found = told(capsys, "verify", str(file), "--rerun", str(other), code=2)
        assert "is no rerun of" in found["error"]["message"]
    original = str(headline / "reference.attnrepro")
    rerun = str(headline / "second-host.rerun.attnrepro")
    assert told(capsys, "verify", original, "--rerun", rerun, code=3)["support"]["not_counted"]


def test_a_key_that_expires_at_once_is_refused(
    file: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    until = ["--until", "2020-01-01"]
    found = told(capsys, "trust", "add", str(file), "--owner", "alice", *until, code=2)
    assert "has passed" in found["error"]["message"]
    assert not (home / "trust.json").exists()


def test_new_replaces_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    # A name that is a folder stands for all that is no regular file; a device would be lost.
    for name in ("/dev", ""):
        told(capsys, "new", name, "--force", code=2)


def test_new_tells_what_check_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["new", str(tmp_path / "a.json"), "--stack", "cuda13.0-torch2.13-fa4"]) == 0
    assert "check refuses this so far" in capsys.readouterr().err
    assert run(["new", str(tmp_path / "b.json")]) == 0
    assert "refuses" not in capsys.readouterr().err


def test_signed_by_yourself(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from attnrepro.artifact import keys

    made = told(capsys, "keygen")
    signer, created = keys.load_or_create_signer()
    assert (signer.public.fingerprint, created) == (made["fingerprint"], False)
    path = tmp_path / "mine.attnrepro"
    path.write_bytes(example.artifact(signer))
    assert "trusted: signed by yourself" in said(capsys, "verify", str(path))
    empty = tmp_path / "empty.json"
    empty.write_bytes(TrustStore().to_bytes())
    said(capsys, "verify", str(path), "--trust", str(empty), code=3)
    assert run(["keygen"]) == 2


def test_keygen_uses_an_openssh_key(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    path = tmp_path / "id_ed25519"
    key = Ed25519PrivateKey.generate()
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    path.chmod(0o600)
    assert told(capsys, "keygen", "--use", str(path))["algorithm"] == "ed25519"


def test_trust_add_refuses_what_is_no_key(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "note.txt"
    path.write_text("hello")
    for words in ([str(path)], ["no-such-key"], ["../keys/x"], [""], [str(tmp_path)]):
        found = told(capsys, "trust", "add", *words, "--owner", "alice", code=2)
        assert found["error"]["message"]
    assert not (home / "trust.json").exists()


def test_trust_add_refuses_an_owner_that_the_file_could_not_hold(
    file: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told(capsys, "trust", "add", str(file), "--owner", "\u0430lice", code=2)
    found = told(capsys, "trust", "add", str(file), "--owner", " ", code=2)
    assert found["error"]["message"] == "--owner is empty"
    assert not (home / "trust.json").exists()


def test_project_key_is_known_and_not_trusted(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = told(capsys, "trust", "list")["known"]
    assert "attnrepro-reference" in known.values()
    told(capsys, "trust", "add", "attnrepro-reference", "--owner", "attnrepro")
    fingerprint = next(key for key, name in known.items() if name == "attnrepro-reference")
    keys = told(capsys, "trust", "list")["keys"]
    assert [key["fingerprint"] for key in keys] == [fingerprint]
    assert said(capsys, "trust", "list").count(fingerprint) == 1


def test_known_key_is_named_and_exits_3(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnrepro.artifact import trust

    known = {example.signer().public.fingerprint: "somebody"}
    monkeypatch.setattr(trust, "known_keys", lambda: known)
    text = said(capsys, "verify", str(file), code=3)
    assert "known as    somebody (ships with attnrepro; not trusted)" in text


def test_seconded(tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = tmp_path / "example.rerun.attnrepro"
    second.write_bytes(example.rerun(Original.of(verify(file, trust=TrustStore()))))
    told(capsys, "trust", "add", str(file), "--owner", "alice")
    told(capsys, "trust", "add", str(second), "--owner", "bob")
    found = told(capsys, "verify", str(file), "--rerun", str(second))
    assert found["support"]["independent_reruns"] == ["bob"]
    text = said(capsys, "verify", str(second))
    assert "outputs-identical" in text
    assert "urn:attnrepro:predicate:rerun:1" in text


def test_host_engine_is_never_called_contained(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from attnrepro.artifact import sign

    seen, predicate = example.observations(), example.predicate()
    seen["containment"] |= {"engine": "host", "contained": False}
    predicate["containment"] = {"engine": "host", "contained": False, "options": []}
    packed = example.content(observations=seen)
    path = tmp_path / "host.attnrepro"
    path.write_bytes(sign.make_artifact(packed, predicate=predicate, signer=example.signer()))
    assert "contained   NO" in said(capsys, "verify", str(path), code=3)


def test_show(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "show", str(file))
    for expected in ("An example", "PASS", "1.003 ms", "FASTER", "signer unknown"):
        assert expected in text
    assert told(capsys, "show", str(file))["observations"] == example.observations()


def test_show_csv_agrees_with_the_observations(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = list(csv.DictReader(io.StringIO(said(capsys, "show", str(file), "--csv"))))
    timing = example.observations()["cells"][0]["subjects"][0]["timing"]["host"]
    assert lines[0]["median_ns"] == str(timing["median"]["value_ns"])
    assert lines[0]["verdict_to_eager"] == "FASTER"
    assert lines[1]["verdict_to_eager"] == ""
    assert len({len(line) for line in lines}) == 1


def test_csv_is_no_formula() -> None:
    seen = example.observations()
    seen["cells"][0]["label"] = "=HYPERLINK(1)"
    assert "'=HYPERLINK(1)" in export.times(seen)


def test_csv_keeps_subjects_without_times() -> None:
    seen = example.observations()
    seen["cells"][0]["subjects"][1] |= {"status": "UNSUPPORTED", "reason": "no", "timing": {}}
    lines = list(csv.DictReader(io.StringIO(export.times(seen))))
    assert [line["status"] for line in lines] == ["PASS", "UNSUPPORTED"]


def test_show_member(file: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    name = example.sample_member("flash", 0)
    assert run(["show", str(file), "--member", name]) == 0
    assert capsysbinary.readouterr().out == example.files()[name]
    assert run(["show", str(file), "--member", name, "--csv"]) == 0
    values = [int(line.split(b",")[1]) for line in capsysbinary.readouterr().out.split()[1:]]
    assert struct.pack("<40q", *values) == example.files()[name]
    assert run(["show", str(file), "--member", "../x"]) == 2
    assert run(["show", str(file), "--member", "logs/flash-0.txt", "--csv"]) == 2


@pytest.mark.parametrize(
    "flags", [("--csv", "--json"), ("--members", "--csv"), ("--member", "manifest.json", "--json")]
)
def test_show_gives_one_thing(
    file: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["show", str(file), *flags]) == 2
    assert "exclude each other" in "".join(capsys.readouterr())


def test_rejected_is_not_shown(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(file.read_bytes()[:-1])
    for verb in (["show"], ["attach", "--pr"], ["verify"]):
        assert run([*verb, str(file)]) == 1
        assert capsys.readouterr().out == ""


def test_attach_needs_one_place(file: Path) -> None:
    assert run(["attach", str(file)]) == 2
    assert run(["attach", str(file), "--pr", "--paper"]) == 2


def test_attach_names_digest_and_verify_line(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = verify(file, trust=TrustStore()).statement.content_sha256
    block = said(capsys, "attach", str(file), "--pr")
    assert f"sha256:{digest}" in block
    assert "attnrepro verify example.attnrepro" in block
    assert "2 passed, 0 failed, 0 unsupported" in block
    paper = said(capsys, "attach", str(file), "--paper")
    assert digest[:32] in paper
    assert paper.count("{") == paper.count("}")
    assert told(capsys, "attach", str(file), "--paper")["block"] == paper


HOSTILE = "`</code><script>|@maintainer #1 [x](http://e) \n\n# head $\\input{x}$ %_&~^"


def _hostile() -> Verified:
    """A verified artifact with every text that a view could show made hostile."""
    seen, manifest = example.observations(), example.manifest()
    cell = seen["cells"][0]
    cell["label"] = seen["device"]["model"] = seen["containment"]["version"] = HOSTILE
    cell["subjects"][1] |= {"reason": HOSTILE}
    cell["subjects"][1]["timing"] = {HOSTILE: cell["subjects"][1]["timing"]["host"]}
    manifest["title"] = HOSTILE
    documents = {"manifest.json": manifest, "observations.json": seen}
    return replace(verify(example.artifact(), trust=TrustStore()), documents=documents)


def test_markdown_is_inert() -> None:
    block = attach.markdown(_hostile(), file="x`; rm -rf ~.attnrepro")
    assert "rm -rf" not in block
    for line in block.splitlines():
        assert line.count("`") % 2 == 0 or line.startswith("```")
        if not line.startswith("```"):
            outside = "".join(line.split("`")[::2])
            assert not set(outside) & set("<@[$\\")
    rows = [line for line in block.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1


def test_latex_is_inert() -> None:
    block = attach.latex(_hostile(), file="x.attnrepro")
    assert r"\input" not in block
    assert r"\textbackslash{}input\{x\}" in block
    assert block.isascii()


def test_latex_escapes_every_special() -> None:
    escaped = attach.escape_latex(r"#$%&~_^\{}é×")
    assert escaped == (
        r"\#\$\%\&\textasciitilde{}\_\textasciicircum{}\textbackslash{}\{\}?$\times$"
    )

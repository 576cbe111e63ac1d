from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from host_fakes import task

from attnrepro.errors import AttnreproError, UsageError
from attnrepro.runfolder import RunFolder, key_of, open_folder

if TYPE_CHECKING:
    from pathlib import Path

KEY = key_of({"a": 1})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return open_folder(tmp_path / "runs", "tiny", KEY)


def put_result(folder: RunFolder, name: str, run_id: str) -> Path:
    path = folder.out("s0") / "tasks" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(task(name, "check", None, []) | {"run": run_id}))
    return path


def test_first_start_is_new(folder: RunFolder) -> None:
    state = folder.start(KEY)
    assert not state.resumed
    assert len(state.run_id) == 16


def test_same_key_is_resumed_with_its_run_id_and_time(folder: RunFolder) -> None:
    first = folder.start(KEY)
    put_result(folder, "check", first.run_id)
    again = folder.start(KEY)
    assert again.resumed
    assert (again.run_id, again.started_utc) == (first.run_id, first.started_utc)
    assert [r["task"] for r in folder.results("s0", first.run_id)] == ["check"]


def test_other_key_starts_clean(folder: RunFolder) -> None:
    first = folder.start(KEY)
    put_result(folder, "check", first.run_id)
    other = folder.start("f" * 64)
    assert not other.resumed
    assert list(folder.results("s0", first.run_id)) == []


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"key": 1}'])
def test_broken_state_starts_clean(folder: RunFolder, damage: bytes) -> None:
    folder.start(KEY)
    (folder.path / "run.json").write_bytes(damage)
    assert not folder.start(KEY).resumed


def test_lock_survives_a_clean_start(folder: RunFolder) -> None:
    (folder.path / ".lock").write_bytes(b"held")
    folder.start(KEY)
    folder.clear()
    assert [p.name for p in folder.path.iterdir()] == [".lock"]


@pytest.mark.parametrize("damage", [b"{", b"{}", b'{"schema": "attnrepro.result/1", "run": NaN}'])
def test_broken_result_is_removed_so_that_its_task_runs_again(
    folder: RunFolder, damage: bytes
) -> None:
    state = folder.start(KEY)
    path = put_result(folder, "check", state.run_id)
    path.write_bytes(damage)
    assert list(folder.results("s0", state.run_id)) == []
    assert not path.exists()


def test_result_of_another_run_does_not_count(folder: RunFolder) -> None:
    state = folder.start(KEY)
    put_result(folder, "check", "f" * 16)
    assert list(folder.results("s0", state.run_id)) == []


def test_link_in_place_of_a_result_is_not_followed(folder: RunFolder, tmp_path: Path) -> None:
    state = folder.start(KEY)
    path = put_result(folder, "check", state.run_id)
    target = tmp_path / "outside.json"
    path.rename(target)
    path.symlink_to(target)
    assert list(folder.results("s0", state.run_id)) == []
    assert target.exists()


@pytest.mark.parametrize("name", ["../run.json", "/etc/hostname", "samples/../../run.json", ""])
def test_reading_stays_inside(folder: RunFolder, name: str) -> None:
    folder.start(KEY)
    folder.out("s0").mkdir(parents=True)
    with pytest.raises(OSError, match=r"."):
        folder.read("s0", name)


def test_reading_follows_no_link(folder: RunFolder, tmp_path: Path) -> None:
    out = folder.out("s0")
    out.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.i64").write_bytes(b"12345678")
    (out / "samples").symlink_to(tmp_path / "elsewhere")
    (out / "y.i64").symlink_to(tmp_path / "elsewhere" / "x.i64")
    for name in ("samples/x.i64", "y.i64"):
        with pytest.raises(OSError, match=r"."):
            folder.read("s0", name)


def test_reading_a_pipe_does_not_wait(folder: RunFolder) -> None:
    folder.out("s0").mkdir(parents=True)
    os.mkfifo(folder.out("s0") / "p")
    with pytest.raises(OSError, match="no plain file"):
        folder.read("s0", "p")


def test_reading_gives_what_was_written(folder: RunFolder) -> None:
    target = folder.out("s0") / "samples" / "launch-0"
    target.mkdir(parents=True)
    (target / "x.i64").write_bytes(b"12345678")
    assert folder.read("s0", "samples/launch-0/x.i64") == b"12345678"


def test_folder_that_cannot_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "runs").write_bytes(b"a file")
    with pytest.raises(UsageError, match="cannot write the run folder"):
        open_folder(tmp_path / "runs", "tiny", KEY)


def test_removed_folder_takes_the_empty_root_with_it(folder: RunFolder) -> None:
    folder.start(KEY)
    folder.remove()
    assert not folder.path.parent.exists()


def test_each_start_has_its_own_log(folder: RunFolder) -> None:
    first = folder.next_log("s0")
    first.write_bytes(b"")
    assert folder.next_log("s0") != first


def test_invalid_result_of_a_finished_runner_is_its_mistake(folder: RunFolder) -> None:
    state = folder.start(KEY)
    path = put_result(folder, "check", state.run_id)
    folder.check_results("s0")
    path.write_text(path.read_text().replace('"entries"', '"entrees"'))
    with pytest.raises(AttnreproError, match=r"check\.json is not valid: .*entr"):
        folder.check_results("s0")
    assert path.exists()

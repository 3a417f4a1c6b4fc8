"""The page as a file, and its server: nothing gets out of its text, and no other user gets in."""

from __future__ import annotations

import errno
import http.client
import json
import os
import re
import socket
import socketserver
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
import pytest

import everystep
from everystep.view import PageServer, disks, serve_page, view_runs, write_page
from everystep.view.contents import contents
from everystep.view.html_page import assemble, embedded_json
from everystep.view.leaf_changes import leaf_changes
from everystep.view.run_reader import RunReader
from everystep.view.web_page import open_runs
from everystep.view.words import labels
from support.processes.command import command, damage_leaf, damage_manifest, step_path
from support.states.shown_runs import HOSTILE, layered_state, long_story, save_by_ranks, train, write_log


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    train(path, layered_state(2), range(1, 6))
    return path


def document(page: Path) -> Any:
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])  # type: ignore[index]


def test_the_page_is_one_file_that_loads_nothing(run: Path, tmp_path: Path) -> None:
    done = write_page([run], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert done.nbytes == len(text.encode())
    assert "default-src &#x27;none&#x27;" in text
    assert (
        re.findall(
            r'(?:src|href)="(?!#)|@import|url\(',
            text.replace(json.dumps(document(tmp_path / "page.html")), ""),
        )
        == []
    )
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert os.listdir(tmp_path) == ["page.html"]


@pytest.mark.parametrize("what", ["an empty directory", "other files", "a device", "a text file"])
def test_no_page_is_made_of_what_is_no_run(what: str, tmp_path: Path) -> None:
    there, page = tmp_path / "there", tmp_path / "page.html"
    if what == "a device":
        there = Path(os.devnull)
    elif what == "a text file":
        there.write_text("hello")
    else:
        there.mkdir()
        if what == "other files":
            (there / "notes").mkdir()
            (there / "notes" / "a.txt").write_text("hello")
    outcome = command("view", there, "--out", page)
    assert outcome.code == 1
    assert str(there) in outcome.err
    with pytest.raises(everystep.CheckpointNotFound, match=re.escape(str(there))):
        serve_page([there])
    assert not page.exists()


def test_the_page_holds_the_run_its_newest_leaves_and_two_comparisons(run: Path, tmp_path: Path) -> None:
    write_page([run], tmp_path / "page.html")
    (shown,) = document(tmp_path / "page.html")["runs"]
    assert shown["view"]["timeline"]["saves"]["step"] == [1, 2, 3, 4, 5]
    assert [entry["step"] for entry in shown["view"]["checkpoints"]] == [3, 4, 5]
    assert [content["step"] for content in shown["contents"]] == [5]
    assert [(change["a_step"], change["b_step"]) for change in shown["changes"]] == [(4, 5), (3, 5)]
    (content,) = shown["contents"]
    assert content["sampled"] == len(content["leaves"]["name"]) == 31
    assert content["writers"][0]["nbytes"] == content["nbytes"]
    assert shown["view"]["disks"][0]["fits"] > 0
    assert shown["problems"] == []


def test_names_and_messages_cannot_leave_their_place(tmp_path: Path) -> None:
    run = tmp_path / "<img src=x onerror=alert(1)>"
    everystep.save(
        step_path(run, 1),
        {HOSTILE: {HOSTILE: np.ones(3)}, "v" + HOSTILE: HOSTILE},
        step=1,
        metrics={HOSTILE: 1.0},
    )
    everystep.save(step_path(run, 2), {HOSTILE: {HOSTILE: np.ones(4)}}, step=2)
    write_log(run, long_story(1600))
    page = tmp_path / "page.html"
    write_page([run], page)
    text = page.read_text()
    assert text.count("</script") == 2  # the data's end, and the script's
    assert "<img" not in text
    assert "\u2028" not in text
    title = re.search("<title>(.*?)</title>", text)
    assert title is not None
    assert title[1].startswith("&lt;img src=x")
    found = document(page)["runs"][0]
    assert found["contents"][0]["leaves"]["name"] == [f"{HOSTILE}.{HOSTILE}"]
    assert any(HOSTILE in item["text"] for item in found["view"]["timeline"]["happenings"])


def test_the_script_never_makes_markup_of_text() -> None:
    folder = Path(everystep.view.__file__).parent / "page"
    for script in folder.glob("*.js"):
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
        ):
            assert word not in script.read_text(), script


def test_a_script_that_would_end_its_own_element_is_refused() -> None:
    with pytest.raises(ValueError, match="end of its own"):
        assemble(title="", style="", body="", script="'</script>'", document={})


def test_json_stands_inside_of_any_element() -> None:
    text = embedded_json({HOSTILE: [float("nan"), float("inf"), "a\udcffb"]})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {HOSTILE: [None, None, "a\\udcffb"]}


def test_runs_are_named_by_what_tells_them_apart() -> None:
    assert labels(["/a/x/run", "/a/y/run"]) == ["x/run", "y/run"]
    assert labels(["/a/one", "/a/two"]) == ["one", "two"]
    assert labels(["/a"]) == ["a"]


def test_a_directory_above_runs_means_all_of_them_and_a_step_itself(run: Path, tmp_path: Path) -> None:
    train(tmp_path / "above" / "a", layered_state(1), range(1, 3))
    train(tmp_path / "above" / "deep" / "b", layered_state(1), range(1, 2))
    views = view_runs([tmp_path / "above", f"{run}@4"])
    assert [len(view.checkpoints) for view in views] == [2, 1, 1]
    assert views[2].checkpoints[0].step == 4
    with pytest.raises(everystep.CheckpointNotFound, match="@99"):
        view_runs([f"{run}@99"])


def test_checkpoints_of_other_names_come_before_those_of_the_run(tmp_path: Path) -> None:
    train(tmp_path / "run", layered_state(1), range(1, 3))
    everystep.save(tmp_path / "run" / "zz-best", {"w": np.ones(2)}, step=1)
    (view,) = view_runs([tmp_path / "run"])
    assert [entry.name for entry in view.checkpoints] == ["zz-best", "step-000000000001", "step-000000000002"]


def test_too_many_runs_for_a_page_are_refused(tmp_path: Path) -> None:
    too_many = [tmp_path / str(number) for number in range(65)]
    for run in too_many:
        run.mkdir()
        (run / "events.jsonl").touch()
    with pytest.raises(ValueError, match="at most 64 runs"):
        view_runs(too_many)
    assert command("view", *too_many, "--out", tmp_path / "page.html").code == 2


def test_metrics_of_pruned_steps_are_shown(run: Path) -> None:
    (view,) = view_runs([run])
    assert len(view.checkpoints) == 3
    assert [metrics["loss"] > 0 for metrics in view.timeline.saves.metrics] == [True] * 5


def test_damage_is_part_of_what_is_shown(run: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", layered_state(1), range(1, 4))
    damage_manifest(step_path(tmp_path / "run", 3))
    damage_leaf(step_path(tmp_path / "run", 2), "model.embed.weight")
    write_page([tmp_path / "run"], tmp_path / "page.html", verify=True)
    (shown,) = document(tmp_path / "page.html")["runs"]
    assert [entry["damage"] is None for entry in shown["view"]["checkpoints"]] == [True, True, False]
    assert [bool(check["problems"]) for check in shown["view"]["checks"]] == [False, True, True]
    # The newest that looked intact is damaged inside: its leaves are named, and the damage is said.
    assert (shown["contents"][0]["step"], shown["contents"][0]["sampled"]) == (2, 0)
    assert "model.embed.weight" in " ".join(shown["problems"])


def test_a_run_without_checkpoints_a_checkpoint_and_a_missing_one(run: Path, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    (view,) = view_runs([tmp_path])
    assert (view.checkpoints, view.summary, view.timeline.events) == ((), None, 0)
    (view,) = view_runs([step_path(run, 5)])
    assert [entry.step for entry in view.checkpoints] == [5]
    with pytest.raises(everystep.CheckpointNotFound):
        view_runs([tmp_path / "missing"])


def test_a_checkpoint_of_another_system_is_shown(tmp_path: Path) -> None:
    np.savez(tmp_path / "arrays.npz", w=np.ones(5), b=np.zeros(2))
    write_page([tmp_path / "arrays.npz"], tmp_path / "page.html", verify=True)
    (shown,) = document(tmp_path / "page.html")["runs"]
    assert shown["contents"][0]["leaves"]["name"] == ["w", "b"]
    assert shown["contents"][0]["sampled"] == 2


def test_a_file_that_is_no_checkpoint_gets_no_page(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing to show")
    with pytest.raises(everystep.EverystepError, match=r"notes\.txt"):
        write_page([tmp_path / "notes.txt"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_ranks_and_volumes_are_shown(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        volume = tmp_path / f"fast-{step}"
        volume.mkdir()
        save_by_ranks(step_path(run, step), step, volumes=(volume,))
    write_page([run], tmp_path / "page.html")
    (shown,) = document(tmp_path / "page.html")["runs"]
    (content,) = shown["contents"]
    assert (content["world"], content["sampled"]) == (4, 6)
    assert [writer["rank"] for writer in content["writers"]] == [0, 1, 2, 3]
    assert sum(writer["nbytes"] for writer in content["writers"]) == 4 * (64 * 256 + 4096) + 4 * 40
    assert {file["volume"] for writer in content["writers"] for file in writer["files"]} >= {str(volume)}
    assert [disk["path"] for disk in shown["view"]["disks"]] == [str(run), str(volume)]
    (changes,) = shown["changes"]
    assert {leaf[0]: leaf[1] for leaf in changes["leaves"]} == {
        "model.w": "changed",
        "model.b": "same",
        **{f"@{rank}.rng": "same" for rank in range(4)},
    }


def test_a_volume_that_cannot_be_reached_is_said(tmp_path: Path) -> None:
    volume = tmp_path / "gone"
    volume.mkdir()
    save_by_ranks(step_path(tmp_path / "run", 1), 1, volumes=(volume,))
    volume.rename(tmp_path / "elsewhere")
    (view,) = view_runs([tmp_path / "run"])
    assert [disk.missing for disk in view.disks] == [None, "No such file or directory"]
    assert view.checkpoints[0].damage is not None


def test_space_is_counted_for_everything_on_a_file_system(tmp_path: Path) -> None:
    volumes = tmp_path / "fast-1", tmp_path / "fast-2"
    for volume in volumes:
        volume.mkdir()
    state = {str(number): np.zeros(4 << 20, np.uint8) for number in range(4)}
    options = everystep.Options(volumes=[str(volume) for volume in volumes])
    with everystep.Checkpointer(tmp_path / "run", state, mode="sync", options=options) as ckpt:
        ckpt.save(1)
    (view,) = view_runs([tmp_path / "run"])
    # The volumes as they were named, not the directories that a save makes on them.
    assert [disk.path for disk in view.disks] == [str(tmp_path / "run"), *map(str, volumes)]
    # All three are one file system, so each of them has room for as many.
    for disk in view.disks:
        assert disk.fits == disk.free_nbytes // view.checkpoints[0].nbytes
    writers = contents(step_path(tmp_path / "run", 1)).writers
    assert {file.volume for writer in writers for file in writer.files} == set(map(str, volumes))


def test_a_checkpoint_on_volumes_needs_little_space_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = tmp_path / "fast"
    volume.mkdir()
    save_by_ranks(step_path(tmp_path / "run", 1), 1, volumes=(volume,))
    (view,) = view_runs([tmp_path / "run"])
    in_run = sum(file.stat().st_size for file in step_path(tmp_path / "run", 1).iterdir())
    # As if the volume were a device of its own.
    monkeypatch.setattr(disks, "_device_number", lambda path: hash(path))
    run, fast = disks.disks(str(tmp_path / "run"), in_run, {str(volume): 1 << 20})
    assert run.fits == run.free_nbytes // in_run
    assert fast.fits == fast.free_nbytes >> 20
    assert view.disks[0].fits == view.disks[1].fits


def test_a_tied_leaf_changes_with_the_leaf_it_is_a_name_of(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        shared = np.full(4, float(step))
        everystep.save(
            step_path(run, step), {"embed": shared, "head": shared, "other": np.ones(2)}, step=step
        )
    changes = leaf_changes(step_path(run, 1), step_path(run, 2))
    found = {leaf.name: leaf for leaf in changes.leaves}
    assert [found[name].change for name in ("embed", "head", "other")] == ["changed", "changed", "same"]
    assert (found["head"].tied, found["embed"].tied) == ("embed", None)
    assert found["head"].max_abs == 1.0


def test_a_log_that_cannot_be_read_is_said_each_time(tmp_path: Path) -> None:
    train(tmp_path / "run", layered_state(1), range(1, 3))
    (tmp_path / "run" / "events.jsonl").unlink()
    (tmp_path / "run" / "events.jsonl").mkdir()
    write_page([tmp_path / "run"], tmp_path / "page.html", verify=True)
    (shown,) = document(tmp_path / "page.html")["runs"]
    assert "events.jsonl cannot be read" in " ".join(shown["view"]["problems"])
    assert len(shown["view"]["checkpoints"]) == 2


def test_lines_of_a_log_that_are_no_events_are_counted(tmp_path: Path) -> None:
    train(tmp_path / "run", layered_state(1), range(1, 4))
    with (tmp_path / "run" / "events.jsonl").open("ab") as log:
        log.write(b'garbage\n{"event":"saved","step":"x"}\n\xff\xfe\n{"event":"saved","ti')
    (view,) = view_runs([tmp_path / "run"])
    assert view.timeline.saves.step == [1, 2, 3]
    assert view.skipped_lines == 4


def test_a_checkpoint_that_may_not_be_read_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "run", layered_state(1), range(1, 3))
    closed = str(step_path(tmp_path / "run", 2))
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if os.fspath(path) == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root may read everything, and tests may be root
    (view,) = view_runs([tmp_path / "run"])
    assert [entry.step for entry in view.checkpoints] == [1, 2]


def test_a_run_below_a_closed_directory_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").touch()
    (reader,) = open_runs([tmp_path / "run"])

    def refuse(path: Any, **more: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "lstat", refuse)
    with pytest.raises(PermissionError):
        reader.view()


def test_a_training_that_holds_its_run_is_seen(tmp_path: Path) -> None:
    state = {"w": np.zeros(3)}
    with everystep.Checkpointer(tmp_path / "run", state, mode="sync") as ckpt:
        ckpt.save(1)
        assert view_runs([tmp_path / "run"])[0].being_written is True
    assert view_runs([tmp_path / "run"])[0].being_written is False


def test_a_path_that_is_not_text_is_shown_all_the_same(tmp_path: Path) -> None:
    run = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff"))
    train(run, layered_state(1), range(1, 3))
    write_page([run], tmp_path / "page.html")
    assert document(tmp_path / "page.html")["runs"][0]["view"]["name"] == "r\\xff"


# --- the server


class Browser:
    def __init__(self, url: str) -> None:
        self.address = urlsplit(url)

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.address.port, timeout=20)
        try:
            connection.request(method, path, headers={"Host": self.address.netloc, **headers})
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), dict(answer.headers)
        finally:
            connection.close()

    def data(self, rest: str) -> Any:
        status, text, _ = self.get(self.address.path + rest)
        return json.loads(text) if status == 200 else (status, json.loads(text)["error"])


@pytest.fixture(scope="module")
def browser(run: Path) -> Iterator[Browser]:
    with serve_page([run]) as server:
        yield Browser(server.url)


def test_only_this_machine_is_listened_to(run: Path) -> None:
    with serve_page([run]) as server:
        assert server._server.socket.getsockname()[0] == "127.0.0.1"
        port = server.port
        kept = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        kept.request("GET", urlsplit(server.url).path)
        assert kept.getresponse().read()
    with pytest.raises(ConnectionRefusedError):  # it has to connect again
        kept.request("GET", urlsplit(server.url).path)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_the_page_needs_its_token(browser: Browser) -> None:
    token = browser.address.path
    assert len(token) > 30
    status, text, headers = browser.get(token)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "connect-src &#x27;self&#x27;" in text
    for wrong in (
        "/",
        "/?token=" + token,
        token[:-2] + "/",
        "/" + "A" * 32 + "/",
        "/%2e%2e/",
        token.upper(),
        "/%C3%A9/",
    ):
        for path in (wrong, wrong + "runs/0/view"):
            status, text, _ = browser.get(path)
            assert (status, "run" in json.loads(text)) == (403, False), path


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil:{port}", ""]
)
def test_a_page_under_another_name_gets_nothing(browser: Browser, name: str) -> None:
    port = str(browser.address.port)
    status, text, _ = browser.get(browser.address.path, Host=name.replace("{port}", port))
    assert status == 403
    assert "another name" in text
    assert browser.get(browser.address.path, Host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(browser: Browser, method: str) -> None:
    assert browser.get(browser.address.path + "runs/0/view", method)[0] in (403, 501)


def test_the_head_of_a_page_has_no_body(browser: Browser) -> None:
    status, text, headers = browser.get(browser.address.path, "HEAD")
    assert (status, text) == (200, "")
    assert int(headers["Content-Length"]) > 1000


def test_the_server_tells_of_leaves_samples_and_changes(browser: Browser) -> None:
    view = browser.data("runs/0/view")["view"]
    names = [entry["name"] for entry in view["checkpoints"]]
    content = browser.data(f"runs/0/contents?name={names[-1]}")
    assert content["leaves"]["sample"] == [None] * 31
    samples = browser.data(f"runs/0/samples?name={names[-1]}&places=0,1,500")
    assert set(samples) == {"0", "1"}
    changes = browser.data(f"runs/0/changes?a={names[0]}&b={names[1]}")
    assert (changes["a_step"], changes["b_step"]) == (3, 4)


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        ("runs/1/view", 404),
        ("runs/-1/view", 404),
        ("runs/0/secrets", 404),
        ("../etc/passwd", 404),
        ("runs/0/contents", 400),
        ("runs/0/contents?name=" + quote("../../../../etc"), 410),
        ("runs/0/contents?name=step-000000000001", 410),
        ("runs/0/samples?name=step-000000000005&places=a", 400),
        ("runs/0/view?first_event=x", 400),
    ],
)
def test_what_is_not_there_is_said(browser: Browser, rest: str, status: int) -> None:
    found = browser.data(rest)
    assert found[0] == status
    assert found[1]


def test_a_live_page_gets_only_what_is_new(tmp_path: Path) -> None:
    state = layered_state(1)
    train(tmp_path / "run", state, range(1, 4))
    with serve_page([tmp_path / "run"]) as server:
        browser = Browser(server.url)
        before = browser.data("runs/0/view")["view"]
        train(tmp_path / "run", state, range(4, 6))
        known = f"first_event={before['timeline']['events']}&origin={before['origin']}"
        after = browser.data(f"runs/0/view?{known}")["view"]
        assert after["first_event"] == before["timeline"]["events"] == 4
        assert after["timeline"]["saves"]["step"] == [4, 5]
        assert [item["kind"] for item in after["timeline"]["happenings"]] == ["opened", "restored"]
        # Of another log, or one that was shortened, everything is told again.
        for other in ("first_event=4&origin=1.5", "first_event=400"):
            assert browser.data(f"runs/0/view?{other}")["view"]["first_event"] == 0


def test_a_run_that_vanishes_keeps_its_history_and_the_others(run: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    train(gone, layered_state(1), range(1, 4))
    with serve_page([gone, run]) as server:
        browser = Browser(server.url)
        before = browser.data("runs/0/view")["view"]
        assert before["problems"] == []
        gone.rename(tmp_path / "elsewhere")
        after = browser.data("runs/0/view")["view"]
        assert "cannot be found any more" in after["problems"][0]
        assert after["timeline"]["saves"]["step"] == [1, 2, 3]
        assert after["checkpoints"] == []
        assert browser.get(browser.address.path)[0] == 200  # a reload shows it, too
        assert browser.data("runs/0/contents?name=step-000000000003")[0] == 410
        assert browser.data("runs/1/view")["view"]["problems"] == []
        (tmp_path / "elsewhere").rename(gone)
        assert browser.data("runs/0/view")["view"]["problems"] == []


def test_an_address_that_is_none_is_refused(browser: Browser) -> None:
    status, text, _ = browser.get("http://[bad")
    assert (status, "not an address" in text) == (400, True)


def test_a_defect_is_reported_instead_of_silence(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: RunReader, **asked: Any) -> Any:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(RunReader, "view", fail)
    assert browser.data("runs/0/view") == (
        500,
        "this is a defect of everystep: ZeroDivisionError: by nothing",
    )
    assert browser.get(browser.address.path)[0] == 500


def test_the_example_in_the_documentation_runs(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs" / "view.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(block.replace('"runs/lm"', repr(str(run))), {})
    assert (tmp_path / "lm.html").exists()


# --- the command


def test_the_command_writes_a_page(run: Path, tmp_path: Path) -> None:
    done = command("view", run, "--out", tmp_path / "page.html")
    assert done.code == 0
    assert "page.html" in done.out
    written = command("view", run, step_path(run, 5), "--out", tmp_path / "page.html", "--json").document
    assert written["nbytes"] == (tmp_path / "page.html").stat().st_size
    assert len(written["runs"]) == 2


def test_the_command_serves_until_it_is_interrupted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def look(server: PageServer) -> None:
        seen.append(Browser(server.url).get(urlsplit(server.url).path)[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "wait", look)
    done = command("view", run, "--json")
    assert (done.code, seen) == (130, [200])
    address = urlsplit(done.document["url"])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.hostname, address.port), timeout=5)
    assert command("view", run, "--serve").out.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--out", "page.txt"], "written as .html"), (["--out", "p.html", "--serve"], "choose one")],
)
def test_wrong_usage_is_said(run: Path, arguments: list[str], message: str) -> None:
    done = command("view", run, *arguments)
    assert done.code == 2
    assert message in " ".join(done.err.replace("│", " ").split())


def test_a_port_in_use_is_said(run: Path) -> None:
    with serve_page([run]) as server:
        done = command("view", run, "--port", str(server.port))
    assert (done.code, len(done.err.splitlines())) == (1, 1)
    assert "--port" in done.err


def test_a_port_that_is_not_allowed_is_said(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(server: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socketserver.TCPServer, "server_bind", refuse)
    done = command("view", run, "--port", "81")
    assert (done.code, done.err) == (
        1,
        "everystep: port 81 is not allowed to this user: choose another with --port, or 0 for any\n",
    )


def test_an_error_of_writing_names_the_page(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "missing" / "page.html"
    done = command("view", run, "--out", page)
    assert (done.code, done.err) == (1, f"everystep: {page}: No such file or directory\n")
    (tmp_path / "folder.html").mkdir()
    done = command("view", run, "--out", tmp_path / "folder.html")
    assert (done.code, done.err) == (1, f"everystep: {tmp_path / 'folder.html'}: Is a directory\n")
    assert os.listdir(tmp_path) == ["folder.html"]


def test_a_run_that_is_missing_is_one_line(tmp_path: Path) -> None:
    done = command("view", tmp_path / "missing", "--out", tmp_path / "page.html")
    assert (done.code, len(done.err.splitlines())) == (1, 1)
    assert command("view", tmp_path / "missing").code == 1

import functools
import hashlib
import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpfl.errors import BadInput
from dpfl.federation import files, load
from dpfl.federation.files import File, find

CONTENT = b"a small file\n"
SHA256 = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
MD5 = f"md5:{hashlib.md5(CONTENT).hexdigest()}"
WRONG = "sha256:" + "0" * 64


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty data directory and an empty cache, which may not exist yet."""
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    monkeypatch.setenv("DPFL_DATA", str(data))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(files, "TIMEOUT_SECONDS", 5.0)
    return data, cache / "dpfl"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Any]:
    """A web server on this machine that serves one file."""
    served = tmp_path / "served"
    served.mkdir()
    (served / "file.txt").write_bytes(CONTENT)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(served))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(timeout=5)


def put(directory: Any, path: Any = "set/file.txt", content: Any = CONTENT) -> Any:
    target = directory / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    return target


def everything_below(directory: Any) -> Any:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_data_directory_comes_before_the_cache(places: Any) -> None:
    data, cache = places
    stored, cached = put(data), put(cache)
    assert find("set", [File("set/file.txt", SHA256)]) == stored
    stored.unlink()
    assert find("set", [File("set/file.txt", SHA256)]) == cached


def test_a_better_alternative_in_the_cache_comes_before_a_lesser_one_in_the_data_directory(places: Any) -> None:
    data, cache = places
    put(data, "set/subset")
    full = put(cache, "set/full")
    assert find("set", [File("set/full", MD5), File("set/subset", SHA256)]) == full


def test_the_users_home_holds_the_cache_when_xdg_names_none(
    places: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    cached = put(tmp_path / ".cache" / "dpfl")
    assert find("set", [File("set/file.txt", SHA256)]) == cached


def test_a_file_with_another_checksum_is_named_with_both_sums(places: Any) -> None:
    data, _ = places
    stored = put(data)
    with pytest.raises(BadInput) as refusal:
        find("set", [File("set/file.txt", WRONG)])
    assert all(part in str(refusal.value) for part in (str(stored), WRONG, SHA256))


def test_download_lands_in_the_cache_and_is_found_there_next_time(places: Any, home: Any) -> None:
    _, cache = places
    path = find("set", [File("set/file.txt", SHA256, f"{home}/file.txt")])
    assert path == cache / "set" / "file.txt"
    assert path.read_bytes() == CONTENT
    assert everything_below(cache) == [path]
    assert find("set", [File("set/file.txt", SHA256, "http://127.0.0.1:1/gone")]) == path


def test_a_download_with_another_checksum_is_refused_and_not_kept(places: Any, home: Any) -> None:
    _, cache = places
    with pytest.raises(BadInput, match="was not kept") as refusal:
        find("set", [File("set/file.txt", WRONG, f"{home}/file.txt")])
    assert WRONG in str(refusal.value)
    assert SHA256 in str(refusal.value)
    assert everything_below(cache) == []


def test_a_page_that_is_not_there_is_reported_with_all_three_places(places: Any, home: Any) -> None:
    data, cache = places
    with pytest.raises(BadInput) as refusal:
        find("set", [File("set/file.txt", SHA256, f"{home}/other.txt")])
    said = str(refusal.value)
    assert f"not in DPFL_DATA ({data})" in said
    assert f"not in the cache ({cache})" in said
    assert f"{home}/other.txt failed (HTTP Error 404" in said
    assert everything_below(cache) == []


def test_a_dead_server_is_reported_and_nothing_is_left(places: Any) -> None:
    _, cache = places
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, but nobody listens
        with pytest.raises(BadInput, match=r"the download from http://127.0.0.1"):
            find("set", [File("set/file.txt", SHA256, f"http://127.0.0.1:{free.getsockname()[1]}/file.txt")])
    assert everything_below(cache) == []


def test_a_cache_that_cannot_be_written_is_a_failed_download(
    places: Any, home: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "occupied").write_text("a file where a directory should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "occupied"))
    with pytest.raises(BadInput, match=r"the download from .* failed"):
        find("set", [File("set/file.txt", SHA256, f"{home}/file.txt")])


def test_data_without_a_public_home_says_so(places: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPFL_DATA")
    with pytest.raises(BadInput) as refusal:
        load("femnist")
    said = str(refusal.value)
    assert "femnist/femnist_leaf_subset.npz" in said
    assert "DPFL_DATA is not set" in said
    assert "no public home serves it" in said
    assert "set DPFL_DATA to a directory that has it" in said


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_data_directory_that_is_none_is_refused_only_where_files_are_needed(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "nowhere"
    if kind == "file":
        bad.write_text("")
    monkeypatch.setenv("DPFL_DATA", str(bad))
    with pytest.raises(BadInput, match=r"DPFL_DATA must be a directory that can be read, was '.*nowhere'"):
        load("mnist")
    assert len(load("digits").pool) == 1438


def test_an_empty_variable_counts_as_unset(places: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFL_DATA", "")
    with pytest.raises(BadInput, match="DPFL_DATA is not set"):
        load("lending-club")


def test_every_checksum_is_a_whole_one() -> None:
    digits = {"sha256": 64, "md5": 32}
    for needs in files.FILES.values():
        for file in (file for alternatives in needs for file in alternatives):
            algorithm, _, value = file.checksum.partition(":")
            assert len(value) == digits[algorithm]

"""
The download, against a real server on this machine: what is saved is the text or nothing, every failed source
is named with its reason, and without any source there is still something to learn.
"""

import hashlib
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers import ROOT, call, checkpoint, environment, run, small_text, tiny

import data.download
import data.text
from data.download import download
from data.text import BY_HAND, MANUAL, find_text

TEXT = small_text(200_000, seed=7).encode()
HTML = b"<!DOCTYPE html><title>Please log in to this hotel's network</title>"


def send(handler, body, status=200, length=None, **headers):
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


class Server(ThreadingHTTPServer):
    """Answers are put into `answers` by the tests: path -> one function of the handler for each request."""

    daemon_threads = True

    def __init__(self):
        self.answers, self.asked, self.closing = {}, [], threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)

    def serve(self, path, *answers):
        self.answers[path] = list(answers)
        return f"http://127.0.0.1:{self.server_port}{path}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        answers = self.server.answers[self.path]
        try:
            (answers.pop(0) if len(answers) > 1 else answers[0])(self)
        except OSError:  # the other side left
            self.close_connection = True

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(data.download, "SIZE", len(TEXT))
    monkeypatch.setattr(data.download, "SHA256", hashlib.sha256(TEXT).hexdigest())
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def whole(server):
    return server.serve("/whole", lambda handler: send(handler, TEXT))


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def refused(target, *urls):
    """The message of a download that finds the text nowhere and leaves nothing behind."""
    with pytest.raises(ConnectionError) as failure:
        download(target, urls)
    assert files(target.parent) == []
    return str(failure.value)


def test_the_right_file_is_placed_whole_and_nothing_beside_it(tmp_path, whole, capsys):
    assert download(tmp_path / "input.txt", [whole]) == tmp_path / "input.txt"
    assert (tmp_path / "input.txt").read_bytes() == TEXT
    assert files(tmp_path) == ["input.txt"]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert whole in captured.err and "sha256 is right" in captured.err and "\r" not in captured.err


def test_a_404_is_asked_once_and_the_next_source_serves(tmp_path, server, whole):
    gone = server.serve("/gone", lambda handler: send(handler, HTML, 404))
    download(tmp_path / "input.txt", [gone, whole])
    assert (tmp_path / "input.txt").read_bytes() == TEXT
    assert server.asked == ["/gone", "/whole"]


def test_an_html_page_with_status_200_is_not_saved(tmp_path, server, whole):
    page = server.serve("/page", lambda handler: send(handler, HTML, **{"Content-Type": "text/html"}))
    message = refused(tmp_path / "input.txt", page)
    assert f"{page}: not the text: {len(HTML)} bytes where {len(TEXT):,} were expected" in message
    download(tmp_path / "input.txt", [page, whole])
    assert (tmp_path / "input.txt").read_bytes() == TEXT


def test_a_body_cut_halfway_is_tried_again_and_not_saved(tmp_path, server, whole):
    cut = server.serve("/cut", lambda handler: send(handler, TEXT[:100_000], length=len(TEXT)))
    message = refused(tmp_path / "input.txt", cut)
    assert cut in message and "100000" in message.replace(",", "")
    assert server.asked == ["/cut"] * data.download.TRIES
    download(tmp_path / "input.txt", [cut, whole])
    assert (tmp_path / "input.txt").read_bytes() == TEXT


def test_a_body_cut_once_comes_whole_at_the_second_try(tmp_path, server):
    url = server.serve(
        "/cut-once",
        lambda handler: send(handler, TEXT[:1000], length=len(TEXT)),
        lambda handler: send(handler, TEXT),
    )
    download(tmp_path / "input.txt", [url])
    assert (tmp_path / "input.txt").read_bytes() == TEXT and server.asked == ["/cut-once"] * 2


def test_a_body_that_never_comes_times_out_and_the_next_source_serves(tmp_path, server, whole, monkeypatch):
    monkeypatch.setattr(data.download, "TIMEOUT", (1, 0.2))

    def hang(handler):
        send(handler, TEXT[:10], length=len(TEXT))
        server.closing.wait(5)

    hanging = server.serve("/hanging", hang)
    begin = time.monotonic()
    assert "timed out" in refused(tmp_path / "input.txt", hanging)
    download(tmp_path / "input.txt", [hanging, whole])
    assert time.monotonic() - begin < 4
    assert (tmp_path / "input.txt").read_bytes() == TEXT


def test_an_answer_that_never_begins_times_out(tmp_path, server, monkeypatch):
    monkeypatch.setattr(data.download, "TIMEOUT", (1, 0.2))
    silent = server.serve("/silent", lambda handler: server.closing.wait(5))
    begin = time.monotonic()
    assert "timed out" in refused(tmp_path / "input.txt", silent)
    assert time.monotonic() - begin < 3


@pytest.mark.parametrize("chunked", [False, True])
def test_a_trickle_ends_at_the_deadline(tmp_path, server, monkeypatch, chunked):
    monkeypatch.setattr(data.download, "DEADLINE", 0.4)

    def trickle(handler):
        handler.protocol_version = "HTTP/1.1"
        handler.send_response(200)
        name, value = ("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(len(TEXT)))
        handler.send_header(name, value)
        handler.end_headers()
        for i in range(100):  # five seconds, never one of silence
            handler.wfile.write(b"1\r\n%c\r\n" % TEXT[i] if chunked else TEXT[i : i + 1])
            handler.wfile.flush()
            if server.closing.wait(0.05):
                break
        handler.close_connection = True

    url = server.serve("/trickle", trickle)
    begin = time.monotonic()
    message = refused(tmp_path / "input.txt", url)
    assert time.monotonic() - begin < 2
    assert f"{url}: too slow" in message and server.asked == ["/trickle"]


def test_a_redirect_is_followed(tmp_path, server, whole):
    old = server.serve("/old", lambda handler: send(handler, b"", 302, Location="/whole"))
    download(tmp_path / "input.txt", [old])
    assert (tmp_path / "input.txt").read_bytes() == TEXT and server.asked == ["/old", "/whole"]


def test_a_redirect_in_a_circle_ends(tmp_path, server):
    circle = server.serve("/circle", lambda handler: send(handler, b"", 302, Location="/circle"))
    assert circle in refused(tmp_path / "input.txt", circle)


def test_another_text_of_the_right_length_is_not_saved(tmp_path, server):
    other = server.serve("/other", lambda handler: send(handler, TEXT[:-1] + b"!"))
    message = refused(tmp_path / "input.txt", other)
    assert f"{other}: not the text: as long, but with another sha256" in message
    assert server.asked == ["/other"]


def test_a_text_that_is_too_long_is_not_read_to_its_end(tmp_path, server):
    sent = []

    def endless(handler):
        send(handler, b"", length=10**9)
        for _ in range(1000):
            handler.wfile.write(TEXT)
            sent.append(len(TEXT))

    url = server.serve("/endless", endless)
    assert "more than its 200,000 bytes" in refused(tmp_path / "input.txt", url)
    assert sum(sent) < 10**8


def test_a_server_error_is_tried_again_and_then_works(tmp_path, server):
    url = server.serve(
        "/busy", lambda handler: send(handler, b"busy", 500), lambda handler: send(handler, TEXT)
    )
    download(tmp_path / "input.txt", [url])
    assert (tmp_path / "input.txt").read_bytes() == TEXT and server.asked == ["/busy", "/busy"]


def test_the_tries_of_one_source_are_bounded(tmp_path, server):
    url = server.serve("/down", lambda handler: send(handler, b"busy", 503))
    assert "503" in refused(tmp_path / "input.txt", url)
    assert server.asked == ["/down"] * data.download.TRIES


def test_when_all_fail_each_source_is_listed_with_its_reason(tmp_path, server):
    gone = server.serve("/gone", lambda handler: send(handler, HTML, 404))
    page = server.serve("/page", lambda handler: send(handler, HTML))
    closed = "http://127.0.0.1:9/closed"
    silent = server.serve("/hangs-up", lambda handler: handler.connection.close())
    lines = refused(
        tmp_path / "input.txt", gone, page, closed, silent, "http://nowhere.invalid/x"
    ).splitlines()
    for url, reason in [
        (gone, "404"),
        (page, "not the text"),
        (closed, "refused"),
        (silent, "losed"),
        ("http://nowhere.invalid/x", "resolve"),
    ]:
        assert any(url in line and reason in line for line in lines), (url, lines)


def test_what_stands_at_the_target_survives_a_failure(tmp_path, server):
    (tmp_path / "input.txt").write_text("my own text", encoding="utf-8")
    page = server.serve("/page", lambda handler: send(handler, HTML))
    with pytest.raises(ConnectionError):
        download(tmp_path / "input.txt", [page])
    assert (tmp_path / "input.txt").read_text(encoding="utf-8") == "my own text"
    assert files(tmp_path) == ["input.txt"]


def test_the_proxy_of_the_environment_is_used(tmp_path, server, monkeypatch):
    server.serve("http://shakespeare.invalid/input.txt", lambda handler: send(handler, TEXT))
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
    download(tmp_path / "input.txt", ["http://shakespeare.invalid/input.txt"])
    assert (tmp_path / "input.txt").read_bytes() == TEXT


def test_every_source_is_fetched_over_tls():
    assert len(data.download.SOURCES) >= 2
    assert all(url.startswith("https://") for url in data.download.SOURCES)


def test_a_full_disk_leaves_nothing_behind(tmp_path, whole, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(data.download.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        download(tmp_path / "input.txt", [whole])
    assert files(tmp_path) == []


def test_two_downloads_at_once_leave_one_whole_file(tmp_path, server):
    both = threading.Barrier(2)

    def slowly(handler):
        both.wait(20)  # both have begun before either gets a byte
        send(handler, TEXT)

    url = server.serve("/slowly", slowly)
    code = (
        f"import data.download as d; d.SIZE = {len(TEXT)}; d.SHA256 = {data.download.SHA256!r}; "
        f"d.download({str(tmp_path / 'input.txt')!r}, [{url!r}])"
    )
    both_of_them = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
            env=environment(tmp_path, plot=True),
        )
        for _ in range(2)
    ]
    assert [process.wait(30) for process in both_of_them] == [0, 0]
    assert (tmp_path / "input.txt").read_bytes() == TEXT and files(tmp_path) == ["input.txt"]


# ---- the script, and the text that is always there


@pytest.fixture
def project(tmp_path):
    """A copy of the project without input.txt, on a machine where every connection is refused."""
    root = tmp_path / "project"
    shutil.copytree(ROOT / "data", root / "data", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "gpt.py", root)
    return root


OFFLINE = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", "NO_PROXY": None}


def script(root, tmp_path):
    return subprocess.run(
        [sys.executable, "data/download.py"],
        cwd=root,
        capture_output=True,
        text=True,
        env=environment(tmp_path, **OFFLINE),
        timeout=30,
    )


def test_the_script_leaves_another_text_alone_and_says_so(project, tmp_path):
    (project / "input.txt").write_text("my own text", encoding="utf-8")
    done = script(project, tmp_path)
    assert done.returncode == 1
    assert "holds another text and stays as it is" in done.stderr and "Traceback" not in done.stderr
    assert (project / "input.txt").read_text(encoding="utf-8") == "my own text"


def test_the_script_without_a_network_says_what_to_do_by_hand(project, tmp_path):
    done = script(project, tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    for url in data.download.SOURCES:
        assert f"  {url}: " in done.stderr
    by_hand = f"By hand: save {data.download.SOURCES[0]} from a browser as {project / 'input.txt'}"
    assert by_hand in done.stderr
    assert not (project / "input.txt").exists() and not list(project.glob(".*part"))


def test_the_script_knows_shakespeare_when_it_is_there(tmp_path, monkeypatch, capsys):
    (tmp_path / "input.txt").write_bytes(TEXT)
    monkeypatch.setattr(data.download, "INPUT", tmp_path / "input.txt")
    monkeypatch.setattr(data.download, "SHA256", hashlib.sha256(TEXT).hexdigest())
    assert not data.download.main()
    assert "is Tiny Shakespeare already" in capsys.readouterr().out


def test_without_a_source_the_text_is_pythons_manual_and_that_is_said(tmp_path, server, monkeypatch, capsys):
    gone = server.serve("/gone", lambda handler: send(handler, HTML, 404))
    monkeypatch.setattr(data.text, "INPUT", tmp_path / "input.txt")
    monkeypatch.setattr(data.text, "download", lambda: download(tmp_path / "input.txt", [gone]))
    name, pieces = find_text()
    err = capsys.readouterr().err
    assert name == MANUAL and len("".join(pieces)) > 300_000 and "lambda" in "".join(pieces)
    assert f"{gone}: 404" in err and BY_HAND in err and "not Shakespeare" in err


def test_training_on_the_fallback_says_so_before_the_first_step_and_after_the_sample(project, tmp_path):
    flags = tiny(tmp_path, "--max_iters", "2", "--data", "")
    done = run(tmp_path, *flags, root=project, env=OFFLINE, stderr=subprocess.STDOUT)
    assert done.code == 0, done.out
    before, after = done.out.split("step 0:")
    assert f"notice: so the text is {MANUAL}, not Shakespeare." in before
    assert f"text:   {MANUAL}, " in before
    sampled = after.split("that model writes:")[1]
    assert f"notice: it learned {MANUAL}, not Shakespeare." in sampled and "from a browser" in sampled
    assert checkpoint(tmp_path / "out/last.pt")["text"] == MANUAL
    assert checkpoint(tmp_path / "out/best.pt")["text"] == MANUAL
    assert not (project / "input.txt").exists()


def test_a_run_on_the_fallback_goes_on_with_the_fallback_even_when_shakespeare_has_come(
    tmp_path, server, monkeypatch
):
    gone = server.serve("/gone", lambda handler: send(handler, HTML, 404))
    monkeypatch.setattr(data.text, "INPUT", tmp_path / "input.txt")
    monkeypatch.setattr(data.text, "download", lambda: download(tmp_path / "input.txt", [gone]))
    flags = tiny(tmp_path, "--max_iters", "2", "--data", "")
    assert call(*flags).code == 0
    (tmp_path / "input.txt").write_bytes(TEXT)
    on = call(*flags, "--resume", "--max_iters", "4")
    assert on.code == 0, on.err
    assert f"text:   {MANUAL}, " in on.out and checkpoint(tmp_path / "out/last.pt")["step"] == 4

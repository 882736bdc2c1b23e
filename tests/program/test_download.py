"""
The download, against a real server on this machine: what is saved is the text or nothing, every source that
failed is listed with its reason, and without any source there is still something to learn.
"""
import hashlib
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers import ROOT, checkpoint, ended, good, run, small_text, start, tiny

import bigram
import data.download
import data.text
from data.text import BY_HAND, MANUAL, find_text

TEXT = small_text(200_000, seed=7).encode()
PAGE = b"<!DOCTYPE html><title>Please log in to this hotel's network</title>"
FEW = "--max_iters 2 --eval_iters 1 --max_new_tokens 5 --device cpu".split()
OFFLINE = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", "NO_PROXY": None}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        try:
            ANSWERS[self.path.removeprefix("http://shakespeare.invalid")](self)
        except OSError:  # the other side left
            self.close_connection = True

    def answer(self, body, status=200, length=None, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": length or len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def hang(self):
        self.server.closing.wait(5)

    def endless(self):
        self.answer(b"", length=10**9)
        for _ in range(300):
            self.wfile.write(TEXT)
        self.server.asked.append("60 MB were read")

    def together(self):
        self.server.both.wait(30)  # both have begun before either gets a byte
        self.answer(TEXT)

    def log_message(self, *args):
        pass


FAILURES = [  # what a source answers, and what is said of it
    ("/gone",    lambda handler: handler.answer(PAGE, 404), "404"),
    ("/page",    lambda handler: handler.answer(PAGE), f"not the text: {len(PAGE)} bytes where 200,000 we"),
    ("/cut",     lambda handler: handler.answer(TEXT[:100_000], length=len(TEXT)), "100,?000"),
    ("/other",   lambda handler: handler.answer(TEXT[:-1] + b"!"), "the right length, but another sha256"),
    ("/circle",  lambda handler: handler.answer(b"", 302, Location="/circle"), "redirects"),
    ("/closes",  lambda handler: handler.connection.close(), "[Cc]losed|aborted|reset"),
    ("/silent",  Handler.hang, "timed out"),
    ("/hangs",   lambda handler: (handler.answer(TEXT[:10], length=len(TEXT)), handler.hang()), "timed out"),
    ("/endless", Handler.endless, "not the text: more than its 200,000 bytes"),
    ("http://127.0.0.1:9/closed", None, "refused"),
    ("http://nowhere.invalid/x", None, "resolve"),
]
ANSWERS = {
    "/right":    lambda handler: handler.answer(TEXT),
    "/moved":    lambda handler: handler.answer(b"", 302, Location="/right"),
    "/together": Handler.together,
    **{source: answer for source, answer, _ in FAILURES},
}


@pytest.fixture
def server(tmp_path, monkeypatch):
    """ a server whose TEXT is the right one; server.name(...) makes its paths, or others, the sources """
    for name in "http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY".split():
        monkeypatch.delenv(name, raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.address = True, f"http://127.0.0.1:{server.server_port}"
    server.asked, server.closing, server.both = [], threading.Event(), threading.Barrier(2)

    def name(*urls):
        urls = [server.address + url if url.startswith("/") else url for url in urls]
        monkeypatch.setattr(data.download, "SOURCES", urls)
        return urls

    server.name = name
    monkeypatch.setattr(data.download, "SIZE", len(TEXT))
    monkeypatch.setattr(data.download, "SHA256", hashlib.sha256(TEXT).hexdigest())
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def target(tmp_path, monkeypatch):
    """ where the text is to be, in a folder that is empty """
    (tmp_path / "project").mkdir()
    for module in (data.download, data.text):
        monkeypatch.setattr(module, "INPUT", tmp_path / "project/input.txt")
    return tmp_path / "project/input.txt"


def files(target):
    return [path.name for path in target.parent.iterdir()]


@pytest.mark.parametrize("source, answer, reason", FAILURES)
def test_what_is_not_the_text_is_never_saved_and_the_next_source_serves(
        server, target, monkeypatch, source, answer, reason):
    monkeypatch.setattr(data.download, "TIMEOUT", (5, 0.2))
    [url] = server.name(source)
    with pytest.raises(ConnectionError, match=rf"could not be fetched:\n  {url}: .*({reason})[^\n]*$"):
        data.download.download()
    assert files(target) == [] and "60 MB were read" not in server.asked
    server.name(source, "/right")
    name, text = find_text()
    assert (name, text.encode(), target.read_bytes()) == ("input.txt", TEXT, TEXT)


def test_the_text_is_placed_once_with_nothing_beside_it_or_on_standard_output(server, target, capsys):
    [url] = server.name("/moved")
    assert find_text() == find_text() == ("input.txt", TEXT.decode())  # a redirection is followed
    assert server.asked == ["/moved", "/right"]
    assert target.read_bytes() == TEXT and files(target) == ["input.txt"]
    assert capsys.readouterr() == ("", f"downloading {url}\n")


@pytest.mark.parametrize("code", ["raise RuntimeError('no ssl')", "import a_missing_module", "x = = 1"])
def test_a_missing_or_broken_requests_is_a_source_that_failed(server, target, tmp_path, monkeypatch, code):
    (tmp_path / "requests.py").write_text(code)
    monkeypatch.delitem(sys.modules, "requests", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    [url] = server.name("/right")
    with pytest.raises(ConnectionError, match=f"{url}: .*(no ssl|a_missing_module|invalid syntax)"):
        data.download.download()
    assert find_text()[0] == MANUAL


def test_sources_are_reached_over_tls_and_through_the_proxy_of_the_environment(server, monkeypatch):
    assert len(data.download.SOURCES) >= 2
    assert all(url.startswith("https://") for url in data.download.SOURCES)
    server.name("http://shakespeare.invalid/right")
    monkeypatch.setenv("http_proxy", server.address)
    assert data.download.download() == TEXT


def test_a_disk_that_is_full_halfway_leaves_nothing_behind_and_what_was_there_as_it_was(target, monkeypatch):
    def half(path, content):
        path.write_text("half of it")
        raise OSError(28, "No space left on device")

    for earlier in ([], ["input.txt"]):
        with monkeypatch.context() as full, pytest.raises(OSError, match="No space left"):
            full.setattr(type(target), "write_bytes", half)
            data.download.place(TEXT, target)
        assert files(target) == earlier and (not earlier or target.read_text() == "my own text")
        target.write_text("my own text")


def test_where_the_folder_cannot_be_written_the_text_is_used_from_memory(server, target, capsys):
    target.parent.rmdir()
    server.name("/right")
    assert find_text() == ("input.txt", TEXT.decode())
    assert f"notice: cannot write {target}, so the text stays in memory" in capsys.readouterr().err


def test_two_downloads_at_once_leave_one_complete_file(server, target):
    code = ("import sys; import data.download as d; d.INPUT, d.SIZE, d.SHA256, d.SOURCES = "
            f"type(d.INPUT)({str(target)!r}), 200_000, {data.download.SHA256!r}, {server.name('/together')}\n"
            "sys.exit(d.main())")
    for process in [start(command=("-c", code)) for _ in range(2)]:
        done = ended(process)
        assert done.code == 0 and "its sha256 is right" in done.out, done.err
    assert target.read_bytes() == TEXT and files(target) == ["input.txt"]


def test_the_script_leaves_another_text_alone_knows_the_right_one_and_ends_at_ctrl_c(
        server, target, monkeypatch, capsys):
    def interrupted(url):
        raise KeyboardInterrupt

    target.write_text("my own text")
    assert "is another text and is left as it is; move it away" in data.download.main()
    assert target.read_text() == "my own text"
    target.write_bytes(TEXT)
    assert data.download.main() is None and "is Tiny Shakespeare already" in capsys.readouterr().out
    target.unlink()
    monkeypatch.setattr(data.download, "fetch", interrupted)
    assert data.download.main() == 130 and files(target) == server.asked == []


def test_without_a_source_the_remedy_is_said(server, target, capsys):
    urls = server.name("/gone", "/cut")
    answer = data.download.main()
    assert [line.split(": ")[0] for line in answer.splitlines()[1:3]] == [f"  {url}" for url in urls]
    assert answer.endswith(f"\nBy hand: save {urls[0]} from a browser as {target}.")
    assert files(target) == [] and capsys.readouterr().out == ""


def test_bigram_learns_pythons_manual_where_no_text_can_be_had(server, target):
    [url] = server.name("/gone")
    done = good(*FEW, main=bigram.main)
    before, after = done.err.split(BY_HAND, 1)
    assert f"{url}: " in before and f"notice: so the text is {MANUAL}, not Shakespeare" in before
    assert f"{MANUAL} on cpu" in done.out
    assert after == f"\nnotice: the model learned {MANUAL}, not Shakespeare. {BY_HAND}\n"


@pytest.mark.slow
def test_without_a_network_both_scripts_learn_pythons_manual_and_leave_no_text_behind(tmp_path):
    project = tmp_path / "copy"
    shutil.copytree(ROOT / "data", project / "data", ignore=shutil.ignore_patterns("__pycache__"))
    for script in ("bigram.py", "gpt.py"):
        shutil.copy(ROOT / script, project)
    done = run(command=["data/download.py"], root=project, env=OFFLINE)
    assert done.code == 1 and done.out == "" and "Traceback" not in done.err
    lines = [line.split(": ")[0] for line in done.err.splitlines() if line.startswith("  ")]
    assert lines == [f"  {url}" for url in data.download.SOURCES]
    assert f"By hand: save {data.download.SOURCES[0]} from a browser as {project / 'input.txt'}" in done.err
    flags = tiny(tmp_path, "--max_iters", 2, "--data", "")
    done = run(*flags, root=project, env=OFFLINE, stderr=subprocess.STDOUT)
    assert done.code == 0, done.out
    before, after = done.out.split("step 0:")
    assert all(f"  {url}: " in before for url in data.download.SOURCES) and f"text:   {MANUAL}, " in before
    assert f"notice: so the text is {MANUAL}, not Shakespeare. By hand: save " in before
    assert f"notice: the model learned {MANUAL}, not Shakespeare." in after.split("the best model writes:")[1]
    texts = [checkpoint(tmp_path / f"out/{name}.pt")["text"]["name"] for name in ("best", "last")]
    assert texts == [MANUAL, MANUAL]
    done = run(*FEW, command=["bigram.py"], root=project, env=OFFLINE)
    assert f"{MANUAL} on cpu" in done.out and f"the model learned {MANUAL}, not Shakespeare" in done.err
    assert not list(project.glob("*input.txt*"))


def test_a_run_on_the_manual_continues_on_it_even_when_shakespeare_has_come(server, target, tmp_path, capsys):
    server.name("/gone")
    name, text = find_text()
    assert name == MANUAL and len(text) > 300_000 and "lambda" in text and BY_HAND in capsys.readouterr().err
    flags = tiny(tmp_path, "--max_iters", 2, "--data", "")
    done = good(*flags)
    assert f"notice: the model learned {MANUAL}, not Shakespeare. {BY_HAND}" in done.err
    target.write_bytes(TEXT)
    assert f"text:   {MANUAL}, " in good(*flags, "--resume", "--max_iters", 4).out
    last = checkpoint(tmp_path / "out/last.pt")
    assert (last["step"], last["text"]["name"]) == (4, MANUAL)

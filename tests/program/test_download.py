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

import data.download
import data.text
from data.text import BY_HAND, MANUAL, find_text

TEXT = small_text(200_000, seed=7).encode()
PAGE = b"<!DOCTYPE html><title>Please log in to this hotel's network</title>"
OFFLINE = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", "NO_PROXY": None}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        try:
            self.server.answers[self.path](self)
        except OSError:  # the other side left
            self.close_connection = True

    def answer(self, body, status=200, length=None, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": length or len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    """ a server of TEXT at /right, which is the text that a download looks for; more answers can be added """
    for name in "http_proxy https_proxy all_proxy".split():
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(data.download, "SIZE", len(TEXT))
    monkeypatch.setattr(data.download, "SHA256", hashlib.sha256(TEXT).hexdigest())
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.asked, server.answers, server.closing = [], dict(ANSWERS), threading.Event()
    server.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def target(tmp_path, monkeypatch):
    """ where the text is to be, in a folder that is empty """
    (tmp_path / "project").mkdir()
    monkeypatch.setattr(data.download, "INPUT", tmp_path / "project/input.txt")
    monkeypatch.setattr(data.text, "INPUT", tmp_path / "project/input.txt")
    return tmp_path / "project/input.txt"


@pytest.fixture
def sources(server, monkeypatch):
    """ names the sources of the download: paths of the server, or addresses """
    def name(*urls):
        urls = [server.address + url if url.startswith("/") else url for url in urls]
        monkeypatch.setattr(data.download, "SOURCES", urls)
        return urls
    return name


def files(target):
    return [path.name for path in target.parent.iterdir()]


def silent(handler):
    handler.server.closing.wait(5)


def hanging(handler):
    handler.answer(TEXT[:10], length=len(TEXT))
    handler.server.closing.wait(5)


def endless(handler):
    handler.answer(b"", length=10**9)
    for _ in range(300):
        handler.wfile.write(TEXT)
    handler.server.asked.append("60 MB were read")


ANSWERS = {
    "/right":   lambda handler: handler.answer(TEXT),
    "/gone":    lambda handler: handler.answer(PAGE, 404),
    "/down":    lambda handler: handler.answer(b"busy", 503),
    "/page":    lambda handler: handler.answer(PAGE, **{"Content-Type": "text/html"}),
    "/cut":     lambda handler: handler.answer(TEXT[:100_000], length=len(TEXT)),
    "/other":   lambda handler: handler.answer(TEXT[:-1] + b"!"),
    "/circle":  lambda handler: handler.answer(b"", 302, Location="/circle"),
    "/moved":   lambda handler: handler.answer(b"", 302, Location="/right"),
    "/closes":  lambda handler: handler.connection.close(),
    "/silent":  silent,
    "/hanging": hanging,
    "/endless": endless,
}
FAILURES = [  # what a source does, and what is said of it
    ("/gone", "404"),
    ("/down", "503"),
    ("/page", f"not the text: {len(PAGE)} bytes where 200,000 were expected"),
    ("/cut", "100,?000"),
    ("/other", "not the text: the right length, but another sha256"),
    ("/circle", "redirects"),
    ("/closes", "[Cc]losed|aborted|reset"),
    ("/silent", "timed out"),
    ("/hanging", "timed out"),
    ("/endless", "not the text: more than its 200,000 bytes"),
    ("http://127.0.0.1:9/closed", "refused"),
    ("http://nowhere.invalid/x", "resolve"),
]


@pytest.mark.parametrize("source, reason", FAILURES)
def test_what_is_not_the_text_is_never_saved_and_the_next_source_serves(
        server, sources, target, monkeypatch, source, reason):
    monkeypatch.setattr(data.download, "TIMEOUT", (5, 0.5))
    [url] = sources(source)
    with pytest.raises(ConnectionError, match=rf"could not be fetched:\n  {url}: .*({reason})[^\n]*$"):
        data.download.download()
    assert files(target) == [] and "60 MB were read" not in server.asked
    sources(source, "/right")
    name, text = find_text()
    assert (name, text.encode(), target.read_bytes()) == ("input.txt", TEXT, TEXT)


def test_the_right_text_is_placed_and_nothing_beside_it_and_standard_output_is_left_alone(
        server, sources, target, capsys):
    [url] = sources("/moved")
    assert find_text() == ("input.txt", TEXT.decode())  # a redirection is followed
    assert server.asked == ["/moved", "/right"]
    assert target.read_bytes() == TEXT and files(target) == ["input.txt"]
    assert capsys.readouterr() == ("", f"downloading {url}\n")
    assert find_text() == ("input.txt", TEXT.decode()) and len(server.asked) == 2  # only once


def test_when_all_fail_each_source_is_listed_in_its_order(sources, target):
    urls = sources(*(source for source, _ in FAILURES[:5]))
    with pytest.raises(ConnectionError) as failure:
        data.download.download()
    lines = str(failure.value).splitlines()
    assert [line.split(": ")[0] for line in lines[1:]] == [f"  {url}" for url in urls]


@pytest.mark.parametrize("code", ["raise RuntimeError('no ssl')", "import a_missing_module", "x = = 1"])
def test_a_missing_or_broken_requests_is_a_source_that_failed(sources, target, tmp_path, monkeypatch, code):
    (tmp_path / "requests.py").write_text(code)
    monkeypatch.delitem(sys.modules, "requests", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    [url] = sources("/right")
    with pytest.raises(ConnectionError, match=f"{url}: .*(no ssl|a_missing_module|invalid syntax)"):
        data.download.download()
    assert find_text()[0] == MANUAL


def test_the_proxy_of_the_environment_is_used(server, sources, monkeypatch):
    sources("http://shakespeare.invalid/input.txt")
    server.answers["http://shakespeare.invalid/input.txt"] = server.answers["/right"]
    monkeypatch.setenv("http_proxy", server.address)
    assert data.download.download() == TEXT


def test_every_source_is_fetched_over_tls():
    assert len(data.download.SOURCES) >= 2
    assert all(url.startswith("https://") for url in data.download.SOURCES)


# ---- where it is saved


def test_a_disk_that_is_full_halfway_leaves_nothing_behind_and_what_was_there_as_it_was(target, monkeypatch):
    def half(path, content):
        path.write_text("half of it")
        raise OSError(28, "No space left on device")

    for earlier in ([], ["input.txt"]):
        with monkeypatch.context() as full, pytest.raises(OSError, match="No space left"):
            full.setattr(type(target), "write_bytes", half)
            data.download.place(TEXT, target)
        assert files(target) == earlier and (not earlier or target.read_bytes() == b"my own text")
        target.write_bytes(b"my own text")


def test_where_the_folder_cannot_be_written_the_text_is_used_from_memory(sources, target, capsys):
    target.parent.rmdir()
    sources("/right")
    assert find_text() == ("input.txt", TEXT.decode())
    assert f"notice: cannot write {target}, so the text stays in memory" in capsys.readouterr().err


def test_two_downloads_at_once_leave_one_complete_file(server, sources, target):
    both = threading.Barrier(2)

    def slowly(handler):
        both.wait(30)  # both have begun before either gets a byte
        handler.answer(TEXT)

    server.answers["/slowly"] = slowly
    code = (f"import sys; import data.download as d; d.INPUT = type(d.INPUT)({str(target)!r}); "
            f"d.SIZE = {len(TEXT)}; d.SHA256 = {data.download.SHA256!r}; d.SOURCES = {sources('/slowly')}; sys.exit(d.main())")
    for process in [start(command=("-c", code)) for _ in range(2)]:
        done = ended(process)
        assert done.code == 0 and "its sha256 is right" in done.out, done.err
    assert target.read_bytes() == TEXT and files(target) == ["input.txt"]


# ---- the script, and the text that is always there


@pytest.fixture
def project(tmp_path):
    """ a copy of the project without input.txt, for a machine where every connection is refused """
    shutil.copytree(ROOT / "data", tmp_path / "copy/data", ignore=shutil.ignore_patterns("__pycache__"))
    for script in ("bigram.py", "gpt.py"):
        shutil.copy(ROOT / script, tmp_path / "copy")
    return tmp_path / "copy"


def test_the_script_without_a_network_says_what_to_do_by_hand(project):
    done = run(command=["data/download.py"], root=project, env=OFFLINE)
    assert done.code == 1 and done.out == "" and "Traceback" not in done.err
    assert all(f"  {url}: " in done.err for url in data.download.SOURCES)
    assert f"By hand: save {data.download.SOURCES[0]} from a browser as {project / 'input.txt'}" in done.err
    assert not (project / "input.txt").exists() and not list(project.glob(".*part"))


def test_the_script_leaves_another_text_alone_and_knows_the_right_one(server, sources, target, capsys):
    target.write_text("my own text")
    assert "is another text and is left as it is; move it away" in data.download.main()
    assert target.read_text() == "my own text"
    target.write_bytes(TEXT)
    assert data.download.main() is None and "is Tiny Shakespeare already" in capsys.readouterr().out
    assert server.asked == []


def test_ctrl_c_ends_the_script_without_a_traceback(target, monkeypatch):
    def interrupted(url):
        raise KeyboardInterrupt

    monkeypatch.setattr(data.download, "fetch", interrupted)
    assert data.download.main() == 130 and files(target) == []


def test_without_a_source_the_text_is_pythons_manual_and_a_run_says_so_before_and_after(project, tmp_path):
    flags = tiny(tmp_path, "--max_iters", 2, "--data", "")
    done = run(*flags, root=project, env=OFFLINE, stderr=subprocess.STDOUT)
    assert done.code == 0, done.out
    before, after = done.out.split("step 0:")
    assert all(f"  {url}: " in before for url in data.download.SOURCES)
    assert f"notice: so the text is {MANUAL}, not Shakespeare. By hand: save " in before
    assert f"text:   {MANUAL}, " in before
    assert f"notice: it learned {MANUAL}, not Shakespeare." in after.split("the best model writes:")[1]
    assert [checkpoint(tmp_path / f"out/{name}.pt")["text"] for name in ("best", "last")] == [MANUAL] * 2
    assert not (project / "input.txt").exists()
    few = "--max_iters 2 --eval_iters 1 --max_new_tokens 5 --device cpu".split()
    done = run(*few, command=["bigram.py"], root=project, env=OFFLINE)
    assert f"{MANUAL} on cpu" in done.out and f"it learned {MANUAL}, not Shakespeare" in done.err


def test_a_run_on_the_manual_continues_on_the_manual_even_when_shakespeare_has_come(
        sources, target, tmp_path, capsys):
    sources("/gone")
    name, text = find_text()
    assert name == MANUAL and len(text) > 300_000 and "lambda" in text
    assert BY_HAND in capsys.readouterr().err
    flags = tiny(tmp_path, "--max_iters", 2, "--data", "")
    good(*flags)
    target.write_bytes(TEXT)
    assert f"text:   {MANUAL}, " in good(*flags, "--resume", "--max_iters", 4).out
    assert checkpoint(tmp_path / "out/last.pt")["step"] == 4

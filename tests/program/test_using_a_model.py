"""
Using a model that is there already: what it writes and when that ends, how well it predicts a text, and what
all this looks like on any screen, for as long as somebody reads.
"""
import math
import os
import re
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from helpers import ASCII, call, checkpoint, ended, good, losses, on_a_terminal, refusal, run, small_text
from helpers import start, steps, tiny, write_small_text

import bigram
import gpt
from data.screen import listed, without_controls
from data.text import typed_text

CHARS = set(small_text())
ODD = "\x07\x0e\x1b[31m\x7f\x9b é\t你好，\u3000\\nabla -=+*123!\n"  # among them what garbles a terminal
needs_terminals = pytest.mark.skipif(os.name == "nt", reason="terminals as on Unix")


@pytest.fixture(scope="module")
def out(trained):
    return trained / "out"


@pytest.fixture(scope="module")
def chinese(tmp_path_factory):
    """ the folder of a model that knows no newline, and characters that many a console lacks """
    folder = tmp_path_factory.mktemp("chinese")
    (folder / "text.txt").write_text("你好世界，。🙂\t" * 100, encoding="utf-8")
    good(*tiny(folder, data=folder / "text.txt"))
    return folder / "out"


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """ the folder of a model that knows the characters of ODD """
    folder = tmp_path_factory.mktemp("odd")
    (folder / "text.txt").write_text(ODD * 60, encoding="utf-8")
    good(*tiny(folder, "--max_iters", 1, data=folder / "text.txt"))
    return folder / "out"


def write(out, *flags, **more):
    """ what --sample writes: 60 characters, unless the flags say otherwise """
    return good("--sample", "--out", out, "--device", "cpu", "--max_new_tokens", 60, *flags, **more).out


@pytest.mark.parametrize("flags", ["--sample", "--prompt the", "--attention the", "--score text.txt"])
def test_without_a_checkpoint_the_file_is_named_and_how_to_make_one(tmp_path, flags):
    sentence = refusal(*flags.split(), "--out", tmp_path)
    assert sentence.startswith(f"there is no {tmp_path / 'best.pt'}; train first (python gpt.py)")


def test_where_only_last_pt_is_it_writes_and_that_is_said(own):
    (own / "out/best.pt").unlink()
    done = good("--sample", "--out", own / "out", "--max_new_tokens", 5)
    notice, seed = done.err.splitlines()
    assert notice == f"there is no {own / 'out/best.pt'}, so this is the model of {own / 'out/last.pt'}"
    assert seed.startswith(f"{own / 'out/last.pt'}, --sample_seed ") and len(done.out) == 7


def test_characters_that_the_model_never_saw_are_named_wherever_they_come_from(out, tmp_path):
    (tmp_path / "a").write_text("Qät", encoding="utf-8")
    for flag, value, name in [("--prompt", "Qät", "the prompt"), ("--score", tmp_path / "a", tmp_path / "a"),
                              ("--attention", "Qät", "--attention")]:
        sentence = refusal(flag, value, "--out", out)
        assert sentence.startswith(f"{name} has characters that the model never saw: 'Qä'; it knows '\\n")


def test_a_text_begins_with_the_prompt_or_else_a_newline_or_else_the_first_character(out, chinese):
    done = good("--prompt", r"the cat\nsat", "--out", out, "--max_new_tokens", 30, "--device", "cpu")
    assert done.out.startswith("the cat\nsat") and len(done.out) == 11 + 30 + 1 and set(done.out) <= CHARS
    assert r"never saw: '\'" in refusal("--prompt", "-", "--out", out, stdin=r"the\n")  # read as it is
    assert write(out)[0] == write(out, "--prompt", "")[0] == "\n"
    assert write(chinese)[0] == "\t"


def test_a_prompt_from_standard_input_is_read_as_a_file_is(out):
    flags = ("--temperature", 0, "--max_new_tokens", 30)
    read = write(out, "--prompt", "-", *flags, stdin=b"\xef\xbb\xbfthat\r\ndog\r")
    assert read == write(out, "--prompt", r"that\ndog\n", *flags)
    assert refusal("--prompt", "-", "--out", out, stdin=b"the\xff") == (
        "the prompt is not UTF-8: byte 0xff at offset 3; save it as UTF-8")


def test_in_a_text_of_the_command_line_two_backslashes_are_one_and_backslash_n_is_a_newline(odd):
    for typed, text in [(r"\\nabla", r"\nabla"), (r"\nabla", "\nabla"), (r"\\\nabla", "\\\nabla"),
                        (r"\\\\n", r"\\n"), (r"a\t\x", r"a\t\x"), ("\\", "\\")]:
        assert typed_text(typed, "the prompt") == text
    assert write(odd, "--max_new_tokens", 3, "--prompt", r"\nabla").startswith("\nabla")
    flags = ("--sample_seed", 4, "--max_new_tokens", 200, "--prompt", r"\\nabla")
    text = write(odd, *flags)
    assert text.startswith(r"\nabla") and "\\" in text[6:]
    assert write(odd, *flags, "--stop", r"\\") == r"\nabla" + text[6:].split("\\")[0] + "\n"


def test_a_text_may_begin_with_dashes(odd):
    for prompt in ("--n", "-1+2=", "--", "-"):
        stdin = "-" if prompt == "-" else ""
        for flags in (["--prompt", prompt], [f"--prompt={prompt}"]):
            assert write(odd, *flags, "--max_new_tokens", 3, stdin=stdin).startswith(prompt)
    assert "never saw: ',rwx'" in refusal("--prompt", "--raw-x, w", "--out", odd)


def as_in_locale_c(text):
    """ what Python makes of a word of the command line where the locale is C """
    return text.encode().decode("ascii", "surrogateescape")


def test_a_text_is_the_same_whatever_the_locale_made_of_it(odd):
    flags = ("--sample_seed", 3, "--max_new_tokens", 200)
    text = write(odd, *flags, "--prompt", "é")
    assert write(odd, *flags, "--prompt", as_in_locale_c("é")) == text
    stopped = write(odd, *flags, "--prompt", "é", "--stop", as_in_locale_c("é"))
    assert "é" in text[1:] and stopped == "é" + text[1:].split("é")[0] + "\n"
    assert "never saw: 'ö'" in refusal("--attention", as_in_locale_c("éö"), "--out", odd)
    assert refusal("--stop", "a\udcff", "--sample", "--out", odd) == (
        "--stop is not UTF-8: byte 0xff at offset 1; save it as UTF-8")


@pytest.mark.slow
def test_texts_and_files_are_read_as_utf_8_in_a_process_whose_locale_is_c(odd, chinese):
    flags = ("--temperature", 0, "--max_new_tokens", 30, "--device", "cpu")
    done = run("--prompt", "-", "--out", chinese, *flags, input="你好".encode(), env=ASCII)
    assert done.code == 0 and len(done.out) == 33, done.err
    flags = ("--sample_seed", 3, "--max_new_tokens", 200, "--prompt", "é")
    text = write(odd, *flags)
    done = run(*flags, "--stop", "é", "--out", odd, env={**ASCII, "PYTHONIOENCODING": "utf-8"})
    assert done.code == 0 and done.out == "é" + text[1:].split("é")[0] + "\n", done.err
    done = run("--attention", "éö", "--out", odd, env={**ASCII, "PYTHONIOENCODING": "utf-8"})
    assert done.code == 2 and "never saw: 'ö'" in done.err


def test_a_long_prompt_is_printed_completely_and_its_end_reaches_the_model(out):
    prompts = "the cat sat on a mat", "dog run on a mat"
    one, two = (write(out, "--prompt", prompt, "--temperature", 0) for prompt in prompts)
    assert one.startswith(prompts[0]) and one[20:] == two[16:] and len(one) == 20 + 60 + 1


def test_temperature_0_needs_no_seed_and_top_k_takes_only_the_likeliest(out):
    one = write(out, "--temperature", 0)
    assert one == write(out, "--temperature", 0) == write(out, "--top_k", 1) and len(one) == 62
    model, tokenizer = gpt.load(out / "best.pt", "cpu")
    likeliest = set(tokenizer.decode(model(torch.tensor([[0]]))[0][0, -1].topk(2).indices.tolist()))
    drawn = write(out, "--max_new_tokens", 1, "--top_k", 2, "--num_samples", 20, "--sample_seed", 1)
    assert {text[1] for text in drawn.split("\n---\n")} == likeliest
    assert write(out, "--top_k", 10**5, "--sample_seed", 3) == write(out, "--sample_seed", 3)


def test_a_seed_repeats_and_several_texts_or_those_without_a_seed_differ(out):
    done = good("--sample", "--out", out, "--device", "cpu", "--max_new_tokens", 60)
    seed = re.search(r"best.pt, --sample_seed (\d+)\n$", done.err)[1]  # said, so that it can be repeated
    assert write(out, "--sample_seed", seed) == done.out != write(out)
    texts = write(out, "--num_samples", 3, "--sample_seed", seed, "--prompt", "the")[:-1].split("\n---\n")
    assert len(set(texts)) == 3 and {len(text) for text in texts} == {63}
    assert texts[0] == write(out, "--sample_seed", seed, "--prompt", "the")[:-1]


@pytest.mark.parametrize("stop, written", [
    ("", "abcabd.abc"), ("abd", "abc"), ("c", "ab"), ("a", ""), ("abcabd", ""), ("abcd", "abcabd.abc"),
    ("d.a", "abcab"), (".abcx", "abcabd.abc"), ("bd.abc", "abca"), ("abcabd.abc!", "abcabd.abc")])
def test_what_is_held_back_as_a_beginning_of_the_stop_is_released_if_it_is_none(stop, written):
    drawn = []
    characters = (drawn.append(ch) or ch for ch in "abcabd.abc")
    assert "".join(gpt.until(stop, characters)) == written
    assert "".join(drawn) == written + stop or written == "abcabd.abc"  # nothing is drawn in vain


def test_stop_ends_each_text_before_it_appears(out):
    flags = ("--sample_seed", 3, "--prompt", "the")
    text = write(out, *flags)[3:-1]
    for stop in ("\n", text[20:24], text[40:41], text[-3:]):
        assert write(out, *flags, "--stop", stop.replace("\n", r"\n")) == "the" + text.split(stop)[0] + "\n"
    several = write(out, "--num_samples", 5, "--stop", r"\n", "--prompt", "the").split("\n---\n")
    assert len(several) == 5 and all("\n" not in one.removesuffix("\n") for one in several)


def test_each_character_is_shown_as_it_is_drawn_and_the_text_is_that_of_generate(out, monkeypatch):
    model, tokenizer = gpt.load(out / "best.pt", "cpu")
    pieces = []
    stdout = SimpleNamespace(write=pieces.append, flush=lambda: pieces.append(None))
    monkeypatch.setattr(sys, "stdout", stdout)
    gpt.main(["--prompt", "the", "--max_new_tokens", 40, "--sample_seed", 3, "--out", out, "--device", "cpu"])
    monkeypatch.undo()
    torch.manual_seed(3)
    tokens = model.generate(torch.tensor([tokenizer.encode("the")]), 40)[0].tolist()
    assert "".join(piece for piece in pieces if piece) == tokenizer.decode(tokens) + "\n"
    pieces = [piece for piece in pieces if piece != ""][:82]
    assert pieces[0] == "the" and {len(ch) for ch in pieces[2::2]} == {1} and pieces[1::2] == [None] * 41


def test_score_is_the_mean_loss_in_several_units_and_no_file_is_written(out, tmp_path):
    path = tmp_path / "other.txt"
    path.write_bytes(small_text(500, seed=9).replace("\n", "\r\n").encode())
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.iterdir()}
    model, tokenizer = gpt.load(out / "best.pt", "cpu")
    loss = gpt.score(model, torch.tensor(tokenizer.encode(small_text(500, seed=9))))
    assert good("--score", path, "--out", out, "--device", "cpu").out == (
        f"{path}: 500 characters, {loss:.4f} nats per character, {loss / math.log(2):.4f} bits per character"
        f", perplexity {math.exp(loss):.5g}\n")
    path.write_text("at")
    assert f"{path}: 2 characters, " in good("--score", path, "--out", out).out
    path.write_text("a")
    assert refusal("--score", path, "--out", out).startswith(f"{path} is too short to measure; use two ")
    write(out)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.iterdir()} == before


def test_the_closing_lines_of_a_run_are_about_its_best_model_which_is_not_always_the_last(tmp_path):
    done = good(*tiny(tmp_path, "--learning_rate", 1))
    model, tokenizer = gpt.load(tmp_path / "out/best.pt", "cpu")
    loss = gpt.score(model, gpt.split_data(small_text(), tokenizer)["val"])
    best = min(checkpoint(tmp_path / "out/last.pt")["reports"], key=lambda report: report["val"])
    assert best["step"] == 0 and best["val"] < losses(steps(done.out)[-1])[1] - 0.1
    line, closing = done.out[done.out.index("best:"):].split("\n", 1)
    assert line == (f"best:   val loss {best['val']:.4f} at step {best['step']}; over the whole validation "
                    f"text {loss:.4f}, which is {loss / math.log(2):.4f} bits per character")
    seconds, sample, files = re.split("; the best model writes:\n|\nfiles:", closing)
    assert re.fullmatch(r"time:   \d:\d\d:\d\d", seconds)
    assert sample == write(tmp_path / "out", "--sample_seed", 1337, "--max_new_tokens", 20)  # the run's seed
    assert files.startswith(f"  in {tmp_path / 'out'}: best.pt") and "write:  python gpt.py --sample" in files


def tastes(shown):
    return re.findall(r"^    \| (.*)$", shown, re.MULTILINE)


def test_a_taste_follows_each_report_with_the_same_random_numbers_but_not_the_runs(tmp_path):
    plain, done = (good(*tiny(tmp_path, "--dropout", 0.2, flag)).out for flag in ("--no-taste", "--taste"))
    assert len(steps(plain)) == 3 and steps(done) == steps(plain) and tastes(plain) == []
    assert len(re.findall(r"^step .*\n    \| .{70}$", done, re.MULTILINE)) == len(tastes(done)) == 3
    frozen, learning = (good(*tiny(tmp_path, "--taste", "--learning_rate", rate)).out for rate in (0, 0.1))
    assert len(set(tastes(frozen))) == 1 < len(set(tastes(learning)))


# ---- on the screen


def test_lines_of_losses_are_the_lectures_to_the_letter_and_a_pipe_gets_no_escape_codes(tmp_path, fast_clock):
    done = good(*tiny(tmp_path, "--eval_iters", 20))
    first, second, third = re.findall("^step .*", done.out, re.MULTILINE)
    for line in (first, second, third):
        assert re.match(r"step \d+: train loss \d\.\d{4}, val loss \d\.\d{4} \(", line)
    assert first.endswith(f" (guessing scores ln({len(CHARS)}) = {math.log(len(CHARS)):.4f})")
    assert re.search(r" \([\d,]+ tokens/s, \d+:\d\d:\d\d left\)$", second)
    assert not set("\r\x1b") & set(done.out + done.err)
    for doing in ("measuring the loss", r"loss \d\.\d{4}"):
        assert re.search(rf"^step \d+ of 20, {doing}, [\d,]+ tokens/s, .* left$", done.err, re.MULTILINE)


@needs_terminals
@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_on_a_terminal_one_line_moves_and_makes_room_for_the_others_but_not_on_a_dumb_one(
        tmp_path, kind, fast_clock, monkeypatch):
    monkeypatch.setenv("TERM", kind)
    done = on_a_terminal(*tiny(tmp_path, "--eval_iters", 20))
    room = r"(\n|\r\x1b\[K\r?)" if kind == "xterm" else r"\n"
    for line in ("step 0: train", "step 20: train", "best: ", "time: "):
        assert re.search(room + line, done.screen)
    moving = re.findall(r"\rstep \d+ of 20, measuring the loss, [^\n\r]*left\x1b\[K", done.screen)
    assert done.code == 0
    assert len(moving) >= 2 if kind == "xterm" else not set("\r\x1b") & set(done.screen)


@needs_terminals
@pytest.mark.parametrize("columns", [50, 21, 200])
def test_the_status_line_keeps_to_the_terminal_that_shows_it_wherever_standard_output_goes(
        tmp_path, columns, fast_clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")  # as a shell may have set it for another window
    with open(tmp_path / "log", "w") as log:
        done = on_a_terminal(*tiny(tmp_path, "--eval_iters", 20), columns=columns, out=log)
    moving = re.findall(r"\r(step [^\r\n]*)\x1b\[K", done.screen)
    assert len(moving) > 3 and max(map(len, moving)) == min(columns - 1, max(map(len, moving)))
    assert columns == 200 or max(map(len, moving)) == columns - 1
    assert max(map(len, moving)) > 50 or columns < 200
    shown = (tmp_path / "log").read_text()
    assert len(steps(shown)) == 3 and not set("\r\x1b") & set(shown)


@needs_terminals
@pytest.mark.parametrize("main", [gpt.main, bigram.main])
def test_control_characters_that_a_model_learned_are_escapes_on_a_terminal_and_exact_elsewhere(odd, main):
    flags = ["--sample", "--out", odd, "--sample_seed", 4, "--max_new_tokens", 400, "--device", "cpu"]
    if main is bigram.main:
        flags = ["--data", odd.parent / "text.txt", "--max_iters", 0, "--eval_iters", 1, "--device", "cpu"]
    text = good(*flags, main=main).out
    shown = on_a_terminal(*flags, main=main).screen
    controls = "\x07\x0e\x1b\x7f\x9b"
    assert set(controls + "\u3000\n\t好") <= set(text)
    escapes = {ord(ch): ascii(ch)[1:-1] for ch in controls}
    shown = shown.split("--sample_seed 4\n")[-1]  # the notice takes the place of the status line
    assert text.translate(escapes) == shown


def test_all_control_characters_but_newlines_and_tabs_are_escapes_and_nothing_else_is():
    for number in [*range(0x500), 0x3000, 0x1F680]:
        is_control = number < 0x20 or 0x7f <= number < 0xa0
        shown = chr(number) if chr(number) in "\n\t" or not is_control else ascii(chr(number))[1:-1]
        assert without_controls(f"a{chr(number)}b") == f"a{shown}b"


def test_errors_list_twenty_characters_and_a_count_invisible_and_combining_ones_as_escapes():
    assert listed("字" * 20) == f"'{'字' * 20}'" and listed("字" * 7020) == f"'{'字' * 20}' and 7,000 more"
    assert listed("\u0301\t\u200b\u00a0x\\") == r"'\u0301\t\u200b\xa0x\'"


def test_a_console_that_lacks_the_characters_ends_nothing(chinese):
    shown = write(chinese, "--prompt", "你好", encoding="ascii")
    assert shown.startswith("??") and len(shown) == 63 and set(shown) <= set("?\t\n")
    done = call("--prompt", "世Q", "--out", chinese, encoding="ascii")
    assert done.code == 2 and r"never saw: 'Q'; it knows '\t\u3002\u4e16\u4f60" in done.err


def test_where_standard_error_is_closed_standard_output_has_the_text_alone(out, monkeypatch, capsys):
    text = write(out, "--sample_seed", 3)
    monkeypatch.setattr(sys, "stderr", None)
    gpt.main(["--sample", "--out", out, "--device", "cpu", "--max_new_tokens", 60, "--sample_seed", 3])
    assert capsys.readouterr().out == text


def test_where_standard_output_is_closed_a_run_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    gpt.main(tiny(tmp_path))
    assert checkpoint(tmp_path / "out/last.pt")["step"] == 20


# ---- whoever reads may leave


def read_and_leave(*flags, after, main=gpt.main):
    """ main, whose reader leaves after these bytes: exit status, standard error, what was read """
    ours, theirs = os.pipe()
    first = bytearray()

    def reader():
        while after not in first:
            first.extend(os.read(ours, 1))
        os.close(ours)

    thread = threading.Thread(target=reader)
    thread.start()
    pipe = open(theirs, "w", encoding="utf-8")
    done = call(*flags, main=main, stdout=pipe)
    thread.join()
    with suppress(BrokenPipeError):
        pipe.close()
    return SimpleNamespace(code=done.code, err=done.err, first=first.decode())


def test_a_reader_that_leaves_ends_a_script_with_the_status_of_a_shell(out, tmp_path):
    done = read_and_leave("--sample", "--out", out, "--max_new_tokens", 9999, "--device", "cpu", after=b"\n")
    assert done.code == 141 and set(done.first) <= CHARS and done.err.count("\n") == 1
    done = read_and_leave(*tiny(tmp_path, "--max_iters", 999), after=b"step 10:")
    assert done.code == 141 and "saved; to continue: " in done.err
    step = checkpoint(tmp_path / "out/last.pt")["step"]
    assert f"stopped at step {step} and saved" in done.err
    few = ["--data", write_small_text(tmp_path), "--eval_iters", 1, "--eval_interval", 5, "--device", "cpu"]
    done = read_and_leave(*few, after=b"step 10:", main=bigram.main)
    assert done.code == 141 and done.err == ""


@needs_terminals
@pytest.mark.parametrize("gone_after", [b"", b"step 0:", b"of 20, loss"])
def test_a_terminal_that_is_gone_silences_a_run_which_goes_to_its_end(tmp_path, gone_after, fast_clock):
    done = on_a_terminal(*tiny(tmp_path, "--taste"), gone_after=gone_after)
    assert done.code == 0 and "best: " not in done.screen
    last, best = (checkpoint(tmp_path / "out" / name) for name in ("last.pt", "best.pt"))
    assert last["step"] == 20 and len(last["losses"]) == 20 and best["step"] in (0, 10, 20)


@needs_terminals
def test_a_terminal_that_is_gone_silences_the_other_tasks_too(out, tmp_path):
    few = ["--data", write_small_text(tmp_path), "--max_iters", 5, "--eval_iters", 1, "--device", "cpu"]
    for flags, main in [(["--sample", "--out", out], gpt.main), (few, bigram.main),
                        (["--score", write_small_text(tmp_path), "--out", out], gpt.main)]:
        done = on_a_terminal(*flags, gone_after=b"", main=main)
        assert done.code == 0 and done.screen == ""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="pipes of a Unix shell")
@pytest.mark.parametrize("name", ["gpt", "bigram"])
def test_a_process_whose_reader_leaves_has_the_status_of_a_shell_and_no_second_complaint(name, tmp_path):
    flags = tiny(tmp_path) if name == "gpt" else ["--data", str(write_small_text(tmp_path))]
    process = start(*flags, command=[f"{name}.py"])
    first = process.stdout.readline()
    process.stdout.close()
    assert process.wait(30) == 141 and first and b"Traceback" not in process.stderr.read()


@pytest.mark.slow
@needs_terminals
@pytest.mark.parametrize("name", ["gpt", "bigram"])
def test_a_process_whose_terminal_is_gone_ends_well(name, tmp_path):
    ours, theirs = os.openpty()
    flags = tiny(tmp_path) if name == "gpt" else ["--data", str(write_small_text(tmp_path))]
    process = start(*flags, command=[f"{name}.py"], stdin=theirs, stdout=theirs, stderr=theirs,
                    start_new_session=True)
    os.close(theirs)
    seen = b""
    while b"guessing" not in seen:
        seen += os.read(ours, 100)
    os.close(ours)
    assert ended(process).code == 0
    assert name == "bigram" or checkpoint(tmp_path / "out/last.pt")["step"] == 20


@pytest.mark.slow
def test_only_the_text_goes_to_standard_output_long_before_its_end(out):
    process = start("--sample", "--out", out, "--max_new_tokens", 10**8, "--device", "cpu")
    first = b"".join(process.stdout.read(1) for _ in range(20)).decode()
    assert set(first) <= CHARS and process.poll() is None
    process.stdout.close()
    assert process.wait(30) == 141 and process.stderr.read().count(b"\n") == 1

"""
Using a model that is there already: what it writes and when that ends, how well it predicts a text, and what
all this looks like on any screen, for as long as somebody reads.
"""
import math
import os
import re
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from helpers import call, checkpoint, ended, good, refusal, run, small_text, start, steps, tiny

import gpt

CHARS = set(small_text())
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": None}


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


def write(out, *flags, **more):
    """ what --sample writes: 60 characters, unless the flags say otherwise """
    return good("--sample", "--out", out, "--device", "cpu", "--max_new_tokens", 60, *flags, **more).out


@pytest.mark.parametrize("flags", ["--sample", "--prompt the", "--attention the", "--score text.txt"])
def test_without_a_checkpoint_the_file_is_named_and_how_to_make_one(tmp_path, flags):
    sentence = refusal(*flags.split(), "--out", tmp_path)
    assert sentence.startswith(f"there is no {tmp_path / 'best.pt'}; train first (python gpt.py)")


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
    assert write(out)[0] == write(out, "--prompt", "")[0] == gpt.beginning(gpt.Tokenizer("\t\n")) == "\n"
    assert write(chinese)[0] == "\t"


def test_a_prompt_from_standard_input_is_read_as_a_file_is_whatever_the_locale_says(out, chinese):
    flags = ("--temperature", 0, "--max_new_tokens", 30)
    read = write(out, "--prompt", "-", *flags, stdin=b"\xef\xbb\xbfthat\r\ndog\r")
    assert read == write(out, "--prompt", r"that\ndog\n", *flags)
    assert refusal("--prompt", "-", "--out", out, stdin=b"the\xff") == (
        "the prompt is not UTF-8: byte 0xff at offset 3; save it as UTF-8")
    done = run("--prompt", "-", "--out", chinese, *flags, "--device", "cpu", input="你好".encode(), env=ASCII)
    assert done.code == 0 and len(done.out) == 33, done.err


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
    shown, flags = [], gpt.Flags(max_new_tokens=40)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=shown.append, flush=lambda: shown.append(None)))
    torch.manual_seed(3)
    gpt.write_text(model, tokenizer, flags, "the", SimpleNamespace(check=lambda: None))
    monkeypatch.undo()
    torch.manual_seed(3)
    tokens = model.generate(torch.tensor([tokenizer.encode("the")]), 40)[0].tolist()
    assert "".join(piece for piece in shown if piece) == tokenizer.decode(tokens) + "\n"
    shown = [piece for piece in shown if piece != ""][:82]
    assert shown[0] == "the" and {len(ch) for ch in shown[2::2]} == {1} and shown[1::2] == [None] * 41


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


def test_the_closing_lines_of_a_run_say_how_good_it_became_its_time_and_what_it_writes(tmp_path):
    done = good(*tiny(tmp_path, "--learning_rate", 1e-2))
    model, tokenizer = gpt.load(tmp_path / "out/best.pt", "cpu")
    loss = gpt.score(model, gpt.split_data(small_text(), tokenizer)["val"])
    best = min(checkpoint(tmp_path / "out/last.pt")["history"], key=lambda row: row["val"])
    line, closing = done.out[done.out.index("best:"):].split("\n", 1)
    assert line == (f"best:   val loss {best['val']:.4f} at step {best['step']}; over the whole validation "
                    f"text {loss:.4f}, which is {loss / math.log(2):.4f} bits per character")
    seconds, sample, files = re.split("; the best model writes:\n|\nfiles:", closing)
    assert re.fullmatch(r"time:   \d:\d\d:\d\d", seconds)
    assert sample == write(tmp_path / "out", "--sample_seed", 1337, "--max_new_tokens", 20)  # the run's seed
    assert files.startswith(f"  in {tmp_path / 'out'}: best.pt") and "write:  python gpt.py --sample" in files


def tastes(shown):
    return re.findall(r"^    \| (.*)$", shown, re.MULTILINE)


def test_a_taste_follows_each_report_with_the_same_random_numbers_but_not_the_runs(tmp_path, monkeypatch):
    taste = gpt.Run.taste
    monkeypatch.setattr(gpt.Run, "taste", lambda run, seconds: taste(run, 60))
    plain, done = (good(*tiny(tmp_path, "--dropout", 0.2, flag)).out for flag in ("--no-taste", "--taste"))
    assert len(steps(plain)) == 3 and steps(done) == steps(plain) and tastes(plain) == []
    assert len(re.findall(r"^step .*\n    \| .{70}$", done, re.MULTILINE)) == len(tastes(done)) == 3
    frozen, learning = (good(*tiny(tmp_path, "--taste", "--learning_rate", rate)).out for rate in (0, 0.1))
    assert len(set(tastes(frozen))) == 1 < len(set(tastes(learning)))


def test_a_taste_is_a_line_shorter_where_writing_is_slow_and_takes_little_time(tmp_path, monkeypatch, capsys):
    def slow(*args):
        for ch in "ab\nc" * 5:
            time.sleep(0.05)
            yield ch

    runner, taken = gpt.Run(torch.nn.Linear(1, 1), gpt.Flags(), tokenizer=gpt.Tokenizer("abc\n")), []
    monkeypatch.setattr(gpt, "stream", slow)
    runner.taste(60)
    assert capsys.readouterr().out == "    | ab↵cab↵cab↵cab↵cab↵c\n"
    runner.taste(0.12)
    assert 1 <= len(tastes(capsys.readouterr().out)[0]) <= 3
    monkeypatch.setattr(gpt.Run, "taste", lambda run, seconds: taken.append((time.monotonic(), seconds)))
    good(*tiny(tmp_path, "--taste", "--max_iters", 50))
    assert len(taken) == 6 and taken[0][1] <= 0.5
    for (before, _), (now, seconds) in zip(taken, taken[1:]):
        assert 0 < seconds <= 0.05 * (now - before)


def test_lines_of_losses_are_the_lectures_to_the_letter_and_a_pipe_gets_no_escape_codes(tmp_path):
    done = run(*tiny(tmp_path, "--eval_iters", 1000))
    first, second, third = re.findall("^step .*", done.out, re.MULTILINE)
    for line in (first, second, third):
        assert re.match(r"step \d+: train loss \d\.\d{4}, val loss \d\.\d{4} \(", line)
    assert first.endswith(f" (guessing scores ln({len(CHARS)}) = {math.log(len(CHARS)):.4f})")
    assert re.search(r" \([\d,]+ tokens/s, \d+:\d\d:\d\d left\)$", second)
    assert done.code == 0 and not set("\r\x1b") & set(done.out + done.err)
    assert re.search(r"^step \d+ of 20, measuring the loss(, .* left)?$", done.err, re.MULTILINE)


@pytest.mark.skipif(os.name == "nt", reason="terminals as on Unix")
@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_on_a_terminal_one_line_moves_and_makes_room_for_the_others_but_not_on_a_dumb_one(tmp_path, kind):
    ours, theirs = os.openpty()
    flags = tiny(tmp_path, "--eval_iters", 700, "--max_iters", 2)
    process = start(*flags, stdout=theirs, stderr=theirs, env={"TERM": kind})
    os.close(theirs)
    screen = b""
    with suppress(OSError):  # the other end is closed
        while piece := os.read(ours, 65536):
            screen += piece
    os.close(ours)
    assert ended(process).code == 0, screen
    screen = screen.decode().replace("\r\n", "\n")
    room = r"(\n|\r\x1b\[K\r?)" if kind == "xterm" else r"\n"
    assert all(re.search(room + line, screen) for line in ("step 0: train", "step 2: train", "best: "))
    moving = re.findall(r"\rstep \d+ of 2, measuring the loss, [^\n\r]*left\x1b\[K", screen)
    assert len(moving) >= 2 if kind == "xterm" else not set("\r\x1b") & set(screen)


def test_only_the_text_goes_to_standard_output_long_before_its_end_and_whoever_reads_may_leave(out):
    process = start("--sample", "--out", out, "--max_new_tokens", 10**8, "--device", "cpu")
    first = b"".join(process.stdout.read(1) for _ in range(20)).decode()
    assert set(first) <= CHARS and process.poll() is None
    process.stdout.close()
    assert process.wait(30) == 0 and process.stderr.read().count(b"\n") == 1


def test_a_console_that_lacks_the_characters_ends_nothing(chinese):
    shown = write(chinese, "--prompt", "你好", encoding="ascii")
    assert shown.startswith("??") and len(shown) == 63 and set(shown) <= set("?\t\n")
    done = call("--prompt", "世Q", "--out", chinese, encoding="ascii")
    assert done.code == 2 and r"never saw: 'Q'; it knows '\t\u3002\u4e16\u4f60" in done.err

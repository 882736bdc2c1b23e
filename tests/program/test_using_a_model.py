"""
Writing text with a model that is there: what is refused and how, what repeats and what does not, and that
every character appears as it is made, on any console, for as long as somebody reads.
"""

import io
import os
import random
import re
import subprocess
import sys
import time

import pytest
import torch
from helpers import call, ended, run, small_text, start, steps, tiny

import gpt

CHARS = sorted(set(small_text()))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder of a trained model."""
    folder = tmp_path_factory.mktemp("sampling")
    done = call(*tiny(folder))
    assert done.code == 0, done.err
    return folder / "out"


@pytest.fixture(scope="module")
def chinese(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chinese")
    text = "".join(random.Random(3).choices("你好世界，。🙂\n", k=2000))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    assert call(*tiny(folder, data=folder / "text.txt")).code == 0
    return folder / "out"


def write(out, *flags, **more):
    done = call("--sample", "--out", out, "--device", "cpu", *flags, **more)
    assert done.code == 0, done.err
    return done


def refusal(*args, **more):
    done = call(*args, **more)
    assert done.code == 2 and done.out == ""
    return done.err.strip().splitlines()[-1].split("error: ")[1]


# ---- refusals


@pytest.mark.parametrize("flags", [["--sample"], ["--prompt", "the"], ["--attention", "the"]])
def test_without_a_checkpoint_the_file_is_named_and_how_to_make_one(tmp_path, flags):
    sentence = refusal(*flags, "--out", tmp_path / "out")
    assert f"there is no {tmp_path / 'out/best.pt'}; train first (python gpt.py)" in sentence


@pytest.mark.parametrize("flags", [["--prompt", "the Qät"], ["--attention", "the Qät"]])
def test_characters_that_the_model_never_saw_are_listed_with_the_vocabulary(out, flags):
    sentence = refusal(*flags, "--out", out)
    assert sentence == f"the model never saw 'Qä'; take only its characters, {''.join(CHARS)!r}"


def test_a_carriage_return_in_the_prompt_is_listed_legibly(out):
    assert r"the model never saw '\r'" in refusal("--prompt", "the\rcat", "--out", out)


# ---- what is written


def test_a_prompt_alone_samples_and_begins_the_text(out):
    done = call("--prompt", "the cat", "--out", out, "--max_new_tokens", "30", "--device", "cpu")
    assert done.code == 0 and done.out.startswith("the cat") and len(done.out) == 7 + 30 + 1
    assert set(done.out) <= set(CHARS)


def test_without_a_prompt_it_begins_with_the_lectures_newline(out):
    done = write(out, "--max_new_tokens", "30")
    assert done.out.startswith(CHARS[0]) and len(done.out) == 1 + 30 + 1 and CHARS[0] == "\n"


def test_an_empty_prompt_is_none(out):
    flags = ("--out", out, "--sample_seed", "3", "--device", "cpu")
    assert call("--prompt", "", *flags).out == call("--sample", *flags).out


def test_a_prompt_may_come_from_standard_input(out):
    flags = ("--sample_seed", "3", "--max_new_tokens", "30")
    done = write(out, "--prompt", "-", *flags, stdin="that dog\n")
    assert done.out.startswith("that dog\n")
    assert done.out == write(out, "--prompt", "that dog\n", *flags).out


@pytest.mark.slow
def test_a_prompt_may_come_through_a_real_pipe_and_no_code_page_harms_it(chinese, tmp_path):
    done = run(
        tmp_path,
        "--prompt",
        "-",
        "--out",
        chinese,
        "--max_new_tokens",
        "5",
        "--device",
        "cpu",
        input="你好".encode(),
        env={"PYTHONUTF8": "1"},
    )
    assert done.code == 0 and done.out.startswith("你好")


def test_a_prompt_longer_than_the_context_is_printed_whole(out):
    prompt = "the cat sat on a mat and saw that dog run home"
    done = write(out, "--prompt", prompt, "--max_new_tokens", "25")
    assert done.out.startswith(prompt) and len(done.out) == len(prompt) + 25 + 1


def test_only_the_end_of_a_long_prompt_reaches_the_model(out):
    flags = ("--temperature", "0", "--max_new_tokens", "25")
    one = write(out, "--prompt", "the cat sat on a mat", *flags).out
    two = write(out, "--prompt", "dog run on a mat", *flags).out
    assert one[len("the cat sat on a mat") :] == two[len("dog run on a mat") :] and len(one) > 40


def test_temperature_0_is_repeatable_without_a_seed_and_greedy(out):
    flags = ("--prompt", "the", "--temperature", "0", "--max_new_tokens", "40")
    one = write(out, *flags).out
    assert one == write(out, *flags).out
    assert one == write(out, "--prompt", "the", "--top_k", "1", "--max_new_tokens", "40").out


def test_top_k_beyond_the_vocabulary_is_all_of_it(out):
    flags = ("--sample_seed", "3", "--max_new_tokens", "60")
    assert write(out, "--top_k", "100000", *flags).out == write(out, *flags).out
    assert write(out, "--top_k", "2", *flags).out != write(out, *flags).out


def test_top_k_takes_only_the_likeliest(out):
    model, tokenizer = gpt.load(out / "best.pt", "cpu")
    likeliest = set(tokenizer.decode(model(torch.tensor([[0]]))[0][0, -1].topk(2).indices.tolist()))
    drawn = {
        write(out, "--max_new_tokens", "1", "--top_k", "2", "--sample_seed", seed).out[1:-1]
        for seed in range(12)
    }
    assert drawn == likeliest


def test_a_seed_repeats_and_without_one_two_differ(out):
    one = write(out, "--sample_seed", "3")
    assert one.out == write(out, "--sample_seed", "3").out != write(out, "--sample_seed", "4").out
    free, other = write(out), write(out)
    assert free.out != other.out
    seed = re.search(r"--sample_seed (\d+)", free.err)[1]  # said, so that a good one can be repeated
    assert write(out, "--sample_seed", seed).out == free.out


def test_several_samples_are_several_texts(out):
    flags = ("--max_new_tokens", "40", "--prompt", "the", "--sample_seed", "3")
    done = write(out, "--num_samples", "3", *flags)
    texts = done.out.removesuffix("\n").split("\n---\n")
    assert len(texts) == len(set(texts)) == 3
    assert all(text.startswith("the") and len(text) == 43 for text in texts)
    assert texts[0] + "\n" == write(out, *flags).out


def test_the_sample_after_training_is_drawn_with_the_seed_of_the_run(tmp_path):
    def sample(name):
        (tmp_path / name).mkdir()
        return call(*tiny(tmp_path / name)).out.split("model writes:\n")[1].split("\nfiles:")[0]

    one, two = sample("a"), sample("b")
    assert one == two and len(one.strip("\n")) > 10
    again = write(tmp_path / "a/out", "--sample_seed", "1337", "--max_new_tokens", "20")
    assert again.out == one


def test_sampling_changes_no_file(out):
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.iterdir()}
    write(out)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.iterdir()} == before


# ---- how it is written


class Console(io.TextIOWrapper):
    """Notes how much had been written at each flush."""

    def __init__(self):
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)
        self.seen = []

    def flush(self):
        super().flush()
        if self.buffer.getvalue() and self.seen[-1:] != [len(self.buffer.getvalue())]:
            self.seen.append(len(self.buffer.getvalue()))


def test_every_character_is_shown_as_it_is_drawn_and_the_text_is_that_in_one_piece(out, monkeypatch):
    model, tokenizer = gpt.load(out / "best.pt", "cpu")
    monkeypatch.setattr(sys, "stdout", Console())
    config = gpt.Flags(prompt="the", max_new_tokens=40)
    gpt.write_text(model, tokenizer, config, 3, type("Quiet", (), {"check": lambda self: None})())
    streamed, seen = sys.stdout.buffer.getvalue().decode(), sys.stdout.seen
    monkeypatch.undo()
    torch.manual_seed(3)
    whole = model.generate(torch.tensor([tokenizer.encode("the")]), 40)[0].tolist()
    assert streamed == tokenizer.decode(whole) + "\n"
    assert seen[:41] == list(range(3, 44))  # the prompt, then one character at a time


def test_characters_arrive_long_before_the_end(out, tmp_path):
    process = start(tmp_path, "--sample", "--out", out, "--max_new_tokens", "100000000", "--device", "cpu")
    first = b"".join(process.stdout.read(1) for _ in range(20))
    assert len(first) == 20 and process.poll() is None
    process.kill()
    ended(process)


def test_only_the_text_goes_to_standard_output(out, tmp_path):
    done = run(tmp_path, "--sample", "--out", out, "--max_new_tokens", "30", "--device", "cpu")
    assert done.code == 0 and len(done.out) == 32 and set(done.out) <= set(CHARS)
    assert f"{out / 'best.pt'}, --sample_seed " in done.err


@pytest.mark.skipif(os.name == "nt", reason="pipes as on Unix")
def test_a_reader_that_leaves_ends_it_quietly(out, tmp_path):
    process = start(tmp_path, "--sample", "--out", out, "--max_new_tokens", "100000000", "--device", "cpu")
    head = subprocess.run(["head", "-c", "5"], stdin=process.stdout, capture_output=True, timeout=30)
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(20) == 0 and len(head.stdout) == 5
    assert "Traceback" not in err and "Exception" not in err and "Error" not in err


def test_a_console_without_the_characters_does_not_end_it(chinese, tmp_path):
    done = run(
        tmp_path,
        "--prompt",
        "你好",
        "--out",
        chinese,
        "--max_new_tokens",
        "20",
        "--device",
        "cpu",
        env={"PYTHONIOENCODING": "ascii"},
    )
    assert done.code == 0 and "Traceback" not in done.err
    assert done.out.startswith("??") and len(done.out) == 23 and set(done.out) <= {"?", "\n"}


@pytest.mark.slow
def test_an_error_about_characters_is_shown_on_such_a_console_too(chinese, tmp_path):
    done = run(
        tmp_path, "--prompt", "世Q", "--out", chinese, "--device", "cpu", env={"PYTHONIOENCODING": "ascii"}
    )
    assert done.code == 2 and "the model never saw 'Q'" in done.err and "Traceback" not in done.err


# ---- the screen


def test_in_a_pipe_there_are_plain_lines_and_no_carriage_returns(tmp_path):
    done = run(tmp_path, *tiny(tmp_path, "--eval_iters", "2000"))
    assert done.code == 0 and "\r" not in done.out + done.err and "\x1b" not in done.out + done.err
    assert re.search(r"^step \d+ of 20, measuring the loss, .*\d:\d\d:\d\d left$", done.err, re.M)
    assert len(steps(done.out)) == 3 and " of 20" not in done.out


def test_lines_of_losses_are_the_lectures_to_the_letter(tmp_path):
    lines = call(*tiny(tmp_path)).out.splitlines()
    found = [line for line in lines if line.startswith("step ")]
    assert len(found) == 3
    for line in found:
        assert re.fullmatch(r"step \d+: train loss \d\.\d{4}, val loss \d\.\d{4} \(.*\)", line)
    assert re.search(r"\([\d,]+ tokens/s, \d+:\d\d:\d\d left\)$", found[1])
    assert f"guessing scores ln({len(CHARS)}) = " in found[0]


@pytest.mark.skipif(os.name == "nt", reason="terminals as on Unix")
def test_on_a_terminal_one_line_moves_and_makes_room_for_the_others(tmp_path):
    import pty
    import select

    ours, theirs = pty.openpty()
    flags = tiny(tmp_path, "--eval_iters", "700", "--max_iters", "2")
    process = start(tmp_path, *flags, stdout=theirs, stderr=theirs)
    os.close(theirs)
    screen, limit = b"", time.monotonic() + 60
    while time.monotonic() < limit and select.select([ours], [], [], 30)[0]:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        screen += piece
    os.close(ours)
    assert process.wait(20) == 0
    screen = screen.decode().replace("\r\n", "\n")
    assert len(re.findall(r"\rstep \d+ of 2, measuring the loss, [^\n\r]* left\x1b\[K", screen)) >= 2
    for line in ("step 0: train", "step 2: train", "best: "):
        assert re.search(r"(\n|\r\x1b\[K)" + line, screen), line

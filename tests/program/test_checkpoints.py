"""
What is in a checkpoint, how a run continues from it to the digit, which flags count then, and what gpt.py
says of a file that it cannot use.
"""
import csv
import json
import os
import pickle
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from helpers import at_batch, call, checkpoint, contents, good, new_model, refusal, small_text, steps, tiny
from helpers import write_checkpoint as write

import gpt
from data.flags import UserError

NEXT = "--resume --max_iters 30 --device cpu --max_new_tokens 2 --no-taste".split()


def record(folder, without=None):
    """ the rows of loss.csv, without one of the columns """
    with open(folder / "out/loss.csv", encoding="utf-8", newline="") as file:
        return [{name: row[name] for name in row if name != without} for row in csv.DictReader(file)]


# ---- to continue


@pytest.mark.parametrize("way", ["--fused", "--no-fused"])
def test_some_steps_and_the_rest_later_are_all_steps_at_once_to_the_digit(tmp_path, way):
    flags, once = ["--dropout", "0.3", way], tmp_path / "once"
    once.mkdir()
    all_steps = steps(good(*tiny(once, *flags)).out)
    assert len(all_steps) == 3 and [row["step"] for row in record(once)] == ["0", "10", "20"]
    for first in (10, 7, 1):
        parts = tmp_path / f"{first} and the rest"
        parts.mkdir()
        good(*tiny(parts, *flags, "--max_iters", first))
        assert steps(good(*tiny(parts, *flags, "--resume")).out) == all_steps[1:]
        one, two = (checkpoint(folder / "out/last.pt")["model"] for folder in (once, parts))
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert record(once, without="seconds") == record(parts, without="seconds")


def test_resume_takes_everything_from_the_file_but_the_flags_that_are_given(own, monkeypatch):
    used, stepped = {}, gpt.Run.stepped

    def watched(run, step, loss):
        used.update(run.optimizer.param_groups[0], dropout=run.model.blocks[0].ffwd.net[3].p)
        stepped(run, step, loss)

    monkeypatch.setattr(gpt.Run, "stepped", watched)
    given = "--weight_decay 0.3 --beta2 0.9 --learning_rate 0.5 --dropout 0.25".split()
    done = good(*NEXT, "--out", own / "out", *given)
    assert [used[name] for name in ("weight_decay", "betas", "lr", "dropout")] == [0.3, (0.9, 0.9), 0.5, 0.25]
    saved = checkpoint(own / "out/last.pt")
    assert steps(done.out)[-1].startswith("step 30: ") and saved["config"]["eval_iters"] == 2
    assert [str(saved["config"][flag[2:]]) for flag in given[::2]] == given[1::2]
    assert [row["learning_rate"] for row in saved["history"]] == [3e-4, 3e-4, 0.5, 0.5]


@pytest.mark.parametrize("name, value", [
    ("n_layer", 3), ("n_head", 4), ("n_embd", 32), ("block_size", 16), ("seed", 5), ("init_std", 0.5),
    ("size", "notebook"), ("init_from", "other/best.pt")])
def test_a_flag_that_contradicts_the_checkpoint_is_refused_before_anything_is_touched(own, name, value):
    before, really = contents(own / "out"), checkpoint(own / "out/last.pt")["config"][name]
    for use, file in (("--resume", "last.pt"), ("--sample", "best.pt"))[:2 if name in gpt.SHAPE else 1]:
        sentence = refusal(use, "--out", own / "out", f"--{name}", value)
        assert f"--{name} {value} contradicts {own / 'out' / file}, where it is {really!r}; " in sentence
    assert contents(own / "out") == before and sorted(os.listdir(own)) == ["out", "words-0.txt"]


@pytest.mark.parametrize("more", ["--size notebook --seed 3", "--size auto", "--init_from {}/out/best.pt"])
def test_the_same_command_line_continues_with_resume_at_its_end(trained, tmp_path, more):
    flags = tiny(tmp_path, *more.format(trained).split())
    good(*flags, "--max_iters", 10)
    assert [line[:8] for line in steps(good(*flags, "--resume").out)] == ["step 10:", "step 20:"]
    good("--sample", "--out", tmp_path / "out", *"--n_layer 2 --block_size 8 --max_new_tokens 2".split())


def test_resume_without_something_to_continue_says_why_and_makes_nothing(own):
    sentence = refusal("--resume", "--out", own / "out", "--max_iters", 10)
    assert "is at step 20; use a larger --max_iters" in sentence
    sentence = refusal("--resume", "--out", own / "none")
    assert f"there is no {own / 'none/last.pt'}; train first" in sentence and not (own / "none").exists()
    (own / "out/best.pt").replace(own / "out/last.pt")
    assert "is a model, not a run to continue" in refusal("--resume", "--out", own / "out")


@pytest.mark.parametrize("text", [small_text(3001), small_text()[::-1], small_text()[:-1] + "\n"])
def test_resume_refuses_another_text_of_another_or_of_the_same_length(own, text):
    other, before = own / "other.txt", contents(own / "out")
    other.write_text(text, encoding="utf-8", newline="\n")
    sentence = refusal(*NEXT, "--out", own / "out", "--data", other)
    assert f"{other} is not the text that the run in {own / 'out'} trains on" in sentence
    assert "--init_from" in sentence and contents(own / "out") == before


def test_resume_takes_the_same_text_from_another_place(own):
    (own / "words-0.txt").rename(own / "moved.txt")
    good(*NEXT, "--out", own / "out", "--data", own / "moved.txt")


def test_the_printed_commands_are_quoted_and_work_from_the_folder_they_are_printed_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        at_batch(patch, 9, lambda: bytearray(2**62))  # a MemoryError
        stopped = call(*tiny(tmp_path, "--out", "My Drive/it's", *"--dtype bfloat16 --no-compile".split()))
    python, script, *args = shlex.split(re.search("; to continue: (.+)", stopped.err)[1])
    assert (python, Path(script)) == ("python", Path(gpt.__file__)) and args[:2] == ["--resume", "--out"]
    assert args[2:] == ["My Drive/it's", *"--device cpu --dtype bfloat16 --compile False".split()]
    done = good(*args)
    assert len(steps(done.out)) == 2 and "bfloat16" in done.out
    python, script, *args = shlex.split(re.search("^write:  (.+)", done.out, re.MULTILINE)[1])
    assert args == ["--sample", "--out", "My Drive/it's", "--device", "cpu"] and good(*args).out
    monkeypatch.chdir(Path(gpt.__file__).parent)
    assert gpt.command({}, "--sample") == "python gpt.py --sample"


# ---- to start from another model


def test_fine_tuning_starts_from_the_weights_and_keeps_the_vocabulary(trained, tmp_path):
    text = tmp_path / "cats.txt"
    text.write_text("the cat sat on a mat " * 50, encoding="utf-8")
    done = good("--init_from", trained / "out/best.pt", "--data", text, "--out", tmp_path / "new",
                *"--max_iters 0 --eval_iters 2 --max_new_tokens 2 --device cpu".split())
    before, after = checkpoint(trained / "out/best.pt"), checkpoint(tmp_path / "new/best.pt")
    assert after["chars"] == before["chars"] and len(after["chars"]) > len(set("the cat sat on a mat"))
    assert all(torch.equal(after["model"][name], before["model"][name]) for name in before["model"])
    assert len(steps(done.out)) == 1 and after["config"]["n_embd"] == 16
    assert after["config"]["batch_size"] == gpt.SIZES["laptop"]["batch_size"]
    assert [row["step"] for row in checkpoint(tmp_path / "new/last.pt")["history"]] == [0]


def test_fine_tuning_on_characters_the_model_never_saw_names_them(trained, tmp_path):
    text = tmp_path / "other.txt"
    text.write_text("the cat sat on ~ zebras 漢 " * 50, encoding="utf-8")
    sentence = refusal(*tiny(tmp_path, data=text), "--init_from", trained / "out/best.pt")
    assert f"{text} has characters that the model never saw: 'bz~漢'; it knows '" in sentence


# ---- files that cannot be used


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


FOREIGN = {
    "an evil pickle":     lambda path: path.write_bytes(pickle.dumps(Evil(path.parent / "touched"), 2)),
    "an evil torch file": lambda path: torch.save({"model": Evil(path.parent / "touched")}, path),
    "an empty file":      lambda path: path.write_bytes(b""),
    "json":               lambda path: path.write_text(json.dumps({"model": 1}), encoding="utf-8"),
    "another dictionary": lambda path: torch.save({"epoch": 3, "net": {"weight": torch.zeros(3)}}, path),
    "bare weights":       lambda path: torch.save(new_model(gpt.Config(1, 1, 8, 8)).state_dict(), path),
    "a tensor":           lambda path: torch.save(torch.zeros(3), path),
    "a list":             lambda path: torch.save([1, 2], path),
    "a folder":           lambda path: path.mkdir(),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file_is_one_sentence_and_runs_nothing(tmp_path, kind):
    best, last = tmp_path / "best.pt", tmp_path / "last.pt"
    FOREIGN[kind](best), FOREIGN[kind](last)
    for path, flags in ((best, ["--sample"]), (last, ["--resume"]), (best, ["--init_from", best])):
        assert f"{path} is not a checkpoint of gpt.py, or it is damaged" in refusal(*flags, "--out", tmp_path)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
def test_a_truncated_checkpoint_is_one_sentence_naming_it(own, share):
    content = (own / "out/last.pt").read_bytes()
    (own / "out/last.pt").write_bytes(content[:int(share * len(content))])
    assert f"{own / 'out/last.pt'} is not a checkpoint of gpt.py" in refusal("--resume", "--out", own / "out")


ODD = [None, -1, 0.5, 10**30, "ab", [3], {}, {"step": "x"}, torch.zeros(2)]


@pytest.mark.parametrize("key", "chars config id step model optimizer random best history curve seconds text "
                                "sha256 checksum".split())
def test_a_checkpoint_that_was_edited_by_hand_is_one_sentence(own, key):
    path, state = own / "out/last.pt", checkpoint(own / "out/last.pt")
    variants = [{name: state[name] for name in state if name != key}] + [{**state, key: odd} for odd in ODD]
    if isinstance(state[key], dict):  # also one level below
        inner = list(state[key])[0]
        variants += [{**state, key: {**state[key], inner: odd}} for odd in ODD]
        variants += [{**state, key: {name: state[key][name] for name in state[key] if name != inner}}]
    for variant in variants:
        torch.save(variant, path)
        assert f"{path} is not a checkpoint of gpt.py, or it" in refusal(*NEXT, "--out", own / "out")


def half(tensor):
    return tensor[..., :tensor.shape[-1] // 2].clone()


@pytest.mark.parametrize("part, name, change", [
    ("optimizer", "exp_avg", half), ("optimizer", "exp_avg_sq", half), ("model", "lm_head.weight", half),
    ("optimizer", "exp_avg", torch.flatten), ("random", "cpu", half), ("random", "cpu", torch.Tensor.float)])
def test_tensors_of_another_shape_or_type_are_refused_before_torch_uses_them(own, part, name, change):
    path, state = own / "out/last.pt", checkpoint(own / "out/last.pt")
    tensors = state[part][0] if part == "optimizer" else state[part]
    tensors[name] = change(tensors[name])
    write(path, state)
    before = contents(own / "out")
    done = call(*NEXT, "--out", own / "out")
    assert done.code == 2 and "Traceback" not in done.err and steps(done.out) == []
    assert contents(own / "out") == before


class LongerBlock(gpt.Block):
    def __init__(self, config):
        super().__init__(config)
        self.extra = nn.Linear(config.n_embd, config.n_embd)


class RenamedModel(gpt.GPTLanguageModel):
    def __init__(self, config, vocab_size):
        super().__init__(config, vocab_size)
        self.head = self.lm_head
        del self.lm_head


@pytest.mark.parametrize("name, other, words", [
    ("Block", LongerBlock, r"Missing key\(s\) in state_dict: \"blocks.0.extra.weight\""),
    ("GPTLanguageModel", RenamedModel, r"Unexpected key\(s\) in state_dict: \"lm_head.weight\"")])
def test_who_changes_the_model_reads_what_differs_in_the_words_of_torch(own, monkeypatch, name, other, words):
    monkeypatch.setattr(gpt, name, other)
    with pytest.raises(UserError, match=words):
        gpt.load(own / "out/best.pt")
    for flags in (["--sample", "--out", own / "out"], [*NEXT, "--out", own / "out"]):
        done = call(*flags)
        assert done.code == 2 and re.search(words, done.err)
        assert "does not fit the model that gpt.py makes now" in done.err and "damaged" not in done.err


# ---- what is in them


def test_a_checkpoint_contains_plain_values_and_everything_that_it_takes(trained):
    last, best = checkpoint(trained / "out/last.pt"), checkpoint(trained / "out/best.pt")
    assert last["step"] == 20 and last["chars"] == "".join(sorted(set(small_text())))
    config = gpt.Flags(**last["config"])
    assert last["config"] == gpt.settings(config)
    assert set(last["model"]) == set(gpt.GPTLanguageModel(config, len(last["chars"])).state_dict())
    assert set(last) - set(best) == {*"optimizer random best history curve twenty seconds".split()}
    assert set(best) == {"text", "sha256", "chars", "config", "id", "step", "model", "checksum"}


class Wrapped(nn.Module):
    def __init__(self, model):
        super().__init__()
        self._orig_mod = self.module = model

    def forward(self, *args):
        return self._orig_mod(*args)

    def __len__(self):  # as in torch 2.13: do not ask whether it is true
        raise TypeError("GPTLanguageModel does not support len()")


def test_no_prefix_of_a_wrapper_reaches_a_file(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", Wrapped)
    good(*tiny(tmp_path, "--compile"))
    for name in ("best.pt", "last.pt"):
        one, two = (checkpoint(folder / "out" / name)["model"] for folder in (trained, tmp_path))
        assert list(one) == list(two) and all(torch.equal(one[key], two[key]) for key in one)


def test_load_gives_a_model_that_is_ready_to_generate_and_leaves_the_callers_random_numbers(trained):
    before = torch.get_rng_state()
    model, tokenizer = gpt.load(trained / "out/best.pt", "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training and tokenizer.chars == sorted(set(small_text()))
    idx = torch.tensor([tokenizer.encode("the cat")])
    text = tokenizer.decode(model.generate(idx, 30, temperature=0)[0].tolist())
    assert text.startswith("the cat") and len(text) == 37
    with pytest.raises(UserError, match="there is no"):
        gpt.load(trained / "out/other.pt")


def test_the_record_has_a_row_for_each_report(trained):
    table = record(trained)
    assert list(table[0]) == ["step", "train", "val", "learning_rate", "tokens", "seconds"]
    assert [int(row["step"]) for row in table] == [0, 10, 20]
    assert [int(row["tokens"]) for row in table] == [0, 10 * 4 * 8, 20 * 4 * 8]
    seconds = [float(row["seconds"]) for row in table]
    assert 0 <= seconds[0] < seconds[1] < seconds[2] < 60
    history = checkpoint(trained / "out/last.pt")["history"]
    assert [float(row["val"]) for row in table] == [row["val"] for row in history]
    assert b"\r" not in (trained / "out/loss.csv").read_bytes()


# ---- the best model


def measure(monkeypatch, *vals):
    """ let the reports find these validation losses, one after the other """
    measured = iter([{"train": 3.0 - i, "val": val} for i, val in enumerate(vals)])
    monkeypatch.setattr(gpt, "estimate_loss", lambda *args: next(measured))


def test_best_is_the_first_lowest_validation_loss_and_a_resumed_run_remembers_it(tmp_path, monkeypatch):
    measure(monkeypatch, 3.0, 1.5, 2.5, 1.5, 1.7)  # the training loss falls all the time
    done = good(*tiny(tmp_path))
    assert checkpoint(tmp_path / "out/last.pt")["step"] == 20
    assert "best:   val loss 1.5000 at step 10; over the whole validation text" in done.out
    done = good(*NEXT, "--out", tmp_path / "out")
    assert "notice" not in done.err and "best:   val loss 1.5000 at step 10; " in done.out
    assert checkpoint(tmp_path / "out/best.pt")["step"] == 10


def test_resume_beside_a_missing_or_a_foreign_best_says_so_and_makes_a_new_one(own, tmp_path):
    state = checkpoint(own / "out/best.pt")
    foreign = [None, {**state, "id": "of another"}, {**state, "step": 0}]  # 0: an older one of the same run
    for number, other in enumerate(foreign):
        out = Path(shutil.copytree(own / "out", tmp_path / f"out-{number}"))
        (out / "best.pt").unlink()
        if other:
            write(out / "best.pt", other)
        done = good(*NEXT, "--out", out)
        notice = f"notice: best.pt in {out} is not this run's best model; the next report makes a new one"
        assert done.err.count(notice) == 1
        best, last = checkpoint(out / "best.pt"), checkpoint(out / "last.pt")
        assert best["id"] == last["id"] and best["step"] == last["best"]["step"] >= 20
        assert f"at step {best['step']}; over the whole validation text" in done.out


@pytest.mark.parametrize("then", [2.8, 1.0])
def test_measuring_again_with_other_eval_iters_leaves_record_files_and_closing_line_in_agreement(
        tmp_path, monkeypatch, then):
    measure(monkeypatch, 3.0, 2.5, 2.0, then, 2.9)  # then: the report at step 20 again
    good(*tiny(tmp_path))
    done = good(*NEXT, "--out", tmp_path / "out", "--eval_iters", 5)
    best, last = checkpoint(tmp_path / "out/best.pt"), checkpoint(tmp_path / "out/last.pt")
    row = next(row for row in record(tmp_path) if int(row["step"]) == best["step"])
    assert last["best"]["step"] == best["step"] == 20 and last["best"]["val"] == float(row["val"]) == then
    assert f"best:   val loss {then:.4f} at step 20; " in done.out
    assert steps(done.out)[0].endswith(f"val loss {then:.4f}")


# ---- runs that meet


def test_a_second_run_moves_the_first_aside_and_says_where(tmp_path):
    flags, first = tiny(tmp_path, "--max_iters", 2), []
    for number in range(3):
        done = good(*flags, "--seed", number)
        first.append(contents(tmp_path / "out"))
        if number:
            aside = tmp_path / "out" / f"old-{number}"
            assert f"the earlier run in {tmp_path / 'out'} is now in {aside}" in done.err
            assert contents(aside) == first[number - 1]
    assert {"best.pt", "last.pt", "loss.csv"} <= set(first[0]) and first[0]["best.pt"] != first[1]["best.pt"]


def test_two_runs_at_once_in_a_folder_are_one_too_many_and_nothing_is_touched(own):
    before = contents(own / "out")
    with gpt.claimed(own / "out"):
        for flags in (tiny(own), [*NEXT, "--out", own / "out"]):
            assert f"another run is writing to {own / 'out'}" in refusal(*flags)
        assert contents(own / "out") == before
    good(*tiny(own))


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    sentence = refusal(*tiny(tmp_path), "--out", tmp_path / "file/out")
    assert f"cannot write to --out {tmp_path / 'file/out'}: " in sentence

"""
What is in a checkpoint, how a run continues from it to the digit, which flags count then, and what gpt.py
says of a file that it cannot use.
"""
import csv
import hashlib
import json
import os
import pickle
import re
import shlex
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from helpers import LIVELY, after_update, at_pass, call, checkpoint, contents, good, measured, new_model
from helpers import refusal, small_text, steps, tiny, with_losses
from torch.nn.modules.module import register_module_forward_pre_hook

import gpt
from data.errors import UserError
from data.files import locked

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


def test_resume_takes_everything_from_the_file_but_the_flags_that_are_given(own):
    used = {}

    def look(module, args):
        if isinstance(module, nn.Dropout):
            used["dropout"] = module.p

    given = "--weight_decay 0.3 --beta2 0.9 --learning_rate 0.5 --dropout 0.25".split()
    with after_update(lambda optimizer: used.update(optimizer.param_groups[0])):
        with register_module_forward_pre_hook(look):
            done = good(*NEXT, "--out", own / "out", *given)
    assert [used[name] for name in ("weight_decay", "betas", "lr", "dropout")] == [0.3, (0.9, 0.9), 0.5, 0.25]
    saved = checkpoint(own / "out/last.pt")
    assert steps(done.out)[-1].startswith("step 30: ") and saved["config"]["eval_iters"] == 2
    assert [str(saved["config"][flag[2:]]) for flag in given[::2]] == given[1::2]
    assert [row["learning_rate"] for row in saved["reports"]] == [3e-4, 3e-4, 0.5, 0.5]


@pytest.mark.parametrize("flags, more, notice", [
    ("--decay",       "",                     "at step 20 was 0.0e+00 and is now 1.0e-04"),
    ("--no-decay",    "--learning_rate 1e-3", "at step 20 was 3.0e-04 and is now 1.0e-03"),
    ("--no-decay",    "",                     None)])
def test_a_finished_run_that_is_continued_says_both_learning_rates_where_they_differ(
        tmp_path, flags, more, notice):
    good(*tiny(tmp_path, flags))
    done = good(*NEXT, "--out", tmp_path / "out", *more.split())
    if notice:
        assert done.err.count(f"notice: the learning rate {notice}\n") == 1
    else:
        assert "learning rate" not in done.err


def test_an_interrupted_run_that_is_continued_says_nothing_of_learning_rates(tmp_path):
    flags = tiny(tmp_path, *LIVELY)
    with at_pass(9, lambda: bytearray(2**62)):
        assert call(*flags).code == 1
    assert "learning rate" not in good(*flags, "--resume").err


def test_resume_remembers_the_time_of_the_earlier_part(own):
    path, state = own / "out/last.pt", checkpoint(own / "out/last.pt")
    assert record(own)[-1]["seconds"] <= str(state["seconds"])
    torch.save({**state, "seconds": 7200.0}, path)
    done = good(*NEXT, "--out", own / "out")
    assert re.search(r"^time:   2:00:\d\d; the best model writes:$", done.out, re.MULTILINE)
    assert 7200 < float(record(own)[-1]["seconds"]) < checkpoint(path)["seconds"] < 7260


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


def test_resume_finds_its_text_from_another_folder(tmp_path, monkeypatch):
    flags = tiny(tmp_path)
    monkeypatch.chdir(tmp_path)
    good(*flags, "--data", "words-0.txt")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(steps(good(*NEXT, "--out", tmp_path / "out").out)) == 2


def test_resume_takes_the_same_text_from_another_place(own):
    (own / "words-0.txt").rename(own / "moved.txt")
    good(*NEXT, "--out", own / "out", "--data", own / "moved.txt")


def test_the_printed_commands_are_quoted_and_work_from_the_folder_they_are_printed_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with at_pass(9, lambda: bytearray(2**62)):  # a MemoryError
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
    assert [row["step"] for row in checkpoint(tmp_path / "new/last.pt")["reports"]] == [0]


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


@pytest.mark.parametrize("name", "config model chars step".split())
def test_a_checkpoint_without_what_a_model_takes_is_one_sentence(own, name):
    path, state = own / "out/best.pt", checkpoint(own / "out/best.pt")
    del state[name]
    torch.save(state, path)
    sentence = refusal("--sample", "--out", own / "out")
    assert f"{path} is not a checkpoint of gpt.py, or it is damaged (KeyError: 'without {name}')" in sentence


@pytest.mark.parametrize("name", "tokens losses reports best random".split())
def test_a_last_without_what_a_continuation_takes_is_one_sentence(own, name):
    path, state = own / "out/last.pt", checkpoint(own / "out/last.pt")
    del state[name]
    torch.save(state, path)
    assert f"{path} is a model, not a run to continue; start from it with --init_from" in (
        refusal(*NEXT, "--out", own / "out"))


def half(tensor):
    return tensor[..., :tensor.shape[-1] // 2].clone()


@pytest.mark.parametrize("name, change", [
    ("exp_avg", half), ("exp_avg_sq", half), ("exp_avg", torch.flatten)])
def test_an_optimizer_of_other_weights_is_refused_before_torch_uses_it(own, name, change):
    path, state = own / "out/last.pt", checkpoint(own / "out/last.pt")
    moments = state["optimizer"]["token_embedding_table.weight"]
    moments[name] = change(moments[name])
    torch.save(state, path)
    before = contents(own / "out")
    done = call(*NEXT, "--out", own / "out")
    assert done.code == 2 and "the optimizer in last.pt has other weights" in done.err
    assert "Traceback" not in done.err and steps(done.out) == [] and contents(own / "out") == before


class FinalNormFirst(gpt.GPTLanguageModel):
    def __init__(self, config, vocab_size):
        super().__init__(config, vocab_size)
        self._modules = {"ln_f": self.ln_f, **self._modules}


class ValueBeforeQuery(gpt.Head):  # of the same shape, so that torch would notice nothing
    def __init__(self, config):
        super().__init__(config)
        self._modules = {name: self._modules[name] for name in "key value query dropout".split()}


@pytest.mark.parametrize("name, other", [("GPTLanguageModel", FinalNormFirst), ("Head", ValueBeforeQuery)])
def test_a_model_whose_weights_are_in_another_order_continues_the_run_to_the_digit(
        own, tmp_path, monkeypatch, name, other):
    shutil.copytree(own / "out", tmp_path / "same")
    expected = steps(good(*NEXT, "--out", tmp_path / "same").out)
    monkeypatch.setattr(gpt, name, other)
    good("--sample", "--out", own / "out", "--max_new_tokens", 2)
    assert steps(good(*NEXT, "--out", own / "out").out) == expected != []


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


def test_last_is_the_state_of_the_run_and_best_the_same_without_optimizer_and_random_numbers(trained):
    last, best = checkpoint(trained / "out/last.pt"), checkpoint(trained / "out/best.pt")
    assert list(last) == [field.name for field in fields(gpt.State)]
    assert set(last) - set(best) == {"optimizer", "random"} and set(best) <= set(last)
    config = gpt.Flags(**last["config"])
    assert last["config"] == gpt.settings(config)
    assert set(last["model"]) == set(gpt.GPTLanguageModel(config, len(last["chars"])).state_dict())
    assert last["chars"] == "".join(sorted(set(small_text())))
    digest = hashlib.sha256(bytes(last["chars"].index(ch) for ch in small_text())).hexdigest()
    assert last["text"] == {"name": str(trained / "words-0.txt"), "sha256": digest}
    assert (last["step"], last["tokens"], len(last["losses"])) == (20, 20 * 4 * 8, 20)
    assert [report["step"] for report in last["reports"]] == [0, 10, 20]
    assert last["best"] == best["best"] == min(last["reports"], key=lambda report: report["val"])
    assert best["step"] == best["best"]["step"]


def test_the_losses_in_a_checkpoint_are_those_of_every_training_step(tmp_path):
    trained_with = []

    def look(model, loss):
        if model.training:
            trained_with.append(loss.item())
        return loss

    with with_losses(look):
        good(*tiny(tmp_path, "--max_iters", 13))
        good(*tiny(tmp_path, "--resume"))
    assert checkpoint(tmp_path / "out/last.pt")["losses"].tolist() == trained_with and len(trained_with) == 20


@pytest.mark.parametrize("name, default", [
    ("init_std", 0.02), ("fused", True), ("beta2", 0.999), ("size", "auto")])
def test_a_setting_that_came_after_a_checkpoint_has_its_default(own, name, default):
    for file in ("best.pt", "last.pt"):
        state = checkpoint(own / "out" / file)
        del state["config"][name]
        torch.save(state, own / "out" / file)
    model, tokenizer = gpt.load(own / "out/best.pt", "cpu")
    good("--sample", "--out", own / "out", "--max_new_tokens", 2)
    good(*tiny(own, "--init_from", own / "out/best.pt", "--out", own / "new"))
    good(*NEXT, "--out", own / "out")
    assert checkpoint(own / "out/last.pt")["config"][name] == default


def test_a_setting_that_is_gone_is_left_out(own):
    path, state = own / "out/last.pt", checkpoint(own / "out/last.pt")
    state["config"]["min_lr"] = 1e-5
    torch.save(state, path)
    good(*NEXT, "--out", own / "out")
    assert "min_lr" not in checkpoint(path)["config"]


def test_a_checkpoint_of_the_second_edition_writes_and_is_a_start_but_is_no_run_to_continue(own):
    for file in ("best.pt", "last.pt"):
        state = checkpoint(own / "out" / file)
        old = {name: state[name] for name in "chars config step model".split()}
        old.update(text="words-0.txt", sha256=state["text"]["sha256"], id="0123", checksum="4567")
        if file == "last.pt":
            old.update({name: state[name] for name in "optimizer random best seconds".split()})
            old.update(history=state["reports"], curve=[], twenty=[])
        torch.save(old, own / "out" / file)
    good("--sample", "--out", own / "out", "--max_new_tokens", 2)
    good(*tiny(own, "--init_from", own / "out/best.pt", "--out", own / "new"))
    assert "last.pt is a model, not a run to continue" in refusal(*NEXT, "--out", own / "out")


def test_where_only_last_is_there_it_writes_scores_and_says_so(own):
    out = own / "out"
    (out / "best.pt").unlink()
    for task in (["--sample", "--max_new_tokens", 2], ["--score", own / "words-0.txt"]):
        done = good(*task, "--out", out)
        assert f"there is no {out / 'best.pt'}, so this is the model of {out / 'last.pt'}\n" in done.err
    (out / "last.pt").unlink()
    assert f"there is no {out / 'best.pt'}; train first" in refusal("--sample", "--out", out)


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
    reports = checkpoint(trained / "out/last.pt")["reports"]
    assert [float(row["val"]) for row in table] == [report["val"] for report in reports]
    assert b"\r" not in (trained / "out/loss.csv").read_bytes()


# ---- the best model


def test_best_is_the_first_lowest_validation_loss_and_a_resumed_run_remembers_it(tmp_path):
    with measured(3.0, 1.5, 2.5):  # the training loss falls all the time
        done = good(*tiny(tmp_path))
    assert checkpoint(tmp_path / "out/last.pt")["step"] == 20
    assert "best:   val loss 1.5000 at step 10; over the whole validation text" in done.out
    with measured(2.5, 1.5):
        done = good(*NEXT, "--out", tmp_path / "out")
    assert "notice" not in done.err and "best:   val loss 1.5000 at step 10; " in done.out
    assert checkpoint(tmp_path / "out/best.pt")["step"] == 10


def test_the_closing_score_and_text_are_those_of_the_best_model(tmp_path):
    with measured(3.0, 1.5, 2.5):
        done = good(*tiny(tmp_path, "--learning_rate", 0.03))
    model, tokenizer = gpt.load(tmp_path / "out/best.pt", "cpu")
    val = torch.tensor(tokenizer.encode(small_text()))[2700:]
    with torch.no_grad():  # each context on its own
        contexts = [val[None, at - at % 8:at + 1] for at in range(len(val) - 1)]
        logits = torch.stack([model(context)[0][0, -1] for context in contexts])
        expected = nn.functional.cross_entropy(logits, val[1:]).item()
    printed = float(re.search(r"over the whole validation text (\S+), which", done.out)[1])
    assert printed == pytest.approx(expected, abs=1e-4)
    write = "--sample --sample_seed 1337 --max_new_tokens 20 --init_from".split()
    best, last = (good(*write, tmp_path / "out" / name).out for name in ("best.pt", "last.pt"))
    assert f"the best model writes:\n{best}\nfiles:" in done.out and best != last


def test_a_finished_run_that_is_continued_keeps_the_best_model_of_its_last_report(tmp_path):
    """ that report is not made again: 17 is no multiple of the interval """
    with measured(3.0, 2.5, 1.5):
        good(*tiny(tmp_path, "--max_iters", 17))
    with measured(2.0, 1.9):
        done = good(*NEXT, "--out", tmp_path / "out")
    assert "notice" not in done.err and "best:   val loss 1.5000 at step 17; " in done.out
    assert checkpoint(tmp_path / "out/best.pt")["step"] == 17


def test_resume_beside_a_missing_or_a_foreign_best_says_so_and_makes_a_new_one(own, tmp_path):
    good(*tiny(own, "--out", own / "other"))
    good(*tiny(own, "--max_iters", 0, "--out", own / "early"))
    older = checkpoint(own / "out/best.pt")
    older.update(step=0, best=older["reports"][0], reports=older["reports"][:1])
    torch.save(older, own / "older.pt")
    (own / "damaged.pt").write_bytes(b"PK")
    for number, other in enumerate([None, "other/best.pt", "early/best.pt", "older.pt", "damaged.pt"]):
        out = Path(shutil.copytree(own / "out", tmp_path / f"out-{number}"))
        (out / "best.pt").unlink()
        if other:
            shutil.copy(own / other, out / "best.pt")
        done = good(*NEXT, "--out", out)
        notice = f"notice: {out / 'best.pt'} is not this run's best model; the next report makes a new one"
        assert done.err.count(notice) == 1
        best, last = checkpoint(out / "best.pt"), checkpoint(out / "last.pt")
        assert best["best"] == last["best"] and best["step"] == last["best"]["step"] >= 20
        assert f"at step {best['step']}; over the whole validation text" in done.out


def test_a_best_that_is_newer_than_last_is_of_this_run_and_stays_until_there_is_a_better_one(tmp_path):
    flags, out = tiny(tmp_path), tmp_path / "out"
    with measured(3.0, 2.5), at_pass(9, lambda: bytearray(2**62)):
        assert call(*flags).code == 1
    earlier = (out / "last.pt").read_bytes()
    with measured(2.5, 1.5):
        good(*flags, "--resume")
    for again in (1.7, 1.4):  # then the report at step 20 is made again
        (out / "last.pt").write_bytes(earlier)
        with measured(2.9), at_pass(12, lambda: bytearray(2**62)):
            done = call(*flags, "--resume")  # fails at step 13
        assert "not this run's" not in done.err and checkpoint(out / "best.pt")["step"] == 20
        with measured(again):
            done = good(*flags, "--resume")
        assert "not this run's" not in done.err
        assert f"best:   val loss {again:.4f} at step 20; " in done.out


@pytest.mark.parametrize("then", [2.8, 1.0])
def test_measuring_again_with_other_eval_iters_leaves_record_files_and_closing_line_in_agreement(
        tmp_path, then):
    with measured(3.0, 2.5, 2.0):
        good(*tiny(tmp_path))
    with measured(then, 2.9, eval_iters=5):  # then: the report at step 20 again
        done = good(*NEXT, "--out", tmp_path / "out", "--eval_iters", 5)
    best, last = checkpoint(tmp_path / "out/best.pt"), checkpoint(tmp_path / "out/last.pt")
    row = next(row for row in record(tmp_path) if int(row["step"]) == best["step"])
    assert last["best"]["step"] == best["step"] == 20
    assert last["best"]["val"] == float(row["val"]) == pytest.approx(then)
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
    with locked(own / "out"):
        for flags in (tiny(own), [*NEXT, "--out", own / "out"]):
            assert f"another run is writing to {own / 'out'}" in refusal(*flags)
        assert contents(own / "out") == before
    good(*tiny(own))


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    sentence = refusal(*tiny(tmp_path), "--out", tmp_path / "file/out")
    assert f"cannot write to --out {tmp_path / 'file/out'}: " in sentence

"""
The exercises of the README, done: a copy of the project is changed as a learner would change it, and shows
what the README says one sees. What trains for more than a moment is marked slow.
"""
import ast
import re
import shutil
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import ROOT, call, good, run, steps, tiny
from torch.nn import functional as F

import gpt

MASK = ('wei = wei.masked_fill(tril == 0, float("-inf"))', "wei = wei")
SCALE = (" * k.shape[-1]**-0.5", "")
RESIDUAL = ("x = x + self.sa(self.ln1(x))", "x = self.sa(self.ln1(x))")
POSITIONS = ("x = tok_emb + pos_emb", "x = tok_emb")
DIFFER = ("notice: Head.forward and all_at_once no longer compute the same; all_at_once runs, and --no-fused "
          "runs Head.forward\n")
CHAPTERS = "tests/test_05_attention.py tests/test_06_blocks.py tests/test_07_model.py".split()


def changed(source, old, new):
    assert source.count(old) == 1
    return source.replace(old, new)


def edited(*changes):
    """ gpt.py after changes, (old, new) each, as a module """
    module, source = ModuleType("edited"), (ROOT / "gpt.py").read_text(encoding="utf-8")
    for change in changes:
        source = changed(source, *change)
    exec(compile(source, "edited", "exec"), vars(module))
    return module


class Copy:
    """ a copy of the project to change """

    def __init__(self, folder):
        self.folder = folder
        for name in ["gpt.py", "bigram.py", "pyproject.toml", "README.md", "input.txt"]:
            shutil.copy(ROOT / name, folder)
        for name in ["data", "tests"]:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        self.gpt = folder / "gpt.py"
        self.text = (folder / "input.txt").read_text(encoding="utf-8")

    def change(self, old, new):
        self.gpt.write_text(changed(self.gpt.read_text(encoding="utf-8"), old, new), encoding="utf-8")

    def rewrite(self, name, body):
        """ another body for a function of gpt.py """
        lines = self.gpt.read_text(encoding="utf-8").splitlines(keepends=True)
        nodes = ast.walk(ast.parse("".join(lines)))
        function = next(node for node in nodes if getattr(node, "name", "") == name)
        lines[function.body[0].lineno - 1:function.end_lineno] = [f"        {line}\n" for line in body]
        self.gpt.write_text("".join(lines), encoding="utf-8")

    def failures(self, *paths):
        """ the tests that fail now """
        done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *paths, root=self.folder, command=(),
                   within=300)
        assert done.code in (0, 1), done.out
        return set(re.findall(r"^FAILED [^:]+::(\w+)", done.out, re.MULTILINE))

    def train(self, *flags):
        """ a run: its validation loss at the end and over the whole text, its notices, what it writes """
        done = run(*flags, root=self.folder, within=300)
        assert done.code == 0, done.err
        last = re.search(r"val loss (\S+)", steps(done.out)[-1])
        whole = re.search(r"over the whole validation text (\S+),", done.out)
        text = done.out.partition("writes:\n")[2].partition("\nfiles:")[0]
        return SimpleNamespace(val=float(last[1]), whole=float(whole[1]), err=done.err, text=text)

    def ask(self, *flags, code=0):
        """ what gpt.py answers, on standard output, or on standard error if it refuses """
        done = run("gpt.py", *flags, root=self.folder, command=())
        assert done.code == code, done.err
        return done.err if code else done.out

    def python(self, lines):
        """ lines that a learner types into Python, in the folder of the copy """
        done = run("-c", lines, root=self.folder, command=())
        assert done.code == 0, done.err


@pytest.fixture
def copy(shakespeare, tmp_path):
    return Copy(tmp_path)


# ---- 1. all heads at once

BY_HAND = """
B, T, C = x.shape
q = torch.stack([h.query(x) for h in self.heads], dim=1)  # (B, nh, T, hs)
k = torch.stack([h.key(x) for h in self.heads], dim=1)
v = torch.stack([h.value(x) for h in self.heads], dim=1)
wei = q @ k.transpose(-2, -1) * k.shape[-1]**-0.5  # (B, nh, T, hs) @ (B, nh, hs, T) -> (B, nh, T, T)
tril = torch.tril(torch.ones(T, T, device=x.device))
wei = wei.masked_fill(tril == 0, float("-inf"))
wei = F.softmax(wei, dim=-1)
wei = self.heads[0].dropout(wei)
out = wei @ v  # (B, nh, T, T) @ (B, nh, T, hs) -> (B, nh, T, hs)
return out.transpose(1, 2).reshape(B, T, -1)
""".strip().split("\n")
SAME = "test_all_heads_at_once_give_what_each_head_gives_and_the_same_gradients"
MISTAKES = {
    "nothing": (["pass"], SAME),
    "no mask": ([line for line in BY_HAND if "masked_fill" not in line], SAME),
    "no scale": ([line.replace(" * k.shape[-1]**-0.5", "") for line in BY_HAND], SAME),
    "scaled by all channels": ([line.replace("k.shape[-1]**-0.5", "C**-0.5") for line in BY_HAND], SAME),
    "heads in a wrong order": ([line.replace(".transpose(1, 2)", "") for line in BY_HAND], SAME),
    "no dropout": ([line for line in BY_HAND if "dropout" not in line],
                   "test_attention_drops_affinities_in_training_only"),
}


@pytest.mark.slow
def test_all_heads_with_matrix_products_are_the_same_function(copy):
    before = copy.train(*tiny(copy.folder))
    copy.rewrite("all_at_once", BY_HAND)
    assert "scaled_dot_product_attention" not in copy.gpt.read_text(encoding="utf-8")
    assert copy.failures("tests/test_06_blocks.py") == set()
    after = copy.train(*tiny(copy.folder))
    assert after.whole == pytest.approx(before.whole, abs=2e-4) and DIFFER not in after.err


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_tests_of_the_sixth_chapter_notice_all_heads_that_are_something_else(mistake, copy):
    body, test = MISTAKES[mistake]
    copy.rewrite("all_at_once", body)
    assert test in copy.failures("tests/test_06_blocks.py")


# ---- 2. break it


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """ the first measurement of a run with --no-fused, and of both ways without the mask in Head.forward """
    flags = tiny(tmp_path_factory.mktemp("runs"), "--max_iters", 0, "--init_std", 0.5)
    broken = edited(MASK).main
    return {"right": good(*flags, "--no-fused"), "broken": good(*flags, "--no-fused", main=broken),
            "broken, fused": good(*flags, main=broken)}


def test_without_the_mask_a_run_says_that_the_head_that_is_read_is_not_what_runs(runs):
    assert {name: done.err.count(DIFFER) for name, done in runs.items()} == {
        "right": 0, "broken": 0, "broken, fused": 1}


def test_the_head_that_is_read_runs_with_no_fused_alone(runs):
    assert steps(runs["broken, fused"].out) == steps(runs["right"].out)
    assert steps(runs["broken"].out) != steps(runs["right"].out)


def test_the_header_of_a_run_says_which_way_runs(runs):
    assert "\nheads:  all at once; --no-fused runs Head.forward\n" in runs["broken, fused"].out
    assert "\nheads:  one by one, Head.forward\n" in runs["right"].out


SMALL = ("--n_layer 2 --n_embd 64 --block_size 32 --max_iters 500 --eval_iters 20 --no-taste --device cpu "
         "--max_new_tokens 200").split()
HEARS = "test_each_position_hears_all_of_its_past_nothing_of_its_future_and_no_other_row"
BREAKS = {  # what is left out: the tests that fail, and between which losses the run ends
    "nothing": ((), set(), 2.0, 2.2),
    "mask": (MASK, {HEARS, "test_each_row_of_affinities_sums_to_one_and_the_future_gets_nothing"}, 0, 0.5),
    "scale": (SCALE, {"test_the_head_is_the_formula_scaled_by_the_head_size"}, 2.0, 2.6),
    "residual": (RESIDUAL, {"test_a_block_is_the_identity_while_its_branches_say_nothing"}, 2.4, 3.5),
    "positions": (POSITIONS, {"test_a_model_that_is_put_together_by_hand_is_the_model"}, 2.2, 2.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("left_out", BREAKS)
def test_what_is_left_out_fails_a_test_and_shows_in_the_loss(left_out, copy):
    change, tests, least, most = BREAKS[left_out]
    if change:
        copy.change(*change)
    failures = copy.failures(*CHAPTERS)
    assert tests <= failures and bool(failures) == bool(change)
    assert least < copy.train("--no-fused", *SMALL).whole < most


@pytest.mark.slow
def test_without_the_mask_the_model_reads_the_future_and_cannot_do_without(copy):
    copy.change(*MASK)
    seen = copy.train("--no-fused", *SMALL)
    assert seen.val < 0.5  # far below what is possible for one who does not know what comes next

    model, tokenizer = edited(MASK).load(copy.folder / "out/best.pt", "cpu")
    text = torch.tensor(tokenizer.encode(copy.text[-32_001:]))
    logits, _ = model(text[:-1].view(-1, 32))
    nothing_ahead = F.cross_entropy(logits[:, -1], text[32::32])  # the last position, as in writing
    assert nothing_ahead > 2.3  # the untouched model is better over all positions, the first ones included


# ---- 3. addition as a text

SUMS = r"""
import random
sums = [f"{a}+{b}={str(a + b)[::-1]}" for a in range(100) for b in range(100)]
random.shuffle(sums)
open("sums.txt", "w").write("\n".join(sums))
"""
ASK = ["--stop", r"\n", "--temperature", 0, "--out", "sums"]


@pytest.mark.slow
def test_sums_are_learned_and_asked_behind_a_newline_without_which_a_short_one_is_ambiguous(copy):
    lines = SUMS.replace("range(100)", "range(30)")
    copy.python(lines.replace("random.shuffle", "random.seed(0)\nrandom.shuffle"))
    sums = (copy.folder / "sums.txt").read_text().split("\n")
    assert len(sums) == 900 and "12+9=12" in sums and "7+8=51" in sums
    copy.train("--data", "sums.txt", "--out", "sums", "--n_layer", 2, "--n_embd", 64, "--block_size", 16,
               "--batch_size", 32, "--max_iters", 1000, "--no-taste", "--device", "cpu")
    assert copy.ask("--prompt", r"\n12+19=", *ASK) == "\n12+19=13\n"
    assert copy.ask("--prompt", r"\n-5+3=", *ASK, code=2).endswith(": '-'; it knows '\\n+0123456789='\n")

    model, tokenizer = gpt.load(copy.folder / "sums/best.pt", "cpu")

    def is_right(line, prefix):
        asked, result = f"{prefix}{line.partition('=')[0]}=", line.partition("=")[2]
        idx = model.generate(torch.tensor([tokenizer.encode(asked)]), 4, temperature=0)
        return tokenizer.decode(idx[0].tolist())[len(asked):].split("\n")[0] == result

    unseen, short = sums[810:], [line for line in sums if line.index("=") == 3]
    assert sum(is_right(line, "\n") for line in unseen) > 0.8 * len(unseen)
    assert sum(is_right(line, "\n") for line in short) > sum(is_right(line, "") for line in short) + 20


# ---- 4. another corpus

LARGE = """
from pydoc_data.topics import topics
shakespeare = open("input.txt").read()
open("large.txt", "w", encoding="utf-8").write("".join(sorted(set(shakespeare))) + "".join(topics.values()))
open("tail.txt", "w").write(shakespeare[int(0.9 * len(shakespeare)):])
"""


@pytest.mark.slow
def test_two_ways_to_shakespeare_are_compared_by_the_score_of_his_last_tenth(copy):
    copy.python(LARGE)
    few = [*SMALL, "--max_iters", 200]
    alone = copy.train(*few, "--out", "alone")
    copy.train(*few, "--out", "large", "--data", "large.txt")
    tuned = copy.train(*few, "--out", "tuned", "--init_from", "large/best.pt")
    scores = {name: float(re.search(r" (\S+) nats", copy.ask("--score", "tail.txt", "--out", name))[1])
              for name in ("alone", "large", "tuned")}
    assert scores["alone"] == pytest.approx(alone.whole, abs=2e-4)
    assert scores["tuned"] == pytest.approx(tuned.whole, abs=2e-4)
    assert scores["tuned"] < scores["alone"] - 0.05 and scores["large"] > scores["alone"]


# ---- 5. a change from a paper

PAPERS = {
    "GELU": [("nn.ReLU()", "nn.GELU()")],
    "tied embeddings": [("        if config.init_std:  # as", """
        self.lm_head.weight = self.token_embedding_table.weight
        if config.init_std:  # as""")],
    "RMSNorm": [("self.ln1 = nn.LayerNorm(", "self.ln1 = nn.RMSNorm("),
                ("self.ln2 = nn.LayerNorm(", "self.ln2 = nn.RMSNorm("),
                ("self.ln_f = nn.LayerNorm(", "self.ln_f = nn.RMSNorm(")],
}


@pytest.mark.slow
@pytest.mark.parametrize("paper", PAPERS)
def test_a_change_from_a_paper_trains_continues_and_writes(paper, tmp_path):
    main, before = edited(*PAPERS[paper]).main, tmp_path / "before"
    untouched = good(*tiny(tmp_path, "--out", before))
    trained = good(*tiny(tmp_path), main=main)
    assert steps(trained.out) != steps(untouched.out) and DIFFER not in trained.err
    assert steps(good("--resume", "--out", tmp_path / "out", "--max_iters", 30, main=main).out)
    assert good("--prompt", "the", "--out", tmp_path / "out", main=main).out.startswith("the")
    if paper == "RMSNorm":  # which has other weights than those of before
        refused = call("--sample", "--out", before, main=main)
        assert refused.code == 2 and "does not fit the model that gpt.py makes now" in refused.err


@pytest.mark.slow
def test_the_sixth_chapter_notices_another_activation_than_the_lectures(copy):
    copy.change(*PAPERS["GELU"][0])
    assert copy.failures("tests/test_06_blocks.py") == {
        "test_feed_forward_is_four_times_as_wide_inside_with_a_relu_for_each_position_alone"}


# ---- what the README says


@pytest.mark.parametrize("lines", [SUMS, LARGE])
def test_the_lines_of_python_are_those_of_the_readme(lines):
    readme = [line.strip() for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()]
    assert [line for line in lines.strip().splitlines() if line not in readme] == []

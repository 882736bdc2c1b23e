""" The pictures: real ones where matplotlib is installed; without it a run is the same and says nothing. """
import copy
import math
import struct
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import WIDE, call, checkpoint, good, new_model, refusal, run, small_text, steps, tiny

import data.pictures
import gpt
from data.errors import UserError
from data.pictures import attention_maps

REPORTS = [dict(zip(["step", "train", "val"], row)) for row in [(0, 3.3, 3.2), (10, 2.5, 2.6), (20, 2, 2.7)]]


@pytest.fixture(scope="module", autouse=True)
def without_pictures():
    """ here they are drawn, unlike in other files """


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """ the folder of a finished run with its picture, and what it printed """
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("drawn")
    return folder / "out", good(*tiny(folder))


@pytest.fixture
def figures(monkeypatch):
    """ the figures that would be saved """
    pytest.importorskip("matplotlib")
    seen = []
    monkeypatch.setattr(data.pictures, "save_figure", lambda figure, path: seen.append(figure))
    return seen


def size(path):
    """ width and height of a real PNG, and the share of its pixels that are not white """
    content, image = path.read_bytes(), pytest.importorskip("matplotlib.image").imread(path)
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content.endswith(b"IEND\xaeB`\x82")
    return *struct.unpack(">II", content[16:24]), float((image[..., :3].min(axis=-1) < 0.9).mean())


def lines(axes):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def labels(axes):
    return "".join(label.get_text() for label in axes.get_yticklabels())


def test_a_run_leaves_a_picture_of_its_losses_and_attention_one_of_the_heads(drawn):
    out, done = drawn
    width, height, ink = size(out / "loss.png")
    assert (width, height) == (1000, 400) and 0.005 < ink < 0.5 and not list(out.glob("*.part"))
    assert done.err.endswith(f"picture: {out / 'loss.png'}\n") and "picture" not in done.out
    done = good("--attention", "the cat", "--out", out, "--device", "cpu")
    assert done.out == "" and done.err == f"picture: {out / 'attention.png'}\n"
    width, height, ink = size(out / "attention.png")
    assert 0.8 < width / height < 1.25 and 400 <= width <= 2000 and ink > 0.02


def test_both_panels_show_both_losses_the_training_steps_the_best_report_and_guessing(figures, tmp_path):
    losses = [3.0] * 10 + [2.8] * 10 + [2.2] * 20 + [1.0] * 19  # the last nineteen are not twenty yet
    data.pictures.draw_loss(losses, REPORTS, REPORTS[1], 27, tmp_path / "loss.png")
    for axes in figures[0].axes:
        assert lines(axes).pop("guessing: ln(27)")[1] == pytest.approx([math.log(27)] * 2)
        assert lines(axes).items() >= {
            "train": ([0, 10, 20], [3.3, 2.5, 2]), "val": ([0, 10, 20], [3.2, 2.6, 2.7]),
            "best: 2.6000 at step 10": ([10], [2.6])}.items()
        assert lines(axes)["training steps"] == ([19, 39], pytest.approx([2.9, 2.2]))
    everything, later = (axes.get_ylim() for axes in figures[0].axes)
    assert everything[0] < 2 < 3.3 < everything[1] and later[0] < 2 < 2.7 < later[1] < 3.2


def test_the_training_steps_are_means_of_twenty_losses_also_after_a_resume(figures, tmp_path):
    good(*tiny(tmp_path, "--max_iters", 50))
    good(*tiny(tmp_path, "--max_iters", 60), "--resume")
    losses = checkpoint(tmp_path / "out/last.pt")["losses"]
    places, means = lines(figures[-1].axes[0])["training steps"]
    assert len(losses) == 60 and places == [19, 39, 59]
    assert means == pytest.approx(losses.view(3, 20).mean(1).tolist())


def test_what_is_drawn_is_the_attention_that_the_model_computes(drawn, figures, tmp_path):
    maps = attention_maps(*gpt.load(drawn[0] / "best.pt", "cpu"), "that dog")
    data.pictures.draw_attention(maps, "that dog", tmp_path / "attention.png")
    panels = figures[0].axes
    assert [axes.get_title() for axes in panels] == [f"layer {i}, head {j}" for i in (1, 2) for j in (1, 2)]
    assert labels(panels[0]) == "that␣dog"
    for axes in panels:
        wei = axes.images[0].get_array().tolist()
        assert [sum(row) for row in wei] == pytest.approx([1] * 8, abs=1e-5)
        assert all(wei[row][column] == 0 for row in range(8) for column in range(row + 1, 8))
        assert wei[7][7] not in (0, 1) and wei[7][0] != wei[7][1]


def test_each_map_is_the_softmax_of_that_heads_affinities():
    model = new_model(WIDE).eval()
    idx = torch.randint(10, (1, 7))
    maps = torch.tensor(attention_maps(model, SimpleNamespace(encode=lambda text: idx[0].tolist()), "any"))
    x = model.token_embedding_table(idx) + model.position_embedding_table.weight[:7]
    for layer, block in enumerate(model.blocks):
        for number, head in enumerate(block.sa.heads):
            normed = block.ln1(x)
            affinities = head.query(normed)[0] @ head.key(normed)[0].T / WIDE.head_size**0.5  # (T, T)
            for t in range(7):
                wei = affinities[t, :t + 1].softmax(0)
                assert torch.allclose(maps[layer, number, t, :t + 1], wei, atol=1e-5)
        x = block(x)


def test_a_picture_leaves_the_model_as_it_was_also_after_an_error():
    model = new_model(WIDE).train()
    model.blocks[1].sa.fused = False  # as somebody may have set it
    before = {name: copy.copy(vars(module)) for name, module in model.named_modules()}
    hooks = {name: len(module._forward_hooks) for name, module in model.named_modules()}
    tokenizer = gpt.Tokenizer("abcdefghij")
    attention_maps(model, tokenizer, "abc")
    with pytest.raises(KeyError):
        attention_maps(model, tokenizer, "xyz")
    handle = model.ln_f.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        attention_maps(model, tokenizer, "abc")
    handle.remove()
    assert {name: vars(module) for name, module in model.named_modules()} == before
    assert hooks == {name: len(module._forward_hooks) for name, module in model.named_modules()}
    assert len(attention_maps(model, tokenizer, "abc")[0]) == 4  # and nothing of before is counted again


def test_a_model_without_heads_is_one_sentence():
    model = new_model(WIDE)
    model.blocks[1].sa.heads = torch.nn.ModuleList()
    for other in (model, new_model(WIDE).blocks, torch.nn.Linear(1, 1)):
        with pytest.raises(UserError, match="^this model has no Head of which the attention could be drawn$"):
            attention_maps(other, gpt.Tokenizer("abc"), "abc")


def test_of_a_long_text_at_most_the_last_40_characters_are_drawn_and_of_none_nothing(tmp_path, figures):
    good(*tiny(tmp_path, "--block_size", 64))
    text, flags = small_text(600, seed=4), ("--out", tmp_path / "out", "--device", "cpu")
    assert good("--attention", text, *flags).err == "notice: the picture shows the last 40 characters\n"
    assert labels(figures[-1].axes[0]) == text[-40:].replace(" ", "␣").replace("\n", "↵")
    assert max(figures[-1].get_size_inches() * 100) < 1500
    assert refusal("--attention", "", *flags) == "--attention takes a text of one character or more"


def test_glyphs_that_the_font_lacks_are_one_sentence(tmp_path, recwarn):
    pytest.importorskip("matplotlib")
    (tmp_path / "text.txt").write_text("你好世界，。的一是" * 100, encoding="utf-8")
    good(*tiny(tmp_path, data=tmp_path / "text.txt"))
    done = good("--attention", "你好世界", "--out", tmp_path / "out", "--device", "cpu")
    assert done.err.count("\n") == 2 and done.err.startswith("notice: the font of the picture lacks some ")
    assert not [str(warning) for warning in recwarn]


def test_without_matplotlib_a_run_says_nothing_and_attention_is_an_error(drawn, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    done, out = good(*tiny(tmp_path)), tmp_path / "out"
    assert steps(done.out) == steps(drawn[1].out) and "picture" not in done.err and "plot" not in done.err
    assert sorted(path.name for path in out.iterdir()) == [".lock", "best.pt", "last.pt", "loss.csv"]
    one, two = (checkpoint(folder / "best.pt")["model"] for folder in (drawn[0], out))
    assert all(one[name].equal(two[name]) for name in one)
    sentence = refusal("--attention", "the cat", "--out", out, "--device", "cpu")
    assert sentence.startswith("--attention needs matplotlib (") and sentence.endswith("[plot]\"")


@pytest.mark.parametrize("error", [ImportError("another numpy"), ValueError("no latex")])
def test_any_failure_of_matplotlib_is_one_sentence_and_the_last(trained, tmp_path, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", SimpleNamespace(Figure=fail))
    done = good(*tiny(tmp_path))
    assert done.err.endswith(f"notice: no loss.png ({type(error).__name__}: {error})\n")
    assert "the best model writes:" in done.out and "\nwrite:  " in done.out
    done = call("--attention", "the cat", "--out", trained / "out", "--device", "cpu")
    assert done.code in (1, 2) and str(error) in done.err.splitlines()[-1]


@pytest.mark.slow
def test_a_backend_that_does_not_exist_costs_at_most_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    done = run(*tiny(tmp_path), env={"MPLBACKEND": "nonsense"})
    assert done.code == 0 and "Traceback" not in done.err and "\nwrite:  " in done.out
    assert done.err.splitlines()[-1].startswith(("picture: ", "notice: no loss.png ("))

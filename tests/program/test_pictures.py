"""The pictures: real ones where matplotlib is installed; else one sentence and an unchanged run."""

import struct
import sys

import pytest
from helpers import call, checkpoint, run, steps, tiny

import gpt


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("drawn")
    done = call(*tiny(folder), plot=True)
    assert done.code == 0, done.err
    return folder, done


def size(path):
    """Width and height of a real PNG, which begins and ends as such."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content[12:16] == b"IHDR"
    assert content.endswith(b"IEND\xaeB`\x82") and len(content) > 5000
    return struct.unpack(">II", content[16:24])


def ink(path):
    """The share of pixels that are not white."""
    image = pytest.importorskip("matplotlib.image").imread(path)
    return float((image[..., :3].min(axis=-1) < 0.9).mean())


def test_a_run_leaves_a_picture_of_its_losses(drawn):
    folder, done = drawn
    width, height = size(folder / "out/loss.png")
    assert 700 <= width <= 1400 and 400 <= height <= 900
    assert 0.005 < ink(folder / "out/loss.png") < 0.5
    assert f"picture: {folder / 'out/loss.png'}" in done.err and ".png" not in done.out
    assert not list((folder / "out").glob("*.part"))


def test_the_picture_shows_both_losses_the_best_step_and_what_guessing_scores(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    seen = []
    monkeypatch.setattr(gpt, "save_figure", lambda figure, path: seen.append(figure))
    history = [
        dict(step=step, train=train, val=val)
        for step, train, val in [(0, 3.3, 3.2), (10, 2.5, 2.6), (20, 2.0, 2.7)]
    ]
    gpt.draw_loss(history, history[1], 27, tmp_path / "loss.png")
    axes = seen[0].axes[0]
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert drawn["train"] == ([0, 10, 20], [3.3, 2.5, 2.0]) and drawn["val"] == ([0, 10, 20], [3.2, 2.6, 2.7])
    assert drawn["best: 2.6000 at step 10"] == ([10], [2.6])
    assert drawn["guessing: ln(27)"][1] == pytest.approx([3.2958, 3.2958], abs=1e-4)


def test_attention_is_drawn_with_a_panel_for_each_layer_and_head(drawn):
    folder, _ = drawn
    done = call("--attention", "the cat", "--out", folder / "out", "--device", "cpu", plot=True)
    assert done.code == 0 and done.out == "" and f"picture: {folder / 'out/attention.png'}" in done.err
    width, height = size(folder / "out/attention.png")
    assert 0.8 < width / height < 1.25 and 400 <= width <= 2000
    assert ink(folder / "out/attention.png") > 0.02


def test_what_is_drawn_is_the_attention_the_model_computes(drawn, monkeypatch, tmp_path):
    folder, _ = drawn
    model, tokenizer = gpt.load(folder / "out/best.pt", "cpu")
    seen = []
    monkeypatch.setattr(gpt, "save_figure", lambda figure, path: seen.append(figure))
    gpt.draw_attention(model, tokenizer, "that dog", tmp_path / "attention.png")
    panels = seen[0].axes
    assert [axes.get_title() for axes in panels] == [f"layer {i}, head {j}" for i in (1, 2) for j in (1, 2)]
    for axes in panels:
        wei = [[float(share) for share in row] for row in axes.images[0].get_array()]
        assert [sum(row) for row in wei] == pytest.approx([1] * 8, abs=1e-5)
        assert all(wei[row][column] == 0 for row in range(8) for column in range(row + 1, 8))
        assert wei[7][7] not in (0, 1) and wei[7][0] != wei[7][1]
        assert [label.get_text() for label in axes.get_yticklabels()] == list("that␣dog")


def test_attention_takes_a_text_longer_than_the_context_and_refuses_none(drawn):
    folder, _ = drawn
    flags = ("--out", folder / "out", "--device", "cpu")
    assert call("--attention", "the cat sat on a mat", *flags, plot=True).code == 0
    done = call("--attention", "", *flags, plot=True)
    assert done.code == 2 and "--attention takes a text of one character or more" in done.err


def test_attention_to_characters_the_model_never_saw_is_one_sentence(drawn):
    folder, _ = drawn
    done = call("--attention", "the Qat", "--out", folder / "out", plot=True)
    assert done.code == 2 and "the model never saw 'Q'; take only its characters" in done.err
    assert len(done.err.strip().splitlines()) == 2


def test_without_matplotlib_there_is_one_sentence_and_nothing_else_changes(drawn, tmp_path):
    folder, with_picture = drawn
    done = call(*tiny(tmp_path))
    assert done.code == 0
    assert done.err == 'no picture, since matplotlib is not installed: pip install -e ".[plot]"\n'
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        ".lock",
        "best.pt",
        "last.pt",
        "loss.csv",
    ]
    assert steps(done.out) == steps(with_picture.out) and len(steps(done.out)) == 3
    one, two = (checkpoint(path / "out/best.pt")["model"] for path in (folder, tmp_path))
    assert all(one[key].equal(two[key]) for key in one)
    done = call("--attention", "the cat", "--out", tmp_path / "out", "--device", "cpu")
    assert done.code == 0 and "no picture, since matplotlib is not installed" in done.err
    assert not (tmp_path / "out/attention.png").exists()


@pytest.mark.slow
def test_a_process_without_matplotlib_ends_well(tmp_path):
    done = run(tmp_path, *tiny(tmp_path, "--max_iters", "1"))
    assert done.code == 0 and "no picture, since matplotlib is not installed" in done.err


def test_importing_and_sampling_need_no_matplotlib(drawn, monkeypatch):
    folder, _ = drawn
    for name in [name for name in sys.modules if name.split(".")[0] in ("matplotlib", "requests")]:
        monkeypatch.setitem(sys.modules, name, None)
    done = call("--sample", "--out", folder / "out", "--max_new_tokens", "5", "--device", "cpu", plot=True)
    assert done.code == 0 and len(done.out) == 7

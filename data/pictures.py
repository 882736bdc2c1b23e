"""
The pictures. They take matplotlib, an optional extra.
"""
import io
import math
import warnings

import torch

from data.files import write_whole
from data.screen import note


def save_figure(figure, path):
    """ a matplotlib figure as a PNG file; one sentence for all the characters that its font lacks """
    content = io.BytesIO()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure.savefig(content, format="png", dpi=100)
    if any("missing from" in str(warning.message) for warning in caught):
        note("notice: the font of the picture lacks some of these characters and shows boxes instead")
    write_whole(path, content.getbuffer())
    note(f"picture: {path}")


def draw_loss(history, curve, best, vocab_size, path):
    """ the reports, the training steps as (step, mean of twenty), the best report, what guessing scores """
    from matplotlib.figure import Figure
    figure, steps = Figure((10, 4), layout="constrained"), [row["step"] for row in history]
    for axes, title in zip(figure.subplots(1, 2), ("the whole run", "after the first drop")):
        axes.plot(*zip(*curve or [(0, math.nan)]), "C0", alpha=0.3, label="training steps")
        for split, style in (("train", "C0.-"), ("val", "C1.-")):
            axes.plot(steps, [row[split] for row in history], style, label=split)
        axes.plot(best["step"], best["val"], "k*", label=f"best: {best['val']:.4f} at step {best['step']}")
        axes.axhline(math.log(vocab_size), color="gray", linestyle="--", label=f"guessing: ln({vocab_size})")
        axes.set(xlabel="step", ylabel="loss (nats per character)", title=title)
    figure.axes[0].legend()
    lowest = min(min(row["train"], row["val"]) for row in history)
    figure.axes[1].set_ylim(lowest - 0.1, lowest + 0.9)
    save_figure(figure, path)


def attention_maps(model, tokenizer, text):
    """ maps[layer][head], (T, T): how much each position of the text takes from each """
    wei = []
    for block in model.blocks:
        block.sa.fused = False  # the loop over heads lets us look inside: dropout is given wei, (1, T, T)
        for head in block.sa.heads:
            head.dropout.register_forward_hook(lambda module, args, output: wei.append(args[0][0].tolist()))
    model.generate(torch.tensor([tokenizer.encode(text)]), 1)
    columns = len(model.blocks[0].sa.heads)
    return [wei[i:i + columns] for i in range(0, len(wei), columns)]


def draw_attention(maps, text, path):
    """ maps[layer][head], (T, T): at which earlier characters (columns) each position (row) looks """
    from matplotlib.figure import Figure
    rows, columns = len(maps), len(maps[0])
    side = min(max(2.0, 0.13 * len(text)), 80 / columns, 80 / rows)  # inches
    figure = Figure((side * columns + 0.5, side * rows + 0.5), layout="constrained")
    labels = [{" ": "␣", "\n": "↵"}.get(ch, ch) for ch in text]
    for number, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        row, column = divmod(number, columns)
        axes.imshow(maps[row][column], cmap="Blues", vmin=0, vmax=1)
        axes.set_title(f"layer {row + 1}, head {column + 1}", fontsize=8)
        axes.set_xticks(range(len(labels)), labels if row == rows - 1 else [], fontsize=7)
        axes.set_yticks(range(len(labels)), labels if column == 0 else [], fontsize=7)
        axes.tick_params(length=0, pad=2)
    save_figure(figure, path)

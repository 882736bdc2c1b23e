"""
The pictures. They take matplotlib, an optional extra.
"""
import math
import warnings

import torch

from data.errors import UserError
from data.files import write_whole
from data.screen import note


def save_figure(figure, path):
    """ a matplotlib figure as a PNG file; one sentence for all the characters that its font lacks """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        write_whole(path, lambda file: figure.savefig(file, format="png", dpi=100))
    if any("missing from" in str(warning.message) for warning in caught):
        note("notice: the font of the picture lacks some of these characters and shows boxes instead")
    note(f"picture: {path}")


def draw_loss(losses, reports, best, vocab_size, path):
    """ the losses of training steps (means of twenty), the reports, the best one, what guessing scores """
    from matplotlib.figure import Figure
    figure = Figure((10, 4), layout="constrained")
    steps = [report["step"] for report in reports]
    ends = range(20, len(losses) + 1, 20)
    means = [sum(losses[end - 20:end]) / 20 for end in ends]
    for axes, title in zip(figure.subplots(1, 2), ("the whole run", "after the first drop")):
        axes.plot([end - 1 for end in ends], means, "C0", alpha=0.3, label="training steps")
        for split, style in (("train", "C0.-"), ("val", "C1.-")):
            axes.plot(steps, [report[split] for report in reports], style, label=split)
        axes.plot(best["step"], best["val"], "k*", label=f"best: {best['val']:.4f} at step {best['step']}")
        axes.axhline(math.log(vocab_size), color="gray", linestyle="--", label=f"guessing: ln({vocab_size})")
        axes.set(xlabel="step", ylabel="loss (nats per character)", title=title)
    figure.axes[0].legend()
    lowest = min(min(report["train"], report["val"]) for report in reports)
    figure.axes[1].set_ylim(lowest - 0.1, lowest + 0.9)
    save_figure(figure, path)


def attention_maps(model, tokenizer, text):
    """ maps[layer][head], (T, T): how much each position takes from each; the model stays as it is """
    layers = [getattr(block, "sa", None) for block in getattr(model, "blocks", [])]
    no_heads = UserError("this model has no Head of which the attention could be drawn")
    if not layers or not all(len(getattr(sa, "heads", [])) for sa in layers):
        raise no_heads
    was_fused = [getattr(sa, "fused", False) for sa in layers]
    affinities, hooks = [], []

    def look(dropout, args, output):
        affinities.append(args[0][0].tolist())  # a head gives its affinities, (1, T, T), to its dropout

    try:
        for sa in layers:
            sa.fused = False  # one head after the other: only then there are affinities to see
            for head in sa.heads:
                if hasattr(head, "dropout"):
                    hooks.append(head.dropout.register_forward_hook(look))
        model.generate(torch.tensor([tokenizer.encode(text)]), 1)
    finally:
        for hook in hooks:
            hook.remove()
        for sa, fused in zip(layers, was_fused):
            sa.fused = fused
    heads = len(layers[0].heads)
    if len(affinities) != heads * len(layers):
        raise no_heads
    return [affinities[i:i + heads] for i in range(0, len(affinities), heads)]


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

"""
The ladder: the lecture's model at each moment, put together from the product's own classes and trained by its
own loop, against the losses on record. While the lecture was recorded, attention was scaled by the width of
the model and not by the size of a head; `Slip` puts that back, and so gives the numbers on the screen.
`pytest -m slow -s tests/test_ladder.py` prints the table.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpt

CONFIG = dict(
    n_embd=32,
    block_size=8,
    batch_size=32,
    dropout=0.0,
    fused=False,
    eval_interval=500,
    eval_iters=200,
    learning_rate=1e-3,
    max_iters=4500,
)
RECORD = {
    "positions": "0: 4.4801/4.4801; 300: 2.5404/2.5566; 600: 2.5160/2.5335; 900: 2.4967/2.5149; "
    "1200: 2.5106/2.5254; "
    "1500: 2.4853/2.5109; 1800: 2.4966/2.5198; 2100: 2.4949/2.5100; 2400: 2.4937/2.5102; "
    "2700: 2.5040/2.5114",
    "one head": "0: 4.2000/4.2047; 500: 2.6911/2.7087; 1000: 2.5196/2.5303; 1500: 2.4775/2.4829; "
    "2000: 2.4408/2.4523; 2500: 2.4272/2.4435; 3000: 2.4130/2.4327; 3500: 2.3956/2.4212; "
    "4000: 2.4041/2.3992; 4500: 2.3980/2.4084",
    "four heads": "0: 4.2248/4.2250; 500: 2.6663/2.6809; 1000: 2.5107/2.5189; 1500: 2.4394/2.4447; "
    "2000: 2.3769/2.3890; 2500: 2.3459/2.3606; 3000: 2.3163/2.3361; 3500: 2.2867/2.3138; "
    "4000: 2.2861/2.2796; 4500: 2.2692/2.2816",
    "four heads, slip": "0: 4.2227/4.2226; 500: 2.6592/2.6733; 1000: 2.4980/2.5064; 1500: 2.4291/2.4349; "
    "2000: 2.3716/2.3844; 2500: 2.3417/2.3561; 3000: 2.3149/2.3347; 3500: 2.2918/2.3171; "
    "4000: 2.2895/2.2868; 4500: 2.2748/2.2858",
    "feed-forward": "0: 4.2022/4.2019; 500: 2.6144/2.6230; 1000: 2.4766/2.4768; 1500: 2.3985/2.3938; "
    "2000: 2.3271/2.3443; 2500: 2.2956/2.3154; 3000: 2.2826/2.2922; 3500: 2.2456/2.2730; "
    "4000: 2.2436/2.2461; 4500: 2.2296/2.2420",
    "feed-forward, slip": "0: 4.1996/4.1995; 500: 2.5993/2.6077; 1000: 2.4629/2.4651; 1500: 2.3974/2.3951; "
    "2000: 2.3297/2.3470; 2500: 2.3018/2.3221; 3000: 2.2828/2.2936; 3500: 2.2495/2.2721; "
    "4000: 2.2435/2.2468; 4500: 2.2285/2.2409",
    "residual": "0: 4.6328/4.6313; 500: 2.3722/2.3678; 1000: 2.2586/2.2626; 1500: 2.1736/2.1966; "
    "2000: 2.1315/2.1730; 2500: 2.0994/2.1471; 3000: 2.0629/2.1341; 3500: 2.0533/2.1124; "
    "4000: 2.0179/2.0998; 4500: 1.9981/2.0961; 4999: 1.9915/2.0716",
    "residual, slip": "0: 4.6255/4.6233; 500: 2.3882/2.3847; 1000: 2.2711/2.2694; 1500: 2.1880/2.2108; "
    "2000: 2.1465/2.1830; 2500: 2.1066/2.1534; 3000: 2.0693/2.1450; 3500: 2.0648/2.1242; "
    "4000: 2.0255/2.1091; 4500: 2.0032/2.1028; 4999: 1.9989/2.0811",
    "layernorm": "0: 4.3103/4.3100; 500: 2.3807/2.3804; 1000: 2.2509/2.2559; 1500: 2.1571/2.1841; "
    "2000: 2.1189/2.1597; 2500: 2.0696/2.1239; 3000: 2.0384/2.1199; 3500: 2.0318/2.1001; "
    "4000: 2.0064/2.0920; 4500: 1.9888/2.0921; 4999: 1.9759/2.0626",
    "layernorm, slip": "0: 4.3103/4.3097; 500: 2.3998/2.4007; 1000: 2.2638/2.2658; 1500: 2.1668/2.1900; "
    "2000: 2.1328/2.1688; 2500: 2.0810/2.1294; 3000: 2.0513/2.1237; 3500: 2.0409/2.1015; "
    "4000: 2.0125/2.0922; 4500: 1.9930/2.0960; 4999: 1.9806/2.0589",
}
ON_SCREEN = {
    "one head": "2.3980/2.4084",
    "four heads": "2.2748/2.2858",
    "feed-forward": "2.2282/2.2409",
    "residual": "1.9995/2.0822",
    "layernorm": "1.9795/2.0595",
}
last_losses = {}


class Slip(gpt.Head):
    """As the head was while the video was recorded."""

    def forward(self, x):
        T, C = x.shape[-2:]
        wei = self.query(x) @ self.key(x).transpose(-2, -1) * C**-0.5  # C is n_embd, and should be head_size
        return F.softmax(wei.masked_fill(self.tril[:T, :T] == 0, float("-inf")), dim=-1) @ self.value(x)


class Heads(nn.Module):
    """Four heads side by side, not projected yet."""

    def __init__(self, config):
        super().__init__()
        self.heads = nn.ModuleList([gpt.Head(config) for _ in range(4)])

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], dim=-1)


class ResidualBlock(nn.Module):
    """A block before it had its norms."""

    def __init__(self, config):
        super().__init__()
        self.sa = gpt.MultiHeadAttention(config)
        self.ffwd = gpt.FeedForward(config)

    def forward(self, x):
        x = x + self.sa(x)
        return x + self.ffwd(x)


class Rung(nn.Module):
    """Embeddings, what the rung adds, lm_head: made in this order, with PyTorch's own initial weights."""

    def __init__(self, name, config):
        super().__init__()
        self.token_embedding_table = nn.Embedding(65, 32)
        self.position_embedding_table = nn.Embedding(8, 32)
        self.middle = nn.Sequential(
            *{
                "positions": lambda: [],
                "one head": lambda: [gpt.Head(gpt.Config(**CONFIG, n_head=1))],
                "four heads": lambda: [Heads(config)],
                "feed-forward": lambda: [Heads(config), nn.Linear(32, 32), nn.ReLU()],
                "residual": lambda: [ResidualBlock(config) for _ in range(3)],
                "layernorm": lambda: [gpt.Block(config) for _ in range(3)] + [nn.LayerNorm(32)],
            }[name]()
        )
        self.lm_head = nn.Linear(32, 65)

    def forward(self, idx, targets=None):
        B, T = idx.shape
        x = self.token_embedding_table(idx) + self.position_embedding_table(torch.arange(T))  # (B, T, C)
        logits = self.lm_head(self.middle(x))  # (B, T, vocab_size)
        return logits, F.cross_entropy(logits.view(B * T, 65), targets.view(B * T))


@pytest.mark.slow
@pytest.mark.parametrize("rung", RECORD)
def test_each_rung_of_the_lecture_gives_its_numbers(rung, shakespeare_data):
    record = [
        (int(step), *map(float, losses.split("/")))
        for step, losses in (report.split(": ") for report in RECORD[rung].split("; "))
    ]
    config = gpt.Config(**{**CONFIG, "max_iters": record[-1][0]}, n_head=4)
    if rung == "positions":
        config.eval_interval, config.learning_rate = 300, 1e-2
    name, _, slip = rung.partition(", ")
    torch.manual_seed(1337)
    model = Rung(name, config)
    if slip:
        for module in model.modules():
            if type(module) is gpt.Head:
                module.__class__ = Slip  # the same weights, the other scale
    history = gpt.train(model, shakespeare_data[1], config)
    last_losses[rung] = f"{history[-1]['train']:.4f}/{history[-1]['val']:.4f}"
    for row, (step, train, val) in zip(history, record, strict=True):
        # other processors round otherwise, which shows after thousands of steps
        tolerance = 6e-5 if step == 0 else 0.002 if step <= 1000 else 0.005
        assert row["step"] == step
        assert (row["train"], row["val"]) == (
            pytest.approx(train, abs=tolerance),
            pytest.approx(val, abs=tolerance),
        )


@pytest.mark.slow
def test_the_table_for_the_teacher():
    if len(last_losses) < len(RECORD):
        pytest.skip("made from the tests above, all of them run together")
    print(f"\n{'rung':14} | on screen     | with the slip | right scale")
    for name in RECORD:
        if "slip" not in name:
            slipped = last_losses.get(f"{name}, slip", last_losses[name])
            print(f"{name:14} | {ON_SCREEN.get(name, ''):13} | {slipped:13} | {last_losses[name]}")
            if name in ON_SCREEN:  # a GPU's digits
                screen, ours = (float(losses.split("/")[1]) for losses in (ON_SCREEN[name], slipped))
                assert ours == pytest.approx(screen, abs=0.005)

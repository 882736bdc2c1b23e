"""
Where the numbers are, shown without a GPU. Fake tensors have a shape, a type and a device, and no numbers:
torch goes through all operations as it would on that device, and refuses one over two devices. The device
that is not the CPU is "lazy" here, since every build of torch can pretend to have it.
"""
import math
import sys
from types import ModuleType

import pytest
import torch
from helpers import script
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

import gpt

DEVICE = "lazy:0"
CONFIG = dict(n_layer=1, n_head=2, n_embd=16, block_size=8, batch_size=4, dropout=0.2, max_iters=22,
              eval_interval=100, eval_iters=2, grad_clip=1.0)


class Watch(TorchDispatchMode):
    """ counts what makes a GPU wait: numbers that are read from it, and copies between it and the CPU """

    def __init__(self):
        super().__init__()
        self.run = None
        self.steps_that_read = []
        self.copies = []  # (how many numbers, from where, to where)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:  # item() and tolist()
            if args[0].device.type != "cpu":
                self.steps_that_read.append(self.run.state.step if self.run else None)
            return 1.0  # a fake tensor has none
        if function is torch.ops.aten.allclose.default:
            return True
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and result.device != args[0].device:
            self.copies.append((result.numel(), str(args[0].device), str(result.device)))
        return result


@pytest.fixture(scope="module", autouse=True)
def fake_tensors():
    with FakeTensorMode(shape_env=ShapeEnv()):
        yield


def on_the_device(program=gpt, **more):
    """ (config, model, tokens): a model and a text on the device """
    config = program.Config(**{**CONFIG, **more})
    with torch.device(DEVICE):
        return config, program.GPTLanguageModel(config, 10), torch.zeros(200, dtype=torch.uint8)


def changed(*changes):
    """ gpt.py with other lines, as a module """
    module = ModuleType("changed")
    sys.modules["changed"] = module  # where dataclasses look
    exec(script("gpt", *changes), vars(module))
    return module


def train_and_write(program, fused, text_on):
    """ the devices of what each part of the lesson gives """
    config, model, tokens = on_the_device(program, fused=fused)
    tokens = tokens.to(text_on)

    def next_batch(split):
        return program.get_batch(tokens, config, DEVICE)

    x, y = next_batch("train")
    logits, loss = model(x, y)
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    model.eval()
    losses = program.estimate_loss(program.Accelerated(program.State(config, model)), next_batch, 2)
    idx = model.generate(torch.zeros((1, 1), dtype=torch.long), 10, temperature=0.8, top_k=5)
    greedy = model.generate(idx, 1, temperature=0.0)
    assert x.shape == y.shape == (4, 8) and idx.shape == (1, 11) and list(losses) == ["train", "val"]
    return {str(tensor.device) for tensor in [x, y, logits, loss, idx, greedy, *gradients]}


# ---- on one device


@pytest.mark.parametrize("fused, text_on", [(True, DEVICE), (False, DEVICE), (True, "cpu")])
def test_all_of_the_lesson_is_on_the_device_of_the_model(fused, text_on):
    assert train_and_write(gpt, fused, text_on) == {DEVICE}


def test_so_are_the_score_and_the_comparison_of_both_paths(capsys):
    config, model, tokens = on_the_device()
    assert gpt.score(model, tokens) is not None and gpt.score(model, tokens.cpu()) is not None
    with Watch():
        gpt.compare_heads(model, config)
    assert capsys.readouterr().err == ""  # it says what it cannot compare


@pytest.mark.parametrize("fused, text_on, old, new", [
    (False, DEVICE, "torch.ones(T, T, device=x.device)", "torch.ones(T, T)"),
    (True,  DEVICE, "torch.arange(T, device=idx.device)", "torch.arange(T)"),
    (True,  DEVICE, "idx = idx.to(self.lm_head.weight.device)", "pass"),
    (True,  DEVICE, "config.block_size, device=tokens.device", "config.block_size"),
    (True,  DEVICE, "ix = ix.to(tokens.device, non_blocking=True)", "pass"),
    (True,  "cpu",  "x.to(device).long(), y.to(device).long()", "x.long(), y.long()")])
def test_a_tensor_that_is_left_on_the_cpu_is_noticed(fused, text_on, old, new):
    with pytest.raises(Exception, match="two different devices|same device"):
        train_and_write(changed((old, new)), fused, text_on)


# ---- without waiting


def watched_training(program=gpt, max_iters=22):
    """ what a run on the device reads and copies """
    config, model, tokens = on_the_device(program, max_iters=max_iters)
    plain = program.Config(**{**vars(config), "fused": False})  # fused AdamW needs a real device
    watch = Watch()
    watch.run = program.Run(program.State(config, model))
    with watch:
        program.train(program.Accelerated(watch.run.state), {"train": tokens, "val": tokens}, plain, DEVICE,
                      watch.run)
    return watch


@pytest.fixture(scope="module")
def watched(fake_tensors):
    return watched_training()


def test_of_twenty_steps_one_reads(watched):
    assert sorted(set(watched.steps_that_read)) == [0, 20, 22]  # the first; those after it; the last report
    assert len(watched.run.state.losses) == 22 and len(watched.run.state.reports) == 2


def test_a_batch_copies_one_number_for_each_sequence(watched):
    batches = 22 + 2 * 2 * 2  # of the steps, and of two reports
    assert watched.copies == [(4, "cpu", DEVICE)] * batches


def test_a_step_that_reads_is_noticed():
    line = "        run.stepped(step, loss)"
    watch = watched_training(changed((line, f"        loss.item()\n{line}")), max_iters=3)
    assert sorted(set(watch.steps_that_read)) == [0, 1, 2, 3]


def test_places_that_come_from_ordinary_memory_are_noticed():
    program = changed(("ix = ix.to(tokens.device, non_blocking=True)", "pass"),
                      ("places = ix[:, None] + torch.arange(config.block_size, device=tokens.device)",
                       "places = (ix[:, None] + torch.arange(config.block_size)).to(tokens.device)"))
    assert watched_training(program, max_iters=1).copies == [(32, "cpu", DEVICE)] * 9


def test_a_measurement_reads_one_number_for_each_split():
    config, model, tokens = on_the_device()
    with Watch() as watch:
        gpt.estimate_loss(model, lambda split: gpt.get_batch(tokens, config, DEVICE), 10)
    assert len(watch.steps_that_read) == 2


def test_writing_reads_each_character_once_and_nothing_else():
    config, model, tokens = on_the_device()
    with Watch() as watch:
        assert len(list(gpt.stream(model, gpt.Tokenizer("abcdefghij"), "a", 12, 0.8, 5))) == 12
    assert len(watch.steps_that_read) == 12 and watch.copies == [(1, "cpu", DEVICE)]


def test_a_score_reads_once_for_all():
    config, model, tokens = on_the_device()
    with Watch() as watch:
        assert math.isclose(gpt.score(model, tokens), 1.0)
    assert len(watch.steps_that_read) == 2  # one number for each size of window

""" What several tests need. The models are tiny, and one thread is faster for them than two that wait. """
import functools
import os
import shutil
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded; processes started here inherit it

import pytest
from helpers import ROOT

import gpt
from data import flags

flags.read_comments = functools.cache(flags.read_comments)  # to find a class takes 20 ms
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it


@pytest.fixture(scope="session")
def shakespeare():
    """ Tiny Shakespeare, a string """
    if not (ROOT / "input.txt").exists():
        pytest.skip("input.txt is not here: python data/download.py fetches it")
    return (ROOT / "input.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def tokenizer(shakespeare):
    return gpt.Tokenizer(shakespeare)


@pytest.fixture(scope="session")
def data(shakespeare, tokenizer):
    """ {"train": (1003854,), "val": (111540,)} """
    return gpt.split_data(shakespeare, tokenizer)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """ the folder of a finished tiny run, to look at; its files are in trained/out """
    from helpers import good, tiny
    folder = tmp_path_factory.mktemp("trained")
    good(*tiny(folder))
    return folder


@pytest.fixture(scope="session")
def all_steps(tmp_path_factory):
    """ what a tiny run with the flags LIVELY prints when nothing disturbs it """
    from helpers import LIVELY, good, steps, tiny
    return steps(good(*tiny(tmp_path_factory.mktemp("once"), *LIVELY)).out)


@pytest.fixture
def own(trained, tmp_path):
    """ a copy of it, to change """
    return Path(shutil.copytree(trained, tmp_path / "own"))


@pytest.fixture
def fast_clock(monkeypatch):
    """ a clock on which a tiny run lasts minutes """
    seconds = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: 1000 * seconds())


@pytest.fixture(scope="module", autouse=True)
def without_pictures():
    """ no matplotlib: to draw the losses takes as long as a tiny run; test_pictures.py does without this """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        yield

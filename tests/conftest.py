"""What several tests need. All models here are tiny, and one thread is faster for them than two that wait."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; children inherit it

import pytest  # noqa: E402

import gpt  # noqa: E402

INPUT = Path(__file__).resolve().parent.parent / "input.txt"


@pytest.fixture(scope="session")
def shakespeare():
    """Tiny Shakespeare, a string."""
    if not INPUT.exists():
        pytest.skip("input.txt is not here: python data/download.py fetches it")
    return INPUT.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def shakespeare_data(shakespeare):
    """(tokenizer, {"train": (1003854,), "val": (111540,)})"""
    return gpt.load_data([shakespeare], "input.txt", 8)

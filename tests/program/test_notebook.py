""" In a notebook: real kernels run both scripts, and are afterwards as they were, whatever happened. """
import asyncio
import sys
from types import SimpleNamespace

import pytest
from helpers import ROOT, checkpoint, environment, tiny, write_small_text

import bigram
import gpt

README = (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
FEW = "--max_iters 20 --eval_iters 1 --max_new_tokens 5 --device cpu --data".split()
SLEEP = "import time; print('asleep'); time.sleep(100)  # interrupt at asleep"


def run_notebook(folder, *cells):
    """ what each cell prints in a real kernel, and its error; `# interrupt at X` sends Ctrl+C at X """
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")

    class Client(nbclient.NotebookClient):
        def process_message(self, message, cell, index):
            awaited = cell.source.partition("# interrupt at ")[2]
            if awaited and awaited in message["content"].get("text", ""):
                asyncio.ensure_future(self.km.interrupt_kernel())
            return super().process_message(message, cell, index)

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = Client(book, timeout=120, allow_errors=True, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment(PYTHONPATH=str(ROOT), IPYTHONDIR=str(folder / "ipython")))
    return ["".join(out.get("text", out.get("ename")) for out in cell.outputs) for cell in book.cells]


@pytest.mark.slow
def test_gpt_runs_in_a_notebook_ends_saved_at_an_interrupt_and_leaves_the_kernel_as_it_was(tmp_path):
    flags = tiny(tmp_path)
    alone, ran, called, threaded, asked, wrote, interrupted, resumed, slept = run_notebook(
        tmp_path, "import bigram, gpt\ntry:\n    gpt.main()\nexcept SystemExit:\n    bigram.main()",
        f"%run '{ROOT}/gpt.py' {' '.join(flags)}",
        f"import gpt, sys, threading; flags, streams = {flags}, (sys.stdout, sys.stderr); gpt.main(flags)",
        "thread = threading.Thread(target=gpt.main, args=(flags,)); thread.start(); thread.join()",
        'gpt.main(["--prompt", "the", "--max_new_tokens", 5]); print((sys.stdout, sys.stderr) == streams)',
        README.replace("ROMEO:", "the cat"),
        "gpt.main(flags + ['--max_iters', 10**8])  # interrupt at step 10:",
        "gpt.main(flags + ['--resume', '--max_iters', 3000, '--eval_interval', 3000])", SLEEP)
    for name in ("gpt", "bigram"):
        assert f'in a notebook, call {name}.main([...]) with flags such as "--max_iters", 100\n' in alone
    for shown in (ran, called, threaded):
        assert "step 20: train loss" in shown and "the best model writes:" in shown and shown.endswith("\n")
    assert asked.endswith("True\n") and wrote.startswith("the cat") and len(wrote) == 208
    assert "to continue: " in interrupted and "SystemExit" in interrupted and "Traceback" not in interrupted
    assert "step 3000: train loss" in resumed and checkpoint(tmp_path / "out/last.pt")["step"] == 3000
    assert slept == "asleep\nKeyboardInterrupt"


@pytest.mark.slow
def test_bigram_runs_in_a_notebook_and_leaves_the_kernel_as_it_was(tmp_path):
    flags = [*FEW, str(write_small_text(tmp_path))]
    ran, called, threaded, interrupted, slept = run_notebook(
        tmp_path, f"%run '{ROOT}/bigram.py' {' '.join(flags)}",
        f"import bigram, threading; flags = {flags}; bigram.main(flags)",
        "thread = threading.Thread(target=bigram.main, args=(flags,)); thread.start(); thread.join()",
        "bigram.main(flags + ['--max_iters', 10**8, '--eval_interval', 10])  # interrupt at step 10:", SLEEP)
    assert all("step 20: train loss" in shown and shown.endswith("\n") for shown in (ran, called, threaded))
    assert "SystemExit" in interrupted and slept == "asleep\nKeyboardInterrupt"


@pytest.mark.parametrize("main", [gpt.main, bigram.main])
def test_standard_output_may_be_any_object_with_write_and_flush(tmp_path, monkeypatch, main):
    shown, said = [], []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=shown.append, flush=lambda: None))
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=said.append, flush=lambda: None))
    main(tiny(tmp_path) if main is gpt.main else [*FEW, str(write_small_text(tmp_path))])
    assert "step 20: train loss" in "".join(shown)
    with pytest.raises(SystemExit):
        main(["--device", "abc"])
    assert "--device abc does not work here" in "".join(said)

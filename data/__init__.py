"""
The text, and the machinery that both scripts share: everything a real program needs beside the lesson.

    download.py    fetches Tiny Shakespeare, and checks it
    text.py        finds a text, reads it, encodes it
    flags.py       settings as flags of the command line, and the values they may have
    script.py      how a script begins and ends: errors in one sentence
    errors.py      the errors that are worth a sentence
    machine.py     devices, types of numbers, random numbers
    processes.py   several processes that compute one run
    screen.py      what a run shows while it works
    signals.py     how a run is asked to stop
    files.py       files that are written completely or not at all, folders for one run at a time
    pictures.py    the losses of a run, the attention of a model (with matplotlib)
    questions.txt  questions and answers, for fine-tuning
"""
import os

# torch's threads wait for one another after each operation. This says how long they spin before they free the
# CPU for other programs; OpenMP looks at it once, when torch is loaded, so data is imported before torch.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

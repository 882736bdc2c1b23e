"""
Can the tests fail? Each mutant breaks gpt.py, bigram.py or the data folder in one place; the default tests
must notice every one of them. Not part of the default run:

    python tests/mutants.py [WORD ...]      all of them, or those with a WORD in their name

A mutant is an exact replacement; one whose text is no longer in the file is an error, so that the list moves
with the code. Prints killed or survived for each, and ends with status 1 if any survived.
"""
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
G, B, D, T, F, L = "gpt.py", "bigram.py", "data/download.py", "data/text.py", "data/files.py", "data/flags.py"
S, E, P, M = "data/screen.py", "data/errors.py", "data/pictures.py", "data/machine.py"
R, N, Q = "data/processes.py", "data/script.py", "data/signals.py"
BOTH = (G, B)
SCALE = "k.transpose(-2, -1) * k.shape[-1]**-0.5"

LESSON = [
    # attention
    ("scale by n_embd", G, SCALE, "k.transpose(-2, -1) * C**-0.5"),
    ("mask off by one", G, "torch.tril(torch.ones(T, T, device=x.device))",
     "torch.tril(torch.ones(T, T), 1)"),
    ("mask of zeros added", G, 'tril == 0, float("-inf")', "tril == 0, 0.0"),
    ("softmax over the wrong dimension", G, "wei = F.softmax(wei, dim=-1)", "wei = F.softmax(wei, dim=-2)"),
    ("q and k exchanged", G, "wei = q @ k.transpose", "wei = k @ q.transpose"),
    ("attention dropout missing", G, "wei = self.dropout(wei)", "wei = wei"),
    ("fused without dropout", G, "p = self.heads[0].dropout.p if self.training else 0.0", "p = 0.0"),
    ("fused with dropout in eval", G, "dropout.p if self.training else 0.0", "dropout.p"),
    ("fused not causal", G, "dropout_p=p, is_causal=True", "dropout_p=p, is_causal=False"),
    ("fused heads interleaved wrongly", G, ".view(B, T, 3, len(self.heads), -1)",
     ".view(B, T, 3, -1, len(self.heads)).transpose(3, 4)"),
    ("fused heads joined wrongly", G, "out.transpose(1, 2).reshape(B, T, -1)", "out.reshape(B, T, -1)"),
    ("fused query and key exchanged", G, "[h.query for h in self.heads] + [h.key for",
     "[h.key for h in self.heads] + [h.query for"),
    ("projection dropped", G, "self.dropout(self.proj(out))", "self.dropout(out)"),
    ("dropout after the projection missing", G, "return self.dropout(self.proj(out))",
     "return self.proj(out)"),
    ("one head too few", G, "for _ in range(config.n_head)])", "for _ in range(max(1, config.n_head - 1))])"),
    ("head_size of a wrong width", L, "    if n_embd % n_head:", "    if False:"),
    ("model never checks its settings", G, "        check(config)  #", "        pass  #"),
    # blocks and the model
    ("post-norm", G, "x = x + self.sa(self.ln1(x))", "x = self.ln1(x + self.sa(x))"),
    ("one norm used twice", G, "self.ffwd(self.ln2(x))", "self.ffwd(self.ln1(x))"),
    ("GELU for ReLU", G, "nn.ReLU(),", "nn.GELU(),"),
    ("feed-forward dropout missing", G, "            nn.Dropout(config.dropout),\n", ""),
    ("positions reversed", G, "torch.arange(T, device=idx.device)",
     "torch.arange(T, device=idx.device).flip(0)"),
    ("biases keep their start", G, "nn.init.zeros_(module.bias)", "pass"),
    ("targets in another order", G, "targets = targets.view(B*T)", "targets = targets.t().reshape(B*T)"),
    # data
    ("targets not shifted", BOTH, "tokens[places + 1]", "tokens[places]"),
    ("targets shifted twice", BOTH, "tokens[places + 1]", "tokens[(places + 2) % len(tokens)]"),
    ("last place never drawn", BOTH, "len(tokens) - config.block_size, (",
     "len(tokens) - config.block_size - 1, ("),
    ("a place beyond the end", BOTH, "len(tokens) - config.block_size, (",
     "len(tokens) - config.block_size + 1, ("),
    ("split 80/20", BOTH, "n = int(0.9 * len(tokens))", "n = int(0.8 * len(tokens))"),
    ("val drawn from train", BOTH, '"val": tokens[n:]', '"val": tokens[:n]'),
    ("vocabulary unsorted", BOTH, "sorted(list(set(text)))", "sorted(list(set(text)), reverse=True)"),
    ("decode by the wrong map", BOTH, "self.itos[i] for i in ids", "self.chars[-i] for i in ids"),
    ("wrong character looked up", T, "= list(stoi.values())", "= [max(0, i - 1) for i in stoi.values()]"),
    ("integers too small", T, "np.iinfo(t).max + 1)", "np.iinfo(t).max + 2)"),
    ("text too short accepted", T, "if min(train, val) <= block_size:", "if min(train, val) < block_size:"),
    ("byte order mark kept", T, '.replace("\\ufeff", "")', ""),
    ("carriage returns kept", T, 'encoding="utf-8") as pieces', 'encoding="utf-8", newline="") as pieces'),
    ("NUL bytes accepted", T, 'if "\\0" not in text:', "if True:"),
    # loss and training
    ("estimate in train mode", BOTH, "    model.eval()  # switches", "    pass  # switches"),
    ("mode not restored after the estimate", BOTH, "    model.train()\n    return out", "    return out"),
    ("estimate of one split only", BOTH, "xb, yb = next_batch(split)", 'xb, yb = next_batch("train")'),
    ("gradients not zeroed", BOTH, "        optimizer.zero_grad(set_to_none=True)\n", ""),
    ("trained on val", BOTH, 'xb, yb = next_batch("train")', 'xb, yb = next_batch("val")'),
    ("warm-up off by one", G, "config.learning_rate * (step + 1) / warm",
     "config.learning_rate * step / warm"),
    ("warm-up without a limit", G, "min(config.warmup_iters, config.max_iters // 10)", "config.warmup_iters"),
    ("decay to the wrong step", G, "(config.max_iters - step) /", "(config.max_iters - step - 1) /"),
    ("learning rate never set", G, 'group["lr"] = rate_at(step, config)', "pass"),
    ("weight decay ignored", G, "weight_decay=config.weight_decay,", "weight_decay=0.01,"),
    ("beta2 ignored", G, "betas=(0.9, config.beta2)", "betas=(0.9, 0.999)"),
    ("gradients never clipped", G, "nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)", "pass"),
    # writing
    ("greedy instead of drawn", BOTH, "idx_next = torch.multinomial(probs, num_samples=1)",
     "idx_next = probs.argmax(-1, keepdim=True)"),
    ("no crop", G, "idx_cond = idx[:, -self.block_size:]", "idx_cond = idx"),
    ("crop from the wrong end", G, "idx_cond = idx[:, -self.block_size:]",
     "idx_cond = idx[:, :self.block_size]"),
    ("first instead of last position", G, "logits = logits[:, -1, :] ", "logits = logits[:, 0, :] "),
    ("temperature upside down", G, "logits / temperature", "logits * temperature"),
    ("top_k keeps one fewer", G, "logits < kth", "logits <= kth"),
    ("top_k over all rows together", G, ".values[:, -1:]", ".values.min()"),
    ("temperature 0 draws", G, "if temperature < 1e-6:", "if False:"),
    ("dropout while writing", M, "    model.eval()\n    try:", "    try:"),
    ("mode not restored after writing", M, "        model.train(was_training)", "        pass"),
    ("prompt does not move to the model", G, "idx = idx.to(self.lm_head.weight.device)", "idx = idx"),
    ("stream forgets its context", G, "idx = model.generate(idx[:, -model.block_size:],",
     "idx = model.generate(idx[:, -1:],"),
    ("stop text printed", G, "waiting = waiting[:-len(stop)]", "pass"),
    ("held back characters lost", G, "    yield waiting\n", ""),
    ("score forgets the last window", G, "windows.append((x[None, n:], y[None, n:]))", "pass"),
    ("score with dropout", G, "    with eval_mode(model):\n        for xb",
     "    with nullcontext():\n        for xb"),
    ("taste moves the random numbers", G,
     "        with random_numbers_kept(self.device):\n            torch.man",
     "        with nullcontext():\n            torch.man"),
    ("taste from other random numbers each time", G, "torch.manual_seed(self.state.config.seed)", "pass"),
    ("unknown characters in a prompt", G, "unknown = sorted(set(text) - set(tokenizer.chars))",
     "unknown = []"),
    ("a changed head goes unnoticed", G, "if not torch.allclose(sa.all_at_once(x), one_by_one,",
     "if False and torch.allclose(sa.all_at_once(x), one_by_one,"),
]
PROGRAM = [
    # the run
    ("best kept on train loss", G, 'val_loss < state.best["val"]', 'train_loss < state.best["train"]'),
    ("resume without optimizer", G, 'optimizer.load_state_dict({"state": memory,',
     'optimizer.load_state_dict({"state": {},'),
    ("resume with reordered weights", G, "for number, name in enumerate(weights) if name in moments}",
     "for number, name in enumerate(moments)}"),
    ("moments of another shape", G, "shapes - {weights[name].shape}:", "False:"),
    ("resume without random state", G, 'set_random_state(self.last["random"], self.device)', "pass"),
    ("random state of the beginning kept", G,
     "        state.random = random_state(self.device)\n        if self.first",
     "        if self.first"),
    ("resume forgets the seconds", G, "self.began_at = time.monotonic() - state.seconds",
     "self.began_at = time.monotonic()"),
    ("resume forgets the tokens", G, 'for name in ["step", "tokens", "seconds"]:',
     'for name in ["step", "seconds"]:'),
    ("the last model writes at the end", G,
     'state.model.load_state_dict(read_checkpoint(out / "best.pt")["model"])',
     'read_checkpoint(out / "best.pt")'),
    ("resume with another text", G, 'sha256 != learned["sha256"]', "False"),
    ("resume of any step", G, 'if flags.resume and start.checkpoint["step"] > flags.max_iters:', "if False:"),
    ("two rates unsaid", G, "        if now != before:", "        if False:"),
    ("a contradicting flag ignored", G, "if given.get(name, saved[name]) != saved[name]:", "if False:"),
    ("training flags beside --sample", G, "asked[1:] + sorted(set(given) - fitting)", "asked[1:]"),
    ("foreign best.pt believed", G, 'best.get("reports", [None])[0] in last["reports"]', "True"),
    ("no save after an error", G, 'run.rescue(error, command(start.given, "--resume"))', "pass"),
    ("half updated weights saved", G, "            if self.is_half_updated():", "            if False:"),
    ("spoiled weights saved", G, "or isinstance(error, Diverged)", "or False"),
    ("weights that are not finite saved", G, "        if not norm.isfinite():", "        if False:"),
    ("a rescue that fails hides the error", G, "        except Exception as failure:",
     "        except KeyError as failure:"),
    ("no save by the clock", G, "self.saved_at > SAVE_AFTER", "self.saved_at > 1e9"),
    ("saving without a rest", G, "if is_last or not rests:", "if True:"),
    ("a start that fails displaces a model", G, "if self.is_new and not is_last:", "if False:"),
    ("the first files are of a later step", G, "copy.deepcopy(files)", "files"),
    ("an earlier run is not brought back", G, "            if aside:\n                bring_back",
     "            if False:\n                bring_back"),
    ("a restart begins anew", G, "    if is_a_restart(task, flags):", "    if False:"),
    ("each process drops the same units", M, "SeedSequence([seed, step, rank()])",
     "SeedSequence([seed, step, 0])"),
    ("a loss that is not a number continues", G, "if not math.isfinite(loss):", "if False:"),
    ("a checkpoint may contain code", G, "weights_only=True", "weights_only=False"),
    ("load moves the random numbers", G, 'with random_numbers_kept(torch.device("cpu")):',
     "with nullcontext():"),
    ("compile without a fall-back", G, "                self.trained = self.model\n        self.model.zero",
     "                raise\n        self.model.zero"),
    ("the caller's gradients stay off", M, "torch.inference_mode(False), torch.enable_grad(), ", ""),
    ("the caller's default type stays", M, "torch.set_default_dtype(torch.float32)", "pass"),
    ("the picture spoils the model", P, "            sa.fused = fused\n", "            pass\n"),
    ("the picture leaves its hooks", P, "            hook.remove()", "            pass"),
    ("file written in place", F, 'part = path.with_name(f"{path.name}.part")', "part = path"),
    ("a held file is not tried again", F, "for pause in (0.1, 0.4, 1.0, None):", "for pause in (None,):"),
    ("no lock", F, "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass"),
    ("earlier run overwritten", G, "aside = move_aside(self.out, FILES) if self.is_new else None",
     "aside = None"),
    ("half an earlier run moved", F, "os.replace(aside / name, folder / name)", "pass"),
    ("nan among the flags", L, "inside = takes[0] <= value < takes[1]",
     "inside = not (value < takes[0] or value >= takes[1])"),
    ("--no-x is --x", L, "}=False", "}=True"),
    ("interrupts never looked at", G, "            self.interrupts.check()\n", "            pass\n"),
    ("handlers never given back", Q, "signal.signal(number, handler or signal.SIG_DFL)", "pass"),
    ("SIGHUP under nohup", Q, "if number and signal.getsignal(number) != signal.SIG_IGN:", "if number:"),
    ("exit status of an interrupt", N, "sys.exit(128 + signalled.args[0])", "sys.exit(0)"),
    ("lack of memory is a traceback", E, "out of memory|allocate memory|", "nothing|"),
    ("glyphs warned of one by one", P, "warnings.catch_warnings(record=True) as caught",
     "warnings.catch_warnings(record=False) as caught"),
    ("home folder not found", L, "given[name] = os.path.expanduser(given[name])", "pass"),
    ("values repaired like names", L, 'joined.append(f"--{name}{equals}{value}")',
     """joined.append(f"--{name}{equals}" + value.replace("-", "_"))"""),
    ("a backslash is never a backslash", T, 'found[1] == "n"', "True"),
    ("control characters reach the terminal", S, "    if is_terminal(sys.stdout):", "    if False:"),
    ("a terminal that is gone ends the run", S, "if error.errno != errno.EIO:", "if True:"),
    ("width of another terminal", S, "os.get_terminal_size(sys.stderr.fileno())", "os.get_terminal_size()"),
    ("a reader that leaves is no failure", N, "sys.exit(128 + SIGPIPE)", "sys.exit(0)"),
    ("memory of others blamed on the batch", E, "if others := memory_of_others(message):", "if others := 0:"),
    ("one process under a launcher is refused", R, 'if os.environ.get("WORLD_SIZE", "") == "1":',
     "if False:"),
    # the download
    ("sha256 not looked at", D, "if hashlib.sha256(content).hexdigest() != SHA256:", "if False:"),
    ("length not looked at", D, "    if len(content) != SIZE:", "    if False:"),
    ("status not looked at", D, "        reply.raise_for_status()\n", ""),
    ("only the first source", D, "for url in SOURCES:", "for url in SOURCES[:1]:"),
]


def apply(folder, files, old, new):
    for name in files if isinstance(files, tuple) else (files,):
        path = folder / name
        source = path.read_text(encoding="utf-8")
        if source.count(old) != 1:
            sys.exit(f"mutants.py: this is {source.count(old)} times in {name}, not once:\n{old}")
        path.write_text(source.replace(old, new), encoding="utf-8")


def copy(folder):
    names = shutil.ignore_patterns(".git", "out", "__pycache__", ".*_cache", ".venv")
    shutil.copytree(ROOT, folder, ignore=names, dirs_exist_ok=True)


def attack(name, files, old, new):
    """ the mutant's name if the tests did not notice it; those that are likely to are run first """
    with tempfile.TemporaryDirectory() as folder:
        copy(Path(folder))
        apply(Path(folder), files, old, new)
        begin = time.monotonic()
        # chapter 9 compares the texts of the pair, and would notice a change in one file without a thought
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        chapters = sorted(f"tests/{path.name}" for path in ROOT.glob("tests/test_*.py"))
        chapters.remove("tests/test_09_pair.py")
        in_lesson = (name, files, old, new) in LESSON
        command += [*chapters, "tests/program"] if in_lesson else ["tests/program", *chapters]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    if done.returncode > 1:  # below 0: the interpreter crashed, which nobody overlooks
        sys.exit(f"{name}: pytest ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    by = next((line for line in done.stdout.splitlines() if line.startswith("FAILED")), "")[:90]
    verdict = "killed  " if done.returncode else "SURVIVED"
    print(f"{verdict} {name} ({time.monotonic() - begin:.0f} s) {by}", flush=True)
    return None if done.returncode else name


def main(words):
    chosen = [mutant for mutant in LESSON + PROGRAM if all(word in mutant[0] for word in words)]
    for _, files, old, new in LESSON + PROGRAM:  # all must apply before the first one runs
        with tempfile.TemporaryDirectory() as folder:
            copy(Path(folder))
            apply(Path(folder), files, old, new)
    survived = [name for name in (attack(*mutant) for mutant in chosen) if name]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} killed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

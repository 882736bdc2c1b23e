"""
The pair: two files that a reader takes one after the other, the definitions they share the same in both, and
a README that says nothing the code does not do.
"""

import ast
import inspect
import math
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import bigram
import gpt

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHARED = [
    "opt",
    "Tokenizer",
    "load_data",
    "get_batch",
    "estimate_loss",
    "make_parser",
    "check",
    "pick_device",
]


@pytest.mark.parametrize("name", SHARED)
def test_the_pair_shares_this_definition_to_the_letter(name):
    assert inspect.getsource(getattr(bigram, name)) == inspect.getsource(getattr(gpt, name))


def test_shared_definitions_stand_in_the_same_order():
    def order(module):
        tree = ast.parse(inspect.getsource(module))
        return [node.name for node in tree.body if getattr(node, "name", None) in SHARED]

    assert order(bigram) == order(gpt) == SHARED


def test_what_both_models_do_with_targets_is_written_out_in_both():
    for module in (bigram.BigramLanguageModel, gpt.GPTLanguageModel):
        source = inspect.getsource(module.forward)
        assert "logits.view(B*T, C)" in source and "targets.view(B*T)" in source


@pytest.mark.parametrize("name, most, lecture_most", [("bigram.py", 270, 190), ("gpt.py", 1040, 350)])
def test_the_files_keep_to_their_size(name, most, lecture_most):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= most and lines.index("# running it") <= lecture_most


def test_no_line_is_longer_than_110_columns():
    sources = [*ROOT.glob("*.py"), *ROOT.glob("data/*.py"), *ROOT.glob("tests/*.py")]
    assert len(sources) > 10
    assert [
        f"{path.name}: {line}"
        for path in sources
        for line in path.read_text(encoding="utf-8").splitlines()
        if len(line) > 110
    ] == []


def test_readme_is_at_most_200_lines():
    assert len(README.splitlines()) <= 200


def test_importing_runs_nothing_and_downloads_nothing():
    code = "import sys; import bigram, gpt; print('requests' in sys.modules, 'matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False False\n", "")


def test_only_torch_numpy_and_requests_are_imported_beside_the_standard_library():
    found = set()
    for path in [ROOT / "bigram.py", ROOT / "gpt.py", *ROOT.glob("data/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module.partition(".")[0])
    # matplotlib is the optional extra, imported where a picture is drawn
    assert found - set(sys.stdlib_module_names) == {"torch", "numpy", "requests", "matplotlib", "data"}


def test_the_top_level_holds_what_it_should_and_nothing_else():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    top = {line.partition("/")[0] for line in done.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == {
        "README.md",
        "bigram.py",
        "data",
        "gpt.py",
        "pyproject.toml",
        "tests",
    }


def readme_commands(script):
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    # what stands before the script (pip, torchrun and its flags) and behind it (a comment) is not ours
    return [
        line.split(script, 1)[1].split(" &&")[0].split("  #")[0]
        for line in lines
        if f"{script}" in line and re.search(rf"(python|torchrun|\d|uv run).* {script}", line)
    ]


@pytest.mark.parametrize("module, script", [(bigram, "bigram.py"), (gpt, "gpt.py")])
def test_every_command_in_the_readme_parses(module, script):
    commands = readme_commands(script)
    assert commands
    config_class = getattr(module, "Flags", module.Config)
    parser = module.make_parser(config_class, "", {})
    for command in commands:
        module.check(config_class(**vars(parser.parse_args(shlex.split(command)))))


def test_every_flag_that_the_readme_names_exists():
    names = {f.name for module in (bigram.Config, gpt.Flags) for f in fields(module)}
    others = {
        "index-url",
        "extra",
        "help",
        "standalone",
        "nproc_per_node",
        "nnodes",
        "rdzv_backend",
        "rdzv_endpoint",
        "rdzv_id",
        "no-sync",
        "size",
    }
    for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", README):
        assert flag in others or flag.removeprefix("no-").replace("-", "_") in names, flag


def test_the_numbers_in_the_readme_that_can_be_recomputed():
    assert f"{math.log(65):.4f}" in README
    for size, values in gpt.SIZES.items():
        model = gpt.GPTLanguageModel(gpt.Config(**values), 65)
        count = f"{sum(p.numel() for p in model.parameters()):,}"
        assert re.search(rf"\| `{size}`[^\n]*\| {count} \|", README), (size, count)
        for name in ("n_layer", "n_head", "n_embd", "block_size"):
            assert getattr(gpt.Config(**values), name) == int(
                re.search(rf"\| `{size}`.*", README)[0].split("|")[
                    2 + ["n_layer", "n_head", "n_embd", "block_size"].index(name)
                ]
            )


def test_the_readme_maps_the_lesson_to_code_and_tests_that_exist():
    rows = re.findall(r"^\| \d+\..*\|$", README, re.MULTILINE)
    assert len(rows) >= 9
    for row in rows:
        code, test = row.split("|")[2:4]
        for name in re.findall(r"`(\w+)(?:\.\w+)?`", code):
            assert any(hasattr(module, name) for module in (gpt, bigram, gpt.GPTLanguageModel)), name
        for name in re.findall(r"`(test_\w+)\.py`", test):
            assert (ROOT / "tests" / f"{name}.py").exists(), name

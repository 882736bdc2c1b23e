"""
The pair as two files that a reader takes one after the other: plain to read, the same where they do the same,
with a README that says nothing the code does not do.
"""
import ast
import difflib
import inspect
import math
import re
import shlex
import subprocess
import sys
from dataclasses import fields

import pytest
from helpers import ROOT, good, new_model, tiny

import bigram
import data
import gpt
from data.flags import check, make_parser, parse

README = (ROOT / "README.md").read_text(encoding="utf-8")
SHARED = "Tokenizer split_data get_batch estimate_loss".split()
TOP = "README.md bigram.py data gpt.py pyproject.toml tests".split()
OTHERS = ("help index-url no-sync "  # flags of pip, uv and torchrun
          "standalone nproc_per_node nnodes rdzv_backend rdzv_endpoint max_restarts").split()
SOURCES = [ROOT / "bigram.py", ROOT / "gpt.py", *sorted(ROOT.glob("data/*.py"))]
TESTS = sorted(ROOT.glob("tests/**/*.py"))


def lines_of(*paths):
    return [line for path in paths for line in (ROOT / path).read_text(encoding="utf-8").splitlines()]


def lesson(path):
    """ what is above the line `running it` """
    return lines_of(path)[:lines_of(path).index("# running it")]


# ---- the pair


@pytest.mark.parametrize("name", SHARED)
def test_the_pair_shares_this_definition_to_the_letter(name):
    assert inspect.getsource(getattr(bigram, name)) == inspect.getsource(getattr(gpt, name))


def test_shared_definitions_come_in_the_same_order():
    for module in (bigram, gpt):
        names = [getattr(node, "name", None) for node in ast.parse(inspect.getsource(module)).body]
        assert [name for name in names if name in SHARED] == SHARED


def test_what_both_models_do_with_targets_is_written_out_in_both():
    endings = [inspect.getsource(model.forward).partition("        if targets is None:")[2]
               for model in (bigram.BigramLanguageModel, gpt.GPTLanguageModel)]
    assert endings[0] == endings[1] != ""


def test_the_difference_between_the_two_lessons_is_the_lecture():
    diff = list(difflib.ndiff(lesson("bigram.py"), lesson("gpt.py")))
    assert len([line for line in diff if line[0] == "-"]) <= 45  # the rest of bigram.py is in gpt.py, too
    assert len([line for line in diff if line[0] == "+"]) <= 230


def test_the_baseline_is_at_most_200_lines_and_the_lesson_of_the_transformer_345():
    assert len(lines_of("bigram.py")) <= 200 and len(lesson("gpt.py")) < 345


# ---- plain to read: each finding is (file, line)


def findings(paths, is_found):
    """ where the syntax tree has a node of this kind """
    return [(path.name, node.lineno) for path in paths
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if is_found(node)]


def inner(node, kind):
    """ the nodes of a kind within another node """
    return [each for each in ast.walk(node) if isinstance(each, kind) and each is not node]


def test_no_function_has_more_than_forty_lines():
    assert findings(SOURCES, lambda node: isinstance(node, ast.FunctionDef)
                    and node.end_lineno - node.lineno >= 40) == []


def test_no_class_sets_more_than_twelve_attributes_of_self():
    def attributes(node):
        return {each.attr for each in inner(node, ast.Attribute)
                if isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"}

    assert findings(SOURCES, lambda node: isinstance(node, ast.ClassDef) and len(attributes(node)) > 12) == []


def test_no_assignment_gives_more_than_two_names_their_values():
    assert findings(SOURCES, lambda node: isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
                    and any(len(getattr(target, "elts", [])) > 2 for target in node.targets)) == []


def test_no_conditional_expression_is_within_another():
    assert findings(SOURCES, lambda node: isinstance(node, ast.IfExp) and inner(node, ast.IfExp)) == []


def test_no_or_is_over_an_and():
    def is_and(node):
        return isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And)

    assert findings(SOURCES, lambda node: isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or)
                    and any(is_and(value) for value in node.values)) == []


def test_every_statement_is_on_a_line_of_its_own():
    for path in [*SOURCES, *TESTS]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        begun = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)]
        assert len(begun) == len(set(begun)), (path, {line for line in begun if begun.count(line) > 1})


def test_no_line_is_longer_than_110_columns():
    assert [line for line in lines_of(*SOURCES, *TESTS) if len(line) > 110] == []


# ---- the files


def test_only_torch_numpy_and_requests_are_imported_and_matplotlib_where_a_picture_is_drawn():
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            found |= {(name.partition(".")[0], path.name) for name in names}
    foreign = {(name, path) for name, path in found if name not in {*sys.stdlib_module_names, "data"}}
    assert {name for name, _ in foreign} == {"torch", "numpy", "requests", "matplotlib"}
    assert {path for name, path in foreign if name == "matplotlib"} == {"pictures.py"}


def test_importing_runs_nothing_downloads_nothing_and_draws_nothing():
    code = "import sys; import bigram, gpt; print('requests' in sys.modules, 'matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False False\n", "")


def test_the_data_folder_says_what_each_of_its_files_is_for():
    named = re.findall(r"^    (\w+\.\w+)  ", data.__doc__, re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in ROOT.glob("data/*.*") if path.name != "__init__.py")


def test_the_top_level_contains_what_it_should_and_nothing_else():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    top = {line.partition("/")[0] for line in done.stdout.splitlines()}
    assert {name for name in top if name[0] != "."} == {*TOP}


# ---- the README


def blocks():
    """ what is between two fences, a block each """
    return re.findall(r"^```\w*\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands(script):
    """ what the README gives to a script: what is between its name and a comment or the next command """
    lines = "".join(blocks()).replace("\\\n", "")  # a command may take several lines
    return re.findall(rf"^[^#\n]*(?:python|torchrun)\b[^#\n]* {script}((?: [^#&\n]*)?)", lines, re.MULTILINE)


@pytest.mark.parametrize("script, config_class, sizes", [("bigram.py", bigram.Config, {}),
                                                         ("gpt.py", gpt.Flags, gpt.SIZES)])
def test_every_command_in_the_readme_parses(script, config_class, sizes):
    assert commands(script)
    for command in commands(script):
        given = parse(make_parser(config_class, script, "", sizes), shlex.split(command))
        check(config_class(**given))


def test_every_flag_that_the_readme_names_exists():
    names = {field.name for config_class in (bigram.Config, gpt.Flags) for field in fields(config_class)}
    for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", README):
        assert flag in OTHERS or flag.removeprefix("no-").replace("-", "_") in names, flag


def test_the_run_in_the_readme_has_every_line_that_a_run_prints(tmp_path):
    def beginnings(text):
        return re.findall(r"^(?:\w+|step 0):", text.partition("writes:\n")[0], re.MULTILINE)

    printed = beginnings(good(*tiny(tmp_path, "--max_iters", 0)).out)
    assert printed[:5] == ["device:", "text:", "model:", "heads:", "size:"]
    assert beginnings(next(block for block in blocks() if block.startswith("device:"))) == printed


def test_the_table_of_sizes_in_the_readme_is_that_of_the_code():
    assert f"{math.log(65):.4f}" in README
    for size, values in gpt.SIZES.items():
        config = gpt.Config(**values)
        count = sum(p.numel() for p in new_model(config, 65).parameters())
        row = re.search(rf"^\| `{size}` \|.*$", README, re.MULTILINE)[0]
        numbers = [getattr(config, name) for name in gpt.SHAPE] + [count]
        assert [cell.strip() for cell in row.split("|")[2:7]] == [f"{number:,}" for number in numbers]


def test_the_readme_maps_every_chapter_to_code_and_tests_that_exist():
    rows = re.findall(r"^\|.*`test_\w+\.py`.*\|$", README, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(test_\w+\.py)`", row)}
    chapters = {path.name for path in ROOT.glob("tests/test_*.py")}
    assert named == chapters, named ^ chapters
    for row in rows:
        for name in re.findall(r"`(\w+)(?:\(\))?`", row):
            assert any(hasattr(module, name) for module in (gpt, bigram, gpt.GPTLanguageModel)), name

"""
The settings of both scripts as flags of the command line: every field of a settings class is one.
"""
import argparse
import inspect
import math
import os
import re
import shlex
import sys
import typing
from dataclasses import MISSING, fields

from data.errors import UserError
from data.processes import first_to_fail, rank

LIMITS = {  # a flag's values: one of these words, or numbers from the first up to but not the second
    **dict.fromkeys("n_layer n_head".split(), (1, 1001)),
    **dict.fromkeys("n_embd block_size batch_size eval_interval".split(), (1, 2**62)),
    **dict.fromkeys("eval_iters num_samples top_k".split(), (1, 2**62)),
    **dict.fromkeys("max_iters warmup_iters seed max_new_tokens sample_seed".split(), (0, 2**63)),
    **dict.fromkeys("init_std learning_rate weight_decay grad_clip temperature".split(), (0, math.inf)),
    **dict.fromkeys("dropout beta2".split(), (0, 1)),
    "dtype": ["auto", "float32", "bfloat16"],
}
PATHS = ["data", "out", "init_from", "score"]  # where ~ is the home folder


class Parser(argparse.ArgumentParser):
    """ argparse's, for one process or several: help and errors are said once """

    def print_help(self, file=None):
        if rank() == 0:
            super().print_help(file)

    def error(self, message):
        self.exit(2, f"{self.format_usage()}{self.prog}: error: {message}\n")

    def exit(self, status=0, message=None):
        super().exit(status, message if message and first_to_fail() else None)


def make_parser(config_class, name, description, sizes):
    """ a flag for every field of the settings, its comment the help; sizes: {name: {setting: value}} """
    parser = Parser(prog=name, usage=f"python {name} [flags]   (--help lists them)", allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter,
                    argument_default=argparse.SUPPRESS, description=description)
    hints = typing.get_type_hints(config_class)
    # of a setting that may be None, such as int | None, the type is the first
    parser.types = {name: (typing.get_args(hint) or [hint])[0] for name, hint in hints.items()}
    groups, comments = {}, read_comments(config_class)
    for field in fields(config_class):
        group, question = comments.get(field.name, ("settings", ""))
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        help = question + shown_values(field, sizes)
        groups[group].add_argument(f"--{field.name}", help=help.replace("%", "%%"),
                                   **how_to_read(parser.types[field.name]))
    return parser


def read_comments(config_class):
    """ {name: (group, question)} from the source of the class, as far as it can be found """
    comments = {}
    for each_class in reversed(config_class.__mro__[:-1]):
        try:
            source = inspect.getsource(each_class)
        except (OSError, TypeError):  # no file: code from a pipe, or run by another program
            continue
        group = "settings"
        for name, comment in re.findall(r"^    (?:(\w+) *:[^#\n]*)?(?:# (.+))?$", source, re.MULTILINE):
            if name:
                comments[name] = group, comment
            elif comment:
                group = comment  # a comment on a line of its own begins a group
    return comments


def shown_values(field, sizes):
    """ what a setting is if no flag says otherwise, for the help """
    if any(field.name in values for values in sizes.values()):
        values = [f"{size} {values.get(field.name, field.default)}" for size, values in sizes.items()]
        return f" [{', '.join(values)}]"
    if field.default in (None, "", MISSING) or isinstance(field.default, bool):
        return ""
    return f" [{field.default}]"


def how_to_read(kind):
    """ a field's type -> what argparse is told about its flag """
    if kind is bool:
        return dict(type=true_or_false, nargs="?", const=True, metavar="BOOL")
    return dict(type=kind, metavar=kind.__name__.upper())


def true_or_false(word):
    """ "True", "false", ... -> a bool """
    if word.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"a switch, so {word!r} cannot follow it; name a run's folder with "
                                         "--out, the beginning of a text with --prompt")
    return word.lower() == "true"


def parse(parser, argv=None):
    """ the flags that were given, a dictionary; --n-layer means --n_layer, and --no-fused --fused=False """
    if argv is None and sys.argv[0].endswith("kernel_launcher.py"):  # sys.argv is the notebook's, not ours
        module = parser.prog.removesuffix(".py")
        raise UserError(f'in a notebook, call {module}.main([...]) with flags such as "--max_iters", 100')
    if isinstance(argv, str):
        argv = shlex.split(argv)
    words = sys.argv[1:] if argv is None else [str(word) for word in argv]
    words, dashes = join_values(parser, words)
    given = {**vars(parser.parse_args(words)), **dashes}
    for name in PATHS:
        if name in given:
            given[name] = os.path.expanduser(given[name])
    return given


def join_values(parser, words):
    """
    Each flag and its value as one word, --name=value, so that a value may begin with a dash; only the name is
    repaired. Also returned: {name: "--"} for the value that argparse would drop.
    """
    joined, dashes = [], {}
    words = list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            joined.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        kind = parser.types.get(name)
        if not equals and name.startswith("no_") and parser.types.get(name[3:]) is bool:
            joined.append(f"--{name[3:]}=False")
            continue
        if kind and not equals and words and (kind is not bool or not words[0].startswith("-")):
            equals, value = "=", words.pop(0)
        if value != "--":
            joined.append(f"--{name}{equals}{value}")
            dashes.pop(name, None)  # of two values the last one counts
        elif kind is str:
            dashes[name] = value
        else:
            parser.error(f"argument --{name}: invalid value: '--'")
    return joined, dashes


def check(config):
    """ UserError unless every value is one that its flag takes, and the heads can share the channels """
    for name in [f.name for f in fields(config) if f.name in LIMITS]:
        value, takes = getattr(config, name), LIMITS[name]
        if isinstance(takes, list):
            if value not in takes:
                raise UserError(f"--{name} {value} is not one of: {', '.join(takes)}")
        elif value is not None:
            inside = takes[0] <= value < takes[1]  # False for a value that is not a number
            if not inside:
                raise UserError(f"--{name} is {value}, but must be at least {takes[0]} and below {takes[1]}")
    n_embd, n_head = getattr(config, "n_embd", 0), getattr(config, "n_head", 1)
    if n_embd % n_head:
        raise UserError(f"n_embd {n_embd} is not a multiple of n_head {n_head}; use n_embd "
                        f"{max(1, n_embd // n_head) * n_head}")

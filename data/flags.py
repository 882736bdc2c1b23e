"""
The settings of both scripts as flags of the command line.
"""
import argparse
import inspect
import math
import re
import sys
from dataclasses import fields

from data.errors import UserError

LIMITS = {  # a flag's values: one of these words, or numbers from the first up to but not the second
    **dict.fromkeys("n_layer n_head".split(), (1, 1001)),
    **dict.fromkeys("n_embd block_size batch_size eval_interval".split(), (1, 2**62)),
    **dict.fromkeys("eval_iters num_samples top_k".split(), (1, 2**62)),
    **dict.fromkeys("max_iters warmup_iters seed max_new_tokens sample_seed".split(), (0, 2**63)),
    **dict.fromkeys("init_std learning_rate weight_decay grad_clip temperature".split(), (0, math.inf)),
    **dict.fromkeys("dropout beta2".split(), (0, 1)),
    "dtype": ["auto", "float32", "bfloat16"],
}


def make_parser(config_class, description, sizes):
    """ a flag for every line of the settings, its comment the help; sizes: {name: {setting: value}} """
    parser = argparse.ArgumentParser(usage="python %(prog)s [flags]   (--help lists them)",
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS, description=description)
    types = {f.name: f.type for f in fields(config_class)}
    source = "".join(inspect.getsource(c) for c in reversed(config_class.__mro__[:-1]))
    for name, question in re.findall(r"^    (?:(\w+): .*)?# (.+)$", source, re.MULTILINE):
        if not name:
            group = parser.add_argument_group(question)  # a comment on a line of its own begins a group
            continue
        default = getattr(config_class, name)
        if any(name in values for values in sizes.values()):
            values = [f"{size} {values.get(name, default)}" for size, values in sizes.items()]
            question += f" [{', '.join(values)}]"
        elif types[name] is not bool and default not in (None, ""):
            question += f" [{default}]"
        how = dict(type=types[name], metavar=types[name].__name__.upper())
        if types[name] is bool:
            how = dict(type=true_or_false, nargs="?", const=True, metavar="BOOL")
        group.add_argument(f"--{name}", help=question.replace("%", "%%"), **how)
    return parser


def true_or_false(word):
    """ "True", "false", ... -> a bool; ValueError for another word """
    return bool(["false", "true"].index(word.lower()))


def parse(parser, argv=None):
    """ the flags that were given, a dictionary; --n-layer means --n_layer, and --no-fused --fused=False """
    words = sys.argv[1:] if argv is None else [str(word) for word in argv]
    words = [re.sub(r"^--no[-_]([\w-]+)$", r"--\1=False", word) for word in words]
    words = [re.sub(r"^--[\w-]+", lambda flag: "--" + flag[0][2:].replace("-", "_"), word) for word in words]
    return vars(parser.parse_args(words))


def check(config):
    """ the config, if every value is one that its flag takes; UserError otherwise """
    for name in [f.name for f in fields(config) if f.name in LIMITS]:
        value, takes = getattr(config, name), LIMITS[name]
        if isinstance(takes, list) and value not in takes:
            raise UserError(f"--{name} {value} is not one of: {', '.join(takes)}")
        if isinstance(takes, tuple) and value is not None and not takes[0] <= value < takes[1]:  # true of nan
            raise UserError(f"--{name} is {value}, but must be at least {takes[0]} and below {takes[1]}")
    return config

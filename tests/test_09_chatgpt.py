"""
Chapter 9: from here to ChatGPT. What was built completes documents; fine-tuning is the same training loop on
documents with answers, and the first of the stages that make an assistant. (The reward model and PPO are told
in the lecture, not built.) A tiny model learns lists of questions by heart, then questions with answers.
"""
import copy
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, new_model

import gpt

QUESTIONS = ["What is {}?", "Where is {}?", "Who made {}?", "Why is there {}?"]
ANSWERS = {"a cat": "It sleeps.", "a dog": "It barks.", "a ship": "It sails.", "the sea": "It roars.",
           "the sun": "It burns.", "a word": "It rings."}
UNTAUGHT = ["a king", "a tree"]  # which the model knows from questions alone
LISTS = gpt.Config(n_layer=2, n_head=2, n_embd=32, block_size=32, dropout=0.0, batch_size=16, max_iters=200,
                   eval_interval=200, eval_iters=5, learning_rate=5e-3, init_std=0.05)
DIALOGUES = replace(LISTS, max_iters=150, eval_interval=25)


def lists_of_questions(count):
    draw, things = random.Random(0), [*ANSWERS, *UNTAUGHT]
    return "".join(draw.choice(QUESTIONS).format(draw.choice(things)) + "\n" for _ in range(count))


def questions_with_answers(count):
    draw, things = random.Random(1), list(ANSWERS)
    return "".join(f"What is {thing}?\n{ANSWERS[thing]}\n\n" for thing in draw.choices(things, k=count))


@pytest.fixture(scope="module")
def stages():
    """ the model after pre-training, the same after fine-tuning, one that saw the second text alone """
    documents, dialogues = lists_of_questions(400), questions_with_answers(300)
    tokenizer = gpt.Tokenizer(documents + dialogues)
    documents, dialogues = (gpt.split_data(text, tokenizer) for text in (documents, dialogues))

    completer = new_model(LISTS, len(tokenizer.chars))
    alone = copy.deepcopy(completer)
    gpt.train(completer, documents, LISTS, "cpu")
    assistant = copy.deepcopy(completer)
    tuning = gpt.train(assistant, dialogues, DIALOGUES, "cpu")
    from_nothing = gpt.train(alone, dialogues, DIALOGUES, "cpu")
    return SimpleNamespace(tokenizer=tokenizer, completer=completer, assistant=assistant, tuning=tuning,
                           from_nothing=from_nothing)


@pytest.fixture
def ask(stages):
    def ask(model, question):
        """ the likeliest text after a question, 60 characters of it, as lines """
        idx = torch.tensor([stages.tokenizer.encode(f"{question}\n")])
        written = model.generate(idx, 60, temperature=0)[0, idx.shape[1]:]
        return stages.tokenizer.decode(written.tolist()).split("\n")

    return ask


def test_a_document_completer_continues_a_question_with_more_questions(stages, ask):
    beginnings = {question.split()[0] for question in QUESTIONS}
    for thing in ANSWERS:
        *lines, cut = ask(stages.completer, f"What is {thing}?")
        assert len(lines) >= 2
        assert all(line.split()[0] in beginnings and line.endswith("?") for line in lines)


def test_after_fine_tuning_the_same_question_has_its_answer(stages, ask):
    assert {thing: ask(stages.assistant, f"What is {thing}?")[0] for thing in ANSWERS} == ANSWERS


def test_it_still_completes_documents_and_writes_the_next_question_itself(stages, ask):
    answer, empty, question, another, *_ = ask(stages.assistant, "What is a dog?")
    assert question.startswith("What is ") and question.endswith("?") and empty == ""
    assert another == ANSWERS[question.removeprefix("What is ").removesuffix("?")]


@pytest.mark.parametrize("thing", UNTAUGHT)
def test_what_it_was_not_taught_it_answers_just_as_firmly(thing, stages, ask):
    assert ask(stages.assistant, f"What is {thing}?")[0].startswith("It ")  # as every answer begins


def test_who_has_learned_the_language_learns_the_answers_in_fewer_steps(stages):
    tuning, from_nothing = ({report["step"]: report["val"] for report in reports}
                            for reports in (stages.tuning, stages.from_nothing))
    assert tuning[25] < 0.7 * from_nothing[25] and tuning[50] < 0.7 * from_nothing[50]


def test_the_questions_in_data_are_written_in_the_characters_of_shakespeare(shakespeare):
    text = (ROOT / "data/questions.txt").read_text(encoding="utf-8")
    assert set(text) <= set(shakespeare)  # so that a model of his can be fine-tuned on them
    lines = text.rstrip("\n").split("\n")
    assert len(lines) > 60
    assert all(line[:3] == start for start, line in zip(["Q: ", "A: ", ""] * len(lines), lines))

"""Where two texts part, against sums written out by hand."""

import math

import pytest
import torch

from kvprof.runtime.generation import Generated, difference


def decode(ids):
    return " ".join(map(str, ids))


def run(tokens, rows, ended="length"):
    return Generated(tokens, ended, torch.tensor(rows, dtype=torch.float64))


A = [[0.0, 1.0, 2.0], [2.0, 0.0, 1.0], [0.5, 0.5, 0.0]]
B = [[0.1, 0.9, 2.2], [1.0, 1.5, 0.0], [9.0, 0.0, 0.0]]


def softmax(row):
    total = sum(map(math.exp, row))
    return [math.exp(value) / total for value in row]


def divergence(full, compressed):
    return sum(p * math.log(p / q) for p, q in zip(softmax(full), softmax(compressed), strict=True))


def test_the_first_different_token_and_what_both_think_of_it():
    found = difference(run([2, 0, 0], A), run([2, 1, 0], B), decode)
    assert found["position"] == 1
    assert found["common_text"] == "2"
    assert (found["compressed_rest"], found["full_rest"]) == ("0 0", "1 0")
    assert found["kl"] == pytest.approx([divergence(B[0], A[0]), divergence(B[1], A[1])])
    ours, theirs = found["compressed_token"], found["full_token"]
    assert (ours["id"], theirs["id"]) == (0, 1)
    assert ours["compressed_probability"] == pytest.approx(softmax(A[1])[0])
    assert ours["full_probability"] == pytest.approx(softmax(B[1])[0])
    assert theirs["compressed_probability"] == pytest.approx(softmax(A[1])[1])
    assert theirs["full_probability"] == pytest.approx(softmax(B[1])[1])


def test_the_same_text_is_compared_to_its_end():
    found = difference(run([2, 0, 0], A), run([2, 0, 0], B), decode)
    assert found["position"] is None
    assert found["compressed_token"] is found["full_token"] is None
    assert found["kl"] == pytest.approx([divergence(b, a) for a, b in zip(A, B, strict=True)])


def test_a_text_that_ends_earlier_departs_there():
    found = difference(run([2, 1], A[:2], "end_of_text"), run([2, 0, 0], B), decode)
    assert found["position"] == 1
    assert found["compressed_token"]["id"] == 1
    assert len(found["kl"]) == 2


def test_tokens_that_a_model_rules_out_add_nothing():
    masked = [[0.0, 1.0, -math.inf]]
    found = difference(run([1], masked), run([1], [[0.0, 2.0, -math.inf]]), decode)
    assert found["kl"] == pytest.approx([divergence([0.0, 2.0], [0.0, 1.0])])

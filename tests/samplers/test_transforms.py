"""Inside torch.jit.trace, torch.func's transforms and torch.export: the sample of a plain call."""

from __future__ import annotations

import io

import pytest
import torch

from d2_static_sampler import build_label_sampler, sample_balanced, subsample_labels
from d2_static_sampler.samplers import draw_words

ASKED = {"num_samples": 32, "positive_fraction": 0.5, "bg_label": 0}
CPU = torch.device("cpu")
SIZES = [300, 3000, 20]  # by tables, by blocks, and fewer candidates than slots
pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")


def make_labels(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 3, shape, generator=generator)


def draw(sampler, labels):
    """Words of the shape that the sampler wants."""
    return draw_words(sampler.words_shape(labels, ASKED["num_samples"]), device=CPU)


def sampling(impl, select):
    """The sampler, and what a transform gets: a function of tensors alone."""
    sampler = build_label_sampler(impl, select=select)

    def sample(labels, words=None):
        sample = sampler(labels, **ASKED, words=words)
        return sample.index, sample.num_pos, sample.num_neg, sample.is_pos, sample.is_valid

    return sampler, sample


def is_right(index, num_pos, num_neg, labels):
    """Whether a row's picks are distinct, of their classes, and as many as Detectron2 takes."""
    positives = index[:num_pos]
    negatives = index[num_pos : num_pos + num_neg]
    quota = min(16, int((labels > 0).sum()))
    return (
        bool((labels[positives] > 0).all() and (labels[negatives] == 0).all())
        and len(positives.unique()) == int(num_pos) == quota
        and len(negatives.unique()) == int(num_neg) == min(32 - quota, int((labels == 0).sum()))
    )


def assert_same(got, expected):
    for value, plain in zip(got, expected, strict=True):
        assert value.dtype == plain.dtype
        assert torch.equal(value, plain)


@pytest.mark.parametrize("impl", ["static", "compiled"])
@pytest.mark.parametrize("select", ["rank", "topk"])
@pytest.mark.parametrize("shape", [(2, 300), (1, 3000), (40,)], ids=str)
def test_a_trace_samples_other_labels_too(impl, select, shape):
    """Also after it was saved; of another size and, with words, as the plain call does."""
    sampler, sample = sampling(impl, select)
    _, plain = sampling("static", select)
    example = make_labels(*shape)
    traced = torch.jit.trace(sample, (example, draw(sampler, example)), check_trace=False)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    for size in SIZES:
        labels = make_labels(*(3,) * (len(shape) - 1), size, seed=size)
        words = draw(sampler, labels)
        for function in (traced, torch.jit.load(io.BytesIO(file.getvalue()))):
            assert_same(function(labels, words), plain(labels, words))


@pytest.mark.parametrize("select", ["rank", "topk"])
def test_a_trace_draws_anew_at_each_call(select):
    _, sample = sampling("static", select)
    traced = torch.jit.trace(sample, (make_labels(2, 300),), check_trace=False)
    labels = make_labels(3, 1000, seed=1)
    first, second = traced(labels), traced(labels)
    assert not torch.equal(first[0], second[0])
    for result in (first, second):
        rows = zip(*result[:3], labels, strict=True)
        assert all(is_right(*row) for row in rows)


def test_a_trace_of_the_function_with_detectron2s_signature():
    """The lengths follow the labels, not those of the example."""
    traced = torch.jit.trace(
        lambda labels: subsample_labels(labels, 32, 0.5, 0), (make_labels(300),), check_trace=False
    )
    for size in SIZES:
        labels = make_labels(size, seed=size)
        positive, negative = traced(labels)
        index = torch.cat([positive, negative])
        assert is_right(index, torch.tensor(len(positive)), torch.tensor(len(negative)), labels)


@pytest.mark.parametrize("impl", ["static", "compiled"])
def test_a_trace_of_a_balanced_batch(impl):
    def balanced(inputs, labels, words):
        return sample_balanced(inputs, labels, 16, impl=impl, words=words)

    arguments = [
        (
            torch.randn(2, size, 3),
            make_labels(2, size, seed=size),
            draw_words((3, 2, 16), device=CPU),
        )
        for size in SIZES
    ]
    traced = torch.jit.trace(balanced, arguments[0], check_trace=False)
    for each in arguments:
        assert_same(traced(*each), balanced(*each))


@pytest.mark.parametrize("impl", ["static", "compiled"])
@pytest.mark.parametrize("select", ["rank", "topk"])
@pytest.mark.parametrize("shape", [(4, 300), (4, 2, 3000), (4, 2, 20)], ids=str)
def test_vmap_is_a_loop(impl, select, shape):
    """Over labels and words, over either alone, and over another dimension than the first."""
    sampler, sample = sampling(impl, select)
    _, plain = sampling("static", select)
    labels = make_labels(*shape)
    words = torch.stack([draw(sampler, one) for one in labels])
    expected = [torch.stack(x) for x in zip(*map(plain, labels, words), strict=True)]
    assert_same(torch.func.vmap(sample)(labels, words), expected)
    last = labels.movedim(0, -1), words.movedim(0, -1)
    assert_same(torch.func.vmap(sample, in_dims=(-1, -1))(*last), expected)
    expected = [torch.stack(x) for x in zip(*(plain(labels[0], w) for w in words), strict=True)]
    assert_same(torch.func.vmap(sample, in_dims=(None, 0))(labels[0], words), expected)
    expected = [torch.stack(x) for x in zip(*(plain(one, words[0]) for one in labels), strict=True)]
    assert_same(torch.func.vmap(sample, in_dims=(0, None))(labels, words[0]), expected)


def test_vmap_of_vmap_and_of_a_balanced_batch():
    sampler, sample = sampling("static", "rank")
    labels = make_labels(2, 3, 300)
    words = torch.stack([draw(sampler, one) for one in labels.flatten(0, 1)]).unflatten(0, (2, 3))
    index = torch.func.vmap(torch.func.vmap(sample))(labels, words)[0]
    for i in range(2):
        for j in range(3):
            assert torch.equal(index[i, j], sample(labels[i, j], words[i, j])[0])

    def balanced(inputs, labels, words):
        return sample_balanced(inputs, labels, 16, words=words)

    arguments = torch.randn(3, 300, 2), labels[0], draw_words((3, 3, 16), device=CPU)
    expected = [torch.stack(x) for x in zip(*map(balanced, *arguments), strict=True)]
    assert_same(torch.func.vmap(balanced)(*arguments), expected)


def test_vmap_draws_as_torch_is_told_to():
    _, sample = sampling("static", "rank")
    labels = make_labels(1, 3000).expand(4, 3000)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(sample)(labels)
    index = torch.func.vmap(sample, randomness="different")(labels)[0]
    assert len(index.unique(dim=0)) == 4
    index = torch.func.vmap(sample, randomness="same")(labels)[0]
    assert len(index.unique(dim=0)) == 1


@pytest.mark.parametrize("impl", ["static", "compiled"])
@pytest.mark.parametrize("select", ["rank", "topk"])
def test_export(impl, select):
    sampler, sample = sampling(impl, select)
    _, plain = sampling("static", select)

    class Sampling(torch.nn.Module):
        def forward(self, labels, words):
            return sample(labels, words)

    labels = make_labels(2, 3000)
    exported = torch.export.export(Sampling(), (labels, draw(sampler, labels))).module()
    labels = make_labels(2, 3000, seed=1)
    words = draw(sampler, labels)
    assert_same(exported(labels, words), plain(labels, words))

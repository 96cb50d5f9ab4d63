"""The static sampler: the whole batch at once, every shape known before the data is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .registry import LABEL_SAMPLER_REGISTRY
from .request import SampleRequest, check_request, check_words
from .sample import LabelSample, empty_sample
from .selection import (
    Form,
    HostForm,
    MemberKeys,
    MemberTable,
    check_selection,
    choose_form,
    choose_host_form,
    is_on_host,
    take_in_graph,
    take_on_host,
)
from .transformed import is_transformed, sample_as_one


class StaticSampler:
    """Fixed shapes: no data-dependent operation, no copy to the host.

    With selection by rank the sample is a pure function of (labels, words): the same on any
    device and in any batch.

    Args:
        select: "rank", "topk" (random keys; its words are one for each candidate) or "auto".
        use_numpy: whether a CPU selects by rank in NumPy, which mostly takes half of torch's time;
            it does so only where nobody traces, transforms or counts operations.
    """

    def __init__(self, select: str = "auto", *, use_numpy: bool = True) -> None:
        if not isinstance(use_numpy, bool):
            raise TypeError(f"use_numpy must be True or False, not {use_numpy!r}")
        self.select = check_selection(select)
        self.use_numpy = use_numpy

    def __call__(
        self,
        labels: Tensor,
        *,
        num_samples: int,
        positive_fraction: float,
        bg_label: int,
        generator: torch.Generator | None = None,
        words: Tensor | None = None,
    ) -> LabelSample:
        """Sample each row; see :class:`~.registry.LabelSampler`."""
        request = check_request(labels, num_samples, positive_fraction, bg_label)
        return self.draw(labels, request, generator, words)

    def draw(
        self,
        labels: Tensor,
        request: SampleRequest,
        generator: torch.Generator | None = None,
        words: Tensor | None = None,
    ) -> LabelSample:
        """Sample each row of (N,) or (B, N) labels as ``request`` says."""
        if is_transformed():
            return self._draw_as_one(labels, request, generator, words)
        form = self.form(labels.shape[-1], request.num_samples)
        shape = form.words_shape(labels.shape[:-1], labels.shape[-1], request.num_samples)
        if words is None:
            words = form.draw_words(shape, device=labels.device, generator=generator)
        else:
            check_words(words, shape, labels.device)
        if labels.dim() == 1:
            words = words.unsqueeze(form.words_batch_dim)
            return self._sample(form, labels[None], words, request).row(0)
        return self._sample(form, labels, words, request)

    def _draw_as_one(
        self,
        labels: Tensor,
        request: SampleRequest,
        generator: torch.Generator | None,
        words: Tensor | None,
    ) -> LabelSample:
        """:meth:`draw` in one operation, and one that draws its words."""
        # By rank all forms give one sample; which it is, a trace must not ask its example.
        form = MemberKeys if self.select == "topk" else MemberTable
        rows = labels if labels.dim() == 2 else labels[None]
        size, quota = request.num_samples, request.quota
        if words is None:
            shape = form.words_shape(rows.shape[:1], rows.shape[1], size)
            words = form.draw_words(shape, device=labels.device, generator=generator)
        else:
            shape = form.words_shape(labels.shape[:-1], labels.shape[-1], size)
            check_words(words, shape, labels.device)
            words = words if labels.dim() == 2 else words.unsqueeze(form.words_batch_dim)
        by_keys = form is MemberKeys
        sample = LabelSample(
            *sample_as_one(rows, words, size, quota, request.background, request.fill, by_keys)
        )
        return sample if labels.dim() == 2 else sample.row(0)

    def words_shape(self, labels: Tensor, num_samples: int) -> tuple[int, ...]:
        """The shape of the words for (N,) or (B, N) labels."""
        form = self.form(labels.shape[-1], num_samples)
        return form.words_shape(labels.shape[:-1], labels.shape[-1], num_samples)

    def form(self, num_candidates: int, num_samples: int) -> Form:
        """The form of selection for rows of N candidates and K slots."""
        return choose_form(self.select, num_candidates, num_samples)

    def host_form(self, num_candidates: int, num_samples: int) -> HostForm:
        """The form of the members that NumPy selects from, for N candidates and K slots."""
        return choose_host_form(num_candidates, num_samples)

    def _sample(
        self, form: Form, labels: Tensor, words: Tensor, request: SampleRequest
    ) -> LabelSample:
        """Sample (B, N) labels."""
        if labels.numel() == 0 or request.num_samples == 0:
            return empty_sample(labels, request.num_samples)
        return self._take(form, labels, words, request)

    def _take(
        self, form: Form, labels: Tensor, words: Tensor, request: SampleRequest
    ) -> LabelSample:
        """Sample (B, N) labels, where none of B, N and K is 0."""
        if self._is_for_numpy(form, labels, words):
            host_form = self.host_form(labels.shape[1], request.num_samples)
            return LabelSample(*take_on_host(host_form, labels, words, request))
        if self._is_for_numpy_in_graph(form, labels):
            size, quota = request.num_samples, request.quota
            background, fill = request.background, request.fill
            return LabelSample(*take_in_graph(labels, words, size, quota, background, fill))
        # Without autograd's bookkeeping the many small operations take a sixth less time; in a
        # graph it stays.
        with torch.no_grad() if torch.compiler.is_compiling() else torch.inference_mode():
            taken = form.of(labels, request.background).take(words, request)
        # What is computed out here are ordinary tensors, which autograd may save.
        index, is_padding, *counts = taken
        return LabelSample(index.masked_fill(is_padding, 0), *torch.cat(counts, 1).unbind(1))

    def _is_for_numpy(self, form: Form, labels: Tensor, words: Tensor) -> bool:
        return self.use_numpy and form is not MemberKeys and is_on_host(labels, words)

    def _is_for_numpy_in_graph(self, form: Form, labels: Tensor) -> bool:
        on_cpu = self.use_numpy and form is not MemberKeys and labels.device.type == "cpu"
        return on_cpu and torch.compiler.is_compiling()


@dataclass(frozen=True)
class Taker:
    """A static sampler whose words are drawn elsewhere, for a graph of its caller's.

    Attributes:
        sampler: whose copy it is; a compiled one is not compiled on its own here.
        form: of the selection, whatever the number of candidates: another would be another graph.
        request: how many of each class to draw.
    """

    sampler: StaticSampler
    form: Form
    request: SampleRequest

    def __call__(self, labels: Tensor, words: Tensor) -> LabelSample:
        """Sample (B, N) labels with words of the form's shape."""
        return self.sampler._sample(self.form, labels, words, self.request)


def subsample_labels(
    labels: Tensor, num_samples: int, positive_fraction: float, bg_label: int
) -> tuple[Tensor, Tensor]:
    """Sample one row, with the signature and the result of Detectron2's function of this name.

    Args:
        labels: (N,) integer or bool; -1 = ignore.
        num_samples: the most candidates to return.
        positive_fraction: the most positives, as a share of ``num_samples``.
        bg_label: the label of a negative.

    Returns:
        The indices of the positives and of the negatives, int64. Their lengths depend on the
        data, so that the host waits for the device here.
    """
    sample = StaticSampler()(
        labels, num_samples=num_samples, positive_fraction=positive_fraction, bg_label=bg_label
    )
    if torch.jit.is_tracing():  # the numbers of the example would stay in the trace
        return sample.index[sample.is_pos], sample.index[sample.is_neg]
    num_pos, num_neg = torch.stack([sample.num_pos, sample.num_neg]).tolist()
    return sample.index[:num_pos], sample.index[num_pos : num_pos + num_neg]


@LABEL_SAMPLER_REGISTRY.register()
def static(select: str = "auto", *, use_numpy: bool = True) -> StaticSampler:
    """``IMPL: static``."""
    return StaticSampler(select, use_numpy=use_numpy)

# SPDX-License-Identifier: Apache-2.0
"""Results of a pipeline: equal to those of the functions it calls, fused or step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashinfer import sampling
from flashinfer.logits_processor import (
    LogitsPipe,
    MinP,
    Sample,
    Softmax,
    TaggedTensor,
    Temperature,
    TensorType,
    TopK,
    TopP,
)

from ..graphs import capture

ROWS, VOCAB = 64, 1111
STREAM = {"seed": 42, "offset": 8}
PARAMETERS = {"temperature": 0.7, "top_k": 50, "top_p": 0.8, "min_p": 0.1}
FROM_LOGITS = {
    "softmax": [Temperature(), Softmax()],
    "sample": [Sample()],
    "temperature": [Temperature(), Sample()],
    "softmax, sample": [Temperature(), Softmax(), Sample()],
    "top_k of logits": [Temperature(), TopK(), Softmax(), Sample()],
    "top_k of logits only": [TopK(), Sample()],
    "top_k": [Temperature(), Softmax(), TopK(), Sample()],
    "top_p": [Temperature(), Softmax(), TopP(), Sample()],
    "min_p": [Temperature(), Softmax(), MinP(), Sample()],
    "top_k, top_p": [Temperature(), Softmax(), TopK(), TopP(), Sample()],
    "all": [Temperature(), TopK(), Softmax(), TopP(), MinP(), Sample()],
    "masks": [Temperature(), Softmax(), TopK(), TopP(), MinP()],
}


@pytest.fixture
def logits(device):
    return 3 * torch.randn(ROWS, VOCAB, device=device)


def per_row(parameters, device):
    """Return the same numbers as tensors."""
    return {
        name: torch.full((ROWS,), value, dtype=torch.int32 if name == "top_k" else torch.float32, device=device)
        for name, value in parameters.items()
    }


@pytest.mark.parametrize("name", FROM_LOGITS)
@pytest.mark.parametrize("tensors", [False, True])
def test_fused_is_the_same_as_the_steps(logits, device, name, tensors):
    parameters = per_row(PARAMETERS, device) if tensors else PARAMETERS
    steps = LogitsPipe(FROM_LOGITS[name], compile=False, input_type=TensorType.LOGITS)
    fused = LogitsPipe(FROM_LOGITS[name], input_type=TensorType.LOGITS)
    assert steps.compiled_ops is None and len(fused.compiled_ops) <= len(fused.ops)
    expected, actual = steps(logits, **parameters, **STREAM), fused(logits, **parameters, **STREAM)
    if actual.is_floating_point():
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(actual, expected)


def generators(device):
    return (torch.Generator(device).manual_seed(7) for _ in range(2))


@pytest.mark.parametrize(
    "processors, direct",
    [
        ([Sample()], lambda p, g: sampling.sampling_from_probs(p, generator=g)),
        ([TopK(), Sample()], lambda p, g: sampling.top_k_sampling_from_probs(p, 50, generator=g)),
        ([TopP(), Sample()], lambda p, g: sampling.top_p_sampling_from_probs(p, 0.8, generator=g)),
        ([MinP(), Sample()], lambda p, g: sampling.min_p_sampling_from_probs(p, 0.1, generator=g)),
        (
            [TopK(), TopP(), Sample()],
            lambda p, g: sampling.top_k_top_p_sampling_from_probs(p, 50, 0.8, generator=g),
        ),
        (
            [TopK(joint_topk_topp=True), TopP(), Sample()],
            lambda p, g: sampling.top_k_top_p_sampling_from_probs(p, 50, 0.8, filter_apply_order="joint", generator=g),
        ),
    ],
    ids=["sample", "top_k", "top_p", "min_p", "top_k first", "joint"],
)
def test_same_as_the_function(logits, device, processors, direct):
    probs = torch.softmax(logits, dim=-1)
    pipe = LogitsPipe(processors, input_type=TensorType.PROBS)
    ours, theirs = generators(device)
    for _ in range(3):  # both generators advance equally
        assert torch.equal(pipe(probs, generator=ours, **PARAMETERS), direct(probs, theirs))


def test_same_as_the_functions_from_logits(logits, device):
    ours, theirs = generators(device)
    pipe = LogitsPipe([Temperature(), Softmax(), TopP(), Sample()])
    probs = sampling.softmax(logits, 0.7)
    expected = sampling.top_p_sampling_from_probs(probs, 0.8, generator=theirs)
    assert torch.equal(pipe(logits, generator=ours, **PARAMETERS), expected)
    pipe = LogitsPipe([Sample()], input_type=TensorType.LOGITS)
    assert torch.equal(pipe(logits, generator=ours), sampling.sampling_from_logits(logits, generator=theirs))


def test_softmax_is_that_of_the_functions(logits):
    pipe = LogitsPipe([Softmax()])
    assert torch.equal(pipe(logits), sampling.softmax(logits))
    assert torch.equal(pipe(logits[0]), sampling.softmax(logits[:1])[0])
    assert torch.equal(pipe(logits.view(2, -1, VOCAB)), sampling.softmax(logits).view(2, -1, VOCAB))


JOINT_ROWS = {"cpu": (99, 32000, 3), "cuda": (989, 128256, 10)}  # rows, columns, draws: few on a CPU


def test_joint_draws_of_long_rows(device):
    """Check top_p on long rows: probabilities that are rounded differently would keep other tokens."""
    rows, vocab, draws = JOINT_ROWS[torch.device(device).type]
    logits = torch.randn(rows, vocab, device=device)
    pipe = LogitsPipe([Softmax(), TopK(joint_topk_topp=True), TopP(), Sample()])
    k, p = vocab // 10, 0.5
    for seed in range(draws):
        states = [torch.Generator(device).manual_seed(seed) for _ in range(3)]
        expected = sampling.top_k_top_p_sampling_from_logits(
            logits, k, p, filter_apply_order="joint", generator=states[0]
        )
        from_probs = sampling.top_k_top_p_sampling_from_probs(
            sampling.softmax(logits), k, p, filter_apply_order="joint", generator=states[1]
        )
        assert torch.equal(from_probs, expected)
        assert torch.equal(pipe(logits, top_k=k, top_p=p, generator=states[2]), expected)


def test_masks(logits):
    probs = torch.softmax(logits, dim=-1)
    assert torch.equal(
        LogitsPipe([TopK()], input_type=TensorType.PROBS)(probs, top_k=9), sampling.top_k_renorm_probs(probs, 9)
    )
    assert torch.equal(
        LogitsPipe([TopK()], input_type=TensorType.LOGITS)(logits, top_k=9), sampling.top_k_mask_logits(logits, 9)
    )
    assert torch.equal(LogitsPipe([TopP()])(probs, top_p=0.5), sampling.top_p_renorm_probs(probs, 0.5))
    kept = LogitsPipe([MinP()])(probs, min_p=0.2)
    assert torch.equal(kept > 0, probs >= 0.2 * probs.amax(dim=-1, keepdim=True))
    torch.testing.assert_close(kept.sum(dim=-1), torch.ones_like(kept[:, 0]))
    torch.testing.assert_close(LogitsPipe([Temperature()])(logits, temperature=0.5), logits * 2)


def test_temperature_of_each_row(logits, device):
    temperature = torch.rand(ROWS, device=device) + 0.5
    expected = torch.softmax(logits / temperature.unsqueeze(-1), dim=-1)
    for compile in (False, True):
        pipe = LogitsPipe([Temperature(), Softmax()], compile=compile)
        for form in (temperature, temperature.unsqueeze(-1)):
            torch.testing.assert_close(pipe(logits, temperature=form), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_temperature_as_tensor(logits, device, shape):
    expected = torch.softmax(logits / 0.7, dim=-1)
    for compile in (False, True):
        pipe = LogitsPipe([Temperature(), Softmax()], compile=compile)
        y = pipe(logits, temperature=torch.full(shape, 0.7, device=device))
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compile", [False, True])
def test_defaults_of_the_constructor(logits, compile):
    pipe = LogitsPipe([Temperature(temperature=0.7), Softmax(), TopP(top_p=0.8), Sample(**STREAM)], compile=compile)
    plain = LogitsPipe([Temperature(), Softmax(), TopP(), Sample()], compile=compile)
    assert torch.equal(pipe(logits), plain(logits, temperature=0.7, top_p=0.8, **STREAM))
    later = {"temperature": 2.0, "top_p": 0.99}
    assert torch.equal(pipe(logits, **later), plain(logits, **later, **STREAM))


def test_indices(device):
    probs = torch.eye(5, device=device)
    rows = torch.tensor([4, 0, 0, 3, 1, 1, 2], device=device)
    for processors in ([Sample()], [TopK(), Sample()], [TopP(), Sample()]):
        pipe = LogitsPipe(processors, input_type=TensorType.PROBS)
        tokens = pipe(probs, indices=rows, top_k=1, top_p=0.5)
        assert tokens.dtype == rows.dtype and torch.equal(tokens, rows)


def test_numbers_of_numpy(logits):
    pipe = LogitsPipe(FROM_LOGITS["all"])
    numbers = {name: np.float64(value) for name, value in PARAMETERS.items()} | {"top_k": np.int64(PARAMETERS["top_k"])}
    assert torch.equal(pipe(logits, **numbers, **STREAM), pipe(logits, **PARAMETERS, **STREAM))


@pytest.mark.parametrize("processor", [TopK(), TopP(), MinP()], ids=repr)
def test_rows_without_numbers(device, processor):
    """Check that NaN is never drawn and that a row of NaN gives 0, fused or step by step."""
    probs = torch.tensor([[torch.nan, 0.0, 0.5, 0.5], [torch.nan] * 4, [0.0] * 4], device=device)
    kept = LogitsPipe([processor], input_type=TensorType.PROBS)(probs, **PARAMETERS)
    assert kept.tolist() == [[0.0, 0.0, 0.5, 0.5], [0.0] * 4, [0.0] * 4]
    steps, fused = (LogitsPipe([processor, Sample()], c, TensorType.PROBS) for c in (False, True))
    indices = torch.arange(3, device=device).repeat(50)
    assert torch.equal(
        steps(probs, **PARAMETERS, **STREAM, indices=indices), fused(probs, **PARAMETERS, **STREAM, indices=indices)
    )


def test_tagged_input(logits):
    pipe = LogitsPipe([Softmax()])
    assert torch.equal(pipe(TaggedTensor.logits(logits)), pipe(logits))
    with pytest.raises(ValueError, match="LogitsPipe: x must be of type LOGITS"):
        pipe(TaggedTensor.probs(logits))


def test_frequencies(device):
    probs = torch.softmax(torch.randn(1, 64, device=device), dim=-1)
    rows = torch.zeros(200_000, dtype=torch.int32, device=device)
    for processors in ([TopK(), Sample()], [TopP(), Sample()], [MinP(), Sample()]):
        mask = LogitsPipe(processors[:1], input_type=TensorType.PROBS)(probs, **PARAMETERS | {"top_k": 9})
        tokens = LogitsPipe(processors, input_type=TensorType.PROBS)(probs, indices=rows, **PARAMETERS | {"top_k": 9})
        counts = torch.bincount(tokens, minlength=64)
        assert (counts[mask[0] == 0] == 0).all()
        assert torch.cosine_similarity(counts.float(), mask[0], dim=0) > 0.999


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile(logits, backend):
    pipe = LogitsPipe([Temperature(), Softmax(), TopP(), Sample()])

    def model(x):
        return pipe(2 * x, temperature=0.7, top_p=0.9, **STREAM) + 1

    assert torch.equal(torch.compile(model, fullgraph=True, backend=backend)(logits), model(logits))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph():
    logits = torch.randn(ROWS, VOCAB, device="cuda")
    stream = {name: torch.tensor([value], device="cuda") for name, value in STREAM.items()}
    pipe = LogitsPipe([Temperature(), Softmax(), TopK(), TopP(), Sample()])
    parameters = per_row(PARAMETERS, "cuda")
    graph, tokens = capture(lambda: pipe(logits, **parameters, **stream))
    for offset in (0, 4, 8):
        logits.normal_()
        stream["offset"].fill_(offset)
        graph.replay()
        assert torch.equal(tokens, pipe(logits, **parameters, **stream))

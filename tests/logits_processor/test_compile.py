# SPDX-License-Identifier: Apache-2.0
"""Types, legalisation, validity and fusion: which pipelines can be built, and from which ops."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import flashinfer.logits_processor as lp
from flashinfer.logits_processor import (
    CompileError,
    Compiler,
    FusionRule,
    LegalizationError,
    LogitsPipe,
    MinP,
    Op,
    Sample,
    Softmax,
    TaggedTensor,
    Temperature,
    TensorType,
    TopK,
    TopP,
    compile_pipeline,
    legalize_processors,
)
from flashinfer.logits_processor import operators as ops

LOGITS, PROBS, INDICES = TensorType


def names(made):
    return [type(op).__name__ for op in made]


@pytest.mark.parametrize(
    "processor, legal",
    [
        (Temperature(), {LOGITS: "TemperatureOp"}),
        (Softmax(), {LOGITS: "SoftmaxOp"}),
        (TopK(), {LOGITS: "LogitsTopKOp", PROBS: "ProbsTopKOp"}),
        (TopP(), {PROBS: "TopPOp"}),
        (MinP(), {PROBS: "MinPOp"}),
        (Sample(), {LOGITS: "LogitsSampleOp", PROBS: "ProbsSampleOp"}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("input_type", TensorType)
def test_legalisation(processor, legal, input_type):
    if input_type in legal:
        assert names(processor.legalize(input_type)) == [legal[input_type]]
    else:
        with pytest.raises(ValueError, match=f"the input must be of type .*, got {input_type.name}"):
            processor.legalize(input_type)
        with pytest.raises(LegalizationError, match="processor 0: "):
            legalize_processors([processor], input_type)


# Fusion of two ops, of three ops with a guard, and no fusion.
FUSED = [
    ([Temperature(), Softmax()], ["FusedTemperatureSoftmaxOp"]),
    ([Temperature(), Softmax(), TopK(), Sample()], ["FusedTemperatureSoftmaxOp", "FusedProbsTopKSampleOp"]),
    ([Softmax(), TopP(), Sample()], ["SoftmaxOp", "FusedProbsTopPSampleOp"]),
    ([Softmax(), MinP(), Sample()], ["SoftmaxOp", "FusedProbsMinPSampleOp"]),
    ([Softmax(), TopK(), TopP(), Sample()], ["SoftmaxOp", "ProbsTopKOp", "FusedProbsTopPSampleOp"]),
    ([Softmax(), TopK(joint_topk_topp=True), TopP(), Sample()], ["SoftmaxOp", "FusedProbsTopKTopPSampleOp"]),
    ([Softmax(), TopK(), TopP()], ["SoftmaxOp", "ProbsTopKOp", "TopPOp"]),
    ([Temperature(), TopK(), Softmax(), Sample()], ["TemperatureOp", "LogitsTopKOp", "SoftmaxOp", "ProbsSampleOp"]),
]


@pytest.mark.parametrize("processors, expected", FUSED, ids=str)
def test_fusion(processors, expected):
    pipe = LogitsPipe(processors)
    assert names(pipe.compiled_ops) == expected
    assert len(pipe.ops) == len(pipe.processors) == len(processors) and pipe.initial_type is LOGITS
    lazy = LogitsPipe(processors, compile=False)
    assert lazy.compiled_ops is None
    lazy.compile()
    assert names(lazy.compiled_ops) == expected


@pytest.mark.parametrize(
    "processors, text",
    [
        ([Softmax(), Temperature()], "processor 1: Temperature: the input must be of type LOGITS, got PROBS"),
        ([Softmax(), Softmax()], "processor 1: Softmax"),
        ([Softmax(), Sample(), TopP()], "processor 2: TopP: the input must be of type PROBS, got INDICES"),
        ([Temperature(), TopP()], "processor 1: TopP: the input must be of type PROBS, got LOGITS"),
        ([TopK(), Sample()], "cannot be inferred, got None and TopK"),
        ([Sample()], "input_type must be given .* which takes LOGITS and PROBS"),
    ],
    ids=str,
)
@pytest.mark.parametrize("compile", [False, True])
def test_pipelines_that_cannot_be(processors, text, compile):
    with pytest.raises(ValueError, match=f"Pipeline creation failed: .*{text}"):
        LogitsPipe(processors, compile=compile)


def test_no_processors():
    with pytest.raises(ValueError, match="processors must have at least one processor, got none"):
        LogitsPipe([])


@pytest.mark.parametrize(
    "made, text",
    [
        ([], "at least one op, got no ops"),
        ([ops.SoftmaxOp(), ops.SoftmaxOp()], "at most one softmax, got 2 softmax ops"),
        ([ops.ProbsSampleOp(), ops.TopPOp()], "must be the last"),
        ([ops.SoftmaxOp(), ops.TemperatureOp()], "must take PROBS, .*, got LOGITS"),
    ],
    ids=["empty", "two softmax", "after a draw", "types"],
)
def test_validity(made, text):
    with pytest.raises(CompileError, match=text):
        compile_pipeline(made)


class OfIndices(Op):
    IN = OUT = INDICES

    def __call__(self, tensor, **kwargs):
        return TaggedTensor.indices(tensor.data + 1)


def test_first_op_takes_logits_or_probs():
    with pytest.raises(CompileError, match="must take LOGITS or PROBS, got INDICES"):
        Compiler().compile([OfIndices()])


def test_custom_rules_and_checks():
    class Negate(ops.TopPOp):
        def __call__(self, tensor, **kwargs):
            return TaggedTensor.probs(-tensor.data)

    rule = FusionRule((ops.SoftmaxOp, ops.TopPOp), lambda found: True, lambda found: SoftmaxOfZeros(), 50)

    class SoftmaxOfZeros(ops.SoftmaxOp):
        def __call__(self, tensor, **kwargs):
            return TaggedTensor.probs(torch.full_like(tensor.data, 1 / tensor.shape[1]))

    assert FusionRule((ops.TopPOp,), all, all).prio == 0
    pipe = LogitsPipe([Softmax(), TopP(), Sample()], custom_fusion_rules=[rule])
    assert names(pipe.compiled_ops) == ["SoftmaxOfZeros", "ProbsSampleOp"]  # matched further left than the default rule

    def at_most_two(made):
        if len(made) > 2:
            raise CompileError("too long")

    with pytest.raises(ValueError, match="Pipeline creation failed: too long"):
        LogitsPipe([Softmax(), TopP(), Sample()], custom_validity_checks=[at_most_two])
    assert names(compile_pipeline([Negate()])) == ["Negate"]


def test_rules_that_never_end():
    rule = FusionRule((ops.TopPOp,), lambda found: True, lambda found: ops.TopPOp())
    with pytest.raises(CompileError, match="fusion did not end"):
        compile_pipeline([ops.TopPOp()], [rule])
    with pytest.raises(CompileError, match="at least one op in its pattern"):
        Compiler().register_fusion_rule(FusionRule((), lambda found: True, lambda found: found[0]))


BAD = [
    ([Temperature()], {}, "0 (TemperatureOp): TemperatureOp: temperature must be in the call"),
    ([Temperature()], {"temperature": 0.0}, "temperature must be a positive float, got 0.0"),
    ([Temperature(), Softmax()], {"temperature": -1.0}, "0 (FusedTemperatureSoftmaxOp): "),
    ([Temperature()], {"temperature": "warm"}, "temperature must be a positive float, got 'warm'"),
    ([Softmax(), TopK()], {}, "1 (ProbsTopKOp): ProbsTopKOp: top_k must be in the call"),
    ([Softmax(), TopK()], {"top_k": 0}, "top_k must be a positive integer, got 0"),
    ([Softmax(), TopK()], {"top_k": 1.5}, "top_k must be a positive integer, got 1.5"),
    ([Softmax(), TopP()], {"top_p": 0.0}, "top_p must be a float in (0, 1], got 0.0"),
    ([Softmax(), TopP()], {"top_p": 1.1}, "top_p must be a float in (0, 1], got 1.1"),
    ([Softmax(), TopP(), Sample()], {"top_p": 2}, "1 (FusedProbsTopPSampleOp): "),
    ([Softmax(), MinP()], {"min_p": 0.0}, "min_p must be a float in (0, 1], got 0.0"),
    ([Softmax(), MinP(), Sample()], {}, "min_p must be in the call"),
    (
        [Softmax(), MinP()],
        {"min_p": torch.ones(8)},
        "batch size mismatch: expected length 2, the rows of the input, got 8",
    ),
    ([Softmax(), MinP()], {"min_p": torch.ones(2, 1)}, "got a 2D tensor"),
]


@pytest.mark.parametrize("processors, parameters, text", BAD, ids=[row[2] for row in BAD])
def test_bad_parameters(processors, parameters, text):
    with pytest.raises(ValueError) as caught:
        LogitsPipe(processors)(torch.randn(2, 8), **parameters)
    assert str(caught.value).startswith("Error executing operator ") and text in str(caught.value)


def test_processors_are_processors():
    with pytest.raises(ValueError, match=r"processors\[1\] must be a LogitsProcessor, got <class .*TopK'>"):
        LogitsPipe([Softmax(), TopK])
    with pytest.raises(TypeError, match=r"LogitsPipe: processors must be a sequence.*, got a Softmax"):
        LogitsPipe(Softmax())
    with pytest.raises(ValueError, match="LogitsPipe: input_type must be a TensorType, got 'logits'"):
        LogitsPipe([TopK()], input_type="logits")


def test_processors_of_others():
    """Check user-defined processors, whose constructors may not call ours."""

    class Fixed(lp.LogitsProcessor):
        def __init__(self):
            pass

        def legalize(self, input_type):
            raise ValueError("not today")

    with pytest.raises(ValueError, match=r"Fixed\(\), which takes neither logits nor probabilities"):
        LogitsPipe([Fixed()])


def test_ops_check_the_type():
    with pytest.raises(ValueError, match="SoftmaxOp: the input must be of type LOGITS, got PROBS"):
        ops.SoftmaxOp()(TaggedTensor.probs(torch.ones(1, 1)))


def test_tagged_tensor():
    x = torch.randn(3, 4)
    tagged = TaggedTensor.probs(x)
    assert tagged == TaggedTensor(x, PROBS) or tagged.type is PROBS
    assert (tagged.shape, tagged.dtype, tagged.device) == (x.shape, x.dtype, x.device)
    assert tagged.size() == x.size() and tagged.size(1) == 4
    assert TaggedTensor.logits(x).type is LOGITS and TaggedTensor.indices(x).type is INDICES
    total = torch.add(tagged, tagged)
    assert type(total) is torch.Tensor and torch.equal(total, x + x)
    assert torch.equal(torch.cat([tagged, x]), torch.cat([x, x]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        tagged.type = LOGITS


def test_names():
    assert set(lp.__all__) <= vars(lp).keys() and len(lp.__all__) == 18
    assert repr(LogitsPipe([TopP(top_p=0.5), Sample()])).startswith("LogitsPipe([TopP(top_p=0.5), Sample(")

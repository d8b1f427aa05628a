# SPDX-License-Identifier: Apache-2.0
"""Pipelines from logits to tokens: processors describe steps, ops execute them, and rules fuse ops.

>>> from flashinfer.logits_processor import LogitsPipe, Sample, Softmax, Temperature, TopP
>>> pipe = LogitsPipe([Temperature(), Softmax(), TopP(), Sample()])
>>> tokens = pipe(torch.randn(4, 128256), temperature=0.7, top_p=0.9)

A pipeline knows the type of the tensor before each step: logits, probabilities or token indices (:class:`TensorType`).
An invalid order is therefore refused when the pipeline is made. Two fused ops then do the work of the four steps above.
"""

from .compiler import CompileError, Compiler, compile_pipeline
from .fusion_rules import FusionRule
from .legalization import LegalizationError, legalize_processors
from .op import Op, ParameterizedOp
from .operators import FusedProbsMinPSampleOp as FusedProbsMinPSampleOp
from .operators import FusedProbsTopKSampleOp as FusedProbsTopKSampleOp
from .operators import FusedProbsTopKTopPSampleOp as FusedProbsTopKTopPSampleOp
from .operators import FusedProbsTopPSampleOp as FusedProbsTopPSampleOp
from .operators import FusedTemperatureSoftmaxOp as FusedTemperatureSoftmaxOp
from .pipeline import LogitsPipe
from .processors import LogitsProcessor, MinP, Sample, Softmax, Temperature, TopK, TopP
from .types import TaggedTensor, TensorType

__all__ = [
    "CompileError",
    "Compiler",
    "FusionRule",
    "LegalizationError",
    "LogitsPipe",
    "LogitsProcessor",
    "MinP",
    "Op",
    "ParameterizedOp",
    "Sample",
    "Softmax",
    "TaggedTensor",
    "Temperature",
    "TensorType",
    "TopK",
    "TopP",
    "compile_pipeline",
    "legalize_processors",
]

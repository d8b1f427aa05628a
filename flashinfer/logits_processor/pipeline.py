# SPDX-License-Identifier: Apache-2.0
"""``LogitsPipe``: an executable list of processors."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Union

import torch

from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from .compiler import CompileError, compile_pipeline
from .fusion_rules import FusionRule
from .legalization import LegalizationError, infer_initial_type, legalize_processors
from .op import Op
from .processors import LogitsProcessor
from .types import TaggedTensor, TensorType
from .validators import ValidityCheck

__all__ = ["LogitsPipe"]


class LogitsPipe:
    r"""A pipeline of processors.

    Parameters
    ----------
    processors : Sequence[LogitsProcessor]
        At least one.
    compile : bool
        Check the order of ops and fuse them.
    input_type : Optional[TensorType]
        What the pipeline is given. Needed where the first processor takes logits and probabilities: TopK and Sample.
    custom_fusion_rules : Optional[Sequence[FusionRule]]
        Rules besides those of :mod:`flashinfer.logits_processor.fusion_rules`.
    custom_validity_checks : Optional[Sequence[ValidityCheck]]
        Checks besides those of :mod:`flashinfer.logits_processor.validators`.

    Attributes
    ----------
    processors : list
        As given.
    ops : list
        One or more for each processor.
    compiled_ops : Optional[list]
        What is executed instead of ``ops``; None where nothing was compiled.
    initial_type : TensorType
        What the pipeline is given.

    Examples
    --------
    >>> from flashinfer.logits_processor import LogitsPipe, Sample, Softmax, Temperature, TopK
    >>> pipe = LogitsPipe([Temperature(), Softmax(), TopK(), Sample()])
    >>> tokens = pipe(torch.randn(4, 128256), temperature=0.7, top_k=50, seed=42, offset=0)
    """

    @explain_type_errors
    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        compile: bool = True,
        input_type: Optional[TensorType] = None,
        custom_fusion_rules: Optional[Sequence[FusionRule]] = None,
        custom_validity_checks: Optional[Sequence[ValidityCheck]] = None,
    ) -> None:
        if not processors:
            raise ArgumentError("LogitsPipe: processors must have at least one processor, got none")
        self.processors = list(processors)
        for i, processor in enumerate(self.processors):
            if not isinstance(processor, LogitsProcessor):
                raise ArgumentError(f"LogitsPipe: processors[{i}] must be a LogitsProcessor, got {processor!r}")
        if input_type is not None and not isinstance(input_type, TensorType):
            raise ArgumentError(f"LogitsPipe: input_type must be a TensorType, got {input_type!r}")
        self.compiled_ops: Optional[list[Op]] = None
        try:
            self.initial_type = input_type or infer_initial_type(self.processors[0])
            self.ops = legalize_processors(self.processors, self.initial_type)
        except LegalizationError as error:
            raise ArgumentError(f"Pipeline creation failed: {error}") from error
        if compile:
            self.compile(custom_fusion_rules, custom_validity_checks)

    def compile(
        self,
        custom_fusion_rules: Optional[Sequence[FusionRule]] = None,
        custom_validity_checks: Optional[Sequence[ValidityCheck]] = None,
    ) -> None:
        """Check and fuse the ops. The arguments are those of the constructor."""
        try:
            self.compiled_ops = compile_pipeline(self.ops, custom_fusion_rules, custom_validity_checks)
        except CompileError as error:
            raise ArgumentError(f"Pipeline creation failed: {error}") from error

    def __call__(self, x: Union[torch.Tensor, TaggedTensor], **kwargs: Any) -> torch.Tensor:
        """Run the pipeline.

        Parameters
        ----------
        x : Union[torch.Tensor, TaggedTensor]
            ``(rows, vocab)``, of the type the pipeline is given.
        **kwargs
            ``temperature``, ``top_k``, ``top_p``, ``min_p``: numbers, or tensors with one for each row; ``indices``,
            ``generator``, ``seed``, ``offset``, ``check_nan``, ``is_deterministic``. Each op takes what it knows; what
            is given here goes before the defaults of the processors.

        Returns
        -------
        torch.Tensor
            What the last op makes.
        """
        tagged = x if isinstance(x, TaggedTensor) else TaggedTensor(x, self.initial_type)
        if tagged.type is not self.initial_type:
            raise ArgumentError(
                f"LogitsPipe: x must be of type {self.initial_type.name} (the pipeline's input), got {tagged.type.name}"
            )
        for i, op in enumerate(self.ops if self.compiled_ops is None else self.compiled_ops):
            try:
                tagged = op(tagged, **kwargs)
            except Exception as error:
                raise ArgumentError(f"Error executing operator {i} ({type(op).__name__}): {error}") from error
        return tagged.data

    def __repr__(self) -> str:
        return f"LogitsPipe({self.processors}, executes {self.ops if self.compiled_ops is None else self.compiled_ops})"

"""The errors a user of tvmx can cause. Every message says what is wrong and what to do next."""

from __future__ import annotations


class TvmxError(Exception):
    """Base of every error that a user's model, file, option or input can cause."""


class ModelError(TvmxError):
    """The ONNX model cannot be imported: broken, hostile, unsupported or under-specified."""


class ConfigError(TvmxError):
    """An option, target or configuration file is not usable as given."""


class CompileError(TvmxError):
    """The program was imported but cannot be lowered, scheduled or linked."""


class TuneError(TvmxError):
    """A tuning session cannot start or its log cannot be read or written."""


class PlanError(TvmxError):
    """A memory planning problem is not well-formed, or a plan breaks its rules."""


class ArtifactError(TvmxError):
    """A compiled `.so` is damaged, foreign, or does not fit this machine."""


class InputError(TvmxError):
    """An array given to the executor has the wrong name, dtype, shape or value."""


class DeviceError(TvmxError):
    """There is no GPU or driver for a model, the GPU does not fit it, or it failed while running."""

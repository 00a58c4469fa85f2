"""Profiles and checks use torch in every process, so their template loads it as for pipelines."""

from tests.pipeline.conftest import without_torch as without_torch

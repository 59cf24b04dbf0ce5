"""Batches of models and workloads with one size grown."""

import dataclasses

import hymell_jax as hj


def grown(
    archs: hj.Architecture, works: hj.Workload, field: str, factor: float
) -> tuple[hj.Architecture, hj.Workload]:
    """The same with a field of either times a factor; contexts follow prompts and outputs."""
    if hasattr(archs, field):
        return dataclasses.replace(archs, **{field: getattr(archs, field) * factor}), works
    works = dataclasses.replace(works, **{field: getattr(works, field) * factor})
    start, end = works.prompt_tokens, works.prompt_tokens + works.output_tokens
    return archs, dataclasses.replace(works, context_start_tokens=start, context_end_tokens=end)

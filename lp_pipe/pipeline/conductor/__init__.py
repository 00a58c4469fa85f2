"""Operations on all workers of a pipeline: each happens on all of them, or on none."""

"""What every refusal of a checkpoint is."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read without guessing. The text names the file and the tensor."""

"""What lies in a model's directory, read without torch: tensors by their headers, the sizes that its config gives."""

from disaggkd_cli.model_files.headers import TensorEntry, tensor_entries, tensor_files

__all__ = ["TensorEntry", "tensor_entries", "tensor_files"]

"""What lies in a model's directory, read without torch: tensors by their headers, the sizes that its config gives."""

from disaggkd_cli.model_files.headers import TensorEntry, tensor_entries, tensor_files
from disaggkd_cli.model_files.sizes import read_model_config, verify_model_directory

__all__ = ["TensorEntry", "read_model_config", "tensor_entries", "tensor_files", "verify_model_directory"]

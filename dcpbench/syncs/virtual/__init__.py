"""The GPU that is not there: tensors, streams and libraries of a dry run."""

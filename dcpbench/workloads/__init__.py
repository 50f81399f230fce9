"""What can be run on a built engine: `decode` measures, `verify` compares."""
